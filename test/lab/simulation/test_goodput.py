"""How the time of a training was spent."""

from __future__ import annotations

from variable_batch_size.lab.simulation.goodput import TimeSpent


def event(name, time, update, **facts):
    return {"version": 1, "event": name, "time": time, "update": update, "world": 1, **facts}


def test_the_seconds_of_a_training_that_is_killed_and_resumes():
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
    found = TimeSpent.from_events(run)
    assert found == TimeSpent(productive=10, redone=2, saving=2, restoring=1, down=5, runs=2, saves=1)
    assert (found.total, found.restart, found.save) == (20, 6, 2)
    assert TimeSpent.from_events(run[:2]).productive == 3
    between = [event("start", 0, 0), event("progress", 10, 10), event("start", 10, 0)]
    looked = [*between, event("restore", 10, 4, seconds=0), event("end", 10, 4)]
    assert TimeSpent.from_events(looked).redone == 0  # another run may still resume at 10
    assert (
        TimeSpent.from_events(
            [*looked, event("start", 10, 0), event("restore", 10, 4, seconds=0), event("end", 13, 7)]
        ).redone
        == 6
    )
    again = [
        *between,
        event("progress", 14, 4),
        event("start", 14, 0),
        event("progress", 17, 3),
    ]  # without a checkpoint
    assert TimeSpent.from_events(again) == TimeSpent(3, redone=14, saving=0, restoring=0, down=0, runs=3, saves=0)
    finished = [*between[:2], event("end", 10, 10), event("start", 99, 0), event("restore", 99, 10, seconds=0)]
    assert TimeSpent.from_events(finished).total == 10  # a script that is started again after its end
