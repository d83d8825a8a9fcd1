"""Batches in tokens: which samples make up a step, and how they are cut, in any world and from any position."""

from __future__ import annotations

import copy
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from variable_batch_size.data.plan.packing import first_fit_decreasing, padded_evenly, padded_groups, spread_evenly
from variable_batch_size.data.tokens.token_batches import boundaries
from variable_batch_size.world import World

pytestmark = pytest.mark.filterwarnings("ignore:With lengths= batch sizes are in tokens")  # of any trace

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=60)
sizes = st.lists(st.integers(1, 120), min_size=1, max_size=12)


def sampler(numbers, trace, world=World(), epochs=2, **options):  # noqa: B008 (a value)
    options = {"max_tokens": 40, "on_end": "hold"} | options
    return vbs.CustomSampler(len(numbers), trace, world.size, world.rank, epochs=epochs, lengths=numbers, **options)


def fits(numbers, trace):
    """Whether the trace has batches that the dataset has, and no more updates an epoch than samples."""
    try:
        one = sampler(numbers, trace)
        one.batches.batch(one.position)
    except ValueError:
        return False
    return all(one.batches.plan.epoch(number).updates <= len(numbers) for number in range(3))


def steps(one, number):
    """The samples of each microbatch of all ranks, by step, of an epoch."""
    epoch = one.batches.plan.epoch(number)
    return {step: one.batches.parts(number, step) for step in range(epoch.first_step, epoch.end_step)}


@given(lengths, sizes, st.integers(0, 3), st.booleans())
@examples(200)
def test_each_sample_comes_once_an_epoch_and_no_drift_adds_up(numbers, trace, seed, shuffle):
    assume(fits(numbers, trace))
    one = sampler(numbers, trace, seed=seed, shuffle=shuffle)
    counted = np.array(numbers)
    for number in range(3):
        parts = steps(one, number)
        assert sorted(np.concatenate([rows for cut in parts.values() for rows in cut]).tolist()) == [
            *range(len(numbers))
        ]
        batches = [int(sum(counted[rows].sum() for rows in cut)) for cut in parts.values()]
        assert [one.batches.batch(vbs_position(one, number, step)).batch_size for step in parts] == batches
        nominal = [one.trace.batch_size(step) for step in parts]
        used = np.cumsum([sum(map(len, cut)) for cut in parts.values()])
        spare = len(numbers) - used > len(parts) - 1 - np.arange(len(parts))  # else each update left takes one sample
        spare[-1] = True
        if min(nominal) >= max(numbers):  # else samples that are longer than a batch push boundaries on
            drift = np.abs(np.cumsum(batches) - np.minimum(np.cumsum(nominal), counted.sum()))
            assert max(drift[spare]) <= max(numbers) / 2


def vbs_position(one, number, step):
    return type(one.position)(number, step)


@given(lengths, sizes, st.integers(1, 5), st.booleans(), st.booleans())
@examples(200)
def test_steps_do_not_depend_on_the_world_and_microbatches_hold_what_fits(numbers, trace, ranks, pad, reproducible):
    assume(fits(numbers, trace))
    options = {"pad": pad, "reproducible": reproducible}
    alone = steps(sampler(numbers, trace, **options), 0)
    counted = np.array(numbers)
    dealt = {step: [] for step in alone}
    for rank in range(ranks):
        one = sampler(numbers, trace, World(rank, ranks), **options)
        cuts, rows = steps(one, 0), iter(list(one))
        for step in dealt:
            for microbatch in one.batches.batch(vbs_position(one, 0, step)).microbatches:
                samples = next(rows)
                assert microbatch.samples in (0, counted[samples].sum())
                dealt[step] += samples if microbatch.samples else []
            used = [counted[rows].max() * len(rows) if pad else counted[rows].sum() for rows in cuts[step]]
            assert max(used) <= 40
            if reproducible:
                assert [one.tolist() for one in cuts[step]] == [one.tolist() for one in alone[step]]
        assert next(rows, None) is None
        assert len(one) == len(list(sampler(numbers, trace, World(rank, ranks), **options)))
    for step, cut in alone.items():
        assert sorted(dealt[step]) == sorted(np.concatenate(cut).tolist())


@given(lengths, sizes, st.data(), st.integers(1, 3), st.integers(1, 3))
@examples(100)
def test_a_run_resumes_at_any_update_in_any_world(numbers, trace, data, before, after):
    assume(fits(numbers, trace))
    whole = sampler(numbers, trace)
    made = [(n, step) for n in range(2) for step in steps(whole, n)]
    stop = data.draw(st.integers(0, len(made) - 1))
    one = sampler(numbers, trace, World(0, before))
    samples = 0
    for _ in range(stop):
        samples += one.batch.batch_size
        one.advance()
    state = copy.deepcopy(one.state_dict())
    assert state["samples"] == samples == one.samples
    other = sampler(numbers, trace, World(after - 1, after))
    other.load_state_dict(state)
    for number, step in made[stop:]:
        due = other.batches.next_update(other.position)
        assert (*due,) == (number, step)
        found = other.batches.parts(*due)
        assert sorted(np.concatenate(found)) == sorted(np.concatenate(whole.batches.parts(number, step)))
        other.advance()
    assert other.samples == 2 * sum(numbers)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=40), st.lists(st.integers(1, 30), min_size=1, max_size=6))
@examples(100)
def test_samples_that_count_nothing_come_too_and_each_update_counts_something(counts, trace):
    assume(sum(count > 0 for count in counts) > 0)
    numbers = [count + 3 for count in counts]
    try:
        one = sampler(numbers, trace, counts=counts)
        parts = steps(one, 0)
    except ValueError:
        return
    assert sorted(np.concatenate([rows for cut in parts.values() for rows in cut])) == [*range(len(numbers))]
    for step, cut in parts.items():
        batch = one.batches.batch(vbs_position(one, 0, step))
        assert batch.batch_size == sum(np.array(counts)[rows].sum() for rows in cut) > 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.data())
@examples(100)
def test_boundaries_are_the_nearest_ends(numbers, data):
    ends = np.cumsum(numbers)
    targets = sorted(data.draw(st.sets(st.integers(1, int(ends[-1])), min_size=1, max_size=len(numbers))))
    found = boundaries(ends, np.array(targets))
    assert (np.diff(found, prepend=0) > 0).all()
    assert found[-1] <= len(ends)
    distance = [np.abs(np.array([0, *ends]) - target).min() for target in targets]
    if all(target - before > 2 * max(numbers) for before, target in zip([0, *targets], targets, strict=False)):
        assert [abs(ends[number - 1] - target) for number, target in zip(found, targets, strict=True)] == distance


@given(st.lists(st.integers(1, 40), min_size=1, max_size=50), st.integers(1, 12))
@examples(100)
def test_packers_place_each_row_once_within_the_capacity(numbers, number):
    rows = np.array(numbers)
    for parts in (first_fit_decreasing(rows, 40), spread_evenly(rows, min(number, len(rows)))):
        assert sorted(np.concatenate(parts)) == [*range(len(rows))]
        assert all(len(part) for part in parts)
    for parts in (padded_groups(rows, 40), padded_evenly(rows, 40, len(padded_groups(rows, 40)) + number)):
        assert sorted(np.concatenate(parts)) == [*range(len(rows))]
        assert max(len(part) * rows[part].max() for part in parts) <= 40


def test_ranks_wait_for_few_tokens():
    """Beside the cut of one rank after another: 8 ranks, lognormal lengths, rows in order or sorted by length."""
    numbers = np.maximum(1, np.random.default_rng(0).lognormal(4, 1, 4000)).astype(int)
    most = int(numbers.max())
    one = sampler(numbers.tolist(), 20 * most, World(0, 8), max_tokens=2 * most)
    waited = slots = 0
    for cut in steps(one, 0).values():
        sums = [int(numbers[rows].sum()) for rows in cut]
        for begin in range(0, len(sums), 8):
            busy = sums[begin : begin + 8]
            waited += 8 * max(busy) - sum(busy)
            slots += 8 * max(busy)
    assert waited / slots < 0.12


WRONG = [
    ({"max_tokens": None}, "lengths= needs max_tokens"),
    ({"max_tokens": 4}, r"at most max_tokens=4 tokens, got 5 in sample 1"),
    ({"lengths": [1, 2]}, "a number for each of the 3 samples, got 2"),
    ({"lengths": [1, 0, 2]}, "lengths must be >= 1, got 0 of sample 1"),
    ({"counts": [0, 0, 0]}, "counts must have a number > 0"),
    ({"minibatch_size": 8}, "bounds a microbatch by max_tokens, got minibatch_size= as well"),
    ({"lengths": None}, "need the lengths of the samples, got none"),
    ({"fixed_shape": True}, "microbatches of any shape, got fixed_shape=True"),
    ({"equal_rounds": True}, "microbatches of any shape, got equal_rounds=True"),
    ({"speeds": [1.0, 2.0]}, "microbatches of any shape, got speeds="),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=str)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        vbs.CustomSampler(3, 5, 2, 0, **{"lengths": [3, 5, 2], "max_tokens": 8} | options)


def test_lengths_are_integers_of_any_array(tmp_path):
    numbers = np.array([3, 5, 2], dtype=np.uint16)
    numbers.tofile(tmp_path / "lengths")
    mapped = np.memmap(tmp_path / "lengths", dtype=np.uint16)
    for kind in (numbers, numbers.tolist(), torch.tensor([3, 5, 2]), mapped):
        assert list(vbs.CustomSampler(3, 5, 1, 0, lengths=kind, max_tokens=8, shuffle=False)) == [[0], [1, 2]]
    with pytest.raises(TypeError, match="lengths must be integers, one for each sample"):
        vbs.CustomSampler(3, 5, 1, 0, lengths=[1.5, 2, 3], max_tokens=8)


def test_fewer_samples_than_updates_raise():
    with pytest.raises(ValueError, match="an epoch of 10 updates needs as many samples that count, got 3"):
        list(vbs.CustomSampler(3, 1, 1, 0, lengths=[3, 5, 2], max_tokens=8))


def test_another_run_has_the_same_lengths():
    state = vbs.CustomSampler(3, 5, 1, 0, lengths=[3, 5, 2], max_tokens=8).state_dict()
    with pytest.raises(ValueError, match="lengths or counts was"):
        vbs.CustomSampler(3, 5, 1, 0, lengths=[3, 2, 5], max_tokens=8).load_state_dict(state)
    vbs.CustomSampler(3, 5, 1, 0, lengths=[3, 5, 2], max_tokens=5).load_state_dict(state)


@pytest.mark.filterwarnings("default")
def test_batch_sizes_in_samples_are_noticed():
    with pytest.warns(
        UserWarning, match="batch sizes are in tokens, but 2 is less than the 40 of one sample; .* by 40"
    ):
        one = vbs.CustomSampler(9, 2, 1, 0, lengths=[40] * 9, max_tokens=80)
    one = vbs.CustomSampler(9, 80, 1, 0, lengths=[40] * 9, max_tokens=80)
    inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.warns(UserWarning, match="but 16 is less than the 40 of one sample"):
        vbs.LinearRuleOptimizer(inner, one, 16)
    with pytest.warns(UserWarning, match="but 32 is less than the 39 of one sample; .* by 22"):  # a usual one is less
        vbs.CustomSampler(3, 32, 1, 0, lengths=[5, 39, 22], max_tokens=80)


def test_a_device_that_compiles_shapes_is_told_to_pad_to_one_length():
    one = vbs.CustomSampler(3, 5, 2, 0, lengths=[3, 5, 2], max_tokens=8)
    message = r"as on a device that compiles shapes; pass minibatch_size= .*, and rows that are padded to one length"
    with pytest.raises(ValueError, match=message):
        one.attach(None, compiles_shapes=True)


@given(st.lists(st.integers(1, 250), min_size=4, max_size=60), st.booleans())
@examples(50)
def test_integers_of_any_width_are_not_copied_and_mean_the_same(numbers, pad):
    options = {"max_tokens": 600, "pad": pad, "trace": max(1, sum(numbers) // 3)}
    expected = sampler(numbers, **options)
    for kind in (np.uint8, np.int16, np.uint32, np.uint64):
        array = np.array(numbers, kind)
        one = sampler(array, **options)
        assert np.shares_memory(one.batches.budget.lengths, array)
        assert list(one) == list(expected)
        assert one.state_dict() == expected.state_dict()
        assert one.batch.batch_size == expected.batch.batch_size


def test_an_epoch_takes_little_memory():
    """Beside the lengths: 4 bytes a sample are kept, and 13 taken."""
    numbers = np.full(1_000_000, 7, np.int32)
    one = sampler(numbers, 2_000, max_tokens=500)
    tracemalloc.start()
    next(iter(one))
    kept, taken = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 5 * len(numbers)
    assert taken < 20 * len(numbers)
