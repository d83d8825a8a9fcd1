"""What the compiler of TPUs makes of an update: collectives, kernels, copies to the host and estimated cycles."""

from __future__ import annotations

import importlib
import os
from collections import Counter

import pytest

from helpers.pages import ROOT

pytest.importorskip("torch_xla")
pytestmark = [
    pytest.mark.xla,
    pytest.mark.slow("compiles graphs for a TPU"),
    pytest.mark.skipif("TPU_COMPILER" not in os.environ, reason="needs jax and libtpu: make test-tpu"),
]

SIDES = ["by hand", "by hand, zeroed", "linear", "AdaScale", "linear, sums twice", "linear, reads the weights"]
SHAPES = ["2048,784", "2048", "2048,2048", "2048", "10,2048", "10"]  # of the parameters
PARAMETERS = 5_824_522
MOST = {"by hand": 1.03, "by hand, zeroed": 0.9}  # estimated cycles of linear / those


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """By side, the graphs that an update executes, and its copies to the host as a graph without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        tpu = importlib.import_module("tpu_compiler")
        folder = tmp_path_factory.mktemp("graphs")
        updates = tpu.dump(folder, "perceptron", SIDES, program="helpers.tpu_mistakes")
        compiled = tpu.compile_updates(updates, "v5e:2x2")
        assert not any(update.copies for update in updates.values())
        yield {side: [compiled[path] for path in update.graphs.elements()] for side, update in updates.items()}


def cycles(update):
    return sum(estimate for graph in update for _, estimate in graph["kernels"])


def faults(graphs, side):
    """What is wrong with an update of the linear rule."""
    last = graphs[side][-1]
    written = Counter(shape for shape, _ in last["kernels"])
    found = {
        "kernels": written != Counter(f"(f32[{shape}], f32[{shape}])" for shape in SHAPES),  # momentum and weight
        "collectives": not sums_once(graphs[side]),
        "host": any(graph["host_transfers"] for graph in graphs[side]),
        **{f"cycles, {other}": cycles(graphs[side]) > most * cycles(graphs[other]) for other, most in MOST.items()},
    }
    return {name for name, wrong in found.items() if wrong}


def sums_once(update):
    """Whether each dtype is summed once, in the last graph, in one message with all that the library adds."""
    reduced = [sums for graph in update for sums in graph["all_reduces"]]
    dtypes = Counter(dtype for sums in reduced for dtype in sums)
    size = sum(sums.get("f32", 0) for sums in reduced) - 4 * PARAMETERS
    return bool(update[-1]["all_reduces"]) and set(dtypes.values()) == {1} and 0 <= size <= 64


def test_an_update_of_the_linear_rule_costs_no_more_than_by_hand(graphs):
    assert faults(graphs, "linear") == set()


def test_adascale_sums_all_in_one_message_and_copies_nothing_to_the_host(graphs):
    assert sums_once(graphs["AdaScale"])
    assert not any(graph["host_transfers"] for graph in graphs["AdaScale"])


def test_another_collective_is_found(graphs):
    assert "collectives" in faults(graphs, "linear, sums twice")


def test_a_pass_over_the_weights_is_found(graphs):
    assert {"kernels", "cycles, by hand"} <= faults(graphs, "linear, reads the weights")
