"""What a controller of the user's own is told if it expects what is not known."""

from __future__ import annotations

import pytest

import variable_batch_size as vbs
from variable_batch_size.adaptive import ControlInput


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
