"""The events of a training, and how its time was spent."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch

from helpers.checkpoints import checkpoint, path_of, restore_checkpoint, told, truncate_state
from helpers.commands import run as execute
from helpers.reference import training
from variable_batch_size.checkpoint import events
from variable_batch_size.checkpoint.events import FILE, Events
from variable_batch_size.checkpoint.storage import Storage
from variable_batch_size.world import World


@pytest.mark.slow("starts commands that import torch")
def test_a_training_writes_its_events_on_rank_0(tmp_path):
    run = training()
    with pytest.raises(KeyError), checkpoint(tmp_path, run, every=2) as saves:  # noqa: PT012
        for _ in range(5):
            run.run(1)
            saves.step()
        raise KeyError
    with (tmp_path / FILE).open("a") as file:
        file.write('{"version": 1, "event"')  # killed while it wrote
    later = training()
    restore_checkpoint(tmp_path, later)
    Events(Storage(tmp_path), World(1, 2)).add("start", 0)
    found = [(line["event"], line["update"]) for line in events.read_events(Storage(tmp_path))]
    assert found[:5] == [("start", 0), ("progress", 1), ("save", 2), ("save", 4), ("end", 5)]
    assert found[-2:] == [("restore", 4), ("end", 4)]
    done = execute("vbs", "goodput", str(tmp_path), "--json")
    assert json.loads(done.stdout)["saves"] == 2
    assert "productive" in execute("vbs", "goodput", str(tmp_path)).stdout
    assert execute("vbs", "goodput", str(tmp_path / "none")).returncode == 1


@pytest.mark.parametrize(
    "change", [{"time": "a"}, {"update": None}, {"event": 3}, {"seconds": 1e308}, {"seconds": "b"}]
)
def test_a_line_without_its_numbers_is_left_out(change, tmp_path):
    found = {"version": 1, "event": "save", "time": 1, "update": 1, "world": 1, "seconds": 1}
    lines = [json.dumps(found), json.dumps(found | change), "[" * 100_000]
    (tmp_path / FILE).write_text("\n".join(lines))
    assert events.read_events(Storage(tmp_path)) == [found]


NOW = 10_000.0  # seconds
START, FIRST = ("start", 0, 0), ("progress", 1, 1)  # event, seconds, update


@pytest.mark.parametrize(
    ("lines", "lost"),
    [
        ([], (0, 0)),
        ([START, FIRST, ("save", 134, 400)], (0, 180)),  # at its pace in a minute
        ([("start", NOW - 140, 0), ("skip", NOW - 139, 1), ("save", NOW - 6, 400)], (0, 18)),  # in the time since then
        ([(*START, 7), FIRST, ("save", 134, 400)], (0, 7)),  # by its interval
        ([START, FIRST, ("save", 50, 5), ("save", 51, 10), ("save", 60, 405)], (5, 2639)),  # it began slowly
        ([START, ("save", 120, 400), ("end", 130, 410)], (10, 10)),
        ([START, ("save", 9, 450), ("start", 20, 0), ("restore", 30, 400), ("progress", 31, 401)], (1, 61)),
        ([START, FIRST, ("save", 134, 450), ("start", 300, 0), ("end", 301, 0)], (50, 253)),  # it restored nothing
        ([START, ("restore", 5, 400)], (0, None)),
        ([START, ("save", 120, 400), ("save", 240, 410)], (10, None)),  # step() was not called
        ([(*START, 7), ("progress", 120, 400), ("progress", 240, 410)], (10, None)),  # it was called once an epoch
    ],
    ids=str,
)
def test_what_a_run_has_lost_is_bounded(lines, lost, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: NOW)
    told_lines = [
        {"version": 1, "world": 1, "seconds": 0, "event": event, "time": at, "update": update}
        | ({"every": every[0]} if every else {})
        for event, at, update, *every in lines
    ]
    (tmp_path / FILE).write_text("\n".join(map(json.dumps, told_lines)))
    assert Events(Storage(tmp_path), World(0, 1)).lost(400) == lost


def test_a_restore_in_the_same_run_knows_what_it_loses(tmp_path, caplog):
    run = training()
    with checkpoint(tmp_path, run) as saves:
        run.run(1)
        saves.save()
        for lost in (2, 0, 3):
            run.run(lost)
            saves.restore()
            assert told(caplog)[-1].endswith(f"lost {lost} updates.")


@pytest.mark.parametrize(("steps", "more"), [(True, r"to about \d+"), (False, "or more")])
def test_a_run_that_was_killed_may_have_made_more_updates(steps, more, tmp_path, caplog):
    run = training()
    saves = checkpoint(tmp_path, run)
    for _ in range(2):
        run.run(1)
        assert not (steps and saves.step())
        saves.save()
    saves._folder.writer._stop()  # as the end of a process does
    truncate_state(path_of(tmp_path, 2))
    with checkpoint(tmp_path, training()) as later, pytest.warns(RuntimeWarning, match="restoring update-00000001-"):
        assert later.restore()
    assert re.search(rf"lost 1 {more} updates\.$", told(caplog)[-1])
    (restored,) = [line for line in events.read_events(Storage(tmp_path)) if line["event"] == "restore"]
    assert (restored["lost"], restored["damaged"]) == (1, "update-00000002-0001-2-1")


def test_the_first_update_is_told_after_a_start_and_after_a_restore(tmp_path):
    run = training()
    with checkpoint(tmp_path, run, every=2) as saves:
        for _ in range(3):
            run.run(1)
            saves.step()
    later = training()
    with checkpoint(tmp_path, later) as saves:
        assert saves.restore()
        for _ in range(2):
            later.run(1)
            saves.step()
    found = [(line["event"], line["update"]) for line in events.read_events(Storage(tmp_path))]
    assert found[:3] == [("start", 0), ("progress", 1), ("save", 2)]
    assert found[-4:] == [("start", 0), ("restore", 2), ("progress", 3), ("end", 4)]


def test_a_skipped_update_is_an_event(tmp_path):
    run, scaler = training(), torch.amp.GradScaler("cpu", init_scale=4.0)
    rows = iter(run.sampler)
    with checkpoint(tmp_path, run) as saves:
        while run.optimizer.updates < 3:
            loss = run.loss(next(rows)) * (torch.inf if run.optimizer.updates == 1 else 1)
            run.optimizer.backward(loss, scaler=scaler)
            scaler.step(run.optimizer)
            scaler.update()
            saves.step()
    assert [line["update"] for line in events.read_events(Storage(tmp_path)) if line["event"] == "skip"] == [2]
