"""What do batches that arrive cost beside a sampler's, and what does packing by tokens save?

Both sides train the same model on batches of equal sizes, which lie in memory; their blocks of updates are interleaved,
and each pair of blocks gives one ratio. In two processes the ranks exchange their numbers of rows, through the store.
Padding is the share of positions that hold no token: of paragraphs of Python's documentation in rows as long as the
longest one of 8, in their order and sorted by length; and packed into 2,048 tokens, about what 8 rows have. The times
of packed and padded updates are those of the GPT of examples/packed_documents.py.
"""

from __future__ import annotations

import argparse
import runpy
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import variable_batch_size as vbs
from records import spread
from results import record
from step import ROWS, perceptron
from variable_batch_size.data.streams.arrival import first_fit_decreasing

EXAMPLE = Path(__file__).parents[1] / "examples" / "packed_documents.py"
MODELS = {"1M parameters": 512, "10M parameters": 2048}
BLOCK, UPDATE = 16, 4 * ROWS  # updates; rows of a rank
CAPACITY = 2048  # tokens of a microbatch
TIME, PADDING = "time of an update of batches that arrive", "share of padding"


class Side:
    """A training whose blocks of updates are timed."""

    def __init__(self, width: int, data: tuple[torch.Tensor, torch.Tensor], *, arriving: bool) -> None:
        torch.manual_seed(0)
        self._model, self._data, self._arriving = perceptron(width, 2), data, arriving
        world = dist.get_world_size() if dist.is_initialized() else 1
        size = BLOCK * UPDATE * world
        source: Any = vbs.ArrivingBatches(ROWS) if arriving else vbs.CustomSampler(size, UPDATE * world, shuffle=False)
        self._optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(self._model.parameters(), lr=1e-4), source, UPDATE)

    def block(self) -> float:
        """Return the seconds of a block."""
        began = time.perf_counter()
        for update in vbs.updates(self._batches(), self._optimizer):
            for x, y in update:
                self._optimizer.backward(torch.nn.functional.cross_entropy(self._model(x), y))
                self._optimizer.step()
        return time.perf_counter() - began

    def _batches(self) -> Iterator[Any]:
        x, y = self._data
        if self._arriving:
            yield from zip(x.split(UPDATE), y.split(UPDATE), strict=True)
        else:
            for indices in self._optimizer.sampler:
                first = indices[0] % len(x)  # in order, as those that arrive
                yield x[first : first + len(indices)], y[first : first + len(indices)]


def compare(pairs: int, where: str) -> None:
    """Record the times of updates of both sides, in this process or several."""
    data = torch.randn(BLOCK * UPDATE, 784), torch.randint(10, (BLOCK * UPDATE,))
    for name, width in MODELS.items():
        sides = [Side(width, data, arriving=arriving) for arriving in (True, False)]
        times = [[side.block() for side in sides] for _ in range(pairs + 1)][1:]
        if not dist.is_initialized() or dist.get_rank() == 0:
            ratios = [ours / theirs for ours, theirs in times]
            record(TIME, "ArrivingBatches / CustomSampler", spread(ratios), on=name, where=where)
            more = [1e3 * (ours - theirs) / BLOCK for ours, theirs in times]
            record(TIME, "ArrivingBatches - CustomSampler", spread(more), "ms", on=name, where=where)


def process(rank: int, folder: str, pairs: int) -> None:
    """Be one of two ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    compare(pairs, "CPU, 2 processes")
    dist.barrier()
    dist.destroy_process_group()


def pack_documents(updates: int) -> None:
    """Record the padding of real texts, and the time of an update with and without it."""
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
    documents = example.paragraphs()
    lengths = np.array(example.predicted(documents))
    text = f"{len(lengths)} paragraphs"
    for what, order in {"rows of 8, in order": lengths, "rows of 8, sorted by length": np.sort(lengths)}.items():
        padded = sum(len(rows) * rows.max() for rows in np.array_split(order, len(order) // 8))
        record(PADDING, what, 1 - lengths.sum() / padded, "share", on=text)
    groups = [lengths[begin : begin + 256] for begin in range(0, len(lengths), 256)]  # of an update each
    packed = sum(len(first_fit_decreasing(group, CAPACITY)) for group in groups) * CAPACITY
    record(PADDING, f"packed into {CAPACITY} tokens", 1 - lengths.sum() / packed, "share", on=text)

    def padded_loss(model: nn.Module, rows: list[bytes]) -> torch.Tensor:
        longest = max(map(len, rows))
        batch = example.pack([row.ljust(longest, b"\0") for row in rows])
        kept = torch.cat([torch.arange(longest - 1) < len(row) - 1 for row in rows])
        batch["labels"] = batch["labels"].where(kept, -100)
        loss: torch.Tensor = example.loss_of(model, batch)
        return loss

    def seconds(parts: list[list[bytes]], loss: Callable[[nn.Module, Any], torch.Tensor]) -> float:
        began = time.perf_counter()
        for part in parts:
            loss(model, part).backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - began

    model, ratios = example.PackedGPT(), list[float]()
    for begin in range(0, 256 * updates, 256):
        own = documents[begin : begin + 256]
        rows = [own[at : at + 8] for at in range(0, 256, 8)]
        bins = [[own[row] for row in part] for part in first_fit_decreasing(lengths[begin : begin + 256], CAPACITY)]
        ratios.append(
            seconds(bins, lambda model, part: example.loss_of(model, example.pack(part))) / seconds(rows, padded_loss)
        )
    record(TIME, "packed / padded", spread(ratios), on="GPT of bytes", where="CPU")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="blocks of 16 updates of each side")
    parser.add_argument("--updates", type=int, default=5, help="of 256 paragraphs")
    flags = parser.parse_args()
    pack_documents(flags.updates)
    compare(flags.pairs, "CPU")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (folder, flags.pairs), nprocs=2)
