"""The decisions of a controller, by functions that a simulation and a training call alike."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeAlias, final

from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace, round_to_allowed
from variable_batch_size.adaptive.base import ControlInput
from variable_batch_size.adaptive.throughput import Throughput
from variable_batch_size.rules.base import Noise

UNKNOWN = Noise(math.nan, math.nan)  # before the first estimate
_NUMBERS = ("devices", "batch_size", "minibatch_size", "updates", "samples", "progress", "fixed_shape")
_VALUES = {"noise": Noise, "throughput": Throughput}


@final
@dataclass(frozen=True, slots=True)
class Decision:
    """A batch size that was chosen.

    Attributes:
        begins: the first update that has it.
        batch_size: samples of an update.
        input: from what it was chosen; None for the batch size that a training starts with.
    """

    begins: int
    batch_size: int
    input: ControlInput | None = None

    def to_plain(self) -> list[Any]:
        """Return the decision as numbers, lists and dictionaries, for checkpoints and messages."""
        if (input := self.input) is None:
            return [self.begins, self.batch_size, None]
        numbers = {name: getattr(input, name) for name in _NUMBERS}
        known = {name: list(astuple(value)) for name in _VALUES if (value := getattr(input, name)) is not None}
        return [self.begins, self.batch_size, numbers | known]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Decision:
        """Return the decision whose `to_plain` this is."""
        begins, batch_size, numbers = plain
        if numbers is None:
            return cls(begins, batch_size)
        values = {name: kind(*numbers[name]) for name, kind in _VALUES.items() if name in numbers}
        return cls(begins, batch_size, ControlInput(**{n: numbers[n] for n in _NUMBERS if n in numbers}, **values))


Decisions: TypeAlias = tuple[Decision, ...]  # the one in effect, then those that begin later


def in_effect(decisions: Decisions, updates: int) -> Decisions:
    """Return the decision in effect after this number of updates, then the pending ones."""
    return decisions[max(row for row, decision in enumerate(decisions) if decision.begins <= updates) :]


def is_due(trace: AdaptiveTrace, updates: int) -> bool:
    """Return whether the controller is asked after this number of updates."""
    return trace.every is not None and updates % trace.every == 0


def first_decisions(trace: AdaptiveTrace, input: ControlInput) -> Decisions:
    """Return the decisions at the beginning of a training."""
    if trace.start is None:
        return (Decision(input.updates, trace.next(input), input),)
    decisions = (Decision(input.updates, trace.start),)
    return in_effect((*decisions, decide(trace, decisions, input)), input.updates)


def decide(trace: AdaptiveTrace, decisions: Decisions, input: ControlInput) -> Decision:
    """Return the controller's next decision.

    Args:
        trace: has the controller.
        decisions: the decision in effect, and pending ones.
        input: what the controller gets, but for its `batch_size`: that of the last decision.
    """
    asked = replace(input, batch_size=decisions[-1].batch_size)
    return Decision(input.updates + trace.delay, trace.next(asked), asked)


def decide_again(
    trace: AdaptiveTrace, decisions: Decisions, devices: int | None, step: int, *, changed: bool = False
) -> Decisions:
    """Return the decisions of a training that restarts on another number of devices, or with another controller.

    A controller that gives its old answers on these devices does not read them, and its decisions stay. Another one
    gets, as `batch_size`, the one in effect until then.

    Args:
        trace: has the controller.
        decisions: those of the training that stopped.
        devices: number of devices; None: that of each decision.
        step: the first step whose batch size may change.
        changed: whether another controller, or another one of its limits, decides from now on.
    """
    decided: list[Decision] = []
    for decision in in_effect(decisions, step):
        asked = None if decision.input is None else with_noise(trace, decision.input)
        if asked is None:
            allowed = round_to_allowed(trace, decision.batch_size)
            decision = decision if allowed == decision.batch_size else Decision(step, allowed)
        elif changed or devices not in (None, asked.devices):
            asked = replace(asked, devices=devices or asked.devices)
            changed = changed or trace.next(asked) != decision.batch_size
            decision = replace(decision, input=asked)
            if changed:
                present = decided[-1].batch_size if decided else decision.batch_size
                asked = replace(asked, batch_size=present)
                decision = Decision(max(decision.begins, step), trace.next(asked), asked)
        decided.append(decision)
    return tuple(decided)


def with_noise(trace: AdaptiveTrace, input: ControlInput) -> ControlInput:
    """Return an input that has a noise if the controller reads it: without an estimate, if none was measured."""
    return replace(input, noise=UNKNOWN) if trace.needs_noise and input.noise is None else input
