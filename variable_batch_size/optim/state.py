"""What the state of an optimizer holds beside the position in the training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import NoneType
from typing import Any, Final

from variable_batch_size._validation import value_error
from variable_batch_size.data.state import NUMBER, Kinds, check_entries, check_items, check_position
from variable_batch_size.optim.differenced import KEYS
from variable_batch_size.optim.noise_estimate import AVERAGES

OWN: Final[Kinds] = {
    "optimizer": (str,),
    "rule": (str,),
    "ref_batchsize": (int, NoneType),
    "progress": NUMBER,
    "last_rates": (dict,),
    "counts": (bool, NoneType),
}
OPTIONAL: Final[Kinds] = {
    "has_gradient": (list,),
    "bias_correction": (list,),
    "stopwatch": (dict,),
    "noise": (dict,),
    "minibatch_size": (int,),
}


def check_state(state: Mapping[str, Any]) -> None:
    """Check the entries of a state, before anything of it is used.

    Raises:
        ValueError: if it is of another version, or an entry is missing or damaged.
    """
    check_position(state.get("sampler", {}) if isinstance(state, Mapping) else {})
    check_entries(state, OWN)
    if not 0 <= state["progress"] < math.inf:
        raise value_error("progress must be a finite number >= 0", state["progress"], "restore a state as it was saved")
    check_entries(state["last_rates"], dict.fromkeys(("lr", "gradient", "reference_lr"), NUMBER), "last_rates.")
    of_noise = {name: OPTIONAL[name] for name in ("noise", "minibatch_size")}
    if of_noise.keys() & state.keys():  # it was measured
        check_entries(state, of_noise)
    present = {name: kind for name, kind in OPTIONAL.items() if name in state}
    check_entries(state, present)
    check_items(state.get("has_gradient", ()), (int,), "has_gradient")
    check_items(state.get("bias_correction", ()), (list,), "bias_correction")
    for group in state.get("bias_correction", ()):
        check_items(group + [None] * (len(group) not in (0, 3)), NUMBER, "bias_correction.")
    if "stopwatch" in state:
        check_entries(state["stopwatch"], {"seconds": (list,)}, "stopwatch.")
    noise = state.get("noise", {})
    if noise:
        check_entries(noise, dict.fromkeys((*AVERAGES, "gain"), NUMBER), "noise.")
    if "earlier" in noise:
        check_entries(noise, {"earlier": (dict,)}, "noise.")
        gradients, *numbers = KEYS
        check_entries(noise["earlier"], {gradients: (list,), **dict.fromkeys(numbers, NUMBER)}, "noise.earlier.")
