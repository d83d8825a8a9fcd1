"""The pictures show what the runs say: one run, and several side by side."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from variable_batch_size.adaptive import ConstantBatch, PerDevice, Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.cluster.capacity_trace import bin_means
from variable_batch_size.lab.simulation import Overheads, plot_runs, simulate
from variable_batch_size.lab.simulation.result import COLUMNS

CAPACITY = CapacityTrace([0, 60, 90], [4, 2, 4], 180, prices=[1.0, 3.0, 1.0])
ARGUMENTS = {
    "throughput": Throughput.simple(samples_per_second=64),
    "ref_batchsize": 256,
    "overheads": Overheads(restart=20, save_every=30, save=5, notice=2),
}
POLICIES = {"a": PerDevice(64), "b": ConstantBatch(100), "c": ConstantBatch(300)}


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def runs(number, capacity=CAPACITY):
    return {name: simulate(capacity, POLICIES[name], **ARGUMENTS) for name in list(POLICIES)[:number]}


def labels(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_the_picture_of_one_run():
    figure = runs(1)["a"].plot()
    nodes, batch, progress, lost = figure.axes
    assert [axes.get_ylabel().split("\n")[0] for axes in (nodes, batch, progress)] == [
        *("nodes", "batch size", "modelled progress")
    ]
    assert lost.get_xlabel() == "time (hours)"
    assert labels(figure.legends[0]) == ["there", "used", "redone", "restarting", "saving"]
    assert progress.get_legend() is None


def test_several_runs_have_a_color_each():
    figure = plot_runs(runs(3))
    _, batch, progress, *lost = figure.axes
    assert labels(figure.legends[0]) == ["there", "redone", "restarting", "saving", "idle"]
    assert labels(progress.get_legend()) == [axes.get_ylabel() for axes in lost] == ["a", "b", "c"]
    colors = [line.get_color() for line in progress.lines]
    assert len(set(colors)) == 3
    assert colors == [axes.yaxis.label.get_color() for axes in lost]
    for line, run in zip(progress.lines, runs(3).values(), strict=True):
        assert line.get_ydata()[-1] == pytest.approx(run.summary["progress"])
    constant = batch.patches[1].get_data().values
    assert set(constant[np.isfinite(constant)]) == {100}


def test_the_colors_are_the_shares_of_the_time():
    for axes, run in zip(plot_runs(runs(3)).axes[3:], runs(3).values(), strict=True):
        for patch in axes.patches:
            values, _, below = patch.get_data()
            assert (values - below).sum() / COLUMNS == pytest.approx(
                run.summary[patch.get_label()] / run.summary["elapsed"]
            )


def test_no_batch_size_is_drawn_without_nodes():
    run = simulate(CapacityTrace([0, 60, 90], [4, 0, 4], 180), POLICIES["a"], **ARGUMENTS)
    figure = plot_runs({"a": run}, "spot.csv: $a")
    assert figure.axes[0].get_title() == "spot.csv: $a"
    figure.canvas.draw()
    sizes, edges, _ = figure.axes[1].patches[0].get_data()
    idle = (edges[:-1] * 3600 >= 60) & (edges[1:] * 3600 <= 90)
    assert idle.any()
    assert np.isnan(sizes[idle]).all()
    assert set(sizes[~idle & ~np.isnan(sizes)]) == {256}


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=20), st.integers(1, 40))
def test_bins_keep_the_integral(parts, columns):
    lengths, values = np.array(parts, np.float64).T
    borders, found = bin_means(np.cumsum([0, *lengths]), values, columns)
    assert found @ np.diff(borders) == pytest.approx(values @ lengths)
    fine, exact = bin_means(np.cumsum([0, *lengths]), values, int(lengths.sum()))
    assert exact == pytest.approx(np.repeat(values, lengths.astype(int)))
    assert fine == pytest.approx(np.arange(lengths.sum() + 1))
