"""What does it cost to draw microbatches: until the first one, for each sample, and in memory?

The rival is `torch.utils.data.DistributedSampler` in a `BatchSampler`, the measure of a sample's cost is
`torch.randperm(n).tolist()`. Each case runs in a process of its own, the cases in turn.
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
from results import record

RANKS, RANK, ROWS = 8, 5, 32
DRAWN = 2_000_000  # samples over which ours is timed, once it runs


def ours(size: int) -> Iterable[list[int]]:
    return vbs.CustomSampler(size, 1024, RANKS, RANK, ROWS)


def long_trace(size: int) -> Iterable[list[int]]:
    """A trace of 10^6 steps, all different, at its ninetieth epoch."""
    sizes = np.random.default_rng(0).integers(512, 1536, 10**6)
    sampler = vbs.CustomSampler(size, vbs.BatchTrace.from_sizes(sizes, on_end="cycle"), RANKS, RANK, ROWS)
    sampler.set_epoch(90)
    return sampler


def theirs(size: int) -> Iterable[list[int]]:
    return BatchSampler(DistributedSampler(range(size), RANKS, RANK), ROWS, drop_last=False)


def permutation(size: int) -> Iterable[list[int]]:
    yield torch.randperm(size).tolist()


def measure(make: Callable[[int], Iterable[list[int]]], size: int, results: multiprocessing.Queue) -> None:
    """Seconds to the first item, seconds a sample over all that are drawn, MB that memory grew."""
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
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=measure, args=(make, size, results))
    process.start()
    answer = results.get()
    process.join()
    return answer


def median(rows: list[tuple[float, ...]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def describe(row: list[float]) -> str:
    first, sample, grown, made = row
    memory = f"memory +{grown:.1f} MB, after +{made:.1f} MB to make it and its trace"
    return f"first microbatch {first * 1e3:.2f} ms, sample {sample * 1e9:.0f} ns, {memory}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e7, 1e8])
    parser.add_argument("--runs", type=int, default=5)
    flags = parser.parse_args()
    for size in map(int, flags.sizes):
        rows: dict[Callable[[int], Iterable[list[int]]], list[tuple[float, ...]]] = {}
        for _ in range(flags.runs):
            for make in (ours, theirs, permutation):
                rows.setdefault(make, []).append(run(make, size))
        us, them, floor = (median(rows[make]) for make in (ours, theirs, permutation))
        record(f"CustomSampler, n = {size:.0e}, rank {RANK} of {RANKS}", describe(us))
        record(f"DistributedSampler, n = {size:.0e}, rank {RANK} of {RANKS}", describe(them))
        ratio = statistics.median(a[1] / b[1] for a, b in zip(rows[ours], rows[permutation], strict=True))
        record(f"a sample of CustomSampler / one of torch.randperm(n).tolist(), n = {size:.0e}", f"{ratio:.2f}")
    alone = median([run(long_trace, 10**9) for _ in range(flags.runs)])
    record("CustomSampler, n = 1e9, trace of 10^6 steps, epoch 90", describe(alone))
