"""What users are told who expect of a controller, or change in it, what they should not."""

from __future__ import annotations

import pytest

import variable_batch_size as vbs
from helpers.adaptive_training import Setting, Wild, part, trained
from variable_batch_size.adaptive import ControlInput
from variable_batch_size.world import World


def test_a_controller_is_told_what_it_must_expect() -> None:
    unsaid = lambda input: round(input.noise.sigma2)  # noqa: E731
    with pytest.raises(AttributeError, match=r"must say in its class what it reads: needs_noise = True.*; add it"):
        vbs.CustomSampler(50, vbs.AdaptiveTrace(unsaid), num_replicas=1, rank=0)

    class Early:
        needs_noise = True

        def __call__(self, input: ControlInput) -> int:
            assert input.noise is not None
            return round(input.noise.noise_scale)

    with pytest.raises(ValueError, match=r"must return a batch size before the first estimate.*return input\.batch"):
        vbs.CustomSampler(50, vbs.AdaptiveTrace(Early()), num_replicas=1, rank=0)

    class Broken:
        def __call__(self, input: ControlInput) -> int:
            return round(float("nan"))

    with pytest.raises(ValueError, match=r"^cannot convert float NaN to integer$"):
        vbs.CustomSampler(50, vbs.AdaptiveTrace(Broken()), num_replicas=1, rank=0)


def setting(start: int, every: int = 10) -> Setting:
    trace = vbs.AdaptiveTrace(Wild(3, needs_noise=False), start=start, every=every, delay=8)
    return Setting(trace, 4, False, "linear")


def test_a_restored_training_warns_if_it_is_asked_at_other_updates_and_not_of_another_start() -> None:
    state, weights, _ = trained(setting(8), [(1, 30)])
    part(setting(9), World(), None, state, 40, weights)
    with pytest.warns(UserWarning, match=r"chosen by .*, every=10, delay=8, and are by .*, every=7, delay=8 from now"):
        part(setting(8, every=7), World(), None, state, 40, weights)
