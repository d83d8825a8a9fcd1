"""The trainings that every trainer makes, what its adapter returns of one, and the same by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import variable_batch_size as vbs
from helpers.reference import batches
from helpers.yardstick import (
    EPOCHS,
    MAX_GRAD_NORM,
    SAMPLES,
    SIZES,
    TRACE,
    UPDATES,
    Samples,
    by_hand,
    in_processes,
    network,
    samples,
    weights,
)

WARM_UP, EVALUATED, VOCABULARY, LENGTH = 4, 200, 11, 8
IGNORED = -100  # the label of a token that does not count


class Texts(TensorDataset):
    """Ragged texts: tokens and labels, (8,) each; of a text of n tokens n - 1 labels count, and never the first."""

    def __init__(self) -> None:
        rng = np.random.default_rng(4)
        self.tokens = torch.from_numpy(rng.integers(VOCABULARY, size=(SAMPLES, LENGTH)))
        counts = torch.arange(LENGTH) < torch.from_numpy(rng.integers(2, LENGTH + 1, size=(SAMPLES, 1)))
        self.labels = torch.where(counts & (torch.arange(LENGTH) > 0), self.tokens, IGNORED)
        super().__init__(self.tokens, self.labels)


@dataclass(frozen=True)
class TrainerCase:
    """A training: 3 epochs of the yardstick's 203 samples, at most 8 rows a microbatch, the reference at 16."""

    inner: str = "adamw"  # or "sgd"
    rule: str = "root"
    clip: float | None = None  # the largest norm of a gradient
    schedule: str = ""  # "step", or "cosine" with warm-up
    dropout: float = 0.0
    adaptive: bool = False  # whether a controller chooses the batch sizes
    # If not 0, the mean loss of the first 200 samples is evaluated after each epoch, in batches of 50, and the training
    # ends after so many epochs in which it did not rise.
    patience: int = 0
    tokens: bool = False  # whether samples are texts, whose loss is a mean over all tokens of an update
    uncounted: bool = False  # whether the script does not say how many tokens that are
    workers: int = 0  # of the loader
    wrapper: str = ""  # "ddp" or "fsdp2"

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values() if value)

    @property
    def trace(self) -> Any:
        return vbs.AdaptiveTrace(_choose, start=24, every=3, delay=5) if self.adaptive else TRACE

    @property
    def counting(self) -> bool:
        return self.tokens and not self.uncounted

    @property
    def epochs(self) -> int:
        """At most so many epochs are trained."""
        return 8 if self.patience else EPOCHS

    def dataset(self) -> Any:
        return Texts() if self.tokens else Samples()

    def model(self) -> nn.Module:
        return language_model() if self.tokens else network(self.dropout)

    def loss(self, output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        """The mean over the rows, or over the labels that count: those of a language model, which predicts the next."""
        if self.tokens:
            output, target = output[:, :-1].flatten(0, 1), target[:, 1:].flatten()
        return cross_entropy(output, target, reduction=reduction)

    def count(self, target: Tensor) -> Tensor:
        """What `loss` is a mean over."""
        return (target != IGNORED).sum() if self.tokens else torch.tensor(len(target))

    def optimizer(self, model: nn.Module) -> Any:
        return AdamW(model.parameters(), lr=0.01) if self.inner == "adamw" else SGD(model.parameters(), 0.1, 0.9)

    def rate(self, update: int) -> float:
        """The factor of the schedule; "cosine" is `get_cosine_schedule_with_warmup` of transformers."""
        if self.schedule == "step":
            return float(0.8 ** (update // 4))
        if self.schedule == "cosine" and update < WARM_UP:
            return update / WARM_UP
        rest = (update - WARM_UP) / (UPDATES - WARM_UP)
        return 0.5 * (1 + math.cos(math.pi * rest)) if self.schedule else 1.0

    def scheduler(self, inner: Optimizer) -> LambdaLR | None:
        return LambdaLR(inner, self.rate) if self.schedule else None


def language_model() -> nn.Sequential:
    """Logits of each token, in float64, with the same weights in each call."""
    model = nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Tanh(), nn.Linear(6, VOCABULARY)).double()
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def _choose(known: Any) -> int:
    return 10 + 7 * (known.updates % 5)


CASES = [
    TrainerCase(),
    TrainerCase("sgd", clip=MAX_GRAD_NORM, schedule="step"),
    TrainerCase("sgd", "adascale", clip=MAX_GRAD_NORM),
    TrainerCase("adamw", "linear", schedule="cosine", workers=1),
]


@dataclass(frozen=True)
class Trained:
    """What came of a training, or of what a resume has left of it."""

    weights: Tensor  # (parameters,)
    losses: Sequence[float]  # of each update, as the trainer logs it
    rates: Sequence[float]  # of the inner optimizer at each update
    sizes: Sequence[int]  # that the trace, or a controller, gives for all updates so far
    updates: int  # with those before a resume
    samples: int  # likewise
    evaluations: Sequence[float] = ()  # after each epoch; by hand, after the last update only

    @staticmethod
    def of(model: nn.Module, optimizer: Any, losses: Sequence[float], rates: Sequence[float], **more: Any) -> Trained:
        """Return it for a model and its CustomOptimizer; every rank has to call it."""
        updates = optimizer.updates
        sizes = optimizer.sampler.trace.batch_sizes(range(updates)).tolist()
        return Trained(weights(model), losses, rates, sizes, updates, optimizer.samples, **more)


class Adapter(Protocol):
    """A trainer; one that goes into processes can be pickled."""

    def fit(
        self, case: TrainerCase, folder: Path, *, save_at: Collection[int] = (), resume: Path | None = None
    ) -> Trained:
        """Train on all ranks; after each update n of `save_at`, the state is at `folder / f"at-{n}"`.

        `resume`: where a state was saved, of which this run is the rest.
        """


def note_rates(inner: Optimizer) -> list[float]:
    """Return a list that gets the learning rate of each step of an optimizer of torch."""
    rates: list[float] = []
    inner.register_step_pre_hook(lambda optimizer, *_: rates.append(float(optimizer.param_groups[0]["lr"])))
    return rates


@cache
def expected(
    case: TrainerCase,
    sizes: tuple[int, ...] = tuple(SIZES),
    updates: int = UPDATES,
    inner_of: Callable[[TrainerCase, nn.Module], Optimizer] = TrainerCase.optimizer,
) -> Trained:
    """Train by hand with one whole batch an update."""
    data, model = case.dataset(), case.model()
    inner = inner_of(case, model)
    rates = note_rates(inner)

    def loss(model: nn.Module, indices: NDArray[np.int64]) -> Tensor:
        inputs, target = torch.utils.data.default_collate([data[index] for index in indices.tolist()])
        return case.loss(model(inputs), target)

    options: dict[str, Any] = {"rule": case.rule, "max_grad_norm": case.clip, "scheduler": case.scheduler(inner)}
    losses = by_hand(model, inner, loss=loss, updates=updates, sizes=sizes, **options)
    trained_on = sum(len(batch) for _, batch in zip(range(updates), batches(sizes, SAMPLES), strict=False))
    evaluations = () if case.tokens else (evaluate(model),)
    return Trained(weights(model), losses, rates, sizes, updates, trained_on, evaluations)


def evaluate(model: nn.Module) -> float:
    """The mean loss of the samples that are evaluated."""
    x, target = samples()
    with torch.no_grad():
        return float(cross_entropy(model(x[:EVALUATED]), target[:EVALUATED]))


@dataclass(frozen=True)
class Fit:
    """A call of `fit`, after a seed was set."""

    case: TrainerCase
    folder: Path
    save_at: Collection[int] = ()
    resume: Path | None = None
    seed: int = 3

    def fit(self, adapter: Adapter) -> Trained:
        torch.manual_seed(self.seed + (dist.get_rank() if dist.is_initialized() else 0))
        trained = adapter.fit(self.case, self.folder, save_at=self.save_at, resume=self.resume)
        if dist.is_initialized():
            dist.barrier()  # rank 0 names what was saved, which the next run may resume
        return trained

    def within(self, wrapper: str) -> Fit:
        return replace(self, case=replace(self.case, wrapper=wrapper))


def fit_in_processes(adapter: Adapter, runs: Sequence[Fit], world: int) -> list[Trained]:
    """Return what rank 0 of some processes gets, of each run, after comparing all ranks' weights."""
    ranks = in_processes(_fit_on_rank, world, adapter, runs)
    for trained in zip(*ranks, strict=True):
        assert all(torch.equal(each.weights, trained[0].weights) for each in trained)
    return ranks[0]  # type: ignore[no-any-return]


def _fit_on_rank(adapter: Adapter, runs: Sequence[Fit]) -> list[Trained]:
    return [run.fit(adapter) for run in runs]
