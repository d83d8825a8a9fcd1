"""Loops of any kind for `check_gradient`: right ones and wrong ones, alone and in processes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs

ROWS, RANKS, MICROBATCHES = 26, (16, 10), (8, 8, 8, 2)
Batch = tuple[Tensor, Tensor, Tensor]


def parts_of(sizes: Sequence[int]) -> dict[str, range]:
    """Consecutive rows, by name."""
    starts = np.cumsum([0, *sizes]).tolist()
    return {f"part {part}": range(starts[part], starts[part + 1]) for part in range(len(sizes))}


def model_of(dtype: torch.dtype = torch.float64) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def batch_of(dtype: torch.dtype = torch.float64, rows: int = ROWS) -> Batch:
    """x, labels, and the tokens that each row stands for."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(4, (rows,), generator=generator), torch.randint(1, 9, (rows,), generator=generator)


def loss_fn(model: nn.Module, rows: Batch) -> Tensor:
    """The mean over rows."""
    return cross_entropy(model(rows[0]), rows[1])


class Loop:
    """A model, its batch and its optimizer; each method is one update."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.model, self.batch = model_of(dtype), batch_of(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def rows(self, begin: int, end: int) -> Batch:
        x, labels, tokens = self.batch
        return x[begin:end], labels[begin:end], tokens[begin:end]

    def mean(self, begin: int, end: int) -> Tensor:
        return loss_fn(self.model, self.rows(begin, end))

    def of_tokens(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The sum over tokens, and their number."""
        x, labels, tokens = self.rows(begin, end)
        return (cross_entropy(self.model(x), labels, reduction="none") * tokens).sum(), tokens.sum()

    def parts(self, sizes: tuple[int, ...] = MICROBATCHES) -> list[tuple[int, int]]:
        return [(part.start, part.stop) for part in parts_of(sizes).values()]

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    # Right ones. --------------------------------------------------------------------------------------------------

    def whole_batch(self) -> None:
        self.mean(0, ROWS).backward()
        self.update()

    def weighed_microbatches(self) -> None:
        for begin, end in self.parts():
            (self.mean(begin, end) * (end - begin) / ROWS).backward()
        self.update()

    def all_tokens(self) -> None:
        pairs = [self.of_tokens(*part) for part in self.parts()]
        (sum(loss for loss, _ in pairs) / sum(count for _, count in pairs)).backward()  # type: ignore[operator, union-attr, misc]
        self.update()

    def ours(self) -> None:
        source = vbs.ArrivingBatches(5, num_replicas=1, rank=0)
        optimizer = vbs.ConstantOptimizer(self.optimizer, source)
        for update in vbs.updates([self.batch], optimizer):
            for rows in update:
                optimizer.backward(loss_fn(self.model, rows))
                optimizer.step()

    def clipped(self) -> None:
        self.mean(0, ROWS).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        self.update()

    def cleared_before(self) -> None:
        self.optimizer.zero_grad()
        self.mean(0, ROWS).backward()
        self.optimizer.step()

    def zeroed_before(self) -> None:
        loss = self.mean(0, ROWS)
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        self.optimizer.step()

    def zeroed_after(self) -> None:
        self.mean(0, ROWS).backward()
        self.optimizer.step()
        self.model.zero_grad(set_to_none=False)

    # Wrong ones. --------------------------------------------------------------------------------------------------

    def mean_of_means(self) -> None:
        (sum(self.mean(*part) for part in self.parts(RANKS)) / 2).backward()  # type: ignore[union-attr]
        self.update()

    def short_last_microbatch(self) -> None:
        for part in self.parts():
            (self.mean(*part) / 4).backward()
        self.update()

    def token_means_of_ranks(self) -> None:
        pairs = [self.of_tokens(*part) for part in self.parts(RANKS)]
        (sum(loss / count for loss, count in pairs) / 2).backward()  # type: ignore[union-attr]
        self.update()

    def rows_where_tokens_are_meant(self) -> None:
        self.whole_batch()

    def dropped_rows(self) -> None:
        self.mean(0, 24).backward()
        self.update()

    def padded_by_repeated_rows(self) -> None:
        x, labels, _ = self.batch
        index = [*range(ROWS), 0, 1]
        cross_entropy(self.model(x[index]), labels[index]).backward()
        self.update()

    def cleared_within(self) -> None:
        for begin, end in self.parts():
            self.optimizer.zero_grad()
            self.mean(begin, end).backward()
        self.update()

    def one_rank_alone(self) -> None:
        self.mean(0, RANKS[0]).backward()
        self.update()

    def never_cleared(self) -> None:
        self.mean(0, ROWS).backward()
        self.optimizer.step()

    def gradients_of_the_step_before(self) -> None:
        loss_fn(self.model, batch_of(rows=60)).backward()
        self.mean(0, ROWS).backward()
        self.update()

    def another_loss(self) -> None:
        (self.mean(0, ROWS) + 0.1 * sum(p.square().sum() for p in self.model.parameters())).backward()
        self.update()


# ----------------------------------------------------------------------------------------------------------- processes


def by_ddp(weighed: bool) -> tuple[nn.Module, Callable[[], None]]:
    """Ranks of 16 and 10 rows; DistributedDataParallel takes the mean of their means."""
    model, (x, labels, _), rank = model_of(), batch_of(), dist.get_rank()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = slice(0, RANKS[0]) if rank == 0 else slice(RANKS[0], ROWS)

    def step() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(wrapped(x[own]), labels[own])
        (loss * (2 * RANKS[rank] / ROWS if weighed else 1)).backward()
        optimizer.step()

    return wrapped, step


def by_fsdp2(ours: bool) -> tuple[nn.Module, Callable[[], None]]:
    """The same under FSDP2, or by this library."""
    model, batch, rank = model_of(), batch_of(), dist.get_rank()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    own = slice(0, RANKS[0]) if rank == 0 else slice(RANKS[0], ROWS)
    rows = tuple(field[own] for field in batch)

    def plain() -> None:
        inner.zero_grad()
        loss_fn(model, rows).backward()  # type: ignore[arg-type]
        inner.step()

    def with_ours() -> None:
        optimizer = vbs.ConstantOptimizer(inner, vbs.ArrivingBatches(4), model=model)
        for update in vbs.updates([rows], optimizer):
            for microbatch in update:
                optimizer.backward(loss_fn(model, microbatch))  # type: ignore[arg-type]
                optimizer.step()

    return model, with_ours if ours else plain


def run_loops(backend: vbs.backend.Backend) -> dict[str, Any]:
    """The reports of this rank."""
    found: dict[str, Any] = {}
    loops = {"ddp": by_ddp(False), "weighed ddp": by_ddp(True), "fsdp2": by_fsdp2(False), "our fsdp2": by_fsdp2(True)}
    for name, (trained, step) in loops.items():
        report = vbs.testing.check_gradient(
            copy.deepcopy(model_of()), loss_fn, batch_of(), step, trained=trained, parts=parts_of(RANKS)
        )
        found[name] = (report.exact, report.factor, [*report.parts.values()], str(report))
    return found
