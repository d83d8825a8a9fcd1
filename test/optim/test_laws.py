"""Every feature in every world: the updates are those of whole batches in one process, wherever a training resumes.

`make fuzz` draws other pairs and more segments; test_contract.py compares the updates of one process with equations.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.features import FEATURES, Run, assert_by_torch
from helpers.laws import REFUSED, check, expected, features_of, reproducible
from helpers.properties import examples
from helpers.reference import EQUATIONS, OPTIMIZERS, assert_equal
from helpers.worlds import ALONE, Layout, Place, alone, through_file
from variable_batch_size.testing import run_ranks

SLOW, NIGHTLY = pytest.mark.slow("starts processes"), pytest.mark.nightly("starts processes")
LAYOUTS = {
    Layout(2, by="plain"): [],
    Layout(3, by="plain"): [SLOW, pytest.mark.torch],
    Layout(2, by="plain", reproducible=True): [],
    Layout(3, by="plain", reproducible=True): [SLOW],
    Layout(2, by="ddp"): [],
    Layout(3, by="ddp"): [SLOW],
    Layout(shards=2): [],
    Layout(shards=3): [NIGHTLY],
    Layout(2, 2): [NIGHTLY],
    Layout(tensors=2): [NIGHTLY],
    Layout(shards=2, tensors=2): [SLOW, pytest.mark.torch],
    Layout(): [NIGHTLY],
    Layout(2, tensors=2, by="plain"): [NIGHTLY],
    Layout(8, by="plain"): [NIGHTLY],
}


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(layout, name, marks=marks, id=f"{layout}-{name}")
        for layout, marks in LAYOUTS.items()
        for name in features_of(layout)
    ],
)
def test_processes_make_the_updates_of_one_from_any_state(layout, name):
    check(name, layout)


@pytest.mark.parametrize("fixed_shape", [False, True])
@pytest.mark.parametrize("name", features_of(ALONE))
def test_one_process_makes_the_updates_of_torch(name, fixed_shape):
    """Where torch alone can train a feature simply; also if rows are repeated to fill a shape."""
    expected(name, fixed_shape=fixed_shape and name != "equal rounds")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_reproducible_is_refused(name):
    with pytest.raises(ValueError, match=f"reproducible=True.*{REFUSED[name]}"):
        Run(reproducible(name), alone()).until(3)


worlds = st.integers(1, 4)
REPRODUCIBLE = replace(ALONE, reproducible=True)


@pytest.mark.parametrize("name", features_of(ALONE))
@given(
    sizes=st.lists(st.integers(1, 50), min_size=2, max_size=6),
    minibatch_size=st.integers(1, 9),
    later=st.integers(1, 9),
    fixed_shape=st.booleans(),
    raw=st.booleans(),
    choice=st.integers(0, 2),
    exact=st.booleans(),
    stop=st.integers(1, 6),
    before=worlds,
    after=worlds,
)
@examples(20)
def test_threads_make_the_updates_of_one_from_any_state(
    name, sizes, minibatch_size, later, fixed_shape, raw, choice, exact, stop, before, after
):
    """To the last bit, if they are reproducible; also where the default for `fixed_shape` is another one later."""
    exact = exact and name in features_of(REPRODUCIBLE)
    feature = replace(reproducible(name) if exact else FEATURES[name], sizes=sizes)
    if name in OPTIMIZERS:
        inners = EQUATIONS[feature.kind].inners
        feature = replace(feature, options=feature.options | {"inner": inners[choice % len(inners)]})
    if name == "equal rounds":
        feature, fixed_shape, minibatch_size, later = FEATURES[name], False, 4, 4
    if name.startswith("second moment"):
        minibatch_size = min(minibatch_size, 4)  # its reference, above which there must be several microbatches
    end = len(feature.sizes)
    stop = min(stop, end - 1)
    how = {"minibatch_size": minibatch_size, "sampling": {"fixed_shape": fixed_shape}}
    free = not (exact or feature.depends_on_cut)  # the microbatches
    again = {"minibatch_size": later if free else minibatch_size, "sampling": {"fixed_shape": not fixed_shape}}

    def begin(backend):
        place = Place.of(Layout(before, by="plain", where="threads"), backend)
        return Run(feature, place, raw=raw, **how).until(stop)

    def resume(backend):
        place = Place.of(Layout(after, by="plain", where="threads"), backend)
        run = Run(feature, place, raw=not raw, **(how if name == "equal rounds" else again)).load(state)
        assert (run.optimizer.lr_factor(), run.optimizer.current_lr()) == rates
        run.until(end)
        return run.results(), run.said()

    begun = run_ranks(begin, before)[0]
    rates, state = (begun.optimizer.lr_factor(), begun.optimizer.current_lr()), through_file(begun.state())
    whole = how if not free else {"minibatch_size": 64}
    right = Run(feature, alone(), **whole).until(end).results()
    (first, said), *others = run_ranks(resume, after)
    assert_equal(first, right, 0 if exact else feature.tolerance)
    assert_by_torch(first, said, feature)
    for other, _ in others:
        assert_equal(other, first, 0)
