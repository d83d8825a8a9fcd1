"""The laws of updates: each feature in each world is that of one process, wherever a training goes on."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from helpers.features import FEATURES, Feature, Run
from helpers.processes import run_job
from helpers.reference import Array, assert_equal
from helpers.worlds import WRAPPERS, Layout, Place, alone
from variable_batch_size.backend import Backend

FIRST, SECOND = 3, 6  # updates after which a training goes on in another world


def features_of(layout: Layout) -> list[str]:
    """Return the features that can be trained in a layout."""
    return [name for name, feature in FEATURES.items() if feature.fits(layout)]


@cache
def expected(name: str, *, fixed_shape: bool = False) -> list[Array]:
    """Return the results of whole batches in one process; where the cut matters, of the same microbatches."""
    feature = FEATURES[name]
    rows = 4 if feature.depends_on_cut or fixed_shape else 64
    sampling = {"fixed_shape": fixed_shape}
    return Run(feature, alone(), minibatch_size=rows, sampling=sampling).until(len(feature.sizes)).results()


def train(backend: Backend, layout: Layout) -> dict[str, Any]:
    """Return the results of features: of trainings in a layout, and of ones that begin and end in one process."""
    found, place = {}, Place.of(layout, backend)
    for number, (name, feature) in enumerate(FEATURES.items()):
        if feature.fits(layout):
            own = (
                replace(layout, wrapper=_wrapper(name, feature, number + layout.size)) if layout.by == "ddp" else layout
            )
            try:
                found[name] = _whole_and_resumed(feature, place._replace(layout=own), raw=number % 2 > 0)
            except Exception as error:
                error.add_note(f"in feature {name!r}")
                raise
    return found


def _wrapper(name: str, feature: Feature, number: int) -> dict[str, Any]:
    own = WRAPPERS[number % len(WRAPPERS)]
    if name.startswith("compiled"):  # torch's compiler wants no bucket that is smaller than the first one
        own = {option: value for option, value in own.items() if option != "bucket_cap_mb"}
    return {**own, "find_unused_parameters": True} if "find_unused_parameters" in feature.options else own


def _whole_and_resumed(feature: Feature, place: Place, *, raw: bool) -> tuple[list[Array], list[Array] | None]:
    end, cut = len(feature.sizes), {"fixed_shape": place.layout.where == "cores"}
    whole = Run(feature, place, raw=raw).until(end).results()
    if place.layout.sharded and feature.keeps_gradients:  # a state has the shards of the last ones
        return whole, None
    begun = Run(feature, alone(), sampling=cut).until(FIRST).state()
    middle = Run(feature, place, raw=raw).load(begun).until(SECOND).state()
    return whole, Run(feature, alone(), sampling=cut).load(middle).until(end).results()


@cache
def _trained(layout: Layout) -> list[dict[str, Any]]:
    return run_job(layout.where, train, layout, ranks=layout.size)


def check(name: str, layout: Layout) -> None:
    """Check a feature in a layout, whose ranks train all that fit at once."""
    ranks, tolerance = _trained(layout), FEATURES[name].tolerance
    if layout.where == "cores" and FEATURES[name].logs:
        tolerance = 1e-6  # a device averages in float32
    right = expected(name, fixed_shape=layout.where == "cores")
    for rank in ranks:
        whole, resumed = rank[name]
        assert_equal(whole, right, tolerance)
        assert_equal(whole, ranks[0][name][0], 0)
        if resumed is not None:
            assert_equal(resumed, right, tolerance)
