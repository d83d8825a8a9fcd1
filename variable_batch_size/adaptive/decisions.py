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
# Fields of a ControlInput: plain numbers, and those that have a class of their own and may be None.
_NUMBERS = ("devices", "batch_size", "minibatch_size", "updates", "samples", "progress", "fixed_shape")
_VALUES = {"noise": Noise, "throughput": Throughput}


@final
@dataclass(frozen=True, slots=True)
class Decision:
    """A batch size that was chosen.

    Attributes:
        begins: the first update that has it.
        batch_size: samples of an update.
        input: what the controller got; None if `start` gives the batch size, and no controller was asked.
    """

    begins: int
    batch_size: int
    input: ControlInput | None = None

    def to_plain(self) -> list[Any]:
        """Return the decision as numbers, lists and dictionaries, for checkpoints and messages."""
        if (input := self.input) is None:
            return [self.begins, self.batch_size, None]
        numbers = {name: getattr(input, name) for name in _NUMBERS}
        known_values = {name: list(astuple(value)) for name in _VALUES if (value := getattr(input, name)) is not None}
        return [self.begins, self.batch_size, numbers | known_values]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Decision:
        """Return the decision that `to_plain` has turned into plain numbers, lists and dictionaries."""
        begins, batch_size, fields = plain
        if fields is None:
            return cls(begins, batch_size)
        numbers = {name: fields[name] for name in _NUMBERS if name in fields}
        values = {name: kind(*fields[name]) for name, kind in _VALUES.items() if name in fields}
        return cls(begins, batch_size, ControlInput(**numbers, **values))


Decisions: TypeAlias = tuple[Decision, ...]  # the one in effect, then those that begin later


def in_effect(decisions: Decisions, updates: int) -> Decisions:
    """Return the decision that gives the batch size after this number of updates, then the pending ones.

    Args:
        decisions: decisions in the order of the updates at which they begin.
        updates: number of updates so far.
    """
    latest = max(row for row, decision in enumerate(decisions) if decision.begins <= updates)
    return decisions[latest:]


def is_due(trace: AdaptiveTrace, updates: int) -> bool:
    """Return whether the controller is asked after this number of updates."""
    return trace.every is not None and updates % trace.every == 0


def first_decisions(trace: AdaptiveTrace, input: ControlInput) -> Decisions:
    """Return the decisions at the beginning of a training, where a controller is asked for the first time.

    Its answer counts at once or, if there is a `start`, after the delay that all later answers have.
    """
    if trace.start is None:
        return (Decision(input.updates, trace.next(input), input),)
    decisions = (Decision(input.updates, trace.start),)
    return in_effect((*decisions, decide(trace, decisions, input)), input.updates)


def decide(trace: AdaptiveTrace, decisions: Decisions, input: ControlInput) -> Decision:
    """Ask the controller, and return its decision.

    Args:
        trace: the trace with the controller.
        decisions: the decision in effect, and pending ones.
        input: what the controller gets; its `batch_size` is replaced by the batch size of the last decision.
    """
    completed_input = replace(input, batch_size=decisions[-1].batch_size)
    return Decision(input.updates + trace.delay, trace.next(completed_input), completed_input)


def decide_again(
    trace: AdaptiveTrace, decisions: Decisions, devices: int | None, step: int, *, changed: bool = False
) -> Decisions:
    """Return the decisions of a training that restarts on another number of devices, or with another controller.

    The controller is asked with the inputs of the old decisions on the new number of devices. As long as it gives its
    old answers, the decisions stay. From the first other answer on, each decision is made again, with the batch size of
    the decision before it as `batch_size`.

    Args:
        trace: the trace with the controller.
        decisions: those of the training that stopped.
        devices: number of devices; None: the number that each decision was made for.
        step: the first step whose batch size may change.
        changed: whether the controller, or the limits of its answers, are others than in the training that stopped.
    """
    new_decisions: list[Decision] = []
    for decision in in_effect(decisions, step):
        new_input = None if decision.input is None else with_noise(trace, decision.input)
        if new_input is None:  # `start`, which no controller has chosen
            allowed = round_to_allowed(trace, decision.batch_size)
            decision = decision if allowed == decision.batch_size else Decision(step, allowed)
        elif changed or devices not in (None, new_input.devices):
            new_input = replace(new_input, devices=devices or new_input.devices)
            changed = changed or trace.next(new_input) != decision.batch_size
            decision = replace(decision, input=new_input)
            if changed:  # the first other answer, or a later one
                present_size = new_decisions[-1].batch_size if new_decisions else decision.batch_size
                new_input = replace(new_input, batch_size=present_size)
                decision = Decision(max(decision.begins, step), trace.next(new_input), new_input)
        new_decisions.append(decision)
    return tuple(new_decisions)


def with_noise(trace: AdaptiveTrace, input: ControlInput) -> ControlInput:
    """Return the input of a controller; if it reads the gradient noise and none was measured yet, with a noise of nan.

    So a controller need not tell a missing noise from an unknown one.
    """
    return replace(input, noise=UNKNOWN) if trace.needs_noise and input.noise is None else input
