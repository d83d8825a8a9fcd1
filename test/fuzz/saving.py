"""The checkpoints of a case: a rank's `Checkpoint`, and the slow twin of its folder."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import variable_batch_size as vbs
from fuzz.case import Case, WrongError
from fuzz.model import Net

VALUE = "value"  # the metric


class Saved(NamedTuple):
    """A checkpoint that must be in the folder."""

    update: int
    number: int  # of the save: a later one of the same update is another revision
    value: float | None  # that was reported
    tensors: list[Tensor]  # weights and averages


@dataclass
class Folder:
    """What must be in the folder; a segment hands it to the next one."""

    path: Path
    entries: list[Saved] = field(default_factory=list)
    generators: Any = None  # the states of the host's random numbers at the newest save of a world of one


class Saves:
    """A rank's `Checkpoint`, every call of which is compared with the twin of the folder."""

    def __init__(
        self, case: Case, folder: Folder, model: Net, optimizer: vbs.CustomOptimizer, average: vbs.WeightAverage | None
    ) -> None:
        assert case.saves is not None
        self.case, self.how, self.optimizer = case, case.saves, optimizer
        self.folder = replace(folder, entries=[*folder.entries])  # each rank has a twin of its own
        self.parameters = [*model.parameters()]
        self.average = average
        parts: dict[str, Any] = {} if average is None else {"average": average}
        best = f"{self.how.mode}:{VALUE}" if self.how.mode else None
        options: dict[str, Any] = {"keep": self.how.keep, "every": self.how.every, "best": best}
        self.checkpoint = vbs.Checkpoint(folder.path, model=model, optimizer=optimizer, **options, **parts)
        self.last = optimizer.updates  # at the last save, restore, or call of step()
        self.restored_best: Saved | None = None  # until the next save
        self.alone = optimizer.backend.world.size == 1

    def drawn(self, what: str) -> random.Random:
        """The draws of an update, the same ones on each rank."""
        return random.Random(f"{self.case.seed}/{what}/{self.optimizer.updates}")

    # The twin. ----------------------------------------------------------------------------------------------------

    @property
    def newest(self) -> Saved | None:
        return max(self.folder.entries, key=lambda entry: entry[:2], default=None)

    @property
    def best(self) -> Saved | None:
        """That with the best value; of equal ones the oldest."""
        sign = -1 if self.how.mode == "max" else 1
        valued = [entry for entry in self.folder.entries if entry.value is not None]
        return min(valued, key=lambda entry: (sign * (entry.value or 0.0), *entry[:2]), default=None)

    def expect(self, value: float | None) -> None:
        """A checkpoint of the present state is in the folder, and what is neither new nor the best is not."""
        if self.restored_best is not None:
            self.folder.entries = [entry for entry in self.folder.entries if entry[:2] <= self.restored_best[:2]]
            self.restored_best = None
        entries, updates = self.folder.entries, self.optimizer.updates
        number = 1 + max((entry.number for entry in entries), default=0)
        entries.append(Saved(updates, number, value, [one.detach().clone() for one in self.tensors]))
        self.prune()
        self.folder.generators = generators() if self.alone else None
        self.last = updates

    def prune(self) -> None:
        best, entries = self.best, self.folder.entries
        last = sorted({entry.update for entry in entries})[-self.how.keep :]
        newest = {max(entry[:2] for entry in entries if entry.update == update) for update in last}
        self.folder.entries = [entry for entry in entries if entry is best or entry[:2] in newest]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.parameters, *(self.average.averages if self.average else [])]

    # The calls. ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Restore what the segment before has saved."""
        if self.checkpoint.restore() != bool(self.folder.entries):
            raise WrongError(f"restore() must find a checkpoint if there is one, of {len(self.folder.entries)}")
        if self.newest:
            self.check_restored(self.newest)

    def save(self) -> None:
        self.expect(None)
        self.checkpoint.save(wait=self.drawn("wait").random() < 0.5)

    def after_update(self) -> None:
        """Call `step()`, and report a value after some updates."""
        updates, every = self.optimizer.updates, self.how.every
        due = every is not None and updates // every > self.last // every
        if due:
            self.expect(None)
        self.last = updates
        if self.checkpoint.step() != due:
            raise WrongError(f"Checkpoint.step() must return {due} after update {updates - 1}")
        if self.how.mode is not None and self.drawn("whether to report").random() < 0.5:
            self.report(self.drawn("value").choice([1.0, 2.0, 3.0, 4.0, math.nan, math.inf]))

    def report(self, value: float) -> None:
        updates, best, newest = self.optimizer.updates, self.best, self.newest
        sign = -1 if self.how.mode == "max" else 1
        better = math.isfinite(value) and (best is None or sign * value < sign * (best.value or 0.0))
        found = self.checkpoint.report(**{VALUE: value if self.drawn("kind").random() < 0.5 else torch.tensor(value)})
        if found != better:
            raise WrongError(f"report({value}) must return {better} after {best and best.value}")
        if better and newest is not None and newest.update == updates and self.restored_best is None:
            place = self.folder.entries.index(newest)
            self.folder.entries[place] = newest._replace(value=value)
            self.prune()
        elif better:
            self.expect(value)

    def restore(self, *, best: bool, start: int) -> None:
        """Restore the newest checkpoint or the best one, unless that belongs to another segment."""
        wanted, own = self.newest, self.best
        assert wanted is not None
        if best and own is not None and own.update >= start:
            wanted = own
        is_best = wanted is own and best
        self.checkpoint.restore(best=is_best)
        self.restored_best = wanted if is_best else None
        self.check_restored(wanted)

    def check_restored(self, wanted: Saved) -> None:
        self.last = wanted.update
        if self.optimizer.updates != wanted.update:
            raise WrongError(f"update {self.optimizer.updates} was restored instead of {wanted.update}")
        if not all(map(torch.equal, self.tensors, wanted.tensors)):
            raise WrongError(f"other weights or averages than those of update {wanted.update} were restored")
        if self.alone and wanted is self.newest and self.folder.generators not in (None, generators()):
            raise WrongError(f"other random numbers than those of update {wanted.update} were restored")

    def end(self) -> None:
        """Save, overwrite what a thread may still write, and close; the folder must have what the twin has."""
        if self.newest is None or self.newest.update != self.optimizer.updates or self.restored_best is not None:
            self.save()
        with torch.no_grad():
            for tensor in self.tensors:
                tensor.fill_(torch.nan)
        random.random(), np.random.rand(), torch.rand(())
        self.checkpoint.close()
        if self.optimizer.backend.world.rank > 0:  # which does not wait for what rank 0 writes
            return
        found = {name: path and int(path.rpartition("/")[2].split("-")[1]) for name, path in self.named.items()}
        newest, best = self.newest, self.best
        wanted = {"latest": newest and newest.update, "best": best and best.update}
        if found != wanted:
            raise WrongError(f"the folder has {found} instead of {wanted}")
        updates = sorted(int(path.name.split("-")[1]) for path in self.folder.path.glob("update-*"))
        if updates != (kept := sorted(entry.update for entry in self.folder.entries)):
            raise WrongError(f"the folder has the updates {updates} instead of {kept}")

    @property
    def named(self) -> dict[str, str | None]:
        return {"latest": self.checkpoint.latest, "best": self.checkpoint.best}


def generators() -> list[Any]:
    """The states of the host's random numbers."""
    kind, keys, *position = np.random.get_state()
    return [random.getstate(), torch.get_rng_state().tolist(), kind, np.asarray(keys).tolist(), position]
