"""A trace that ends before the training does raises when the sampler is created."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.runs import error_of, sizes

Ends = dict[str, int]


def missing(trace, dataset_size, drop_last, ends):
    """The slow twin: walk over the updates; what is missing up to each end if the trace ends before, or None."""
    epoch = start = samples = step = 0
    while ends.get("epochs") != epoch and ends.get("max_updates") != step and ends.get("max_samples") != samples:
        if step == len(trace):
            trained = {"epochs": epoch * dataset_size + start, "max_updates": step, "max_samples": samples}
            units = {"epochs": dataset_size, "max_updates": 1, "max_samples": 1}
            return {name: end * units[name] - trained[name] for name, end in ends.items()}
        if drop_last and start + trace[step] > dataset_size:
            epoch, start = epoch + 1, 0
            continue
        size = min(trace[step], dataset_size - start, ends.get("max_samples", 2**62) - samples)
        start, samples, step = start + size, samples + size, step + 1
        if start == dataset_size:
            epoch, start = epoch + 1, 0
    return None


@st.composite
def trainings(draw):
    dataset_size = draw(st.integers(1, 40))
    trace = draw(sizes(dataset_size)) * draw(st.integers(1, 3))
    near = sum(trace) - draw(st.integers(-5, 3 * dataset_size))
    values = {"max_updates": len(trace) + draw(st.integers(-9, 3)), "max_samples": near}
    values["epochs"] = near // dataset_size
    names = draw(st.sets(st.sampled_from(sorted(values)), min_size=1))
    return trace, dataset_size, draw(st.booleans()), {name: max(1, values[name]) for name in names}


@given(trainings())
@examples(400)
def test_creation_raises_if_and_only_if_the_walk_over_the_epochs_would(case):
    trace, dataset_size, drop_last, ends = case
    found = error_of(lambda: vbs.CustomSampler(dataset_size, trace, 1, 0, 4, drop_last=drop_last, **ends))
    expected = missing(*case)
    assert (found is None) == (expected is None)
    if expected is None:  # nor does any epoch raise later
        sampler, number = vbs.CustomSampler(dataset_size, trace, 1, 0, 4, drop_last=drop_last, **ends), 0
        while not sampler.plan.ends_with(sampler.plan.epoch(number)) and number + 1 != ends.get("epochs"):
            number += 1
        return
    assert found is not None
    names = {
        "max_samples": f"max_samples={ends.get('max_samples')}",
        "epochs": f"the end of epoch {ends.get('epochs', 0) - 1}",
    }
    left = min(((expected[name], text) for name, text in names.items() if name in ends), default=None)
    assert left is None or f"{left[0]} samples before {left[1]}" in found
    updates = f"{expected.get('max_updates')} updates before max_updates={ends.get('max_updates')};"
    assert (updates in found) == ("max_updates" in ends)


def after(sampler, place):
    """Return the place of a training that has made one update more."""
    batches = sampler.batches
    return batches.place_after(place, batches.batch(batches.next_update(place.position)))


@given(trainings(), st.data())
@examples(100)
def test_a_training_whose_trace_is_long_enough_resumes_after_any_update(case, data):
    trace, dataset_size, drop_last, ends = case
    cut = vbs.BatchTrace.from_sizes(trace, on_end="error" if missing(*case) is None else "hold")

    def start():
        sampler = vbs.CustomSampler(dataset_size, cut, 1, 0, dataset_size, drop_last=drop_last, **ends)
        return sampler, [sampler.plan.step(e, n).batch_size for e in epochs(sampler) for n in of(e)]

    def epochs(sampler):
        return [sampler.plan.epoch(n) for n in range(sampler.epoch, min(ends.get("epochs", 50), 50))]

    def of(epoch):
        return range(epoch.first_step, epoch.end_step)

    sampler, expected = start()
    stop = data.draw(st.integers(0, len(expected)))
    place = sampler.place
    for _ in range(stop):
        place = after(sampler, place)
    again, _ = start()
    again.load_state_dict({**sampler.state_dict(), **sampler.batches.state_dict(place, end_pending=False)})
    left = [again.plan.step(e, n).batch_size for e in epochs(again) for n in of(e) if n >= stop]
    assert left == expected[stop:]


def test_the_message_counts_up_to_the_end_of_the_training():
    """Epoch 0 shortens its last step from 64 to 44 samples, so 1276 samples need more than the sum of 1276."""
    trace = [16] * 12 + [48] * 10 + [32] * 8 + [7] * 4 + [64] * 5
    assert sum(trace) == 1276
    message = (
        r"^the trace must last longer, but its 39 steps end in epoch 1, which begins at step 35, 20 samples before "
        r'max_samples=1276; add steps \(shortened ones count\), or pass on_end="stop", "hold" or "cycle"$'
    )
    with pytest.raises(ValueError, match=message):
        vbs.CustomSampler(1000, trace, 1, 0, max_samples=1276)
    for end in ({"max_samples": 1256}, {"max_samples": 1276, "on_end": "hold"}, {"max_updates": 39}):
        vbs.CustomSampler(1000, trace, 1, 0, **end)


@pytest.mark.parametrize("drop_last", [False, True])
def test_many_epochs_of_one_batch_size_are_counted_at_once(drop_last):
    long = vbs.BatchTrace.parse("0:7 1T:3 2T:4", steps=3 * 10**12)
    for samples in (long.total_samples // 2, 10**12):
        vbs.CustomSampler(10, long, 1, 0, max_samples=samples, drop_last=drop_last)
    with pytest.raises(ValueError, match=r"its 3000000000000 steps end in epoch \d+, which"):
        vbs.CustomSampler(10, long, 1, 0, max_samples=long.total_samples + 1, drop_last=drop_last)
    with pytest.raises(ValueError, match="samples before the end of epoch 99999999999999"):
        vbs.CustomSampler(10, long, 1, 0, epochs=10**14, drop_last=drop_last)


def test_a_restore_raises_if_the_trace_is_too_short_from_there():
    """An earlier end has shortened an update, which counts as a whole step."""
    sampler = vbs.CustomSampler(10, [4, 4, 4, 4], 1, 0, max_samples=6)
    place = after(sampler, after(sampler, sampler.place))
    again = vbs.CustomSampler(10, [4, 4, 4, 4], 1, 0, max_samples=16 - 2)
    longer = vbs.CustomSampler(20, [4, 4, 4, 4], 1, 0, max_samples=16)
    state = {**sampler.state_dict(), **sampler.batches.state_dict(place, end_pending=False)}
    again.load_state_dict(state)
    with pytest.raises(ValueError, match="2 samples before max_samples=16"):
        longer.load_state_dict(state, strict=False)
