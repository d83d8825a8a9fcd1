"""The gradient noise by progress."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from variable_batch_size.adaptive import ConstantBatch, Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.simulation import NoiseCurve, simulate
from variable_batch_size.rules import adascale_gain
from variable_batch_size.tracker import Tracker


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True).map(sorted), st.integers(0, 25))
def test_a_row_holds_up_to_the_next_one(knots, progress):
    curve = NoiseCurve(knots, [float(knot + 1) for knot in knots], [1.0] * len(knots))
    assert curve.at(progress).sigma2 == max([knot for knot in knots if knot <= progress], default=knots[0]) + 1
    change = curve.next_change(progress)
    assert change == min((knot for knot in knots[1:] if knot > progress), default=math.inf)


def test_the_gain():
    assert NoiseCurve.constant(100.0, 1.0).gain(0, 100, 50) == pytest.approx(1.5)
    tiny = NoiseCurve.constant(1e-320, 0.0)
    assert tiny.gain(0, 100, 50) == 2
    huge = NoiseCurve.constant(1e308, 1e308)
    assert huge.gain(0, 4, 1) == NoiseCurve.constant(1.0, 1.0).gain(0, 4, 1)


def test_from_the_scalars_of_a_training(tmp_path):
    rows = [(1.0, math.nan, math.nan), (2.5, 8.0, 2.0), (3.0, 8.0, 2.0), (4.0, 9.0, -1.0), (5.0, -1.0, 0.0)]
    with Tracker(tmp_path, progress=False) as tracker:
        tracker.log(0, {"lr": 0.1})
        for update, (progress, sigma2, mu2) in enumerate(rows, 1):
            tracker.log(10 * update, {"vbs/progress": progress, "vbs/sigma2": sigma2, "vbs/mu2": mu2})
    curve = NoiseCurve.from_csv(tmp_path / "scalars.csv")
    assert curve == NoiseCurve([2.5, 4.0], [8.0, 9.0], [2.0, 0.0])
    assert hash(curve) == hash(NoiseCurve([2.5, 4.0], [8.0, 9.0], [2.0, 0.0]))
    marked = tmp_path / "marked.csv"  # as spreadsheets write it
    marked.write_text("vbs/progress,vbs/sigma2,vbs/mu2,loss\n2.5,8,2,1\n4,9,0,1\n5,7,1", encoding="utf-8-sig")  # cut
    assert NoiseCurve.from_csv(marked) == curve


def test_progress_follows_the_noise():
    run = simulate(
        CapacityTrace([0], [1], 30),
        ConstantBatch(4),
        throughput=Throughput.simple(4),
        rule="adascale",
        ref_batchsize=1,
        noise=NoiseCurve([0, 10], [1.0, 0.0], [0.0, 1.0]),  # a gain of 4, then of 1
    )
    assert (run.summary["progress"], run.summary["efficiency"]) == (12 + 27, 39 / 120)
    assert adascale_gain(1.0, 0.0, 4, 1) == 4
