"""What does a loss of the whole batch cost beside the microbatches alone, and beside one forward of the whole batch?

Two columns of pairs go through one encoder of a CLIP loss, in one process. "Microbatches" computes the same forwards
and backwards in one pass: what a loss within microbatches costs, which is another loss. "One big batch" is plain torch,
if memory has room for it; peaks of memory are those of separate processes. If sentence-transformers is installed, its
CachedMultipleNegativesRankingLoss has the same loss of one device, in plain torch. Blocks of updates are interleaved;
each pair gives one ratio.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from records import spread
from results import record

WIDTH, BATCH, MINIBATCH, BLOCK = 1024, 1024, 64, 4
TIME, MEMORY = "time of an update of a contrastive loss", "memory of an update of a contrastive loss"
WHERE = "CPU, 1 process"
WAYS = ("whole_batch", "microbatches", "one big batch", "CachedMultipleNegativesRankingLoss")


def tower() -> nn.Sequential:
    """Return an encoder of 4M parameters."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(WIDTH, 128))


def clip_loss(image: Tensor, text: Tensor) -> Tensor:
    """Return the loss of pairs in one direction, as the peer has it."""
    return cross_entropy(20 * image @ text.T, torch.arange(len(image)))


class Encoder(nn.Module):
    """A tower as sentence-transformers calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = tower()

    def __getitem__(self, number: int) -> nn.Module:  # what the peer asks for its kind
        return self.tower

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the embeddings beside the features."""
        return {**features, "sentence_embedding": normalize(self.tower(features["input_ids"]), dim=1)}


class Side:
    """A way to train, whose blocks of updates are timed; both columns of pairs go through one tower."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        self._way, self._model = way, Encoder()
        self._data = TensorDataset(torch.randn(BLOCK * BATCH, WIDTH), torch.randn(BLOCK * BATCH, WIDTH))
        self._inner = torch.optim.SGD(self._model.parameters(), lr=1e-4)
        self._sampler = vbs.CustomSampler(BLOCK * BATCH, BATCH, 1, 0, MINIBATCH, shuffle=False)
        if way in WAYS[:2]:
            self._optimizer = vbs.LinearRuleOptimizer(self._inner, self._sampler, BATCH)
        if way == WAYS[3]:
            from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

            model: Any = self._model
            self._cached = CachedMultipleNegativesRankingLoss(model, scale=20.0, mini_batch_size=MINIBATCH)

    def _encode(self, rows: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self._model({"input_ids": row})["sentence_embedding"] for row in rows)

    def block(self) -> float:
        """Return the seconds of a block."""
        began = time.perf_counter()
        if self._way in WAYS[:2]:
            for update in vbs.updates(DataLoader(self._data, batch_sampler=self._sampler), self._optimizer):
                if self._way == WAYS[0]:
                    vbs.whole_batch(self._optimizer, update, encode=self._encode, loss=clip_loss)
                    continue
                for rows in update:
                    self._optimizer.backward(clip_loss(*self._encode(rows)))
                    self._optimizer.step()
        else:
            for rows in DataLoader(self._data, BATCH):
                self._inner.zero_grad()
                if self._way == WAYS[3]:
                    features = [{"input_ids": row, "attention_mask": row[:, :1]} for row in rows]
                    loss = self._cached(features, None)
                else:
                    loss = clip_loss(*self._encode(rows))
                loss.backward()
                self._inner.step()
        return time.perf_counter() - began


def print_peak_memory(way: str) -> None:
    """Print the peak memory of this process, in bytes, after a block of updates."""
    Side(way).block()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def memory(ways: list[str], on: str) -> None:
    """Record what an update takes beyond one whose loss is computed within microbatches."""
    found = {}
    for way in ways:
        command = [sys.executable, __file__, "--memory-of", way]
        found[way] = min(int(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(3))
    for way in ways:
        if way != WAYS[1]:
            record(MEMORY, f"{way} - microbatches alone", (found[way] - found[WAYS[1]]) / 1e6, "MB", on=on, where=WHERE)


def main() -> None:
    """Measure, and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9, help="pairs of blocks")
    parser.add_argument("--memory-of", choices=WAYS, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    if flags.memory_of:
        print_peak_memory(flags.memory_of)
        return
    others = [way for way in WAYS[1:] if way != WAYS[3] or importlib.util.find_spec("sentence_transformers")]
    on = f"two columns, B = {BATCH}, microbatches of {MINIBATCH}"
    memory([WAYS[0], *others], on)  # first: a process begins with the peak of the one that starts it
    sides = {way: Side(way) for way in (WAYS[0], *others)}
    for side in sides.values():
        side.block()
    times = [{way: side.block() for way, side in sides.items()} for _ in range(flags.pairs)]
    for way in others:
        ratios = spread([one[WAYS[0]] / one[way] for one in times])
        record(TIME, f"{WAYS[0]} / {way}", ratios, on=on, where=WHERE)


if __name__ == "__main__":
    main()
