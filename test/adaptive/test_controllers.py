"""The contract of every controller, and what each one computes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rule_pages import description

from helpers import controllers
from helpers.controllers import EXAMPLES, FUNCTIONS, WARM_UP, after, monotone, smoothed
from variable_batch_size import adaptive
from variable_batch_size.adaptive import (
    AdaptiveTrace,
    ConstantBatch,
    ControlInput,
    Goodput,
    NoiseScale,
    NormTest,
    PerDevice,
    Throughput,
)
from variable_batch_size.adaptive.base import describe_controller, needs_throughput
from variable_batch_size.adaptive.decided_trace import describe
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.simulation import NoiseCurve, Overheads, simulate
from variable_batch_size.rules import adascale_gain
from variable_batch_size.rules.base import Noise, needs_noise

LARGEST = 2**53
SIZES = st.integers(1, LARGEST) | st.integers(1, 5000)
ESTIMATES = st.floats() | st.sampled_from([0.0, math.nan, math.inf, 1e-300, 1e300]) | st.floats(0, 1e6)
THROUGHPUTS = st.builds(
    Throughput, st.floats(0, 10), st.floats(1e-9, 1), st.floats(0, 10), st.floats(0, 1), st.floats(1, 10)
)
INPUTS = st.builds(
    ControlInput,
    devices=st.integers(1, 2**20),
    batch_size=SIZES,
    minibatch_size=st.none() | SIZES,
    updates=st.integers(0, LARGEST),
    samples=st.integers(0, LARGEST) | st.integers(0, 10**5),
    progress=st.floats(0, 1e15),
    noise=st.builds(Noise, ESTIMATES, ESTIMATES),
    throughput=st.none() | THROUGHPUTS,
)
UNKNOWN = Noise(math.nan, math.nan)
LATE = 10**7  # samples: after every handover
ALL = [*EXAMPLES, *FUNCTIONS]
every_class = pytest.mark.parametrize("controller", EXAMPLES, ids=str)
every_controller = pytest.mark.parametrize("controller", ALL, ids=describe_controller)
every_reader_of_noise = pytest.mark.parametrize("controller", [*filter(needs_noise, ALL)], ids=describe_controller)


def test_every_controller_has_an_example():
    classes = {name for name in adaptive.__all__ if "__call__" in vars(getattr(adaptive, name))}
    assert {type(controller).__name__ for controller in EXAMPLES} == classes - {"Controller"}


@every_controller
@given(input=INPUTS)
def test_it_is_a_pure_function_to_a_batch_size(controller, input):
    size = controller(input)
    assert type(size) is int
    assert 1 <= size <= LARGEST
    assert controller(dataclasses.replace(input)) == size


@every_controller
@given(input=INPUTS)
def test_it_says_that_it_reads_the_throughput(controller, input):
    """A training measures it only then."""
    if not needs_throughput(controller):
        assert controller(dataclasses.replace(input, throughput=None)) == controller(input)


@every_class
def test_it_is_a_value(controller):
    same = dataclasses.replace(controller)
    assert same == controller
    assert hash(same) == hash(controller)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(controller, dataclasses.fields(controller)[0].name, 1)


@every_class
def test_its_repr_makes_it_again(controller):
    assert eval(repr(controller), vars(controllers)) == controller


@every_class
def test_it_describes_itself(controller):
    assert {"Use when", "Fails when", "Source"} <= set(description(type(controller)))


@every_reader_of_noise
def test_it_refuses_to_do_without_the_noise(controller):
    with pytest.raises(ValueError, match=r"^\w+\(.*\) needs the gradient noise, got noise=None; measure it, or pass "):
        controller(ControlInput(devices=1, batch_size=8, samples=LATE))


@every_reader_of_noise
@pytest.mark.parametrize("noise", [UNKNOWN, Noise(math.inf, math.inf), Noise(math.nan, 1.0)], ids=str)
def test_it_keeps_the_batch_size_until_it_knows_the_noise(controller, noise):
    input = ControlInput(devices=1, batch_size=96, samples=LATE, noise=noise, throughput=Throughput.simple(100))
    assert controller(input) == 96
    with pytest.raises(ValueError, match=r"^\w+\(.*\) needs a batch size to keep while it .*, got batch_size=None; pa"):
        controller(dataclasses.replace(input, batch_size=None))


@pytest.mark.parametrize("controller", [NoiseScale(), NormTest(0.5)], ids=str)
def test_an_estimate_that_is_not_positive_gives_no_noise_scale(controller):
    for mu2 in (0.0, -1.0):
        assert controller(ControlInput(devices=1, batch_size=96, noise=Noise(10.0, mu2))) == 96


CAPACITY = CapacityTrace([0, 40, 90, 200, 420], [2, 4, 1, 3, 2], 1e9)
CURVE = NoiseCurve([0, 20, 60, 61], [3e3, 9e4, 2e4, 1.0], [10.0, 20.0, 9.0, 0.0])
ARGUMENTS = {
    "throughput": Throughput(0.01, 0.002, 0.4, 0.05, 1.5),
    "ref_batchsize": 64,
    "rule": "adascale",
    "noise": CURVE,
    "minibatch_size": 48,
    "until": 150,
    "by": "updates",
}


@every_controller
@given(
    every=st.none() | st.integers(1, 20),
    delay=st.integers(0, 30),
    dataset_size=st.none() | st.integers(1000, 5000),
    overheads=st.none() | st.just(Overheads(restart=3, notice=1e6)),
)
def test_its_record_makes_the_same_training(controller, every, delay, dataset_size, overheads):
    arguments = ARGUMENTS | {"dataset_size": dataset_size, "overheads": overheads}
    bounds = None if dataset_size is None else (1, dataset_size)
    run = simulate(CAPACITY, controller, start=64, bounds=bounds, every=every, delay=delay, **arguments)
    again = simulate(CAPACITY, run.trace, **arguments)
    assert again.trace == run.trace
    assert run.summary["updates"] == 150
    assert again.summary == pytest.approx(run.summary, rel=1e-9)


@given(st.integers(1, 10**6), st.integers(-20, 10), st.integers(-3, 3), st.integers(1, 50))
def test_they_end_at_the_right_batch_size(sigma2, mu2, factor, every):
    """All numbers but sigma2 are powers of 2, so that each is right to the last bit."""
    curve = NoiseCurve.constant(sigma2, 2.0**mu2)
    scale = Fraction(sigma2) / Fraction(2) ** mu2
    right = {
        NoiseScale(2.0**factor): max(1, round(scale * Fraction(2) ** factor)),
        NormTest(2.0**factor): max(64, math.ceil(scale / Fraction(2) ** (2 * factor))),
    }
    capacity = CapacityTrace([0], [2], 1e18)
    for controller, size in right.items():
        run = simulate(capacity, controller, start=64, every=every, delay=5, **(ARGUMENTS | {"noise": curve}))
        assert run.trace.batch_size(149) == size


def geometric(low, high):
    return {*np.rint(np.geomspace(low, high)).astype(int).tolist(), low, high}


@given(INPUTS, st.integers(1, 10**5), st.integers(0, 10**6), st.booleans())
def test_the_candidates_are_a_grid_with_the_bounds_full_rounds_and_the_present_size(input, low, more, known):
    high, present = low + more, input.batch_size if known else None
    controller = Goodput((low, high))
    found = controller.candidates(dataclasses.replace(input, batch_size=present)).tolist()
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (low, high)
    assert present is None or (present in found) == (low <= present <= high)
    full = input.devices * (input.minibatch_size or 1)
    assert high < full or high - high % full < low or any(size % full == 0 for size in found)
    ratio = (high / low) ** (1 / 49)
    assert all(after <= (before + 0.5) * ratio + 0.5001 for before, after in itertools.pairwise(found))


@pytest.mark.slow("tries a thousand models")
def test_goodput_is_the_best_of_all_candidates_of_1000_models():
    for seed in range(1000):
        check_goodput(np.random.default_rng(seed))


def check_goodput(random):
    """Throughput times efficiency, as Pollux writes them, for a random reference."""
    number = lambda low, high: float(np.exp(random.uniform(np.log(low), np.log(high))))  # noqa: E731
    model = Throughput(number(1e-3, 1), number(1e-5, 1e-2), number(1e-3, 10), number(1e-4, 1), random.uniform(1, 10))
    sigma2, mu2, devices = number(1, 1e6), number(1e-3, 1e2), int(number(1, 100))
    microbatch = None if random.random() < 0.3 else int(number(1, 1000))
    fixed = microbatch is not None and random.random() < 0.5
    low = int(number(1, 1000))
    high, reference, present = (int(low * number(1, 1000)) for _ in range(3))
    threshold = random.choice([0.0, 0.05, 0.5])

    def goodput(size):
        gain = adascale_gain(sigma2, mu2, size, reference)
        return (
            size / model.seconds(size, devices, microbatch, spread=False, fixed_shape=fixed) * gain / (size / reference)
        )

    controller = Goodput((low, high), threshold)
    noise = Noise(sigma2, mu2)
    input = ControlInput(devices, present, microbatch, noise=noise, throughput=model, fixed_shape=fixed)
    sizes = controller.candidates(input).tolist()
    assert geometric(low, high) <= set(sizes)
    best = max(map(goodput, sizes))
    found = controller(input)
    if present in sizes and found == present:
        assert best <= (1 + threshold) * goodput(present) * (1 + 1e-12)
    else:
        assert found in sizes
        assert goodput(found) >= best * (1 - 1e-12)
        assert present not in sizes or best > (1 + threshold) * goodput(present) * (1 - 1e-12)
    without = controller(dataclasses.replace(input, batch_size=None))
    assert goodput(without) >= max(map(goodput, geometric(low, high))) * (1 - 1e-12)


@given(SIZES, SIZES, SIZES, st.integers(1, 10**6))
def test_goodput_tries_other_sizes_while_it_does_not_know_the_throughput(present, one, other, sigma2):
    low, high = sorted([one, other])
    input = ControlInput(devices=2, batch_size=present, noise=Noise(float(sigma2), 1.0))
    size = Goodput((low, high))(input)
    assert low <= size <= max(low, 2 * present)
    assert size <= high
    assert (size == present) == (low == high == present)
    unknown = dataclasses.replace(input, noise=UNKNOWN)
    assert Goodput((low, high))(unknown) == sorted([low, present, high])[1]


def test_goodput_doubles_up_to_its_bound_and_halves_there():
    sizes = [16]
    for _ in range(5):
        sizes.append(Goodput((16, 100))(ControlInput(devices=2, batch_size=sizes[-1], noise=Noise(9.0, 1.0))))
    assert sizes == [16, 32, 64, 100, 50, 100]


def test_equal_goodputs_take_the_smaller_batch():
    """Without noise, and with one row of each device, an update is worth the same and takes the same seconds."""
    input = ControlInput(devices=100, noise=Noise(0.0, 1.0), throughput=Throughput.simple(100))
    assert Goodput((3, 90))(input) == 3
    assert Goodput((3, 90))(dataclasses.replace(input, batch_size=50)) == 50


@given(INPUTS, SIZES, SIZES, SIZES)
def test_bounds_hold(input, wanted, one, other):
    low, high = sorted([one, other])
    assert AdaptiveTrace(ConstantBatch(wanted), bounds=(low, high)).next(input) == sorted([low, wanted, high])[1]


@dataclasses.dataclass(frozen=True)
class Wild:
    salt: int

    def __call__(self, input):
        return 1 + (input.updates * 37 + input.devices * 11 + self.salt) % 97


@pytest.mark.parametrize("overheads", [None, Overheads(restart=2, save_every=20)])
@given(
    salt=st.integers(0, 99), every=st.integers(1, 9), delay=st.integers(0, 30), size=st.none() | st.integers(100, 300)
)
def test_monotone_never_falls_in_a_training(salt, every, delay, size, overheads):
    """Whatever the end of an epoch has shortened, is still to come, or was lost."""
    arguments = ARGUMENTS | {"dataset_size": size, "overheads": overheads}
    run = simulate(CAPACITY, monotone(Wild(salt)), start=20, every=every, delay=delay, **arguments)
    sizes = run.trace.batch_sizes(np.arange(len(run.trace)))
    assert (np.diff(sizes) >= 0).all()


@given(
    st.integers(1, 10**5), st.integers(1, 10**6), st.floats(0.1, 1), st.sampled_from([1, 16, 32]) | st.integers(1, 99)
)
def test_smoothed_comes_closer_until_it_is_there(begin, wanted, weight, multiple):
    controller, present = smoothed(ConstantBatch(wanted), weight, multiple), begin * multiple
    trace = AdaptiveTrace(controller, multiple_of=multiple)
    end = AdaptiveTrace(ConstantBatch(wanted), multiple_of=multiple).next(ControlInput(devices=1))
    for _ in range(1000):
        input = ControlInput(devices=1, batch_size=present)
        answer, size = controller(input), trace.next(input)
        assert min(present, wanted) <= answer <= max(present, wanted)
        mean = present ** (1 - weight) * wanted**weight
        assert abs(answer - mean) <= multiple + 1e-9 * mean
        if present == end:
            assert size == end
            break
        assert size != present
        present = size
    assert present == end


@given(INPUTS, SIZES, st.integers(1, 5000))
def test_multiples_are_the_nearest(input, wanted, samples):
    size = AdaptiveTrace(ConstantBatch(wanted), multiple_of=samples).next(input)
    assert size % samples == 0
    assert abs(size - wanted) <= samples / 2 or size == samples or size + samples > LARGEST


def test_after_follows_a_batch_trace():
    controller = after(5_000, lambda input: WARM_UP.batch_size(input.updates), NoiseScale())
    run = simulate(CAPACITY, controller, every=1, **(ARGUMENTS | {"noise": NoiseCurve.constant(800, 2)}))
    # 10 updates of 100, and 20 of 200, are 5000 samples.
    assert [run.trace.batch_size(step) for step in (0, 9, 10, 29, 30, 149)] == [100, 100, 200, 200, 400, 400]


@given(INPUTS, st.sampled_from([0.25, 4]))
def test_the_noise_scale_has_no_unit(input, unit):
    """The loss times a constant multiplies sigma^2 and mu^2, and changes no batch size."""
    noise = input.noise
    assert noise is not None
    assume(all(abs(value) < 1e290 and not 0 < abs(value) < 1e-290 for value in (noise.sigma2, noise.mu2)))
    other = dataclasses.replace(input, noise=Noise(noise.sigma2 * unit, noise.mu2 * unit))
    for controller in ALL:
        assert controller(other) == controller(input)


@given(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2), st.integers(1, 2))
def test_functions_are_told_apart_by_what_they_take_from_around_them(a, b, c, d):
    """Also within others; their addresses are those of a run."""
    controllers = [after(x, ConstantBatch(8), smoothed(PerDevice(y), 0.5, 1)) for x, y in ((a, b), (c, d))]
    one, other = (describe(AdaptiveTrace(controller)) for controller in controllers)
    assert (one == other) == ((a, b) == (c, d))
    then = f"smoothed.<locals>.choose(controller=PerDevice(samples={b}), multiple=1, weight=0.5)"
    assert one.startswith(f"after.<locals>.choose(first=ConstantBatch(batch_size=8), samples={a}, then={then}), bound")


def again(input):
    return input.batch_size or again(dataclasses.replace(input, batch_size=8))


def test_a_function_that_calls_itself_has_a_name():
    def choose(input):
        return input.batch_size or choose(dataclasses.replace(input, batch_size=8))

    assert describe_controller(again) == "again()"
    assert describe_controller(choose).endswith(".<locals>.choose()")
