"""The controllers that can be named in a string; a new one is a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from variable_batch_size._validation import value_error
from variable_batch_size.adaptive.constant import ConstantBatch
from variable_batch_size.adaptive.per_device import PerDevice

Policy: TypeAlias = PerDevice | ConstantBatch

POLICIES: Mapping[str, Callable[[int], Policy]] = MappingProxyType({"per-device": PerDevice, "constant": ConstantBatch})


def parse_policy(text: str) -> Policy:
    """Return the controller that a string names.

    >>> parse_policy("per-device:64"), parse_policy("constant:1024")
    (PerDevice(samples=64), ConstantBatch(batch_size=1024))

    Raises:
        ValueError: if it is not the name of a controller, a colon and an integer >= 1.
    """
    name, _, samples = text.partition(":")
    if name not in POLICIES or not (samples.isdecimal() and samples.isascii() and 0 < len(samples) <= 16):
        forms = " or ".join(f"{name}:SAMPLES" for name in POLICIES)
        raise value_error(f"a policy must be {forms}, with an integer >= 1", f"{text!r:.60}", "pass per-device:64")
    return POLICIES[name](int(samples))
