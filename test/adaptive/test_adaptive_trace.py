"""A controller in a training: whatever stops it, reads ahead or computes it, it decides the same, and on record."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.adaptive_training import SAMPLES, Setting, Wild, trained
from helpers.controllers import smoothed
from helpers.properties import examples
from variable_batch_size.adaptive import PerDevice


@st.composite
def settings_(draw):
    ahead = draw(st.integers(0, 9))
    wild = Wild(draw(st.integers(0, 999)), draw(st.booleans()))
    multiple = draw(st.sampled_from([1, 1, 2, 4]))
    trace = vbs.AdaptiveTrace(
        smoothed(wild, 0.8, multiple) if draw(st.booleans()) else wild,
        start=draw(st.none() | st.integers(1, 7).map(lambda number: 4 * number)),
        bounds=draw(st.none() | st.just((3, 28))),
        multiple_of=multiple,
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


def until(parts):
    """Return (world size, updates at the end) of parts with so many updates each."""
    return [(size, sum(number for _, number in parts[: row + 1])) for row, (size, _) in enumerate(parts)]


@examples(8)
@given(settings_(), PARTS)
def test_decisions_do_not_depend_on_worlds_stops_and_loaders(setting, drawn):
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
    position = ("epoch", "step", "samples", "first_step", "samples_before")
    replayed_at, was_at = ({name: one["vbs"]["sampler"][name] for name in position} for one in (again, state))
    assert replayed_at == was_at
    assert again["vbs"]["progress"] == state["vbs"]["progress"]


@examples(6)
@given(settings_(), PARTS, st.integers(1, 20))
def test_the_record_of_a_controller_that_reads_the_world_replays(setting, drawn, samples):
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
