"""A checkpoint that trainings go on from, with another rule, trace and learning rate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from variable_batch_size._validation import value_error
from variable_batch_size.checkpoint import read_checkpoint
from variable_batch_size.lab.evaluation.provenance import content_hash


@final
@dataclass(frozen=True)
class Start:
    """A checkpoint from which the training runs of an experiment start, instead of from an untrained model.

    Attributes:
        name: name of the folder of the training, with the number of updates.
        digits: hash of what it has saved.
        updates: updates before it.
        samples: samples before it.
        epoch: the last epoch that has begun before it, whose order of samples stays; -1: none.
        lr: learning rate of its first parameter group at `ref_batchsize`, before the schedule.
        ref_batchsize: batch size at which it was tuned; None if it is not known.
        dataset_size: samples of the dataset.
        order: what the order of the samples depends on, too: `seed`, `shuffle` and `drop_last`.
        has_noise: whether it has averages of the gradient noise.
        others: names of parts that the trainings do not have.
        path: folder of the checkpoint.
    """

    name: str
    digits: str
    updates: int
    samples: int
    epoch: int
    lr: float
    ref_batchsize: int | None
    dataset_size: int
    order: dict[str, Any]
    has_noise: bool
    others: tuple[str, ...]
    path: Path = field(compare=False)

    @classmethod
    def read(cls, folder: str | os.PathLike[str], *, scheduled: bool) -> Start:
        """Read the newest intact checkpoint of a training, or one checkpoint. Nothing is written to the folder.

        Args:
            folder: folder of the training, or of the checkpoint.
            scheduled: whether the task has a schedule.

        Raises:
            ValueError: if there is none, or it lacks a part.
        """
        contents = read_checkpoint(folder)
        path = Path(folder).absolute()
        parts, updates = contents["parts"], contents["facts"]["updates"]
        _check_parts(parts, scheduled, path)
        state, group = parts["optimizer"]["vbs"], parts["optimizer"]["param_groups"][0]
        position = state["sampler"]
        epoch_has_begun = position["step"] != position["first_step"]
        return cls(
            name=f"{path.name}, {updates:,} updates",
            digits=content_hash(parts),
            updates=updates,
            samples=position["samples"],
            epoch=position["epoch"] if epoch_has_begun else position["epoch"] - 1,
            lr=float(group.get("initial_lr", group["lr"])),
            ref_batchsize=state["ref_batchsize"],
            dataset_size=position["dataset_size"],
            order={name: position[name] for name in ("seed", "shuffle", "drop_last")},
            has_noise=bool(state.get("noise")),
            others=tuple(parts.keys() - {"model", "optimizer", "sampler", "scheduler"}),
            path=max(path.glob(f"update-{updates:08d}-*"), default=path),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the name and the hash of the checkpoint, as values of JSON."""
        return {"start": self.name, "start_hash": self.digits}


def _check_parts(parts: Mapping[str, Any], scheduled: bool, path: Path) -> None:
    """Raise ValueError if a checkpoint lacks a part that is needed to continue training from it.

    Args:
        parts: the saved states by name, such as "model".
        scheduled: whether the state of a scheduler is needed.
        path: folder of the checkpoint, for the error message.
    """
    needed = {"model": "model" in parts, "optimizer": "vbs" in parts.get("optimizer", {})}
    if scheduled:
        needed['scheduler, a ProgressScheduler(by="samples")'] = parts.get("scheduler", {}).get("by") == "samples"
    if not all(needed.values()):
        missing = " and no ".join(name for name, is_there in needed.items() if not is_there)
        requirement = f"runs can continue from a checkpoint with {', '.join(needed)}"
        remedy = "save them with vbs.Checkpoint, and pass its folder"
        raise value_error(requirement, f"no {missing} in {path}", remedy)
