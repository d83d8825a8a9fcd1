"""What a case draws: a seed makes a training, each of its dimensions by a draw of its own name."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

from fuzz.plan import Planned, TraceCase, planned_updates

Value = TypeVar("Value")

# What can be switched off by --without, and how often it is tried. A feature may have no effect on a case.
FEATURES = {
    "unused": 0.15,  # parameters that never have a gradient
    "frozen": 0.15,
    "tied": 0.2,
    "rare": 0.15,  # a head for some samples only
    "alternate": 0.1,  # a head for some updates only
    "rare_betas": 1.0,  # a rule that scales betas, with such a head
    "dropout": 0.15,
    "batchnorm": 0.15,
    "low_precision": 0.1,
    "groups": 0.3,  # two parameter groups
    "clipping": 0.25,
    "noise_rules": 0.3,
    "squares": 0.3,  # a rule of Adam's second moment
    "timescale": 0.1,  # the rule is wrapped in ConstantTimescale
    "loss_scale": 0.15,  # a loss times c changes no gain
    "schedule": 0.2,  # the user changes lr after every update
    "poison": 0.1,  # a sample with an infinite loss, where the noise is measured
    "cut": 0.5,  # fixed_shape=False
    "worlds": 0.3,
    "resume": 0.4,
    "other_cut": 0.2,  # resume with another fixed_shape: the saved one wins
    "other_microbatch": 0.4,  # resume with another minibatch_size
    "loaders": 0.3,
    "read_ahead": 0.15,  # a loader that has read microbatches which the loop has not trained on
    "workers": 0.002,
    "zero_grad": 0.4,
    "stray_backward": 0.15,  # a backward() for no microbatch between two steps, then optimizer.zero_grad()
    "stray_inside": 0.1,  # the same inside a step: no effect, or an error
    "clears": 0.2,
    "discard": 0.2,
    "save_inside": 0.1,  # state_dict() inside a step raises
    "set_epoch": 0.15,  # of the epoch under way
    "finished_epoch": 0.15,  # set_epoch of an epoch that is over raises
    "rollback": 0.1,
    "faults": 0.15,  # exceptions inside step()
    "misuse": 0.1,  # zero_grad of the model inside a step, step() without backward()
    "in_place": 0.1,  # gradients changed in place, in the first updates
    "ends": 0.2,  # max_updates, max_samples, on_end="stop"
    "controller": 0.25,  # the batch sizes are chosen while the training goes on
    "by_update": 0.3,  # a loop over vbs.updates
    "backward": 0.3,  # optimizer.backward(loss)
    "wrong_loop": 0.15,  # a microbatch skipped, or stepped twice, or a backward() left in a loop that is left
    "interrupt": 0.1,  # KeyboardInterrupt at a line of step()
    "closure": 0.15,  # step(closure)
    "log": 0.4,  # optimizer.log
    "counts": 0.2,  # step(count=), or vbs.updates(counts=)
    "average": 0.3,  # WeightAverage
    "checkpoint": 0.35,  # segments and rollbacks go through a Checkpoint
}

RULES = ("constant", "linear", "root", "legw")
NOISE_RULES = ("adascale", "adamscale")
SQUARES_RULE = "invariant-adam"
OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")


class WrongError(AssertionError):
    """The package accepted what it must not, or raised where it must not."""


@dataclass(frozen=True)
class Event:
    """Something that happens once, before microbatch `after` of update `update` (the last one, if it has fewer)."""

    kind: str
    update: int
    after: int = 0
    detail: str = ""
    target: int = 0  # update to which a rollback returns


@dataclass(frozen=True)
class Segment:
    """A part of the training, up to update `end`, by fresh objects that load the state of the part before."""

    end: int
    world: int
    minibatch_size: int
    fixed_shape: bool  # what the sampler is created with
    loader: str
    saved_by: int  # rank whose state is saved, modulo the world
    through_file: bool


@dataclass(frozen=True)
class RuleCase:
    """A rule by its name, and how it is passed."""

    name: str
    by_name: bool
    warmup: float
    timescale: bool


@dataclass(frozen=True)
class AverageCase:
    """A `WeightAverage`."""

    decay: float
    by: str  # "progress" or "samples"


@dataclass(frozen=True)
class SavesCase:
    """How a training is saved in a folder."""

    keep: int
    every: int | None  # updates
    mode: str | None  # "min" or "max" of what is reported


@dataclass(frozen=True)
class Case:
    """A training. All numbers are arguments of the package; everything else is derived by plan and twin."""

    seed: int
    without: frozenset[str]
    dataset_size: int
    trace: TraceCase
    epochs: int
    drop_last: bool
    shuffle: bool
    sampler_seed: int
    fixed_shape: bool
    segments: tuple[Segment, ...]
    events: tuple[Event, ...]
    parts: frozenset[str]
    dtype: torch.dtype
    optimizer: str
    groups: tuple[Mapping[str, Any], ...]  # hyperparameters of each parameter group
    rules: tuple[RuleCase, ...]  # one, or one a group
    ref_batchsize: int
    noise: str | None
    max_grad_norm: float | None
    reduction: str
    clears: bool  # whether the loop calls optimizer.zero_grad() before each microbatch
    loss_scale: float
    decay: float  # of the user's lr after every update
    poisoned: int | None
    zero_grad: str
    find_unused: bool
    optimizer_first: bool  # whether set_epoch is called on the optimizer before the sampler
    host_dropout: bool
    max_updates: int | None = None
    max_samples: int | None = None
    by_update: bool = False
    backward: bool = False
    closure: bool = False
    logs: bool = False
    counts: bool = False
    average: AverageCase | None = None
    saves: SavesCase | None = None
    used: frozenset[str] = field(default=frozenset(), compare=False)

    @cached_property
    def updates(self) -> list[Planned]:
        return planned_updates(
            self.trace,
            self.dataset_size,
            self.epochs,
            drop_last=self.drop_last,
            shuffle=self.shuffle,
            seed=self.sampler_seed,
            max_updates=self.max_updates,
            max_samples=self.max_samples,
        )

    @property
    def divides(self) -> bool:
        """Whether the counts are those of vbs.updates(counts=), by which the loop divides."""
        return self.counts and self.by_update and self.backward and self.seed % 2 == 1

    @property
    def measures_noise(self) -> bool:
        return self.noise is not None or any(rule.name in NOISE_RULES for rule in self.rules)

    @property
    def measures_squares(self) -> bool:
        return any(rule.name == SQUARES_RULE for rule in self.rules)

    @property
    def intermittent(self) -> bool:
        return bool({"rare", "alternate"} & self.parts)

    def minibatch_size(self, update: int) -> int:
        return self._segment(update).minibatch_size

    def ranks(self, update: int) -> int:
        """The number of ranks over which a step is spread."""
        if self.measures_noise or self.measures_squares or "batchnorm" in self.parts:
            return 1
        return self._segment(update).world

    def _segment(self, update: int) -> Segment:
        return next(segment for segment in self.segments if update < segment.end)


class Draw:
    """Independent draws by name: a new dimension changes no other one."""

    def __init__(self, seed: int, without: frozenset[str]) -> None:
        if unknown := without - set(FEATURES):
            raise ValueError(f"--without takes the names {', '.join(FEATURES)}, got {', '.join(sorted(unknown))}")
        self.seed, self.without = seed, without
        self.used: set[str] = set()

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    def choice(self, name: str, values: Sequence[Value]) -> Value:
        return self.rng(name).choice(values)

    def integer(self, name: str, low: int, high: int) -> int:
        return self.rng(name).randint(low, high)

    def number(self, name: str, low: float, high: float) -> float:
        return round(self.rng(name).uniform(low, high), 4)

    def feature(self, name: str, possible: bool = True) -> bool:
        if not possible or name in self.without or self.rng(f"feature {name}").random() >= FEATURES[name]:
            return False
        self.used.add(name)
        return True
