"""A controller in a training: whatever stops it, reads ahead or computes it, it decides the same, and on record."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.adaptive_training import DATA, SAMPLES, TARGETS, Setting, Wild, part, read_ahead, trained
from helpers.loops import InThread
from variable_batch_size.adaptive import ControlInput, NoiseScale, PerDevice
from variable_batch_size.testing import ThreadBackend, run_ranks
from variable_batch_size.world import World


@st.composite
def settings_(draw: st.DrawFn) -> Setting:
    ahead = draw(st.integers(0, 9))
    trace = vbs.AdaptiveTrace(
        Wild(draw(st.integers(0, 999)), draw(st.booleans())),
        start=draw(st.none() | st.integers(4, 28)),
        bounds=draw(st.none() | st.just((3, 28))),
        multiple_of=draw(st.sampled_from([1, 1, 2, 4])),
        every=draw(st.integers(1, 12)),
        delay=4 + ahead + draw(st.integers(0, 6)),
    )
    return Setting(
        trace,
        minibatch_size=draw(st.integers(1, 9)),
        fixed_shape=draw(st.booleans()),
        rule=draw(st.sampled_from(["linear", "adascale"])),
        ahead=ahead,
        drop_last=draw(st.booleans()),
    )


PARTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 16)), min_size=1, max_size=3)


def until(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (world size, updates at the end) of parts with so many updates each."""
    return [(size, sum(number for _, number in parts[: row + 1])) for row, (size, _) in enumerate(parts)]


@settings(max_examples=30)
@given(settings_(), PARTS)
def test_decisions_do_not_depend_on_worlds_stops_and_loaders(setting: Setting, drawn: list[tuple[int, int]]) -> None:
    """Law 10: the same decisions; the replay of their record equals the training."""
    parts = until(drawn)
    updates = parts[-1][1]
    state, weights, runs = trained(setting, parts)
    _, alone, runs_alone = trained(setting, [(1, updates)])
    assert runs == runs_alone
    assert torch.allclose(alone, weights, rtol=1e-9, atol=1e-12)
    lengths = [end - first for (first, _), (end, _) in zip(runs, [*runs[1:], (updates, 0)], strict=True)]
    record = vbs.BatchTrace.from_runs([size for _, size in runs], lengths, on_end="hold")
    measured = "microbatches" if setting.trace.needs_noise or setting.rule == "adascale" else None
    replay = Setting(**{**vars(setting), "trace": record, "noise": measured})
    again, replayed, _ = trained(replay, parts)
    assert torch.equal(replayed, weights)
    position = ("epoch", "step", "samples", "progress", "first_step", "samples_before")
    assert {name: again["vbs"][name] for name in position} == {name: state["vbs"][name] for name in position}


@settings(max_examples=20)
@given(settings_(), PARTS, st.integers(1, 20))
def test_the_record_of_a_controller_that_reads_the_world_replays(
    setting: Setting, drawn: list[tuple[int, int]], samples: int
) -> None:
    parts = until(drawn)
    trace = vbs.AdaptiveTrace(PerDevice(samples), bounds=(1, SAMPLES), every=7, delay=setting.trace.delay)
    setting = Setting(**{**vars(setting), "trace": trace})
    _, weights, runs = trained(setting, parts)
    begins = [0, *(updates for _, updates in parts)]
    sizes = {begin: min(samples * size, SAMPLES) for begin, (size, _) in zip(begins, parts, strict=False)}
    changes = list(sizes.items())
    if not setting.drop_last:  # where the size of the next step ends an epoch, it stays
        assert runs == [run for row, run in enumerate(changes) if row == 0 or changes[row - 1][1] != run[1]]
    lengths = [end - first for (first, _), (end, _) in zip(runs, [*runs[1:], (parts[-1][1], 0)], strict=True)]
    record = vbs.BatchTrace.from_runs([size for _, size in runs], lengths, on_end="hold")
    measured = "microbatches" if setting.rule == "adascale" else None
    _, replayed, _ = trained(Setting(**{**vars(setting), "trace": record, "noise": measured}), parts)
    assert torch.equal(replayed, weights)


# What a loader reads. ------------------------------------------------------------------------------------------------


def small(every: int = 10, delay: int = 8, **options: Any) -> Setting:
    trace = vbs.AdaptiveTrace(Wild(3, needs_noise=False), every=every, delay=delay, **options)
    return Setting(trace, minibatch_size=4, fixed_shape=False, rule="linear")


def build(setting: Setting, **options: Any) -> tuple[torch.nn.Linear, vbs.CustomSampler, vbs.CustomOptimizer]:
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 1, bias=False).double()
    sampler = vbs.CustomSampler(SAMPLES, setting.trace, 1, 0, setting.minibatch_size, seed=5, **options)
    inner = torch.optim.SGD(model.parameters(), lr=0.003)
    return model, sampler, vbs.CustomOptimizer(inner, sampler, ref_batchsize=8, rule=setting.rule, **{"noise": None})


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Indices as a dataset, for loaders with workers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def train(model: torch.nn.Linear, optimizer: vbs.CustomOptimizer, batch: Any) -> None:
    rows = torch.as_tensor(batch)
    ((model(DATA[rows])[:, 0] - TARGETS[rows]) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def runs_of(sampler: vbs.CustomSampler) -> list[tuple[int, int]]:
    return [(int(first), int(size)) for first, size in zip(*sampler.trace.runs, strict=True)]


EXPECTED = trained(small(), [(1, 60)])[2]


@pytest.mark.parametrize("workers", range(5))
def test_workers_change_nothing(workers: int) -> None:
    model, sampler, optimizer = build(small(delay=16))
    expected = trained(small(delay=16), [(1, 40)])[2]
    data = torch.utils.data.DataLoader(Samples(), batch_sampler=sampler, num_workers=workers)
    for _ in vbs.remaining_epochs(sampler, optimizer, until=40, by="updates"):
        for batch in data:
            if optimizer.updates < 40:
                train(model, optimizer, batch)
        if optimizer.updates >= 40:
            break
    assert [run for run in runs_of(sampler) if run[0] < 40] == expected


def test_a_loader_that_reads_in_a_thread_waits_for_the_decisions() -> None:
    model, sampler, optimizer = build(small(delay=4), max_updates=60)
    for _ in vbs.remaining_epochs(sampler, optimizer):
        for batch in InThread(sampler, 1000):
            train(model, optimizer, batch)
    assert optimizer.updates == 60
    assert runs_of(sampler) == trained(small(delay=4), [(1, 60)])[2]


def test_a_loader_that_reads_too_far_is_told_which_delay_to_pass() -> None:
    delay, refused = 4, True
    while refused:
        model, sampler, optimizer = build(small(every=3, delay=delay), max_updates=60)
        try:
            for _ in vbs.remaining_epochs(sampler, optimizer):
                for batch in read_ahead(sampler, 12):
                    train(model, optimizer, batch)
            refused = False
        except RuntimeError as error:
            found = re.fullmatch(
                r"a loader must not read updates whose batch size is not chosen yet, but it reads update \d+ when \d+ "
                r"are made, and the batch sizes are known up to update \d+; pass delay=(\d+) to the AdaptiveTrace, or "
                r"let the loader prefetch less",
                str(error),
            )
            assert found is not None
            assert int(found[1]) > delay
            delay = int(found[1])
    assert 4 < delay <= 12 + 4
    assert optimizer.updates == 60


def test_updates_reads_by_update() -> None:
    model, sampler, optimizer = build(small(), max_updates=60)
    loader = torch.utils.data.DataLoader(Samples(), batch_sampler=sampler)
    lengths = []
    while not optimizer.done:
        updates = vbs.updates(loader, optimizer)
        lengths.append(len(updates))
        for update in updates:
            for batch in update:
                train(model, optimizer, batch)
    assert runs_of(sampler) == EXPECTED
    plan, numbers = sampler.plan, range(len(lengths))
    assert sum(lengths) != 60  # an estimate, as if the last batch size stayed
    assert plan.epoch(numbers[-1]).end_step == 60


# Beginning, stopping, failing. ---------------------------------------------------------------------------------------


def test_the_record_is_a_trace(tmp_path: Path) -> None:
    model, sampler, optimizer = build(small())
    with pytest.raises(ValueError, match=r"^the trace of what has happened needs at least one update, but there was"):
        _ = sampler.trace
    for batch in sampler:
        train(model, optimizer, batch)
    sampler.trace.to_csv(tmp_path / "trace.csv")
    again = vbs.BatchTrace.from_csv(tmp_path / "trace.csv")
    assert again == sampler.trace
    assert len(again) == optimizer.updates


def test_a_skipped_epoch_drops_its_questions() -> None:
    model, sampler, optimizer = build(small(every=5, delay=6))
    for batch in sampler:
        train(model, optimizer, batch)
        if optimizer.updates == 6 and not optimizer.inside_step:  # the question of update 5 is not answered
            break
    sampler.set_epoch(2)
    with pytest.warns(UserWarning, match=r"^set_epoch\(2\) skips"):
        optimizer.set_epoch(2)
    first = optimizer.updates
    for batch in sampler:
        train(model, optimizer, batch)
    assert optimizer.updates > first + 5
    sizes = [size for begin, size in runs_of(sampler) if begin <= first]
    assert len(sizes) == 1  # the first answer, which the answer to update 0 is


def test_a_training_with_a_fixed_trace_goes_on_with_a_controller() -> None:
    fixed = Setting(8, minibatch_size=4, fixed_shape=False, rule="linear")
    state, weights, _ = trained(fixed, [(1, 33)])
    adaptive = small(start=8)
    results = run_ranks(lambda backend: part(adaptive, backend.world, backend, state, 60, weights), 2)
    (_, _, runs), (_, _, others) = results
    assert runs == others
    assert runs[0] == (0, 8)
    assert runs[1][0] == 48  # asked at 40
    for start, match in (
        (
            None,
            r"^a training with a fixed trace can go on with a controller if its batch size is start, got start=None",
        ),
        (9, r"^a state can be restored only with the samples .* first 33 batch sizes of the trace are not the same"),
    ):
        with pytest.raises(ValueError, match=match):
            part(small(start=start), World(), None, state, 60, weights)


@dataclass(frozen=True)
class Failing:
    def __call__(self, input: ControlInput) -> int:
        if input.updates == 10:
            raise ZeroDivisionError("no machines")
        return 8


@pytest.mark.parametrize("answer", [0, -3, 2.5, "8", None, True])
def test_a_wrong_answer_is_refused(answer: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^the batch size of the controller must be an integer >= 1"):
        vbs.CustomSampler(SAMPLES, vbs.AdaptiveTrace(lambda input: answer), 1, 0)


def test_all_ranks_raise_when_a_controller_fails() -> None:
    setting = Setting(vbs.AdaptiveTrace(Failing(), every=5, delay=5), 4, fixed_shape=False, rule="linear")

    def rank(backend: ThreadBackend) -> str:
        with pytest.raises(RuntimeError) as caught:
            part(setting, backend.world, backend, None, 40, torch.zeros(1, 3, dtype=torch.float64))
        return str(caught.value)

    messages = run_ranks(rank, 3)
    assert set(messages) == {
        "the controller must choose a batch size, but after update 10 it failed with ZeroDivisionError: no machines; "
        "correct Failing() and restore the last checkpoint"
    }


def test_bad_arguments() -> None:
    wild = Wild(1, needs_noise=False)
    for error, match, arguments in (
        (
            ValueError,
            r"^the bounds must include a multiple of multiple_of=64",
            {"bounds": (65, 127), "multiple_of": 64},
        ),
        (ValueError, r"^start must be an integer >= 8", {"start": 4, "bounds": (8, 16)}),
        (ValueError, r"^every must be an integer >= 1", {"every": 0}),
        (TypeError, r"^delay must be an integer >= 0", {"delay": 2.5}),
    ):
        with pytest.raises(error, match=match):
            vbs.AdaptiveTrace(wild, **arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^controller must be a callable object such as PerDevice\(64\)"):
        vbs.AdaptiveTrace(64)  # type: ignore[arg-type]
    for match, trace in (
        (r"^delay must be > 3 in a training, got 3; pass 16", vbs.AdaptiveTrace(wild, delay=3)),
        (
            r"^the upper one of bounds must be at most the dataset's size of 120",
            vbs.AdaptiveTrace(wild, bounds=(1, 121)),
        ),
        (r"needs a batch size to keep while it knows too little", vbs.AdaptiveTrace(NoiseScale())),
    ):
        with pytest.raises(ValueError, match=match):
            vbs.CustomSampler(SAMPLES, trace, 1, 0)
    with pytest.raises(ValueError, match=r"^on_end must be left out with a trace that never ends"):
        vbs.CustomSampler(SAMPLES, vbs.AdaptiveTrace(wild), 1, 0, on_end="stop")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
def test_a_copy_of_a_sampler_goes_on_by_itself(copied: Callable[[vbs.CustomSampler], vbs.CustomSampler]) -> None:
    model, sampler, optimizer = build(small())
    for batch in sampler:
        train(model, optimizer, batch)
    other = copied(sampler)
    other.set_epoch(1)
    sampler.set_epoch(1)
    assert list(other) == list(sampler)
    assert runs_of(other) == runs_of(sampler)
