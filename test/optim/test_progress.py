"""The sum of the progress, on the host and on a device: it can start anywhere, and does not lose small terms."""

from __future__ import annotations

import pytest
import torch

from variable_batch_size.optim.update import Progress


@pytest.mark.parametrize("begin", [0.0, 3.75, 2.0**23 + 0.5])
def test_the_sum_on_a_device_stays_exact_in_a_long_training(begin: float) -> None:
    progress, gain = Progress(begin), torch.tensor(0.3)
    for _ in range(5000):
        progress.add(gain)
    exact = begin + 5000 * gain.double().item()
    assert float(progress) == pytest.approx(exact, abs=1e-3)
    plain = torch.tensor(begin)
    for _ in range(5000):
        plain += gain
    assert begin < 2**23 or abs(plain.item() - exact) > 100  # the error of a single float32


def test_the_sum_on_the_host_is_one_of_floats() -> None:
    progress = Progress(1.5)
    progress.add(0.25)
    assert float(progress) == 1.75


def test_later_reads_the_sum_as_of_the_call() -> None:
    for gain in (1.0, torch.tensor(1.0)):
        progress = Progress()
        progress.add(gain)
        later = progress.later()
        progress.add(gain)
        assert (later(), float(progress)) == (1.0, 2.0)
