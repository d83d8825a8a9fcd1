"""Hypothesis strategies for traces, plans and samplers, the twin of a plan, and a training that logs its samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import variable_batch_size as vbs
from variable_batch_size.data.plan.plan import Plan
from variable_batch_size.data.plan.shuffle import order
from variable_batch_size.trace.batch_trace import BatchTrace
from variable_batch_size.world import World

LARGEST = 300  # batch size
MAX_UPDATES, MAX_EPOCHS = 20, 3  # of an end of the training
PRIMES = (2, 3, 5, 7, 11, 13, 29, 31, 37, 53, 59, 61)

minibatch_sizes = st.one_of(st.integers(1, 64), st.sampled_from(PRIMES), st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
worlds = st.integers(1, 9)


def speeds_of(world: int) -> st.SearchStrategy[list[int]]:
    """Speeds of the ranks of a world."""
    return st.lists(st.integers(1, 9), min_size=world, max_size=world)


@st.composite
def sizes(draw: st.DrawFn, largest: int) -> list[int]:
    """Batch sizes up to `largest`: constant, at random, or in runs."""
    size = st.integers(1, largest)
    kind = draw(st.sampled_from(["constant", "random", "runs"]))
    if kind == "constant":
        return [draw(size)] * draw(st.integers(1, 5))
    if kind == "random":
        return draw(st.lists(size, min_size=1, max_size=20))
    runs = draw(st.lists(st.tuples(size, st.integers(1, 12)), min_size=1, max_size=5))
    return [value for value, length in runs for _ in range(length)]


@st.composite
def traces(draw: st.DrawFn, dataset_size: int, epochs: int) -> BatchTrace:
    """A trace that covers a number of epochs, some of them because it is held, cycled or endless."""
    largest = min(dataset_size, LARGEST)
    some = draw(sizes(largest))
    end = draw(st.sampled_from(["error", "hold", "cycle", "stop", None]))
    if end is None:
        return BatchTrace.constant(some[0])
    if end == "error":  # an epoch takes at most one step more than it has samples for; `ends` may draw later ends
        laps = -(-max(epochs, MAX_EPOCHS) * (dataset_size + largest) // sum(some))
        some = some * max(laps, -(-MAX_UPDATES // len(some)))
    return BatchTrace.from_sizes(some, on_end=end)


@dataclass(frozen=True)
class Sampling:
    """The arguments of a sampler, without its world."""

    trace: BatchTrace
    dataset_size: int
    minibatch_size: int
    drop_last: bool
    fixed_shape: bool
    seed: int
    epochs: int
    begin: tuple[int, int, int] = (0, 0, 0)  # epoch, step, and place in its order, at which a resumed run begins
    max_updates: int | None = None
    max_samples: int | None = None
    samples_made: int = 0  # before `begin`

    @property
    def ends(self) -> dict[str, int | None]:
        return {"max_updates": self.max_updates, "max_samples": self.max_samples}

    def plan(self, minibatch_size: int | None = None) -> Plan:
        size = minibatch_size or self.minibatch_size
        return Plan(self.trace, self.dataset_size, size, self.drop_last, self.fixed_shape, **self.ends)  # type: ignore[arg-type]

    def sampler(self, world: World = World(), minibatch_size: int | None = None, **options: Any) -> vbs.CustomSampler:  # noqa: B008
        return vbs.CustomSampler(
            self.dataset_size,
            self.trace,
            world.size,
            world.rank,
            minibatch_size or self.minibatch_size,
            self.seed,
            **{"drop_last": self.drop_last, "fixed_shape": self.fixed_shape} | self.ends | options,
        )

    @cached_property
    def updates(self) -> list[list[PlannedUpdate]]:
        """The updates of each epoch."""
        return shortened(self.endless, self.trace, self.max_updates, self.max_samples, self.samples_made)

    @cached_property
    def endless(self) -> list[list[PlannedUpdate]]:
        """The updates of each epoch of a training that does not end."""
        held = self.trace.with_on_end("hold") if self.trace.on_end == "stop" else self.trace
        return updates(held, self.dataset_size, self.drop_last, self.epochs, self.begin)

    def is_complete(self, epoch: int) -> bool:
        """Whether an epoch does not end because the training does."""
        return self.updates[epoch] == self.endless[epoch]

    def ended_after(self, epoch: int) -> bool:
        """Whether the training has ended with an epoch."""
        made = [update for of_epoch in self.updates[: epoch + 1] for update in of_epoch]
        samples = self.samples_made + sum(update.batch_size for update in made)
        ends = [self.max_updates, self.trace.steps if self.trace.on_end == "stop" else None]
        return self.begin[1] + len(made) in ends or samples == self.max_samples

    @cached_property
    def steps(self) -> Steps:
        """The samples of every step of all epochs, in any world."""
        orders = [order(self.dataset_size, self.seed, e)(np.arange(self.dataset_size)) for e in range(self.epochs)]
        every = [update for epoch in self.updates for update in epoch]
        return [(u.epoch, u.step, orders[u.epoch][u.start : u.start + u.batch_size].tolist()) for u in every]

    def epoch_of(self, step: int) -> int:
        return next(epoch for epoch, of_epoch in enumerate(self.updates) if of_epoch and step <= of_epoch[-1].step)


@st.composite
def samplings(draw: st.DrawFn, largest_dataset: int = 400, epochs: int = 3) -> Sampling:
    """Any valid arguments of a sampler."""
    dataset_size = draw(st.integers(1, largest_dataset))
    return Sampling(
        trace=draw(traces(dataset_size, epochs)),
        dataset_size=dataset_size,
        minibatch_size=draw(minibatch_sizes),
        drop_last=draw(st.booleans()),
        fixed_shape=draw(st.booleans()),
        seed=draw(st.integers(0, 2**64 - 1)),
        epochs=epochs,
        **draw(ends(dataset_size)),
    )


@st.composite
def ends(draw: st.DrawFn, dataset_size: int) -> dict[str, int]:
    """An end of the training in its first epochs, or none."""
    largest = {"max_updates": MAX_UPDATES, "max_samples": MAX_EPOCHS * dataset_size}
    names = draw(st.sampled_from([(), (), ("max_updates",), ("max_samples",), ("max_updates", "max_samples")]))
    return {name: draw(st.integers(1, largest[name])) for name in names}


@dataclass(frozen=True)
class PlannedUpdate:
    """One update: `batch_size` samples from position `start` of the order of `epoch`."""

    epoch: int
    step: int
    start: int
    batch_size: int


def updates(
    trace: BatchTrace, dataset_size: int, drop_last: bool, epochs: int, begin: tuple[int, int, int] = (0, 0, 0)
) -> list[list[PlannedUpdate]]:
    """The slow twin of `Plan.epoch` and `Plan.step`: the updates of epochs 0, 1, ...; none before `begin`."""
    first, step, start = begin
    result: list[list[PlannedUpdate]] = [[] for _ in range(min(first, epochs))]
    for epoch in range(first, epochs):
        result.append([])
        while start < dataset_size:
            size = trace.batch_size(step)
            if drop_last and size > dataset_size - start:
                break
            size = min(size, dataset_size - start)
            result[-1].append(PlannedUpdate(epoch, step, start, size))
            start += size
            step += 1
        start = 0
    return result


def shortened(
    epochs: list[list[PlannedUpdate]], trace: BatchTrace, max_updates: int | None, max_samples: int | None, made: int
) -> list[list[PlannedUpdate]]:
    """The updates up to the end of the training, of which the last may be shortened; `made` samples are before them."""
    end = min(max_updates or 2**62, 2**62 if trace.on_end != "stop" or trace.steps is None else trace.steps)
    left = 2**62 if max_samples is None else max_samples - made
    result: list[list[PlannedUpdate]] = []
    for epoch in epochs:
        result.append([])
        for update in epoch:
            size = min(update.batch_size, left)
            if update.step < end and size > 0:
                result[-1].append(replace(update, batch_size=size))
                left -= size
    return result


# ------------------------------------------------------------------------- a training that logs its samples

Log = list[tuple[int, int, int, list[int]]]  # (epoch, step, number of the microbatch in the step, its samples)


class LoggedTraining:
    """One rank of a training, on a dataset whose samples are their own indices."""

    def __init__(
        self, case: Sampling, backend: vbs.backend.Backend | None = None, minibatch_size: int | None = None
    ) -> None:
        self.case, self.backend = case, backend or vbs.backend.LocalBackend()
        self.sampler = case.sampler(self.backend.world, minibatch_size)
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.optimizer = vbs.ConstantOptimizer(
            torch.optim.SGD([self.weight], lr=0.0), self.sampler, backend=self.backend
        )
        self.log: Log = []  # of committed updates
        self._open: Log = []  # of the update in progress

    def set_epoch(self, epoch: int) -> None:
        self._open = []
        self.sampler.set_epoch(epoch)
        self.optimizer.set_epoch(epoch)

    def take(self, batch: list[int] | torch.Tensor) -> bool:
        """Train on a microbatch, and log its samples once `step()` has counted it."""
        rows = batch.tolist() if isinstance(batch, torch.Tensor) else batch
        due, world = self.optimizer.microbatch, self.backend.world
        (self.weight * len(rows)).backward()
        updated = self.optimizer.step()
        assert len(rows) == due.rows
        distinct = list(dict.fromkeys(rows))[: due.samples]
        assert len(distinct) == due.samples
        number = world.rank + len(self._open) * world.size
        self._open.append((self.case.epoch_of(due.step), due.step, number, distinct))
        if updated:
            self.log += self._open
            self._open = []
        return updated

    def discard_step(self) -> None:
        self._open = []
        self.optimizer.discard_step()

    def train(self, loader: Iterable[Any] | None = None, updates: int | None = None) -> LoggedTraining:
        """Train like a user, from the optimizer's position, for a number of updates or to the end of the last epoch."""
        left = -1 if updates is None else updates
        for epoch in range(self.optimizer.epoch, self.case.epochs if left else 0):
            self.set_epoch(epoch)
            for batch in self.sampler if loader is None else loader:
                left -= self.take(batch)
                if left == 0:
                    return self
        return self


Steps = list[tuple[int, int, list[int]]]  # (epoch, step, its samples in order)


def together(logs: Iterable[Log]) -> Steps:
    """The samples of all ranks, step by step, with the microbatches of a step in order."""
    steps: dict[tuple[int, int], list[int]] = {}
    for epoch, step, _, samples in sorted(entry for log in logs for entry in log):
        steps.setdefault((epoch, step), []).extend(samples)
    return [(*key, samples) for key, samples in steps.items()]


def read_ahead(sampler: vbs.CustomSampler, number: int, snapshot: dict[str, int] | None = None) -> Iterator[list[int]]:
    """Read like a DataLoader with workers: `number` microbatches ahead, and repeatedly at the end."""
    source, waiting = iter(sampler), deque[list[int]]()
    if snapshot:
        source.load_state_dict(snapshot)

    def read() -> None:
        with suppress(StopIteration):
            waiting.append(next(source))

    for _ in range(number):
        read()
    while number and waiting:
        batch = waiting.popleft()
        read()
        yield batch
    if not number:
        yield from source


def error_of(attempt: Callable[[], object]) -> str | None:
    """The message of the error that `attempt` raises, or None."""
    try:
        attempt()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None
