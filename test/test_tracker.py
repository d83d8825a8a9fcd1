"""The scalars of a training in the CSV and in TensorBoard events, and the progress bar."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import pty
import re
import struct
import termios
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tensorboardX.proto.event_pb2 import Event

import variable_batch_size as vbs
from helpers.reference import REF, SGD, SIZES, training
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks

TAGS = ["global_batch_size", "num_microbatches", "world_size", "lr_effective", "lr_factor", "samples"]


def events(folder: Path) -> list[Event]:
    """Read TensorBoard's files: each record is a length, its checksum, the event and its checksum."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, start = path.read_bytes(), 0
        while start < len(data):
            (length,) = struct.unpack("<Q", data[start : start + 8])
            found.append(Event.FromString(data[start + 12 : start + 12 + length]))
            start += length + 16
    return found


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    return [(event.step, value.tag, value.simple_value) for event in events(folder) for value in event.summary.value]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train 7 updates on three ranks, each with a tracker, and log every second update; return the folder."""
    folder = tmp_path_factory.mktemp("runs")

    def train(backend: Backend) -> bool:
        with vbs.Tracker(folder) as tracker:
            training(dataset_size=sum(SIZES), backend=backend, tracker=tracker, log_steps=2).run(len(SIZES))
            return tracker._files is not None

    assert run_ranks(train, 3) == [True, False, False]
    return folder


def test_every_log_steps_updates_one_row_is_written(logged: Path) -> None:
    table = pd.read_csv(logged / "scalars.csv")
    assert list(table) == ["update", *(f"vbs/{tag}" for tag in TAGS)]
    assert table["update"].tolist() == [2, 4, 6]
    for update, *row in table.itertuples(index=False):
        size = SIZES[update - 1]
        microbatches = size // 4 + (0, 1, 1, 2)[size % 4]  # a remainder of 3 is split into 2 and 1
        expected = [size, microbatches, 3, SGD["lr"] * size / REF, size / REF, sum(SIZES[:update])]
        assert row == pytest.approx(expected)


def test_tensorboard_has_the_same_values(logged: Path) -> None:
    table = pd.read_csv(logged / "scalars.csv").set_index("update")
    expected = [(step, tag, pytest.approx(value)) for step, row in table.iterrows() for tag, value in row.items()]
    assert scalars(logged) == expected


def test_without_a_logdir_or_before_log_steps_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training().run(4)
    training(tracker=vbs.Tracker(tmp_path / "short")).run(9)  # log_steps is 10 by default
    training(tracker=vbs.Tracker(), log_steps=1).run(4)
    assert list(tmp_path.iterdir()) == []


def test_log_steps_without_a_tracker_writes_to_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = training(log_steps=3).run(4)
    assert run.optimizer.tracker is not None
    run.optimizer.tracker.close()
    assert pd.read_csv("runs/scalars.csv")["update"].tolist() == [3]


def log_without_closing(folder: Path) -> None:
    tracker = vbs.Tracker(folder)
    tracker.log(1, {"value": 0.5})
    globals()["tracker"] = tracker  # so that it is not collected before the process ends


def test_an_open_tracker_is_flushed_when_the_process_ends(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=log_without_closing, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "scalars.csv").read_text() == "update,value\n1,0.5\n"
    assert scalars(tmp_path) == [(1, "value", 0.5)]


def test_a_collected_tracker_closes_its_files(tmp_path: Path) -> None:
    tracker = vbs.Tracker(tmp_path)
    tracker.log(1, {"value": 0.5})
    del tracker
    gc.collect()  # an open file would raise a ResourceWarning here
    assert scalars(tmp_path) == [(1, "value", 0.5)]


def test_resuming_from_an_earlier_update_replaces_later_rows(tmp_path: Path) -> None:
    with vbs.Tracker(tmp_path) as tracker:
        run = training(tracker=tracker, log_steps=1).run(3)
        state = run.optimizer.state_dict()
        run.run(4)
    first = (tmp_path / "scalars.csv").read_text().splitlines()
    with vbs.Tracker(tmp_path) as tracker:
        run = training(minibatch_size=8, tracker=tracker, log_steps=1)
        run.optimizer.load_state_dict(state)
        run.run(2)
    second = (tmp_path / "scalars.csv").read_text().splitlines()
    assert second[:4] == first[:4]
    assert [line.split(",")[0] for line in second] == ["update", "1", "2", "3", "4", "5"]
    assert second[4] != first[4]  # another number of microbatches
    assert [event.step for event in events(tmp_path) if event.HasField("session_log")] == [4]  # TensorBoard's purge
    assert not list(tmp_path.glob("*.part"))


def test_rejects_a_folder_with_other_columns_and_leaves_it_unchanged(tmp_path: Path) -> None:
    (tmp_path / "scalars.csv").write_text("update,loss\n1,0.5\n")
    tracker = vbs.Tracker(tmp_path)
    with pytest.raises(
        ValueError, match=r"^logdir must .*scalars\.csv has the columns update,loss instead of update,a; choose"
    ):
        tracker.log(1, {"a": 1.0})
    assert (tmp_path / "scalars.csv").read_text() == "update,loss\n1,0.5\n"


def test_resuming_keeps_every_digit_of_earlier_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = (rng.random(300) * 10.0 ** rng.integers(-20, 20, 300)).tolist()
    for updates in (range(200), range(200, 300)):
        with vbs.Tracker(tmp_path) as tracker:
            for update in updates:
                tracker.log(update, {"value": values[update]})
    lines = (tmp_path / "scalars.csv").read_text().splitlines()[1:]
    assert [float(line.split(",")[1]) for line in lines] == values


def test_resuming_drops_a_truncated_row(tmp_path: Path) -> None:
    (tmp_path / "scalars.csv").write_text("update,a,b\n1,0.5,2\n2,0.")
    with vbs.Tracker(tmp_path) as tracker:
        tracker.log(3, {"a": 1.5, "b": 4})
    assert (tmp_path / "scalars.csv").read_text() == "update,a,b\n1,0.5,2\n3,1.5,4\n"


def drawn_on_a_terminal(**options: bool) -> str:
    """Return what a training of two epochs writes to standard error, a terminal."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))  # rows and columns
    with os.fdopen(reader, "rb", buffering=0) as screen, os.fdopen(writer, "w") as stderr:
        with redirect_stderr(stderr), vbs.Tracker(**options) as tracker:
            training(tracker=tracker).run(6)
        print("end", end="", file=stderr, flush=True)
        drawn = b""
        while not drawn.endswith(b"end"):
            drawn += screen.read(4096)
    return drawn.decode()


def test_draws_a_bar_in_samples_on_a_terminal() -> None:
    drawn = drawn_on_a_terminal()
    assert re.search(r"epoch 0: 100%.*50.0/50.0 .* samples/s.*epoch 1: .*end$", drawn, re.DOTALL)


def test_draws_no_bar_without_progress() -> None:
    assert drawn_on_a_terminal(progress=False) == "end"


def test_draws_no_bar_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with vbs.Tracker() as tracker:
        training(tracker=tracker).run(6)
    assert capfd.readouterr() == ("", "")
