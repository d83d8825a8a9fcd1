"""The pictures of a report: rules are told apart, each training is seen, and nothing has a look that means another."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

from helpers.evaluations import records, shortened
from variable_batch_size._validation import FloatArray
from variable_batch_size.lab.evaluation import Analysis
from variable_batch_size.lab.evaluation.figures import (
    _mark_outside,
    draw_batch_sizes,
    draw_curves,
    draw_lr,
    draw_regret,
    look,
    svg,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def test_neighbors_differ_in_color_and_in_dashes() -> None:
    """Lines that coincide are both seen, and told apart without colors."""
    for (color, dashes), (other_color, other_dashes) in pairwise(look([str(number) for number in range(40)]).values()):
        assert color != other_color
        assert dashes != other_dashes


def test_rules_look_different() -> None:
    assert len(set(look([str(number) for number in range(40)]).values())) == 40


# What a deuteranope sees of linear RGB: Machado, Oliveira and Fernandes 2009, severity 1.
DEUTERANOPE = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(color: str) -> FloatArray:
    """The CIELAB coordinates of what a deuteranope sees of a color."""
    values = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(XYZ @ (DEUTERANOPE @ linear).clip(0, 1) / (0.9505, 1.0, 1.089))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_rules_look_different_to_a_deuteranope() -> None:
    """Two of twelve with the same dashes differ by 15 in color; 2.3 is just seen."""
    looks = look([str(number) for number in range(12)]).values()
    pairs = [(lab(one), lab(other)) for (one, dashes), (other, same) in combinations(looks, 2) if dashes == same]
    assert len(pairs) == 6
    assert min(float(np.linalg.norm(one - other)) for one, other in pairs) > 15


def test_a_training_that_failed_outside_is_marked_at_the_edge() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    for end in (5.0, -5.0, 0.5):
        axes.plot([0, 1], [0.0, end])
        axes.plot([1], [end], "x")
    axes.set_ylim(-1, 1)
    _mark_outside(axes)
    marks = [(line.get_marker(), *line.get_data()[1]) for line in axes.get_lines()[6:]]
    assert marks == [("^", 1.0), ("v", -1.0)]


@pytest.mark.parametrize("rows", [1, 2, 15])
def test_each_training_that_failed_has_one_mark_that_is_seen(rows: int) -> None:
    """Also one that failed after its first evaluation, which is above what is shown."""
    from matplotlib.figure import Figure

    first, *others = records({"constant": 0.0}, ["64"], grid=())
    analysis = Analysis([replace(shortened(first, rows), status="diverged"), *others])
    axes = Figure().subplots()
    draw_curves(axes, analysis.rows("simulated", "64"), "loss", "samples", look(analysis.rules))
    low, high = axes.get_ylim()
    marks = [line for line in axes.get_lines() if line.get_marker() in ("x", "^", "v")]
    seen = [line.get_marker() for line in marks if low <= line.get_data()[1][-1] <= high]
    assert seen == ["x" if rows == 15 else "^"]


def test_the_range_of_batch_sizes_is_drawn_where_it_is_known() -> None:
    from matplotlib.figure import Figure

    found = records({"constant": 0.0}, ["spot"], seeds=1, grid=())
    known = [
        replace(one, curve=one.curve | {"batch_least": one.curve["batch_size"], "batch_most": one.curve["batch_size"]})
        for one in found
    ]
    for these, bands in (found, 0), (known, 1):
        axes = Figure().subplots()
        draw_batch_sizes(axes, Analysis(these).rows("simulated", "spot"), look(["constant"]))
        assert len(axes.collections) == bands


@pytest.mark.parametrize("adaptive", [False, True])
def test_batch_sizes_have_the_colors_of_rules_only_where_rules_have_their_own_ones(adaptive: bool) -> None:
    """A training that failed, or was shorter by its end, has the same ones as far as it went."""
    from matplotlib.figure import Figure

    found = records({"constant": 0.0, "linear": 0.1, "root": 0.1}, ["spot"], seeds=1, grid=())
    looks = look(rules := [one.cell["rule"] for one in found])
    sizes = found[1].curve["batch_size"] or ()
    found[1] = replace(shortened(found[1], 7), status="diverged")
    if adaptive:
        found[2] = replace(found[2], curve=found[2].curve | {"batch_size": [size and 2 * size for size in sizes]})
    axes = Figure().subplots()
    draw_batch_sizes(axes, Analysis(found).rows("simulated", "spot"), looks)
    colors = [line.get_color() for line in axes.get_lines()]
    assert colors == ([looks[rule][0] for rule in rules] if adaptive else 3 * ["black"])


@pytest.mark.parametrize("place", ["samples", "seconds"])
def test_seeds_go_on_where_the_shortest_training_ends(place: str) -> None:
    from matplotlib.figure import Figure

    first, *others = records({"constant": 0.0}, ["64"], grid=())
    analysis = Analysis([shortened(first, 2), *others])
    axes = Figure().subplots()
    rows = analysis.rows("simulated", "64")
    draw_curves(axes, rows, "loss", place, look(analysis.rules))
    mean, *thin = [np.asarray(line.get_data(), np.float64) for line in axes.get_lines()]
    assert mean[0, -1] == first.curve[place][1]
    assert len(thin) == len(others)
    for line, record in zip(thin, sorted(others, key=lambda one: one.key), strict=True):
        assert line[0].tolist() == record.curve[place][1:]
        np.testing.assert_allclose(line[1], record.curve["loss"][1:])
    np.testing.assert_allclose(mean[1, -1], np.mean([one.curve["loss"][1] for one in (first, *others)]))
    low, high = axes.get_ylim()
    assert low < min(line[1, -1] for line in thin)
    assert high < mean[1, 0]  # what all have is the begin, and the ends are what is shown


def test_no_seed_goes_on_alone_where_all_have_equal_evaluations() -> None:
    from matplotlib.figure import Figure

    analysis = Analysis(records({"constant": 0.0}, ["64"], grid=()))
    axes = Figure().subplots()
    draw_curves(axes, analysis.rows("simulated", "64"), "loss", "samples", look(analysis.rules))
    assert len(axes.get_lines()) == 1


def test_learning_rates_that_differ_by_rounding_warn_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    from matplotlib.figure import Figure

    (record,) = records({"constant": 0.0}, ["64"], seeds=1, grid=())
    rates = [None, *10 * [0.01], *10 * [math.nextafter(0.01, 1)]]
    analysis = Analysis([replace(record, curve=record.curve | {"lr": rates})])
    axes = Figure().subplots()
    draw_lr(axes, analysis.rows("simulated", "64"), look(analysis.rules))
    axes.figure.draw_without_rendering()
    assert not recwarn.list


@pytest.mark.parametrize("traces", [["64"], ["64", "spot"], ["64", "0:64 40:256", "spot"]])
def test_the_title_of_a_heat_map_fits_above_it(traces: list[str]) -> None:
    from matplotlib.text import Text

    analysis = Analysis(records({"constant": 0.0, "linear-momentum-x": 0.1}, traces, grid=()))
    drawn = []

    def draw(axes: Axes) -> None:
        draw_regret(axes, analysis, "simulated")
        drawn.append(axes)

    svg(draw, (max(3.2, 1.25 + 0.8 * len(traces)), 2.0))  # as wide as in a report
    drawn[0].figure.draw_without_rendering()
    (title,) = drawn[0].findobj(lambda artist: isinstance(artist, Text) and "regret" in artist.get_text())
    assert title.get_window_extent().x1 <= drawn[0].figure.bbox.x1
