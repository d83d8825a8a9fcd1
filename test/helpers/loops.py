"""A small training for tests of user loops, and loaders that prefetch."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator

import pytest

import variable_batch_size as vbs
from helpers.runs import LoggedTraining, Sampling

CASE = Sampling(vbs.BatchTrace.from_sizes([7, 3, 12, 1, 5], on_end="cycle"), 40, 4, False, True, seed=3, epochs=3)
# Microbatches of the updates: 3 2 3 1 2 3 2 1 (17), then 1 2 3 2 3 1 2 2 (16), then 2 3 1 2 3 2 3 (16).

EACH = r"^step\(\) must follow the backward\(\) of every microbatch, but {} of those that were read .*; call it once"
with_prefetching = pytest.mark.parametrize("ahead", [0, 1, 3, 50])


def epoch_steps(*epochs: int) -> list[tuple[int, int, list[int]]]:
    return [step for step in CASE.steps if step[0] in epochs]


def begun(epoch: int = 0) -> LoggedTraining:
    run = LoggedTraining(CASE)
    run.set_epoch(epoch)
    return run


def take(run: LoggedTraining, batches: Iterator[list[int]], number: int) -> None:
    for batch in itertools.islice(batches, number):
        run.take(batch)


class InThread:
    """A loader that reads in a thread of its own, up to `size` microbatches ahead, as torch_xla's does."""

    def __init__(self, sampler: vbs.CustomSampler, size: int) -> None:
        self.sampler, self.size = sampler, size

    def __iter__(self) -> Iterator[list[int]]:
        waiting: queue.Queue[list[int] | None] = queue.Queue(self.size)

        def read() -> None:
            try:
                for batch in self.sampler:
                    waiting.put(batch)
            finally:
                waiting.put(None)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        while (batch := waiting.get()) is not None:
            yield batch
        thread.join()
