"""What `training_step` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from variable_batch_size._validation import type_error
from variable_batch_size.integrations.loss_check import WITH_CLASS_WEIGHTS

MEAN_LOSS: Final = "update_loss"  # under which the mean over an update is logged
REMEDY: Final = (
    f"return a mean over rows, with class weights {WITH_CLASS_WEIGHTS}; for a "
    'mean over tokens pass optimizer_options={"reduction": "sum"} to the strategy, and return {"loss": the sum, '
    '"count": of how many tokens}; a loss that compares rows with one another cannot be cut into microbatches'
)
OF_TOKENS: Final = "return the mean over what lengths=, or counts=, counts of the rows"


class Output(NamedTuple):
    """What `training_step` has returned: a loss, or a dict with "loss", and perhaps "count" and "log"."""

    loss: Tensor
    count: Any  # of how many tokens, for example, the loss is a sum; None for rows
    logged: Mapping[str, Any]  # values by name, for `optimizer.log`

    @staticmethod
    def of(returned: Any, rows: int | None = None) -> Output:
        """Return an Output from what `training_step` has returned.

        Args:
            returned: a loss, or a dict.
            rows: number of rows if the loss is a sum over them, so that `optimizer.log` takes sums; None for a mean.
        """
        entries = returned if isinstance(returned, Mapping) else {"loss": returned}
        loss, count = entries.get("loss"), entries.get("count")
        if not isinstance(loss, Tensor):
            raise type_error("training_step must return a loss for every microbatch", loss, "return one of gradient 0")
        means = entries.get("log", {})
        if rows is not None:
            count_or_rows = torch.as_tensor(rows if count is None else count)
            means = {name: torch.where(count_or_rows > 0, mean * count_or_rows, 0.0) for name, mean in means.items()}
        return Output(loss, count, {MEAN_LOSS: loss, **means})
