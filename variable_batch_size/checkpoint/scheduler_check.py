"""Whether a checkpoint includes the scheduler, without which a restored training begins its schedule again."""

from __future__ import annotations

import warnings
from collections.abc import Collection

from variable_batch_size._validation import value_error
from variable_batch_size.optim.lr_scheduler import ProgressScheduler, is_stepped_by_progress
from variable_batch_size.optim.optimizer import CustomOptimizer


def check_scheduler(parts: Collection[object], optimizer: CustomOptimizer) -> None:
    """Warn if the learning rate has a scheduler, but no part is one.

    Raises:
        ValueError: if a part is the scheduler that a `ProgressScheduler` steps, and that is not a part.
    """
    if not any(isinstance(part, ProgressScheduler) for part in parts):
        for part in parts:
            if is_stepped_by_progress(part):
                raise value_error(
                    "the scheduler of a checkpoint must be the one whose step() the loop calls",
                    f"a {type(part).__name__} that a ProgressScheduler steps",
                    "pass the ProgressScheduler",
                )
    # Every scheduler of torch wraps the method step() of its optimizer, to warn if it is not called.
    scheduled = any(hasattr(one.step, "_wrapped_by_lr_sched") for one in (optimizer, optimizer.inner))
    if scheduled and not any(hasattr(part, "get_last_lr") for part in parts) and optimizer.backend.world.rank == 0:
        warnings.warn(
            "The checkpoint has no scheduler, but one was created for the optimizer: a restored training would begin "
            "its schedule again; pass scheduler=",
            UserWarning,
            stacklevel=4,  # at Checkpoint()
        )
