"""The laws of updates: each feature in each world is that of one process, wherever a training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

import variable_batch_size as vbs
from helpers.features import FEATURES, Feature, Run, assert_by_torch
from helpers.processes import run_job
from helpers.reference import Array, assert_equal
from helpers.worlds import WRAPPERS, Layout, Place, alone
from variable_batch_size.backend import Backend

FIRST, SECOND = 3, 6  # updates after which a training goes on in another world
# What `reproducible=True` refuses, and the end of the sentence.
REFUSED = dict.fromkeys((name for name in FEATURES if "second moment" in name), "without the squares of elements")
REFUSED |= {"invariant-adam": "without the squares of elements", "complex": "real parameters"}
REFUSED |= dict.fromkeys(("scaled", "scaled, noise", "counts, scaled"), "got a GradScaler")
REFUSED |= dict.fromkeys((name for name in FEATURES if name.startswith("denominators")), "must be a whole number")


def features_of(layout: Layout) -> list[str]:
    """Return the features that can be trained in a layout."""
    unlike = {*REFUSED, "equal rounds"} if layout.reproducible else set()  # which one cut has in some worlds only
    return [name for name, feature in FEATURES.items() if feature.fits(layout) and name not in unlike]


def reproducible(name: str) -> Feature:
    """Return a feature whose updates are the same to the last bit in any world."""
    feature = FEATURES[name]
    return replace(feature, by_updates=True, sampling=lambda size: {**feature.sampling(size), "reproducible": True})


@cache
def expected_hash(name: str) -> str:
    """Return the hash of the results in one process, which are also right."""
    feature = reproducible(name)
    results = Run(feature, alone(), raw=_is_raw(name)).until(len(feature.sizes)).results()
    assert_equal(results, expected(name), feature.tolerance)
    return _hash_of(results)


def _hash_of(results: list[Array]) -> str:
    return vbs.weights_hash({str(number): torch.from_numpy(one) for number, one in enumerate(results)})


def _is_raw(name: str) -> bool:
    return [*FEATURES].index(name) % 2 > 0


@cache
def expected(name: str, *, fixed_shape: bool = False) -> list[Array]:
    """Return the results of whole batches in one process; where the cut matters, of the same microbatches."""
    feature = FEATURES[name]
    rows = 4 if feature.depends_on_cut or fixed_shape else 64
    sampling = {"fixed_shape": fixed_shape}
    run = Run(feature, alone(), minibatch_size=rows, sampling=sampling).until(len(feature.sizes))
    found = run.results()
    assert_by_torch(found, run.said(), feature)
    return found


def train(backend: Backend, layout: Layout) -> dict[str, Any]:
    """Return the results of features: of trainings in a layout, and of ones that begin and end in one process.

    If they are reproducible, it is the hash of one that begins and ends in the layout, and is in one process between.
    """
    found, place = dict[str, Any](), Place.of(layout, backend)
    if layout.reproducible:
        for name in features_of(layout):
            found[name] = _hash_of(_resumed(reproducible(name), (place, alone(), place), [_is_raw(name)] * 3))
        return found
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
    whole = Run(feature, place, raw=raw).until(len(feature.sizes)).results()
    if place.layout.sharded and feature.keeps_gradients:  # a state has the shards of the last ones
        return whole, None
    return whole, _resumed(feature, (alone(), place, alone()), (False, raw, False))


def _resumed(feature: Feature, places: Sequence[Place], raw: Sequence[bool]) -> list[Array]:
    """Return the results of a training that goes on from place to place."""
    cut = {"fixed_shape": any(place.layout.where == "cores" for place in places)}
    state = None
    for place, own, until in zip(places, raw, (FIRST, SECOND, len(feature.sizes)), strict=True):
        run = Run(feature, place, raw=own, sampling=cut)
        state = (run if state is None else run.load(state)).until(until).state()
    return run.results()


@cache
def _trained(layout: Layout) -> list[dict[str, Any]]:
    return run_job(layout.where, train, layout, ranks=layout.size)


def check(name: str, layout: Layout) -> None:
    """Check a feature in a layout, whose ranks train all that fit at once."""
    ranks, tolerance = _trained(layout), FEATURES[name].tolerance
    if layout.reproducible:
        assert {rank[name] for rank in ranks} == {expected_hash(name)}
        return
    if layout.where == "cores" and FEATURES[name].logs:
        tolerance = 1e-6  # a device averages in float32
    right = expected(name, fixed_shape=layout.where == "cores")
    for rank in ranks:
        whole, resumed = rank[name]
        assert_equal(whole, right, tolerance)
        assert_equal(whole, ranks[0][name][0], 0)
        if resumed is not None:
            assert_equal(resumed, right, tolerance)
