"""Frozen, never used and tied parameters, and one outside the model: saved before the first update, and later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.odd_parameters import train, work
from helpers.processes import spawn


@pytest.mark.slow("starts processes")
@pytest.mark.torch
@pytest.mark.parametrize(
    "way", ["fsdp", *(pytest.param(way, marks=pytest.mark.nightly("starts processes")) for way in ("plain", "ddp"))]
)
def test_a_training_goes_on_from_update_0_and_from_later_ones(way: str, tmp_path: Path) -> None:
    outside, saved = way == "plain", tmp_path / "saved"  # a wrapped model has all parameters of its optimizer
    train("plain", (1, 0), 0, saved, outside=outside)
    spawn(work, (way, 0, tmp_path, outside), nprocs=2)
    spawn(work, (way, 2, tmp_path, outside), nprocs=2)
    train("plain", (1, 0), 3, saved, outside=outside)
    spawn(work, (way, 6, tmp_path, outside), nprocs=2)
    found, undisturbed = torch.load(tmp_path / "found.pt"), train("plain", (1, 0), 6, outside=outside)
    for tensor, expected in zip(found, undisturbed, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)
