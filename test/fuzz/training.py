"""One rank of a training with the package: a user's loop, with the events of a case."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import variable_batch_size as vbs
from fuzz.case import Case, Event, Segment, WrongError
from fuzz.model import FEATURES, Data, Net, seed_masks, tokens
from fuzz.objects import (
    PlantedError,
    State,
    create_average,
    create_inner,
    create_loader,
    create_optimizer,
    create_rule,
    create_sampler,
)
from fuzz.saving import Folder, Saves
from helpers.interrupts import Interrupt
from variable_batch_size.backend import Backend

LINES_OF_STEP = 500  # executed in a call of step(), about


@dataclass(frozen=True)
class Record:
    """What was true after an update on a rank."""

    update: int
    weights: dict[str, Tensor]
    rows: list[list[int]]  # of each microbatch of this rank
    world: tuple[int, int]  # rank and size
    updated: bool
    updates: int
    samples: int
    epoch: int
    progress: float
    lr_factor: float
    logged: dict[str, float]
    count: float | None
    averages: dict[str, Tensor]
    done: bool


class Rank:
    """The objects of a user's script on one rank, for one segment of a case."""

    def __init__(
        self, case: Case, segment: Segment, start: int, state: State | None, folder: Folder | None, backend: Backend
    ) -> None:
        self.case, self.segment, self.start, self.backend = case, segment, start, backend
        self.model = Net(case.parts, torch.Generator().manual_seed(case.seed)).to(case.dtype)
        self.data = Data(case.seed, case.dataset_size, case.poisoned, case.dtype)
        self.records: list[Record] = []
        self.open_rows: list[list[int]] = []  # of the microbatches of the step under way
        self.epoch: int | None = None  # the last one that was set
        self.events = [event for event in case.events if start <= event.update < segment.end]
        self.inner = create_inner(case, self.model)
        self.sampler = create_sampler(case, segment, backend.world)
        faulty = any(event.kind == "fault" and event.detail.startswith("rule") for event in self.events)
        self.rules = [create_rule(rule, faulty) for rule in case.rules]
        self.optimizer = create_optimizer(case, self.model, self.inner, self.sampler, self.rules, backend)
        self.average = create_average(case, self.model, self.optimizer)
        self.saves = Saves(case, folder, self.model, self.optimizer, self.average) if folder is not None else None
        self.loader = create_loader(segment.loader, self.sampler)
        self.saved: dict[int, State] = {}
        self.fault: Event | None = None
        self.final: State = {}  # after the last update
        self.misuse = False  # whether a RuntimeError of step() is the answer to a wrong loop
        self.totals: Any = {}  # of the counts of the update, if the loop divides by them
        self.wrong = ""  # what the loop does wrong with the microbatch at hand
        self.skipped = False  # whether the next update must be refused
        self.interrupt: Interrupt | None = None  # of the next step()
        self.repaired = 0  # interrupts so far
        self.given = state

    def begin(self) -> None:
        """Load the state of the part before."""
        if self.saves is not None:
            self.saves.begin()
        elif self.given is not None:
            self.load(self.given)
        if self.given is not None and self.given["loaders"] is not None:
            self.loader.load_state_dict(copy.deepcopy(self.given["loaders"][self.backend.world.rank]))

    def save(self) -> State:
        if self.saves is not None:
            return {"loaders": None}
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {} if self.average is None else {"average": self.average.state_dict()}
        return copy.deepcopy(state) | {"loaders": None}

    def keep(self, update: int) -> None:
        """Keep the present state, to which a rollback may return."""
        self.saved[update] = self.save()
        if self.saves is not None and (self.saves.newest is None or self.saves.newest.update < update):
            self.saves.save()

    def load_kept(self, update: int) -> None:
        """Return to the state of an update or, with checkpoints, to the newest one."""
        if self.saves is None:
            self.load(self.saved[update])
        else:
            self.restore("newest")

    def restore(self, which: str) -> None:
        assert self.saves is not None
        self.saves.restore(best=which == "best", start=self.start)
        self.open_rows, self.epoch = [], None

    def load(self, state: State) -> None:
        """Load weights and optimizer; the sampler follows."""
        self.model.load_state_dict(copy.deepcopy(state["model"]))
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        if self.average is not None:
            self.average.load_state_dict(copy.deepcopy(state["average"]))
        self.open_rows, self.epoch = [], None

    # The loop. ----------------------------------------------------------------------------------------------------

    def train(self) -> State:
        with nullcontext() if self.saves is None else self.saves.checkpoint:
            self.begin()
            return self.train_segment()

    def train_segment(self) -> State:
        while (update := self.optimizer.updates) < self.segment.end:
            before = self.progress()
            if self.epoch != (epoch := self.case.updates[update].epoch):
                self.set_epoch(epoch)
            try:
                for batch in self.batches():
                    if self.iterates_anew(batch) or self.optimizer.updates >= self.segment.end:
                        break
            except RuntimeError:
                if not (self.skipped or self.misuse):
                    raise
                self.discard()
                self.skipped = self.misuse = False
                continue
            if self.skipped:
                raise WrongError("a microbatch was skipped, and the loop over vbs.updates goes on")
            if self.progress() == before:
                raise WrongError(f"the loader yields no update, but {update} of {len(self.case.updates)} are committed")
        if self.events:
            raise WrongError(f"the search is wrong: {self.events} did not happen")
        state = self.save()
        if self.segment.loader == "stateful":
            state["loaders"] = copy.deepcopy(self.loader.state_dict())
        if self.saves is not None:
            self.saves.end()
        return state

    def progress(self) -> tuple[object, ...]:
        return len(self.records), len(self.events), self.misuse, self.fault, self.wrong, self.repaired

    def batches(self) -> Iterator[Any]:
        if not self.case.by_update:
            yield from self.loader
            return
        for update in vbs.updates(self.loader, self.optimizer, counts=self.tokens if self.case.divides else None):
            self.totals = update.counts if self.case.divides else {}
            yield from update

    def tokens(self, batch: Sequence[int] | Tensor) -> dict[str, int]:
        return {"tokens": sum(map(tokens, batch.tolist() if isinstance(batch, Tensor) else batch))}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        both = self.sampler.set_epoch, self.optimizer.set_epoch
        for set_epoch in reversed(both) if self.case.optimizer_first else both:
            set_epoch(epoch)

    def iterates_anew(self, batch: Sequence[int] | Tensor) -> bool:
        """Train on a microbatch; return whether the loop has to iterate over the loader again."""
        rows = batch.tolist() if isinstance(batch, Tensor) else list(batch)
        update = self.optimizer.updates
        while event := self.due_event():
            if self.handle(event):
                self.skipped = False  # what was skipped is read again
                return True
        if self.wrong == "skipped":
            self.wrong, self.skipped = "", True
            return False
        try:
            updated = self.take(rows, update)
        except KeyboardInterrupt:
            self.wrong, self.skipped = "", False
            self.repaired += 1
            self.repair_interrupt(rows, update)
            return True
        except RuntimeError:
            if not self.misuse:
                raise
            self.misuse = self.skipped = False
            self.discard()
            return True
        except PlantedError:
            self.wrong = ""
            self.repair(rows)
            return True
        self.open_rows.append(rows)
        if self.optimizer.updates > update:
            self.commit(update, updated)
        elif updated:
            raise WrongError("step() returned True in the middle of a step")
        if self.case.zero_grad == "after":
            self.optimizer.zero_grad()
        if self.wrong == "twice":
            self.wrong = ""
            self.must_raise(lambda: (self.backward(rows), self.optimizer.step()), "a second step() of a microbatch")
            self.discard()
            return True
        return False

    def take(self, rows: list[int], update: int) -> bool:
        """Train on a microbatch, as a user's loop does."""
        if not self.case.host_dropout:
            seed_masks(self.model, self.case.seed, update, rows[0])
        elif not self.open_rows:
            seed_masks(self.model, self.case.seed, update, None)
        if self.case.zero_grad == "before":
            self.optimizer.zero_grad()
        self.model.update = update
        if self.case.logs:
            counted = self.case.counts and not self.case.divides
            weights = torch.tensor([tokens(row) if counted else 1.0 for row in rows], dtype=torch.float64)
            divisor: Any = 1 if self.case.reduction == "sum" else len(rows)  # as of the loss
            if self.case.divides:
                divisor = self.optimizer.microbatch.batch_size
            self.optimizer.log(value=(torch.tensor(rows) * weights).sum() / divisor, one=weights.sum() / divisor)
        if self.case.closure:
            return self.optimizer.step(lambda: self.gradients(rows, update), **self.count(rows))
        self.gradients(rows, update)
        interrupt, self.interrupt = self.interrupt or nullcontext(), None
        with interrupt:
            return self.optimizer.step(**self.count(rows))

    def gradients(self, rows: list[int], update: int) -> None:
        self.backward(rows)
        if self.multiplied_due(update):
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    def count(self, rows: list[int]) -> dict[str, Any]:
        number = sum(map(tokens, rows))
        counted = self.case.counts and not self.case.divides
        return {"count": number if number % 2 else torch.tensor(number)} if counted else {}

    def backward(self, rows: list[int]) -> None:
        loss = self.data.loss(self.model, rows, self.case.reduction, of_tokens=self.case.counts)
        if self.case.clears:
            self.optimizer.zero_grad()
        if self.case.divides:
            self.optimizer.backward(loss / self.totals["tokens"] * self.case.loss_scale, divided=True)
        elif self.case.backward:
            self.optimizer.backward(loss * self.case.loss_scale)
        else:
            (loss * self.case.loss_scale).backward()  # type: ignore[no-untyped-call]

    def commit(self, update: int, updated: bool) -> None:
        """Record an update, and let the user's schedule change lr."""
        optimizer, world = self.optimizer, self.backend.world
        self.check_hyperparameters(update)
        self.misuse = False
        self.records.append(
            Record(
                update=update,
                weights={name: parameter.detach().clone() for name, parameter in self.model.named_parameters()},
                rows=self.open_rows,
                world=(world.rank, world.size),
                updated=updated,
                updates=optimizer.updates,
                samples=optimizer.samples,
                epoch=optimizer.epoch,
                progress=optimizer.progress,
                lr_factor=optimizer.lr_factor(),
                logged={name: value.item() for name, value in optimizer.logged.items()},
                count=None if optimizer.count is None else optimizer.count.item(),
                averages=self.averages(),
                done=optimizer.done,
            )
        )
        self.open_rows = []
        for group, reference in zip(optimizer.param_groups, self.case.groups, strict=True):
            group["lr"] = reference["lr"] * self.case.decay ** (update + 1)
        if self.saves is not None:
            self.saves.after_update()

    def averages(self) -> dict[str, Tensor]:
        names = [name for name, _ in self.model.named_parameters()]
        found = [] if self.average is None else [one.clone() for one in self.average.averages]
        return dict(zip(names, found, strict=False))

    def check_hyperparameters(self, update: int) -> None:
        """Between updates every hyperparameter has the user's value."""
        for group, reference in zip(self.optimizer.param_groups, self.case.groups, strict=True):
            wanted = {**reference, "lr": reference["lr"] * self.case.decay**update}
            if found := {name: group[name] for name in wanted if group[name] != wanted[name]}:
                raise WrongError(f"after update {update} the hyperparameters are {found}, and not {wanted}")

    def discard(self) -> None:
        self.optimizer.discard_step()
        self.open_rows = []

    # The events. --------------------------------------------------------------------------------------------------

    def due_event(self) -> Event | None:
        """Take the next event that is due before the microbatch at hand."""
        update, last = self.optimizer.updates, self.optimizer.microbatch.ends_step
        for target in {event.target for event in self.events if event.kind == "rollback"} | {self.start}:
            if target == update and not self.open_rows and target not in self.saved:
                self.keep(target)
        for event in self.events:
            received = len(self.open_rows)
            if event.update == update and (received == event.after or (last and received <= event.after)):
                if event.detail == "multiplied":
                    continue
                self.events.remove(event)
                return event
        return None

    def multiplied_due(self, update: int) -> bool:
        for event in self.events:
            if event.detail == "multiplied" and event.update == update:
                self.events.remove(event)
                self.misuse = True
                return True
        return False

    def handle(self, event: Event) -> bool:
        """Let an event happen; return whether the loop has to iterate over the loader again."""
        result = getattr(self, f"on_{event.kind}")(event)
        return bool(result)

    def on_stray_backward(self, event: Event) -> bool:
        """A backward() that is for no microbatch, and zero_grad(): no effect, or an error where it cannot be undone."""
        self.model.update = 0
        self.model.eval()
        self.model(torch.ones(3, FEATURES, dtype=self.case.dtype)).sum().backward()
        self.model.train()
        try:
            self.optimizer.zero_grad()
        except RuntimeError:
            if not self.open_rows:
                raise
            self.discard()
            return True
        return False

    def on_discard(self, event: Event) -> bool:
        self.discard()
        return True

    def on_set_epoch(self, event: Event) -> bool:
        self.set_epoch(self.case.updates[self.optimizer.updates].epoch)
        self.open_rows = []
        return True

    def on_finished_epoch(self, event: Event) -> bool:
        epoch = self.case.updates[self.optimizer.updates].epoch - 1
        target: Any = self.optimizer if event.detail == "optimizer" else self.sampler
        self.must_raise(lambda: target.set_epoch(epoch), f"{event.detail}.set_epoch({epoch}) after that epoch")
        self.discard()  # a loop that continues after the error iterates anew
        return True

    def on_save_inside(self, event: Event) -> None:
        if self.open_rows:
            self.must_raise(self.optimizer.state_dict, "state_dict() inside a step")
            if self.saves is not None and self.segment.world == 1:
                self.must_raise(self.saves.checkpoint.save, "Checkpoint.save() inside a step")

    def on_rollback(self, event: Event) -> bool:
        self.load_kept(event.target if event.target in self.saved else self.start)
        return True

    def on_restore(self, event: Event) -> bool:
        self.restore(event.detail)
        return True

    def on_fault(self, event: Event) -> None:
        self.fault = event
        where = event.detail.split()[0]
        if where == "rule":
            self.rules[-1].armed = True
            return

        def fail(*_: object) -> None:
            handle.remove()
            raise PlantedError(where)

        register: Any = getattr(self.inner, f"register_step_{where}")
        handle = register(fail)

    def repair(self, rows: list[int]) -> None:
        """After an exception inside step(), discard the step if the inner step had not begun, else restore."""
        if self.fault is None:
            raise WrongError("an exception without a fault")
        (where, how), self.fault = self.fault.detail.split(), None
        self.check_hyperparameters(self.optimizer.updates)
        self.must_raise(self.optimizer.state_dict, "state_dict() after an exception inside step()")
        if self.case.backward:
            self.must_raise(lambda: self.backward(rows), "backward() after an exception inside step()")
        else:
            with suppress(RuntimeError):  # of zero_grad()
                self.backward(rows)
        self.must_raise(self.optimizer.step, "step() after an exception inside step()")
        if where == "post_hook":
            self.must_raise(self.optimizer.discard_step, "discard_step() after an exception of the inner step")
        if (
            how == "discard" and where == "rule" and self.case.noise != "differenced"
        ):  # it forgets the previous gradient
            self.discard()
            return
        self.load_kept(max(self.saved))

    def on_interrupt(self, event: Event) -> None:
        self.interrupt = Interrupt(1 + int(float(event.detail) * LINES_OF_STEP))

    def repair_interrupt(self, rows: list[int], update: int) -> None:
        """After an interrupt at any line of step(): the update has happened or not."""
        if self.optimizer.updates > update:
            self.open_rows.append(rows)
            self.commit(update, updated=True)
        elif self.case.noise == "differenced":  # of which an interrupt may leave no previous gradient
            self.load_kept(max(self.saved))
            return
        try:
            self.discard()
        except RuntimeError:
            self.load_kept(max(self.saved))

    def on_twice(self, event: Event) -> None:
        if self.case.by_update or self.segment.loader in ("sampler", "loader"):
            self.wrong = "twice"

    def on_skipped(self, event: Event) -> None:
        self.wrong = "skipped"

    def on_left(self, event: Event) -> bool:
        """A loop that an exception has ended after `backward()`, and that is run again."""
        if self.case.by_update:
            self.backward(self.open_rows[0] if self.open_rows else [0])  # which a new loop forgets, with the step
            self.open_rows = []
        elif self.segment.world == 1:
            self.backward([0])
            self.misuse = True
        else:
            return False
        return True

    def on_misuse(self, event: Event) -> bool:
        """Do what a user must not do: it raises at once or by the end of the step, or has no effect."""
        if event.detail == "no_backward":
            if self.optimizer.microbatch.samples == 0:
                return False  # a replay may have no gradients
            self.must_raise(self.optimizer.step, "step() without a backward()")
            self.discard()
            return True
        if self.open_rows:
            self.misuse = True
            self.model.zero_grad(set_to_none=event.detail == "cleared")
        return False

    def must_raise(self, call: Any, what: str) -> None:
        try:
            call()
        except RuntimeError:
            return
        raise WrongError(f"{what} must raise RuntimeError, but it returned")
