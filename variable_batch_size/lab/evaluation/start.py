"""A checkpoint that trainings go on from, with another rule, trace and learning rate."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from variable_batch_size._validation import value_error
from variable_batch_size.checkpoint.parts import Parts as Stored
from variable_batch_size.checkpoint.reading import read_checkpoint
from variable_batch_size.checkpoint.stored import StoredState
from variable_batch_size.lab.evaluation.provenance import content_hash
from variable_batch_size.optim.update import OtherSettingsWarning

if TYPE_CHECKING:
    from variable_batch_size.lab.evaluation.training import Parts


@final
@dataclass(frozen=True)
class Start:
    """A checkpoint of a training of a task.

    Attributes:
        updates: updates before it.
        samples: samples before it.
        epoch: the last epoch that has begun before it, whose order of samples stays; -1: none.
        lr: learning rate of its first parameter group at `ref_batchsize`, before the schedule.
        ref_batchsize: batch size at which it was tuned; None if it is not known.
        position: what the order of the samples depends on: `dataset_size`, `seed`, `shuffle` and `drop_last`.
        has_noise: whether it has averages of the gradient noise.
        digits: hash of its parts.
        path: folder of the training, or of the checkpoint.
    """

    updates: int
    samples: int
    epoch: int
    lr: float
    ref_batchsize: int | None
    position: dict[str, Any]
    has_noise: bool
    digits: str
    path: Path = field(compare=False)

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, scheduled: bool) -> Start:
        """Return what is known of the newest intact checkpoint of a folder, which is only read.

        Args:
            path: the folder.
            scheduled: whether the task has a schedule.

        Raises:
            ValueError: if there is none, or it lacks a part.
        """
        parts = read_checkpoint(path)["parts"]
        needed = {
            "model": "model" in parts,
            "optimizer": "vbs" in parts.get("optimizer", {}),
            'scheduler, a ProgressScheduler(by="samples")': not scheduled
            or parts.get("scheduler", {}).get("by") == "samples",
        }
        if not all(needed.values()):
            missing = " and no ".join(name for name, is_there in needed.items() if not is_there)
            remedy = "save them by vbs.Checkpoint, and pass its folder"
            raise value_error(
                f"a training can go on from a checkpoint with {', '.join(needed)}", f"no {missing} in {path}", remedy
            )
        own, group = parts["optimizer"]["vbs"], parts["optimizer"]["param_groups"][0]
        position = own["sampler"]
        begun = position["step"] > position["first_step"]
        return cls(
            position["step"],
            position["samples"],
            position["epoch"] if begun else position["epoch"] - 1,
            float(group.get("initial_lr", group["lr"])),
            own["ref_batchsize"],
            {name: position[name] for name in ("dataset_size", "seed", "shuffle", "drop_last")},
            bool(own.get("noise")),
            content_hash(parts),
            Path(path),
        )

    def __str__(self) -> str:
        """Return the name of the folder, with the number of updates."""
        return f"{self.path.absolute().name}, {self.updates:,} updates"

    def as_json(self) -> dict[str, Any]:
        """Return what names it, as values of JSON."""
        return {"start": str(self), "start_hash": self.digits}

    def load(self, parts: Parts, lr_factor: float) -> None:
        """Bring the objects of a training into its state, with another learning rate.

        Raises:
            ValueError: if it is of another model, or its learning rate is not that of the schedule of the task.
            RuntimeError: if the folder has another checkpoint by now.
        """
        contents = read_checkpoint(self.path)
        if content_hash(contents["parts"]) != self.digits:
            raise RuntimeError(f"the checkpoint in {self.path} must stay, but there is another one; pass a copy of it")
        others: dict[str, Any] = {} if parts.scheduler is None else {"scheduler": parts.scheduler}
        wanted = {name: contents["parts"][name] for name in ("model", "optimizer", *others)}
        stored = StoredState(os.fspath(self.path), wanted, contents["rng"])
        with warnings.catch_warnings():  # that the rule is another one is what is compared
            warnings.simplefilter("ignore", OtherSettingsWarning)
            Stored(parts.model, parts.optimizer, others).load(stored, strict=False)
        schedule, group = parts.schedule, parts.optimizer.param_groups[0]
        if schedule is not None:
            expected = schedule.base_lrs[0] * schedule.lr_lambdas[0](schedule.last_epoch)
            if not math.isclose(float(group["lr"]), float(expected), rel_tol=1e-6):
                requirement = f"the schedule of the task must be that of the checkpoint in {self.path}"
                found = f"lr {float(group['lr']):g} in it, and {float(expected):g} by the task"
                raise value_error(requirement, found, "pass the samples of that training (--samples)")
            schedule.base_lrs = [rate * lr_factor for rate in schedule.base_lrs]
        for group in parts.optimizer.param_groups:
            for name in {"lr", "initial_lr"} & set(group):
                value = group[name]
                group[name] = value.mul_(lr_factor) if isinstance(value, Tensor) else value * lr_factor
