"""The controllers that can be named in a string; a new one is a line here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, final

from variable_batch_size._validation import value_error
from variable_batch_size.adaptive.base import Controller
from variable_batch_size.adaptive.goodput import Goodput
from variable_batch_size.adaptive.noise_scale import NoiseScale, NormTest
from variable_batch_size.adaptive.static import ConstantBatch, PerDevice
from variable_batch_size.trace.schedule import parse_count

INTEGER = "[0-9]{1,16}[kKmMbBtT]?"  # 60k is 60,000
NUMBER = r"[0-9]{1,16}(?:\.[0-9]{1,16})?"


@final
class Argument(NamedTuple):
    """What follows the name of a controller and a colon.

    Attributes:
        name: what messages call it.
        pattern: regular expression of it, with one group for each argument of `make`.
        make: returns the controller, given the texts of the groups.
    """

    name: str
    pattern: str
    make: Callable[..., Controller]


def _to_int(text: str) -> int:
    """Return the number that a text of the form INTEGER means."""
    number = parse_count(text)
    assert number is not None  # because of the form
    return number


POLICIES: Mapping[str, Argument] = {
    "per-device": Argument("SAMPLES", f"({INTEGER})", lambda samples: PerDevice(_to_int(samples))),
    "constant": Argument("SAMPLES", f"({INTEGER})", lambda samples: ConstantBatch(_to_int(samples))),
    "noise-scale": Argument("FACTOR", f"({NUMBER})", lambda factor: NoiseScale(float(factor))),
    "norm-test": Argument("ETA", f"({NUMBER})", lambda eta: NormTest(float(eta))),
    "goodput": Argument(
        "LOW-HIGH", f"({INTEGER})-({INTEGER})", lambda low, high: Goodput((_to_int(low), _to_int(high)))
    ),
}
*_OTHERS, _LAST = (f"{policy}:{argument.name}" for policy, argument in POLICIES.items())
FORMS = f"{', '.join(_OTHERS)} or {_LAST}"


def parse_policy(text: str) -> Controller:
    """Return the controller that a string names.

    >>> parse_policy("per-device:64"), parse_policy("goodput:32-4096")
    (PerDevice(samples=64), Goodput(bounds=(32, 4096), threshold=0.05))

    Raises:
        ValueError: if it is not the name of a controller, a colon and its argument.
    """
    name, _, argument = text.partition(":")
    match = re.fullmatch(POLICIES[name].pattern, argument) if name in POLICIES else None
    if match is None:
        raise value_error(f"a policy must be {FORMS}", f"{text!r:.60}", "pass per-device:64")
    return POLICIES[name].make(*match.groups())
