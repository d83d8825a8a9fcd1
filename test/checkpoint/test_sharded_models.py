"""Checkpoints of models that are sharded, saved and restored over different ranks, or whose parameters are odd."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import variable_batch_size as vbs
from helpers.checkpoints import updates
from helpers.odd_parameters import train as train_odd
from helpers.processes import run_job
from helpers.reference import assert_equal
from helpers.sharded_checkpoints import Segment, Setting, along, train
from helpers.worlds import ODD, Layout
from variable_batch_size.backend import LocalBackend

FSDP = [Segment(Layout(shards=3), 2), Segment(Layout(shards=2), 4), Segment(None, 5), Segment(Layout(shards=4), 8)]
OTHERS = [
    Segment(Layout(2, 2), 2),
    Segment(Layout(tensors=2), 3),
    Segment(Layout(shards=2, tensors=2), 5),
    Segment(None, 6, ranks=2),
    Segment(Layout(2, tensors=2, by="plain"), 6),
    Segment(Layout(shards=2, tensors=2), 7),
    Segment(None, 8),  # the end: full_tensor() of torch 2.9 is wrong for unequal chunks of tensor parallelism in FSDP2
]
SLOW, TORCH = pytest.mark.slow("starts processes"), pytest.mark.torch
MARKS = {("fsdp", "adam"): (), ("fsdp", "differenced"): (pytest.mark.nightly("compiles"), TORCH)}
SETTINGS = {
    "adam": Setting(vbs.AdamScaleOptimizer),
    "adaptive": Setting(vbs.AdaScaleOptimizer, adaptive=True),
    "wide": Setting(vbs.RootRuleOptimizer, width=6),
    "differenced": Setting(vbs.LinearRuleOptimizer, {"noise": "differenced"}, compiled=True),
}


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize(
    ("segments", "setting"),
    [
        pytest.param(
            segments, setting, id=f"{way}-{name}", marks=MARKS.get((way, name), pytest.mark.nightly("starts processes"))
        )
        for way, segments in (("fsdp", FSDP), ("others", OTHERS))
        for name, setting in SETTINGS.items()
        if way == "others" or name in ("adam", "differenced")
    ],
)
def test_a_training_goes_on_over_other_ranks(segments: list[Segment], setting: Setting, tmp_path: Path) -> None:
    found = along(setting, segments, tmp_path)
    alone = Segment(None, len(ODD))
    assert_equal(found, train(setting, alone, 0, None))
    assert updates(tmp_path / "saved") == [2, 8]
    best = vbs.read_checkpoint(tmp_path / "saved", best=True)
    expected = train(setting, Segment(None, 2), 0, None)
    weights = [tensor.numpy() for tensor in best["parts"]["model"].values()]
    assert_equal(weights, expected[: len(weights)])


@pytest.mark.slow("starts processes")
@pytest.mark.torch
@pytest.mark.parametrize(
    "way", ["fsdp", *(pytest.param(way, marks=pytest.mark.nightly("starts processes")) for way in ("plain", "ddp"))]
)
def test_a_training_goes_on_from_update_0_and_from_later_ones(way: str, tmp_path: Path) -> None:
    outside, saved = way == "plain", tmp_path / "saved"  # a wrapped model has all parameters of its optimizer
    train_odd(LocalBackend(), "plain", 0, saved, outside)
    run_job("gloo", train_odd, way, 0, saved, outside, ranks=2)
    run_job("gloo", train_odd, way, 2, saved, outside, ranks=2)
    train_odd(LocalBackend(), "plain", 3, saved, outside)
    found, _ = run_job("gloo", train_odd, way, 6, saved, outside, ranks=2)
    undisturbed = train_odd(LocalBackend(), "plain", 6, None, outside)
    for tensor, expected in zip(found, undisturbed, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)
