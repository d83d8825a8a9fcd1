"""The events of a training, and how its time was spent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import checkpoint
from helpers.commands import run as execute
from helpers.reference import training
from variable_batch_size.checkpoint import events
from variable_batch_size.checkpoint.events import FILE, Events, Goodput
from variable_batch_size.world import World


def event(name: str, time: float, update: int, **facts: float) -> dict[str, object]:
    return {"version": 1, "event": name, "time": time, "update": update, "world": 1, **facts}


def test_the_seconds_of_a_training_that_is_killed_and_resumes() -> None:
    """10 updates of 1 s, two of them lost; a save of 2 s after the 6th; 5 s down; 1 s to restore."""
    run = [
        event("start", 0, 0),
        event("progress", 3, 3),
        event("save", 8, 6, seconds=2),
        event("progress", 10, 8),  # killed
        event("start", 15, 0),
        event("restore", 16, 6, seconds=1, lost=2),
        event("progress", 18, 8),
        event("end", 20, 10, error=0),
    ]
    found = Goodput.of(run)
    assert found == Goodput(productive=10, redone=2, saving=2, restoring=1, down=5, runs=2, saves=1)
    assert (found.total, found.restart, found.save) == (20, 6, 2)
    assert Goodput.of(run[:2]).productive == 3
    between = [event("start", 0, 0), event("progress", 10, 10), event("start", 10, 0)]
    assert Goodput.of([*between, event("restore", 10, 4, seconds=0)]).redone == 6


def test_a_training_writes_its_events_on_rank_0(tmp_path: Path) -> None:
    run = training()
    with pytest.raises(KeyError), checkpoint(tmp_path, run, every=2) as saves:  # noqa: PT012
        for _ in range(5):
            run.run(1)
            saves.step()
        raise KeyError
    with (tmp_path / FILE).open("a") as file:
        file.write('{"version": 1, "event"')  # killed while it wrote
    later = training()
    with checkpoint(tmp_path, later) as saves:
        assert saves.restore()
    Events(tmp_path, World(1, 2)).add("start", 0)
    found = [(line["event"], line["update"]) for line in events.read(tmp_path)]
    assert found[:4] == [("start", 0), ("save", 2), ("save", 4), ("end", 5)]
    assert found[-2:] == [("restore", 4), ("end", 4)]
    done = execute("vbs", "goodput", str(tmp_path), "--json")
    assert json.loads(done.stdout)["saves"] == 2
    assert "productive" in execute("vbs", "goodput", str(tmp_path)).stdout
    assert execute("vbs", "goodput", str(tmp_path / "none")).returncode == 1


@pytest.mark.parametrize(
    "change", [{"time": "a"}, {"update": None}, {"event": 3}, {"seconds": 1e308}, {"seconds": "b"}]
)
def test_a_line_without_its_numbers_is_left_out(change: dict[str, object], tmp_path: Path) -> None:
    found = event("save", 1, 1, seconds=1)
    lines = [json.dumps(found), json.dumps(found | change), "[" * 100_000]
    (tmp_path / FILE).write_text("\n".join(lines))
    assert events.read(tmp_path) == [found]


def test_a_skipped_update_is_an_event(tmp_path: Path) -> None:
    run, scaler = training(), torch.amp.GradScaler("cpu", init_scale=4.0)
    rows = iter(run.sampler)
    with checkpoint(tmp_path, run) as saves:
        while run.optimizer.updates < 3:
            loss = run.loss(next(rows)) * (torch.inf if run.optimizer.updates == 1 else 1)
            run.optimizer.backward(scaler.scale(loss))
            scaler.step(run.optimizer)
            scaler.update()
            saves.step()
    assert [line["update"] for line in events.read(tmp_path) if line["event"] == "skip"] == [2]
