"""What do microbatches by tokens save beside microbatches by rows, and what does a sampler with lengths cost?

Texts have 20 to 2,000 tokens, with a lognormal distribution, and batches the same mean number of tokens. The memory is
the same: rows x longest row <= `--max-tokens`. "By rows" a microbatch has as many rows as it could have of the longest
text, in random order or sorted by length; "by lengths" it is that of `lengths=, max_tokens=, pad=True`; "packed" is
without padding, for a model that keeps documents apart.

The figures are arithmetic, of many texts: padding is the share of positions without a token, waiting the share of
positions in which ranks wait for the one that has most in a round, and both make the positions a token. Times are
epochs of one small GPT on 2 ranks, interleaved; each gives one ratio. With `--sizes` samplers of so many texts, whose
lengths are in a file, are measured, as in benchmarks/sampler.py.

    python benchmarks/tokens.py  # five minutes
    python benchmarks/tokens.py --epochs 0 --figures 0 --sizes 1e8 --runs 1
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from numpy.typing import NDArray
from torch import Tensor, nn

import variable_batch_size as vbs
from records import spread
from results import record
from sampler import RANK, RANKS, record_all, run

SHORTEST, LONGEST, VOCABULARY, WIDTH, HEADS = 20, 2000, 256, 64, 4
SIDES, PACKED = ("by lengths", "by rows", "by rows, sorted"), "packed"
CASES = {"padding": "share", "waiting": "share", "positions": "a token"}
TIME, FIGURES = "time of an epoch of texts", "padding and waiting, of texts"


def lengths_of(texts: int) -> NDArray[np.int64]:
    """Return the lengths of texts."""
    drawn = np.random.default_rng(0).lognormal(5.5, 1.0, texts)
    return np.clip(drawn, SHORTEST, LONGEST).astype(np.int64)


def sampler_of(side: str, lengths: NDArray[np.int64], tokens: int, most: int, ranks: int, rank: int) -> Any:
    """Return a sampler whose batches have about `tokens` tokens, and its microbatches at most `most` positions."""
    if side in (SIDES[0], PACKED):
        pad = side != PACKED
        return vbs.CustomSampler(len(lengths), tokens, ranks, rank, lengths=lengths, max_tokens=most, pad=pad)
    rows = max(1, round(tokens / lengths.mean()))
    shuffle = side == "by rows"
    return vbs.CustomSampler(len(lengths), rows, ranks, rank, max(1, most // LONGEST), shuffle=shuffle)


def texts_of(side: str, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the lengths in the order of the dataset."""
    return np.sort(lengths) if side == "by rows, sorted" else lengths


def padded(lengths: list[int]) -> int:
    """Return the positions of rows that are padded."""
    return len(lengths) * max(lengths)


def positions(side: str, lengths: NDArray[np.int64], tokens: int, most: int, ranks: int) -> tuple[float, float, float]:
    """Return padding, waiting, and positions a token of an epoch."""
    ordered = texts_of(side, lengths)
    computed = slots = 0
    dealt = [sampler_of(side, ordered, tokens, most, ranks, rank) for rank in range(ranks)]
    rows = [iter(list(sampler)) for sampler in dealt]
    for step in range(dealt[0].plan.epoch(0).end_step):
        of_ranks = []
        for sampler, microbatches in zip(dealt, rows, strict=True):
            batch = sampler.batches.batch(type(sampler.position)(0, step))
            own = [(next(microbatches), part.samples) for part in batch.microbatches]
            cost = sum if side == PACKED else padded
            of_ranks.append([cost(ordered[taken].tolist()) for taken, samples in own if samples])
        for of_round in itertools.zip_longest(*of_ranks, fillvalue=0):
            computed += sum(of_round)
            slots += ranks * max(of_round)
    return 1 - lengths.sum() / computed, 1 - computed / slots, slots / lengths.sum()


class Block(nn.Module):
    """Causal attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape as x, (rows, tokens, WIDTH)."""
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.between(x))


class GPT(nn.Module):
    """A small GPT, for which what follows a text, its padding, changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, (rows, VOCABULARY, tokens), of (rows, tokens)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.blocks(x)).transpose(1, 2)
        return logits


class Side:
    """A training whose epochs are timed."""

    def __init__(self, side: str, flags: argparse.Namespace) -> None:
        torch.manual_seed(0)
        lengths = lengths_of(flags.texts)
        ordered, world = texts_of(side, lengths), dist.get_world_size()
        self._texts = [torch.randint(VOCABULARY, (int(length) + 1,)) for length in ordered]
        self._model, self._by_rows = GPT(), side != "by lengths"
        sampler = sampler_of(side, ordered, flags.tokens, flags.max_tokens, world, dist.get_rank())
        inner = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        options: Any = {"reduction": "sum"} if self._by_rows else {}
        self._optimizer = vbs.ConstantOptimizer(inner, sampler, **options)

    def epoch(self) -> float:
        """Return the seconds of an epoch."""
        optimizer = self._optimizer
        dist.barrier()
        began = time.perf_counter()
        for update in vbs.updates(optimizer.sampler, optimizer):
            for rows in update:
                texts = [self._texts[row] for row in rows]
                padded = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)
                logits = self._model(padded[:, :-1].clamp(min=0))
                reduction = "sum" if self._by_rows else "mean"
                loss = nn.functional.cross_entropy(logits, padded[:, 1:], ignore_index=-100, reduction=reduction)
                optimizer.backward(loss)
                optimizer.step(count=(padded[:, 1:] != -100).sum() if self._by_rows else None)
        dist.barrier()
        return time.perf_counter() - began


def process(rank: int, folder: str, flags: argparse.Namespace) -> None:
    """Be one of two ranks, and record the times of epochs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    sides = {side: Side(side, flags) for side in SIDES}
    times = [{name: side.epoch() for name, side in sides.items()} for _ in range(flags.epochs + 1)][1:]
    if rank == 0:
        where = "CPU, 2 processes"
        for other in SIDES[1:]:
            ratios = [epoch[SIDES[0]] / epoch[other] for epoch in times]
            record(TIME, f"{SIDES[0]} / {other}", spread(ratios), on="small GPT", where=where)
        record(TIME, SIDES[0], spread([epoch[SIDES[0]] for epoch in times]), "s", on="small GPT", where=where)
    dist.barrier()
    dist.destroy_process_group()


def record_figures(texts: int, flags: argparse.Namespace) -> None:
    """Record what an epoch computes beyond its tokens."""
    lengths = lengths_of(texts)
    for ranks in (2, 8):
        for side in (*SIDES, PACKED):
            found = positions(side, lengths, ranks * flags.tokens // 2, flags.max_tokens, ranks)
            for (case, unit), value in zip(CASES.items(), found, strict=True):
                record(FIGURES, side, float(value), unit, on=f"{texts:,} texts", where=f"{ranks} ranks", case=case)


def by_tokens(folder: str, size: int) -> Iterable[list[int]]:
    """Return a sampler of texts whose lengths are in a file."""
    lengths = np.memmap(Path(folder, f"{size}"), np.int32, "r")
    return vbs.CustomSampler(size, 2**20, RANKS, RANK, lengths=lengths, max_tokens=2**14)


def record_sizes(sizes: Iterable[float], runs: int) -> None:
    """Record times and memory of samplers."""
    for size in map(int, sizes):
        with tempfile.TemporaryDirectory() as folder:
            with Path(folder, f"{size}").open("wb") as file:
                for begin in range(0, size, 2**20):
                    lengths_of(min(2**20, size - begin)).astype(np.int32).tofile(file)
            record_all(
                "CustomSampler(lengths=)",
                [run(partial(by_tokens, folder), size) for _ in range(runs)],
                f"{size:.0e} samples",
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=150, help="of an epoch that is timed")
    parser.add_argument("--epochs", type=int, default=7, help="that are timed of each side; 0: none")
    parser.add_argument("--tokens", type=int, default=16_000, help="of a batch of 2 ranks")
    parser.add_argument("--max-tokens", type=int, default=8_000, help="positions of a microbatch")
    parser.add_argument("--figures", type=int, default=20_000, help="texts of the figures; 0: none")
    parser.add_argument("--sizes", type=float, nargs="*", default=[1e7], help="samples of samplers")
    parser.add_argument("--runs", type=int, default=3, help="processes for each size")
    flags = parser.parse_args()
    if flags.figures:
        record_figures(flags.figures, flags)
    if flags.epochs:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(process, (folder, flags), nprocs=2)
    record_sizes(flags.sizes, flags.runs)
