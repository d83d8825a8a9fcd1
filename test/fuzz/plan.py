"""Which samples make up which update, in plain Python: the slow twin of sampler, plan and split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import variable_batch_size as vbs
from helpers.shuffle_twin import Twin as OrderTwin
from helpers.splitting import rows_of, split_sizes
from variable_batch_size.adaptive import ControlInput


@dataclass(frozen=True)
class Asked:
    """When a controller is asked, and when its answers count."""

    every: int
    delay: int
    start: int | None


@dataclass(frozen=True)
class TraceCase:
    """A batch trace: sizes that end, are held or are cycled, written as a user may write them, or by a controller."""

    kind: str  # "constant", "list", "schedule"
    sizes: tuple[int, ...]  # of steps 0, 1, ...
    on_end: str  # "error", "stop", "hold", "cycle"
    asked: Asked | None = None  # what a controller answers: the size of the step from which its answer counts

    def batch_size(self, step: int) -> int:
        asked = self.asked
        if asked is None:
            return self.listed(step)
        if step < asked.delay and asked.start is not None:
            return asked.start
        question = max(step - asked.delay, 0) // asked.every * asked.every
        return self.listed(question + asked.delay)

    def listed(self, step: int) -> int:
        if step < len(self.sizes):
            return self.sizes[step]
        if self.on_end in ("error", "stop"):
            raise IndexError(f"the trace has {len(self.sizes)} steps, and step {step} was asked for")
        return self.sizes[-1] if self.on_end == "hold" else self.sizes[step % len(self.sizes)]

    def __call__(self, input: ControlInput) -> int:
        """Answer as a controller."""
        assert self.asked is not None
        return self.listed(input.updates + self.asked.delay)

    def argument(self) -> int | str | list[int] | vbs.AdaptiveTrace:
        if self.asked is not None:
            bounds = 1, max(self.sizes)  # by which a rule that scales betas is checked
            return vbs.AdaptiveTrace(self, self.asked.start, bounds, every=self.asked.every, delay=self.asked.delay)
        if self.kind == "constant":
            return self.sizes[0]
        if self.kind == "list":
            return list(self.sizes)
        starts = [step for step in range(len(self.sizes)) if step == 0 or self.sizes[step] != self.sizes[step - 1]]
        return " ".join(f"{step}:{self.sizes[step]}" for step in starts)


@dataclass(frozen=True)
class Planned:
    """One update: its samples, in order."""

    epoch: int
    samples: tuple[int, ...]
    ends_epoch: bool

    def microbatches(self, minibatch_size: int, fixed_shape: bool, ranks: int) -> list[tuple[int, list[int]]]:
        """The number of distinct samples and the rows (indices in the dataset) of each microbatch of the update.

        `ranks`: the number of ranks over which steps are spread.
        """
        result, start = [], 0
        for size in split_sizes(len(self.samples), minibatch_size, fixed_shape, ranks):
            positions = rows_of(start, size, minibatch_size, fixed_shape)
            result.append((size, [self.samples[position] for position in positions]))
            start += size
        return result


def planned_updates(
    trace: TraceCase,
    dataset_size: int,
    epochs: int,
    *,
    drop_last: bool,
    shuffle: bool,
    seed: int,
    max_updates: int | None = None,
    max_samples: int | None = None,
) -> list[Planned]:
    """Every update of a training, epoch by epoch, up to its end."""
    result: list[Planned] = []
    most = len(trace.sizes) if trace.on_end == "stop" else 10**9
    most, left = min(most, max_updates or most), max_samples or 10**9
    for epoch in range(epochs):
        order: Sequence[int] = OrderTwin(dataset_size, seed, epoch).table() if shuffle else range(dataset_size)
        steps: list[tuple[int, ...]] = []
        used = 0
        while used < dataset_size and len(result) + len(steps) < most and left:
            size = trace.batch_size(len(result) + len(steps))
            if drop_last and size > dataset_size - used:
                break
            steps.append(tuple(order[used : used + min(size, left)]))
            used += len(steps[-1])
            left -= len(steps[-1])
        result += [Planned(epoch, samples, number == len(steps)) for number, samples in enumerate(steps, 1)]
    return result
