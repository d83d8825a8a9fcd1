"""Checkpoints of sharded models: saved over some ranks, and restored over others, or in a model that is not sharded."""

from __future__ import annotations

from pathlib import Path

import pytest

import variable_batch_size as vbs
from helpers.checkpoints import updates
from helpers.reference import assert_equal
from helpers.sharded_checkpoints import Segment, Setting, along, train
from helpers.worlds import ODD, Layout

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
