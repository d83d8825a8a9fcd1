"""Means of losses and accuracies over exactly the samples that were trained on, whatever ranks and restarts there were.

An optimizer's microbatches are not alike: some rows repeat, some microbatches are replays, and a step that is broken
off is computed again. So what is added waits until its step is committed, and weighs as much as it has samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from variable_batch_size.data.microbatching import Microbatch
from variable_batch_size.optim.consistency import gather
from variable_batch_size.optim.optimizer import CustomOptimizer

SAMPLES = "samples"  # the name of what is counted and not averaged

_WITHOUT_FLOAT64 = ("mps", "xla")  # devices that do not have it, or only imitate it


@final
class _Sum(NamedTuple):
    """Of samples, and of a value over these: 0-D tensors, whose sum is meant. Nothing changes in place."""

    samples: int = 0
    parts: tuple[Any, ...] = ()


@final
class Accumulator:
    """Means over all samples of the committed updates, on all ranks, since the last `reset()`.

    mean = sum_j n_j v_j / sum_j n_j over the microbatches j of n_j distinct samples, where v_j is the mean over the
    microbatch's rows: of the loss, or of a hit, `(output.argmax(1) == target).float().mean()`. Rows that repeat are
    then right by themselves, and a replay counts 0. Counts and sums over rows are not: pass means.

    Call `add` before the `step()` of every microbatch, on every rank and with the same names, for replays too. It
    never waits for the device. What is added to a step that is dropped, by `discard_step()`, `set_epoch()` or
    `load_state_dict()` of the optimizer, is dropped with it. Sums are kept in float64, or in two float32 where a device
    has no float64, so that a million microbatches lose no digits. (After Accumulator of AdaptDL: Qiao et al. 2021,
    arXiv 2008.12260.)

    Args:
        optimizer: the `CustomOptimizer` that knows which microbatch is due, and when its step is committed.

    Raises:
        TypeError: for another optimizer.
    """

    def __init__(self, optimizer: CustomOptimizer) -> None:
        if not isinstance(optimizer, CustomOptimizer):
            raise TypeError(
                f"the optimizer must be the vbs.CustomOptimizer of the loop, got {type(optimizer).__name__}; pass the "
                f"wrapper, not what it wraps"
            )
        self._optimizer = optimizer
        self._before: dict[str, tuple[int, float]] = {}  # samples and sum over all ranks, before a restart
        self._committed: dict[str, _Sum] = {}  # of this rank, since then
        self._now: dict[str, _Sum] = {}  # with the step that is being accumulated
        self._latest: Microbatch | None = None
        self._had: frozenset[str] = frozenset()  # names that it has had
        optimizer.watch(self)

    def reset(self) -> None:
        """Begin again with no samples."""
        self._before, self._committed = {}, {}
        self.discard()

    @torch.no_grad()
    def add(self, **means: Tensor | float) -> None:
        """Add values of the microbatch that is due, each a mean over its rows: 0-D tensors, or numbers.

        Raises:
            RuntimeError: after the last `step()` of an epoch, or for a name that this microbatch has had.
            TypeError, ValueError: for what is no single number, or is called "samples".
        """
        microbatch = self._due()
        had = self._had if microbatch == self._latest else frozenset()
        for name, mean in means.items():
            self._check(name, mean, had)
        new = means if had else {SAMPLES: 1.0, **means}
        for name, mean in new.items():
            self._now[name] = self._plus(self._now.get(name, _Sum()), mean, microbatch.samples)
        self._latest, self._had = microbatch, had | new.keys()

    def read(self) -> dict[str, float]:
        """The mean of each name, and under "samples" how many samples there were; every rank has to call it.

        It takes one all-reduce. In the middle of a step it tells about those before.
        """
        sums = self._over_ranks()
        means = {name: total / samples if samples else math.nan for name, (samples, total) in sums.items()}
        return {**means, SAMPLES: sums.get(SAMPLES, (0, 0.0))[0]}

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Samples and sums over all ranks, as plain numbers without a world; every rank has to call it.

        Save it together with the optimizer's state, of the same update.
        """
        return {name: {SAMPLES: samples, "sum": total} for name, (samples, total) in self._over_ranks().items()}

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, float]]) -> None:
        """Go on from what `state_dict()` gave, on any world; every rank loads the same."""
        before = {name: (int(saved[SAMPLES]), float(saved["sum"])) for name, saved in state_dict.items()}
        self.reset()
        self._before = before

    def commit(self) -> None:
        """Count what was added to the step; the optimizer calls it."""
        self._committed = dict(self._now)

    def discard(self) -> None:
        """Drop what was added since the last commit; the optimizer calls it."""
        self._now = dict(self._committed)
        self._latest, self._had = None, frozenset()

    def _due(self) -> Microbatch:
        try:
            return self._optimizer.microbatch
        except RuntimeError:
            raise RuntimeError(
                "add() needs a microbatch whose step() is to come, but the epoch has had its last one; call it between "
                "backward() and step()"
            ) from None

    def _check(self, name: str, mean: Tensor | float, had: Set[str]) -> None:
        if name == SAMPLES:
            raise ValueError(f"the name {SAMPLES!r} is that of their number, which is counted by itself; leave it out")
        if name in had:
            raise RuntimeError(
                f"a microbatch gives one value a name, but a second {name!r} came in step {self._optimizer.updates}; "
                f"call add() once between backward() and step()"
            )
        if isinstance(mean, Tensor):
            if mean.numel() != 1:
                raise ValueError(
                    f"{name} must be a mean over the microbatch's rows, got a tensor of shape {tuple(mean.shape)}; "
                    f"pass its .mean()"
                )
        elif not isinstance(mean, (int, float, np.floating, np.integer)):
            raise TypeError(f"{name} must be a number or a 0-D tensor, got {mean!r:.60}; pass a mean over the rows")

    def _plus(self, old: _Sum, mean: Tensor | float, samples: int) -> _Sum:
        number = old.samples + samples
        value = mean.reshape(()) if isinstance(mean, Tensor) else torch.tensor(mean, dtype=torch.float64)
        if value.device.type not in _WITHOUT_FLOAT64:
            (total,) = old.parts or (torch.zeros((), dtype=torch.float64, device=value.device),)
            return _Sum(number, (torch.add(total, value, alpha=samples) if samples else total,))
        backend = self._optimizer.backend
        high, low = old.parts or backend.scalars([0.0, 0.0], value)
        weight = torch.as_tensor(backend.scalar(samples, value), dtype=torch.float32)
        share = torch.where(weight > 0, value * weight, 0.0)  # a replay's value may be infinite
        return _Sum(number, added(high, low, share))

    def _over_ranks(self) -> dict[str, tuple[int, float]]:
        """Samples and sum of each name, over all ranks, before a restart and after."""
        backend, mine = self._optimizer.backend, dict(sorted(self._committed.items()))
        sums = dict(self._before)
        if not mine:
            return sums
        numbers = [number for own in mine.values() for number in (own.samples, self._total(own.parts))]
        device = self._optimizer.param_groups[0]["params"][0].device
        rows = gather(in_singles(numbers), backend, device).double()
        totals = rows.view(backend.world.size, 3, len(mine), 2).sum(dim=1).sum(dim=0).tolist()
        for name, (samples, total) in zip(mine, totals, strict=True):
            earlier, sum_before = sums.get(name, (0, 0.0))
            sums[name] = earlier + int(samples), sum_before + total
        return sums

    def _total(self, parts: Sequence[Tensor]) -> float:
        return sum((self._optimizer.backend.host(part).double().item() for part in parts), 0.0)


def added(high: Tensor, low: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """high + low + value to twice the digits that one has (Knuth, TAOCP volume 2, section 4.2.2, theorem B)."""
    total = high + value
    share = total - high  # of `value` in it
    return total, low + ((high - (total - share)) + (value - share))


def in_singles(numbers: Sequence[float]) -> list[float]:
    """Three rows of float32 numbers, one after another, whose sums are `numbers`: any device adds up zeros exactly."""
    rest, rows = torch.tensor(numbers, dtype=torch.float64), []
    for _ in range(3):
        row = rest.float()
        rest = torch.where(row.isfinite(), rest - row.double(), 0.0)
        rows += row.tolist()
    return rows
