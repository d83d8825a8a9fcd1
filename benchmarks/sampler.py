"""What does it cost to draw microbatches: time to the first one, time per sample, and memory?

The alternative is `torch.utils.data.DistributedSampler` in a `BatchSampler`; the unit for the time per sample is
`torch.randperm(n).tolist()`. Each measurement runs in a new process, and the cases are interleaved.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

import variable_batch_size as vbs
from records import Measured
from results import record

RANKS, RANK, ROWS = 8, 5, 32
WHERE = f"rank {RANK} of {RANKS}"
QUESTIONS = (
    ("time to the first microbatch", "ms", 1e3),
    ("time per sample", "ns", 1e9),
    ("memory to iterate", "MB", 1),
    ("memory of sampler and trace", "MB", 1),
)  # with the unit, and the factor from that of `measure`
DRAWN = 2_000_000  # samples after the first microbatch over which the time per sample is measured


def custom(size: int) -> Iterable[list[int]]:
    return vbs.CustomSampler(size, 1024, RANKS, RANK, ROWS)


def long_trace(size: int) -> Iterable[list[int]]:
    """Return a sampler with a trace of 10^6 steps of random sizes, at epoch 90."""
    sizes = np.random.default_rng(0).integers(512, 1536, 10**6)
    sampler = vbs.CustomSampler(size, vbs.BatchTrace.from_sizes(sizes, on_end="cycle"), RANKS, RANK, ROWS)
    sampler.set_epoch(90)
    return sampler


def distributed(size: int) -> Iterable[list[int]]:
    return BatchSampler(DistributedSampler(range(size), RANKS, RANK), ROWS, drop_last=False)


def permutation(size: int) -> Iterable[list[int]]:
    yield torch.randperm(size).tolist()


def measure(make: Callable[[int], Iterable[list[int]]], size: int, results: multiprocessing.Queue) -> None:
    """Put a tuple into `results`.

    Its items: seconds to the first microbatch, seconds per sample, and the growth of peak memory in MB during the
    iteration and during construction.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sampler = make(size)
    prepared = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    iterator = iter(sampler)
    drawn = len(next(iterator))
    first = time.perf_counter() - began
    for indices in islice(iterator, DRAWN // ROWS):
        drawn += len(indices)
    seconds = (time.perf_counter() - began) / drawn
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results.put((first, seconds, (grown - prepared) / 1024, (prepared - before) / 1024))


def run(make: Callable[[int], Iterable[list[int]]], size: int) -> tuple[float, ...]:
    """Call `measure` in a new process, and return its tuple."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=measure, args=(make, size, results))
    process.start()
    measured = results.get()
    process.join()
    return measured


def median(rows: list[tuple[float, ...]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def record_all(what: str, rows: list[tuple[float, ...]], on: str) -> None:
    """Record the medians of the tuples of `measure`."""
    for (question, unit, factor), value in zip(QUESTIONS, median(rows), strict=True):
        record(question, what, Measured(value * factor, n=len(rows)), unit, on=on, where=WHERE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e7, 1e8], help="samples in the dataset")
    parser.add_argument("--runs", type=int, default=5, help="processes per case, of which the medians are reported")
    flags = parser.parse_args()
    for size in map(int, flags.sizes):
        rows: dict[Callable[[int], Iterable[list[int]]], list[tuple[float, ...]]] = {}
        for _ in range(flags.runs):
            for make in (custom, distributed, permutation):
                rows.setdefault(make, []).append(run(make, size))
        samples = f"{size:.0e} samples"
        record_all("CustomSampler", rows[custom], samples)
        record_all("DistributedSampler", rows[distributed], samples)
        ratio = statistics.median(a[1] / b[1] for a, b in zip(rows[custom], rows[permutation], strict=True))
        what, measured = "CustomSampler / torch.randperm(n).tolist()", Measured(ratio, n=flags.runs)
        record("time per sample", what, measured, on=samples, where=WHERE)
    long = [run(long_trace, 10**9) for _ in range(flags.runs)]
    record_all("CustomSampler", long, "1e+09 samples, trace of 10^6 steps, epoch 90")
