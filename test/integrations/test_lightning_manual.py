"""Several optimizers of one `training_step` in Lightning: in which order their backwards and steps may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.lightning_gan import Gan, gan_job
from helpers.lightning_jobs import ALLOWED, fit

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in ALLOWED]


def test_a_gan_whose_backwards_come_first_has_the_weights_of_whole_batches(tmp_path: Path) -> None:
    gan_job(tmp_path)


@pytest.mark.parametrize("order", ["as in Lightning's documentation", "closures"])
def test_a_backward_after_a_step_is_refused_in_the_first_microbatch(order: str) -> None:
    module = Gan(order)
    message = (
        r"all backwards of a training_step must run before its first step\(\), .* one ran after step\(\) of the "
        r"optimizer SGD; call manual_backward\(\) for every loss first, and step\(\) of all optimizers after that"
    )
    with pytest.raises(RuntimeError, match=message):
        fit(module)
    assert module.calls == 1
