"""Batch sizes that begin after so many samples or tokens, and linear ramps: those of Megatron-LM, step by step."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.megatron import FACTORS, LinearRamp, StepSchedule, play
from helpers.properties import examples
from helpers.traces import MAX_BATCH_SIZE
from variable_batch_size.trace import BatchTrace

any_entries = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=8)  # (gap, batch size)
small = st.integers(1, 99)


@st.composite
def any_schedule(draw):
    """Draw a schedule of thresholds up to 10^15 and of small or large batch sizes, in any way to write it."""
    factor = draw(st.sampled_from([1, *FACTORS.values()]))
    entries, threshold = [(0, draw(small))], 0
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 120), small), max_size=8)):
        threshold += gap * factor
        entries.append((threshold, size * draw(st.sampled_from([1, 1000]))))
    words = [f"{draw(written(threshold))}:{draw(written(size))}" for threshold, size in entries]
    return draw(st.sampled_from([" ", ",", ", ", "  \n"])).join(words)


def written(value):
    """Return the ways to write a number: as it is, or with one of the suffixes."""
    short = [f"{value // factor}{suffix}" for suffix, factor in FACTORS.items() if value % factor == 0]
    return st.sampled_from([str(value), *short, *(text.lower() for text in short)])


@given(any_entries, st.integers(1, 40), st.sampled_from([None, 1, 2, 7]))
def test_each_step_has_the_batch_size_of_megatron(gaps, size, sequence_length):
    threshold, schedule = 0, f"0:{size}"
    for gap, size in gaps:
        threshold += gap
        schedule += f" {threshold}:{size}"
    twin = StepSchedule(schedule, sequence_length)
    assume(twin.valid)
    trace = parse(schedule, sequence_length)
    assert trace.batch_sizes(range(99)).tolist() == play(twin, 99)


@given(any_schedule(), st.sampled_from([None, 1, 1000, 4096, 8191]))
def test_a_schedule_as_it_is_agrees_with_megatron_wherever_the_batch_size_changes(schedule, sequence_length):
    twin = StepSchedule(schedule, sequence_length)
    if not twin.valid:
        with pytest.raises(ValueError, match=r"schedule entry \d+ \(.*\): (sample|tokens // sequence_length) must be "):
            parse(schedule, sequence_length)
        return
    trace = parse(schedule, sequence_length)
    assert trace.batch_size(0) == twin(0)
    for threshold, _ in twin.entries[1:]:
        begin = trace.step_at(threshold)
        for step in range(max(0, begin - 1), begin + 3):
            assert trace.batch_size(step) == twin(trace.offset(step))
    assert trace.batch_size(2**60) == twin.entries[-1][1]


def parse(schedule, sequence_length):
    if sequence_length is None:
        return BatchTrace.parse(schedule, unit="samples")
    return BatchTrace.parse(schedule, unit="tokens", sequence_length=sequence_length)


def test_a_schedule_of_trillions_of_tokens_has_one_run_for_each_batch_size():
    trace = BatchTrace.parse("0:768 250B:1536 500B:3072 750B:6144", unit="tokens", sequence_length=4096)
    begins = [trace.step_at(tokens * 10**9 // 4096 - 1) + 1 for tokens in (250, 500, 750)]
    assert [trace.batch_size(step) for begin in begins for step in (begin - 1, begin)] == [
        *(768, 1536, 1536, 3072, 3072, 6144)
    ]
    assert len(trace._size) == 4


def test_a_step_that_reaches_several_thresholds_leaves_out_the_batch_sizes_between():
    trace = BatchTrace.parse("0:100 10:5 99:8 100:7 1M:6", unit="samples", steps=10**6)
    assert trace == BatchTrace.parse("0:100 1:7 142844:6", steps=10**6)


def test_the_end_of_a_trace_and_one_size_alone_do_not_depend_on_the_unit():
    trace = BatchTrace.parse("0:128 1K:256", 9, unit="samples", on_end="cycle")
    assert trace.batch_sizes(range(7, 11)).tolist() == [128, 256, 128, 128]
    assert BatchTrace.parse("64", unit="samples") == BatchTrace.parse("0:64") == BatchTrace.constant(64)


# Ramps

ramps = st.builds(
    lambda start, increments, increment, samples: (start, start + increments * increment, increment, samples),
    *(small, st.integers(1, 30), small, st.integers(1, 3000)),
)


@given(ramps)
def test_each_step_of_a_ramp_has_the_batch_size_of_megatron(ramp):
    assert BatchTrace.ramp(*ramp).batch_sizes(range(120)).tolist() == play(LinearRamp(*ramp), 120)


@given(small, st.integers(1, 2000), small, st.integers(1, 10**9))
def test_a_ramp_agrees_with_the_floats_of_megatron_if_an_increment_has_whole_samples(
    start, increments, increment, samples_per_increment
):
    samples = increments * samples_per_increment
    ramp = (start, start + increments * increment, increment, samples)
    trace, twin = BatchTrace.ramp(*ramp), LinearRamp(*ramp, real=float)
    for i in range(0, increments + 1, 1 + increments // 20):
        begin = trace.step_at(i * samples_per_increment)
        for step in range(max(0, begin - 1), begin + 3):
            assert trace.batch_size(step) == twin(trace.offset(step))
    assert trace.batch_size(2**60) == trace.max_batch_size == ramp[1]


@given(ramps)
def test_a_ramp_is_the_schedule_of_its_batch_sizes(ramp):
    start, end, increment, samples = ramp
    increments = (end - start) // increment
    assume(samples >= increments)
    begins = [-(Fraction(-i * samples, increments) // 1) for i in range(increments + 1)]
    schedule = " ".join(f"{begin}:{start + i * increment}" for i, begin in enumerate(begins))
    named = BatchTrace.ramp(start=start, end=end, increment=increment, samples=samples)
    assert named == BatchTrace.parse(schedule, unit="samples")


def test_a_ramp_ends_like_any_other_trace():
    trace = BatchTrace.ramp(8, 16, 8, 100, steps=14, on_end="cycle")
    assert trace.batch_sizes(range(12, 16)).tolist() == [8, 16, 8, 8]
    assert BatchTrace.ramp(1, 2, 1, MAX_BATCH_SIZE).constant_from == MAX_BATCH_SIZE


@given(
    st.integers(1, 300),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 300)), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
)
@examples(200)
def test_a_batch_size_from_an_epoch_on_begins_with_that_epoch(samples, entries, drop_last, named):
    epochs = [0, *itertools.accumulate(length for length, _ in entries)]
    sizes = [min(size, samples) for _, size in entries]
    schedule = " ".join(f"{epoch}:{size}" for epoch, size in zip(epochs, sizes, strict=False))
    rests = [samples % size * drop_last for size in sizes]
    if any(following <= rest for following, rest in zip(sizes[1:], rests, strict=False)):
        with pytest.raises(ValueError, match=r"with drop_last=True the batch size from epoch .* which would"):
            vbs.CustomSampler(samples, f"{schedule} epochs", 1, 0, drop_last=True)
        return
    trace = f"{schedule} epochs"
    if not named:
        trace = BatchTrace.parse(schedule, unit="epochs", dataset_size=samples, drop_last=drop_last)
    sampler = vbs.CustomSampler(samples, trace, 1, 0, drop_last=drop_last)
    for (begin, end), size in zip(itertools.pairwise(epochs), sizes, strict=True):
        for number in range(begin, end):
            epoch = sampler.plan.epoch(number)
            steps = range(epoch.first_step, epoch.end_step)
            assert {sampler.plan.trace.batch_size(step) for step in steps} == {size}
            assert len(steps) == (samples // size if drop_last else -(-samples // size))


def test_epochs_need_a_dataset_that_is_large_enough():
    for call in (lambda: BatchTrace.of("0:4 2:8 epochs"), lambda: BatchTrace.parse("0:4 2:8", unit="epochs")):
        with pytest.raises(ValueError, match=r"in epochs needs the size of the dataset, got none; pass"):
            call()
    with pytest.raises(ValueError, match=r"must be <= 7, the size of the dataset, got 8; correct the entry, or datas"):
        vbs.CustomSampler(7, "0:4 2:8 epochs", 1, 0)
