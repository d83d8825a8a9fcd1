"""The events of a training, and how its time was spent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import checkpoint, told, truncate_state
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
    looked = [*between, event("restore", 10, 4, seconds=0), event("end", 10, 4)]
    assert Goodput.of(looked).redone == 0  # another run may still resume at 10
    assert (
        Goodput.of([*looked, event("start", 10, 0), event("restore", 10, 4, seconds=0), event("end", 13, 7)]).redone
        == 6
    )
    again = [
        *between,
        event("progress", 14, 4),
        event("start", 14, 0),
        event("progress", 17, 3),
    ]  # without a checkpoint
    assert Goodput.of(again) == Goodput(3, redone=14, saving=0, restoring=0, down=0, runs=3, saves=0)
    finished = [*between[:2], event("end", 10, 10), event("start", 99, 0), event("restore", 99, 10, seconds=0)]
    assert Goodput.of(finished).total == 10  # a script that is started again after its end


@pytest.mark.slow("starts commands that import torch")
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


def test_a_run_that_was_killed_may_have_made_more_updates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It tells its updates once a minute."""
    run = training()
    saves = checkpoint(tmp_path, run)
    for _ in range(2):
        run.run(1)
        saves.save()
    saves._folder.unlock()  # as the end of a process does
    truncate_state(tmp_path / "update-00000002")
    with checkpoint(tmp_path, training()) as later, pytest.warns(RuntimeWarning, match="restoring update-00000001"):
        assert later.restore()
    assert told(caplog)[-1].endswith("lost at least 1.")
    (restored,) = [line for line in events.read(tmp_path) if line["event"] == "restore"]
    assert (restored["lost"], restored["damaged"]) == (1, "update-00000002")


def test_a_skipped_update_is_an_event(tmp_path: Path) -> None:
    run, scaler = training(), torch.amp.GradScaler("cpu", init_scale=4.0)
    rows = iter(run.sampler)
    with checkpoint(tmp_path, run) as saves:
        while run.optimizer.updates < 3:
            loss = run.loss(next(rows)) * (torch.inf if run.optimizer.updates == 1 else 1)
            run.optimizer.backward(loss, scaler=scaler)
            scaler.step(run.optimizer)
            scaler.update()
            saves.step()
    assert [line["update"] for line in events.read(tmp_path) if line["event"] == "skip"] == [2]
