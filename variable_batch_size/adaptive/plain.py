"""Decisions as plain numbers, lists and dictionaries, for checkpoints and messages."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from variable_batch_size.adaptive.base import ControlInput
from variable_batch_size.adaptive.throughput import Throughput
from variable_batch_size.rules.base import Noise
from variable_batch_size.trace.growing import Decision

_NUMBERS = ("devices", "batch_size", "minibatch_size", "updates", "samples", "progress", "fixed_shape")
_VALUES = {"noise": Noise, "throughput": Throughput}


def plain_decision(decision: Decision) -> list[Any]:
    """Return a decision as a list."""
    return [decision.begins, decision.batch_size, None if decision.input is None else plain_input(decision.input)]


def decision_of(plain: list[Any]) -> Decision:
    """Return the decision whose `plain_decision` this is."""
    begins, batch_size, found = plain
    return Decision(begins, batch_size, None if found is None else input_of(found))


def plain_input(input: ControlInput) -> dict[str, Any]:
    """Return what a controller got as a dictionary."""
    numbers = {name: getattr(input, name) for name in _NUMBERS}
    known = {name: getattr(input, name) for name in _VALUES if getattr(input, name) is not None}
    return numbers | {name: list(astuple(value)) for name, value in known.items()}


def input_of(plain: dict[str, Any]) -> ControlInput:
    """Return the input whose `plain_input` this is."""
    values = {name: _VALUES[name](*plain[name]) for name in _VALUES if name in plain}
    return ControlInput(**{name: plain[name] for name in _NUMBERS if name in plain}, **values)
