"""Frozen, never used and tied parameters, and one outside the model: saved before the first update, and later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.odd_parameters import train
from helpers.processes import run_job
from variable_batch_size.backend import LocalBackend


@pytest.mark.slow("starts processes")
@pytest.mark.torch
@pytest.mark.parametrize(
    "way", ["fsdp", *(pytest.param(way, marks=pytest.mark.nightly("starts processes")) for way in ("plain", "ddp"))]
)
def test_a_training_goes_on_from_update_0_and_from_later_ones(way: str, tmp_path: Path) -> None:
    outside, saved = way == "plain", tmp_path / "saved"  # a wrapped model has all parameters of its optimizer
    train(LocalBackend(), "plain", 0, saved, outside)
    run_job("gloo", train, way, 0, saved, outside, ranks=2)
    run_job("gloo", train, way, 2, saved, outside, ranks=2)
    train(LocalBackend(), "plain", 3, saved, outside)
    found, _ = run_job("gloo", train, way, 6, saved, outside, ranks=2)
    undisturbed = train(LocalBackend(), "plain", 6, None, outside)
    for tensor, expected in zip(found, undisturbed, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)
