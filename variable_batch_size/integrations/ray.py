"""Ray Train: the checkpoints of a training are those of its run; see docs/trainers/ray.md."""

from __future__ import annotations

from numbers import Real
from typing import Any, final

import pyarrow.fs
from torch import Tensor, nn

from variable_batch_size._validation import check_int, type_error
from variable_batch_size.checkpoint.checkpoint import Checkpoint
from variable_batch_size.checkpoint.parts import Stateful
from variable_batch_size.integrations.versions import require_version
from variable_batch_size.optim.optimizer import CustomOptimizer

require_version("ray", "2.60", "ray")

import ray.train  # noqa: E402


@final
class RunCheckpoint:
    """Saves a training as checkpoints of its Ray run, and restores the newest one, on any number of workers.

    Each checkpoint that Ray lists, keeps and deletes is the folder of a `vbs.Checkpoint`, which the workers write in
    the storage of the run. Create it in the function of a `TorchTrainer`, and call its methods on all workers after the
    same updates.

    Args:
        model, optimizer: see `vbs.Checkpoint`.
        every: number of updates, >= 1, after which `step()` saves.
        parts: further parts of `vbs.Checkpoint`, such as `scheduler`.

    Raises:
        TypeError: if `every` is not an integer.
        ValueError: if `every` is not positive.
    """

    def __init__(self, *, model: nn.Module, optimizer: CustomOptimizer, every: int, **parts: Stateful) -> None:
        """Begin without a checkpoint, which `restore` or the first save opens."""
        self._every, self._optimizer = check_int(every, "every", 1), optimizer
        self._parts: dict[str, Any] = {"model": model, "optimizer": optimizer, **parts}
        self._last_update = optimizer.updates
        self._latest: Checkpoint | None = None  # the last one restored or saved; open as long as the training runs

    def restore(self) -> bool:
        """Restore the checkpoint that was reported last in this run, and return whether there is one.

        Raises:
            RuntimeError: on every worker, as `vbs.Checkpoint.restore(required=True)`.
        """
        reported = ray.train.get_checkpoint()
        if reported is not None:
            self._latest = self._open(reported)
            self._latest.restore(required=True)
            self._last_update = self._optimizer.updates
        return reported is not None

    def step(self, **metrics: float | Tensor) -> bool:
        """Save and report if the training has passed another multiple of `every` updates, and return whether it did.

        Call it in the loop, after every `optimizer.step()`; see `save` for `metrics`. What it saves at the end of an
        epoch resumes before the loop's code for that end, as with `vbs.Checkpoint.step`.
        """
        if self._optimizer.inside_step:
            return False
        updates_before, self._last_update = self._last_update, self._optimizer.updates
        is_due = self._last_update // self._every > updates_before // self._every
        if is_due:
            self._save(metrics, in_loop=self._last_update == updates_before + 1)  # otherwise the call is after an epoch
        return is_due

    def save(self, **metrics: float | Tensor) -> None:
        """Save the state after the last update, and report it with the numbers of updates and samples.

        Args:
            metrics: values by name, each a number or a tensor with one; Ray takes those of rank 0.

        Raises:
            TypeError: if a metric is no number.
            RuntimeError: on every worker, as `vbs.Checkpoint.save()`.
        """
        self._save(metrics, in_loop=False)

    def _save(self, metrics: dict[str, float | Tensor], *, in_loop: bool) -> None:
        """Save a checkpoint in the storage of the run, and report it with the metrics to Ray.

        Args:
            metrics: values by name.
            in_loop: whether the loop has yet to run its code for the end of an epoch.
        """

        def write(run: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
            """Save into a folder of the run, and return it, after closing the checkpoint that was open before."""
            new_checkpoint = ray.train.Checkpoint(f"{run.path}/{name}", run.filesystem)
            checkpoint_before, self._latest = self._latest, self._open(new_checkpoint)
            self._latest.save(in_loop=in_loop)
            if checkpoint_before is not None:
                checkpoint_before.close()
            return new_checkpoint

        numbers = {name: _checked_number(name, value) for name, value in metrics.items()}
        optimizer, storage = self._optimizer, ray.train.get_context().get_storage()
        ray.train.report(
            {"update": optimizer.updates, "samples": optimizer.samples, **numbers},
            checkpoint=ray.train.Checkpoint(storage.experiment_fs_path, storage.storage_filesystem),
            checkpoint_upload_fn=write,  # Ray calls it on all workers, with the name that they have agreed on
        )
        self._last_update = optimizer.updates

    def _open(self, checkpoint: ray.train.Checkpoint) -> Checkpoint:
        """Return the `vbs.Checkpoint` for the folder or the object-store URL of a checkpoint of Ray."""
        filesystem = checkpoint.filesystem
        scheme = "" if isinstance(filesystem, pyarrow.fs.LocalFileSystem) else f"{filesystem.type_name}://"
        run = ray.train.get_context().get_experiment_name()
        return Checkpoint(f"{scheme}{checkpoint.path}", run=run, **self._parts)


def _checked_number(name: str, value: object) -> object:
    """Return a metric as a number, also from a tensor with one.

    Raises:
        TypeError: if it is none.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if not isinstance(value, Real):
        raise type_error(f"metric {name} must be a number, or a tensor with one", value, "pass its mean")
    return value
