"""The scalars of a training in the CSV and in TensorBoard events, and the progress bar."""

from __future__ import annotations

import copy
import csv
import fcntl
import gc
import io
import math
import multiprocessing
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from contextlib import redirect_stderr
from itertools import count
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.interrupts import Interrupt
from helpers.properties import examples
from helpers.reference import REF, SGD, SIZES, training
from helpers.tensorboard import events
from variable_batch_size.testing import run_ranks
from variable_batch_size.tracker import ScalarsFile, read_scalars

TAGS = [
    *("epoch", "samples", "seconds", "samples_per_second", "updates_per_second"),
    *("global_batch_size", "num_microbatches", "world_size", "lr_effective", "lr_factor"),
]
OF_TIME = ["vbs/seconds", "vbs/samples_per_second", "vbs/updates_per_second"]


def scalars(folder):
    values = [(event.step, value) for event in events(folder) for value in event.summary.value]
    return [
        (step, value.tag, value.simple_value) for step, value in values if not value.metadata.plugin_data.plugin_name
    ]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Train 7 updates on three ranks, each with a tracker, and log every second update; return the folder."""
    folder = tmp_path_factory.mktemp("runs")

    def train(backend):
        with vbs.Tracker(folder) as tracker:
            training(dataset_size=sum(SIZES), backend=backend, tracker=tracker, log_steps=2).run(len(SIZES))
            return tracker._files is not None

    assert run_ranks(train, 3) == [True, False, False]
    return folder


def test_a_loop_may_log_on_every_rank(tmp_path):
    """The file is that of rank 0, whoever else logs, and however late."""

    def train(backend):
        with vbs.Tracker(tmp_path, progress=False) as tracker:
            run = training(dataset_size=sum(SIZES), backend=backend, tracker=tracker, log_steps=1)
            for update in range(1, len(SIZES) + 1):
                run.run(update)
                tracker.log(update, {"loss": backend.world.rank})
        with vbs.Tracker(tmp_path, progress=False) as tracker:
            training(dataset_size=sum(SIZES), backend=backend, tracker=tracker)
            tracker.log(len(SIZES) + 1, {"loss": backend.world.rank})

    run_ranks(train, 3)
    table = pd.read_csv(tmp_path / "scalars.csv")
    assert table["loss"].tolist() == [0.0] * (len(SIZES) + 1)
    assert table["vbs/global_batch_size"].dropna().tolist() == list(SIZES)


def test_every_log_steps_updates_one_row_is_written(logged):
    table = pd.read_csv(logged / "scalars.csv")
    assert list(table) == ["update", *(f"vbs/{tag}" for tag in TAGS)]
    assert table["update"].tolist() == [2, 4, 6]
    for update, *row in table.drop(columns=OF_TIME).itertuples(index=False):
        size, samples = SIZES[update - 1], sum(SIZES[:update])
        microbatches = min(size, -(-size // 12) * 3)  # as many on each of three ranks
        expected = [samples / sum(SIZES), samples, size, microbatches, 3, SGD["lr"] * size / REF, size / REF]
        assert row == pytest.approx(expected)


def test_the_rates_are_those_since_the_row_before(logged):
    table = pd.read_csv(logged / "scalars.csv")
    seconds, updates, samples = (table[tag] for tag in ("vbs/seconds", "update", "vbs/samples"))
    assert (seconds.diff().dropna() > 0).all()
    first = [[seconds[0], 1, SIZES[1]]]  # the first update of a run begins its time
    later = np.stack([column.diff()[1:] for column in (seconds, updates, samples)], axis=1).tolist()
    for row, (passed, made, used) in zip(table.itertuples(), first + later, strict=True):
        assert [row[5], row[6]] == pytest.approx([used / passed, made / passed], rel=1e-3)


def test_tensorboard_has_the_same_values(logged):
    table = pd.read_csv(logged / "scalars.csv").set_index("update")
    expected = [(step, tag, pytest.approx(value)) for step, row in table.iterrows() for tag, value in row.items()]
    assert scalars(logged) == expected


def test_tensorboard_shows_batch_size_learning_rate_and_loss_together(logged):
    values = [value for event in events(logged) for value in event.summary.value]
    (layout,) = [value for value in values if value.metadata.plugin_data.plugin_name == "custom_scalars"]
    text = layout.tensor.string_val[0].decode(errors="replace")
    for part in ("batch size", "vbs/global_batch_size", "learning rate", "vbs/lr_effective", "loss"):
        assert part in text


def test_without_a_logdir_or_before_log_steps_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    training().run(4)
    training(tracker=vbs.Tracker(tmp_path / "short")).run(9)  # log_steps is 10 by default
    training(tracker=vbs.Tracker(), log_steps=1).run(4)
    assert list(tmp_path.iterdir()) == []


def test_log_steps_without_a_tracker_writes_to_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = training(log_steps=3).run(4)
    assert run.optimizer.tracker is not None
    run.optimizer.tracker.close()
    assert pd.read_csv("runs/scalars.csv")["update"].tolist() == [3]


def log_without_closing(folder):
    tracker = vbs.Tracker(folder)
    tracker.log(1, {"value": 0.5})
    globals()["tracker"] = tracker  # so that it is not collected before the process ends


@pytest.mark.slow("starts processes")
def test_an_open_tracker_is_flushed_when_the_process_ends(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=log_without_closing, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "scalars.csv").read_text() == "update,value\n1,0.5\n"
    assert scalars(tmp_path) == [(1, "value", 0.5)]


def test_a_collected_tracker_closes_its_files(tmp_path):
    tracker = vbs.Tracker(tmp_path)
    tracker.log(1, {"value": 0.5})
    del tracker
    gc.collect()  # an open file would raise a ResourceWarning here
    assert scalars(tmp_path) == [(1, "value", 0.5)]


@pytest.mark.parametrize("noted", [None, 0, 3, 4])
def test_resuming_from_an_earlier_update_replaces_later_rows(noted, tmp_path):
    """Those up to the restored update keep their values, also if the loop repeats what it logs at that update."""
    with vbs.Tracker(tmp_path) as tracker:
        run = training(tracker=tracker, log_steps=1).run(3)
        state = run.optimizer.state_dict()
        run.run(4)
    first = pd.read_csv(tmp_path / "scalars.csv", index_col="update")
    with vbs.Tracker(tmp_path) as tracker:
        run = training(minibatch_size=8, tracker=tracker, log_steps=1)
        run.optimizer.load_state_dict(state)
        if noted is not None:
            tracker.log(noted, {"noted": 1})
        run.run(2)
    second = pd.read_csv(tmp_path / "scalars.csv", index_col="update")
    assert [*second.index] == [*range(0 if noted == 0 else 1, 6)]
    pd.testing.assert_frame_equal(second.loc[1:3, first.columns], first.loc[1:3], check_dtype=False)
    microbatches = "vbs/num_microbatches"
    assert second.loc[4, microbatches] != first.loc[4, microbatches]  # the run has larger ones
    assert noted is None or second["noted"].dropna().to_dict() == {noted: 1}
    assert [event.step for event in events(tmp_path) if event.HasField("session_log")] == [4]  # TensorBoard's purge
    assert not list(tmp_path.glob("*.part"))


def test_an_interrupt_while_a_device_is_read_loses_no_row(tmp_path):
    tracker, answers = vbs.Tracker(tmp_path), iter([KeyboardInterrupt(), 2.0, 3.0])

    def read():
        if isinstance(answer := next(answers), KeyboardInterrupt):
            raise answer
        return {"loss": answer}

    tracker.log_later(1, read)
    tracker.log_later(2, read)
    with pytest.raises(KeyboardInterrupt):
        tracker.write_pending(9)
    tracker.close()
    assert (tmp_path / "scalars.csv").read_text() == "update,loss\n1,2.0\n2,3.0\n"


def test_what_is_logged_after_close_is_added(tmp_path):
    tracker = vbs.Tracker(tmp_path)
    tracker.log(1, {"loss": 2.0})
    tracker.close()
    tracker.log(1, {"accuracy": 0.5})
    tracker.close()
    assert (tmp_path / "scalars.csv").read_text() == "update,loss,accuracy\n1,2.0,0.5\n"
    assert not [event for event in events(tmp_path) if event.HasField("session_log")]


@pytest.mark.parametrize("log_steps", [1, 3])
def test_a_restore_in_the_same_process_replaces_later_rows(log_steps, tmp_path):
    """As in a new process: the rows are those of one course, and TensorBoard hides what was left."""
    for folder, goes_back in ((tmp_path / "straight", False), (tmp_path / "back", True)):
        with vbs.Tracker(folder) as tracker:
            run = training(tracker=tracker, log_steps=log_steps).run(4)
            state, weights = run.optimizer.state_dict(), copy.deepcopy(run.model.state_dict())
            run.run(5)
            if goes_back:
                run.optimizer.load_state_dict(state)
                run.model.load_state_dict(weights)
                assert read_scalars(folder / "scalars.csv")[1][-1]["update"] == "9"
                tracker.log(5, {"noted": 1})  # as a controller, before the row of the update is there
                run.run(5)
            else:
                tracker.log(5, {"noted": 1})
    straight, back = (pd.read_csv(tmp_path / name / "scalars.csv") for name in ("straight", "back"))
    pd.testing.assert_frame_equal(back.drop(columns=OF_TIME), straight.drop(columns=OF_TIME))
    assert (back[OF_TIME[1:]].dropna() > 0).all(axis=None)
    assert [event.step for event in events(tmp_path / "back") if event.HasField("session_log")] == [5]


CHANGES = {
    "a row": (4, {"a": 40}),
    "a column": (4, {"b": 40}),
    "more values of the last row": (3, {"a": 333}),
    "fewer digits in the last row": (3, {"a": 3}),
    "an earlier row": (2, {"a": 22}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an open file that was interrupted
def test_an_interrupt_at_any_line_leaves_a_table_that_goes_on(change, tmp_path):
    """The row that was interrupted is as before or as after; all others are there, also the later ones."""
    update, scalars = CHANGES[change]
    before = {1: {"a": "10"}, 2: {"a": "20"}, 3: {"a": "30"}}
    after = {number: dict(row) for number, row in before.items()}
    after.setdefault(update, {}).update({tag: str(value) for tag, value in scalars.items()})
    later = {5: {"a": "50"}, 6: {"c": "60"}}
    for line in count(1):
        path = tmp_path / f"{line}.csv"
        table = ScalarsFile(path)
        for number, row in before.items():
            table.add(number, {"a": int(row["a"])})
        try:
            with Interrupt(line, "tracker.py"):
                table.add(update, scalars)
            break
        except KeyboardInterrupt as error:
            where = str(error)
        rows = read_scalars(path)[1]
        assert {int(row.pop("update")): row for row in rows} in (before, after), where
        for number, row in later.items():
            table.add(number, {tag: int(value) for tag, value in row.items()})
        table.close()
        rows = read_scalars(path)[1]
        assert {int(row.pop("update")): row for row in rows} in (before | later, after | later), where
        table = ScalarsFile(path)
        table.close()
    table.close()
    assert line > 15


# ------------------------------------------------------------------------------------------------- any rows, any time

TAG = st.sampled_from(["loss", "a,b", 'a "quoted" tag', "two\nlines", "vbs/lr", "accuracy", " ", "é"])
NUMBERS = st.one_of(st.integers(-(2**40), 2**40), st.floats(allow_nan=True, allow_infinity=True))
LOGS = st.lists(st.tuples(st.integers(0, 9), st.dictionaries(TAG, NUMBERS, max_size=3)), min_size=1, max_size=8)


def same(found, expected):
    number = float(found)
    return number == expected or (math.isnan(number) and math.isnan(expected))


@given(st.lists(LOGS, min_size=1, max_size=3), st.data())
@examples(60)
def test_any_sequence_of_logs_gives_a_table_that_readers_take(runs, data):
    """A dict of dicts is the model; each run but the first may follow a kill in the middle of a write."""
    with tempfile.TemporaryDirectory() as folder:
        path, expected, columns = Path(folder, "scalars.csv"), dict[int, dict[str, float]](), ["update"]
        for number, run in enumerate(runs):
            if number and data.draw(st.booleans(), label="killed"):
                text = path.read_bytes()
                rows_begin = text.index(b"\n", header_length(path) - 1) + 1
                end = data.draw(st.integers(rows_begin, len(text)), label="bytes left")
                path.write_bytes(text[:end])
                whole = text[rows_begin:end].count(b"\n")
                expected = dict(sorted(expected.items())[:whole])
            with vbs.Tracker(folder) as tracker:
                cut = False
                for update, scalars in run:
                    if update > 0 and not cut:
                        cut, expected = True, {known: row for known, row in expected.items() if known < update}
                    tracker.log(update, scalars)
                    expected[update] = expected.get(update, {}) | scalars
                    columns += [tag for tag in scalars if tag not in columns]
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["update"]) for row in rows] == sorted(expected)
        table = pd.read_csv(path, keep_default_na=False, na_values=[], dtype=str)
        assert list(table) == columns
        for row, (_, scalars) in zip(rows, sorted(expected.items()), strict=True):
            assert {tag for tag, cell in row.items() if cell != ""} == {"update", *scalars}
            assert all(same(row[tag], value) for tag, value in scalars.items())
        numbers = pd.read_csv(path)
        assert all(kind.kind in "iufb" for kind in numbers.dtypes if len(numbers))


def header_length(path):
    """The bytes of the header, which may hold line breaks in quotes."""
    columns = next(csv.reader(io.StringIO(path.read_text(encoding="utf-8"))))
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(columns)
    return len(buffer.getvalue().encode())


def test_a_users_scalars_have_columns_of_their_own(tmp_path):
    with vbs.Tracker(tmp_path) as tracker:
        run = training(tracker=tracker, log_steps=2).run(2)
        tracker.log(2, {"loss": 3.2})
        tracker.log(3, {"loss": np.float32(2.5), "hits": torch.tensor(7)})
        run.run(2)
    table = pd.read_csv(tmp_path / "scalars.csv")
    assert list(table) == ["update", *(f"vbs/{tag}" for tag in TAGS), "loss", "hits"]
    assert table["update"].tolist() == [2, 3, 4]
    assert table["loss"].tolist()[:2] == [3.2, 2.5]
    assert table["hits"].isna().tolist() == [True, False, True]
    assert table["vbs/samples"].isna().tolist() == [False, True, False]


def test_rows_are_appended_and_not_written_anew(tmp_path):
    with vbs.Tracker(tmp_path) as tracker:
        tracker.log(0, {"a": 1})
        file = (tmp_path / "scalars.csv").stat().st_ino
        for update in range(1, 50):
            tracker.log(update, {"a": update})
            tracker.log(update, {"a": -update})
        assert (tmp_path / "scalars.csv").stat().st_ino == file
        tracker.log(50, {"b": 1})
        assert (tmp_path / "scalars.csv").stat().st_ino != file


FOREIGN = {
    "no update": "epoch,loss\n1,0.5\n",
    "a column twice": "update,a,a\n1,2,3\n",
    "a wide row": "update,a\n1,2,3\n4,5\n",
    "a narrow row": "update,a\n1\n4,5\n",
    "text": "update,a\n1,two\n",
    "no integer": "update,a\n1.5,2\n",
    "negative": "update,a\n-1,2\n",
    "no CSV": 'update,"a\n1,2\n',
    "binary": "\x00\x01\n",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_refuses_a_foreign_file_when_the_optimizer_is_made(kind, tmp_path):
    path = tmp_path / "scalars.csv"
    path.write_text(FOREIGN[kind])
    refused = pytest.raises(ValueError, match=r"^logdir must .*scalars\.csv has .*; choose another logdir")
    with refused:
        training(tracker=vbs.Tracker(tmp_path))
    with refused:
        vbs.Tracker(tmp_path).log(1, {"a": 1.0})
    assert path.read_text() == FOREIGN[kind]


@pytest.mark.parametrize("later", [vbs.AdaScaleOptimizer, vbs.LinearRuleOptimizer])
def test_a_training_that_goes_on_with_another_rule_adds_its_columns(later, tmp_path):
    """And leaves those empty that it has not."""
    first = {vbs.AdaScaleOptimizer: vbs.LinearRuleOptimizer}.get(later, vbs.AdaScaleOptimizer)
    with vbs.Tracker(tmp_path) as tracker:
        run = training(first, tracker=tracker, log_steps=1).run(2)
    with vbs.Tracker(tmp_path) as tracker:
        again = training(later, tracker=tracker, log_steps=1)
        with pytest.warns(UserWarning, match="rule"):
            again.optimizer.load_state_dict(run.optimizer.state_dict())
        again.run(2)
    table = pd.read_csv(tmp_path / "scalars.csv")
    assert [*table["update"]] == [1, 2, 3, 4]
    assert [*table["vbs/gain"].notna()] == [kind is vbs.AdaScaleOptimizer for kind in (first, first, later, later)]


def drawn_on_a_terminal(**options):
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


def test_draws_a_bar_in_samples_on_a_terminal():
    drawn = drawn_on_a_terminal()
    assert re.search(r"epoch 0: 100%.*50.0/50.0 .* samples/s.*epoch 1: .*end$", drawn, re.DOTALL)


def test_draws_no_bar_without_progress():
    assert drawn_on_a_terminal(progress=False) == "end"


def test_draws_no_bar_without_a_terminal(capfd):
    with vbs.Tracker() as tracker:
        training(tracker=tracker).run(6)
    assert capfd.readouterr() == ("", "")


FULL = """
import resource, sys, warnings
import variable_batch_size as vbs
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
with warnings.catch_warnings(record=True) as caught, vbs.Tracker(sys.argv[1]) as tracker:
    warnings.simplefilter("always")
    for update in range(int(sys.argv[2])):
        tracker.log(update, {"loss": 1.5})
print(*{str(warning.message).split(" end at")[0] for warning in caught if warning.category is RuntimeWarning})
"""


@pytest.mark.slow("starts a process")
@pytest.mark.parametrize("updates", [2_000, 500], ids=["in the middle", "at the end"])
def test_a_full_disk_ends_the_events_and_not_the_training(tmp_path, updates):
    """A file of 20 kB is all that there is room for, and what an open file holds back are 8 kB."""
    path = os.pathsep.join([str(Path(vbs.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", FULL, str(tmp_path / "logs"), str(updates)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
    assert process.stdout == f"The events of TensorBoard in {tmp_path / 'logs'}\n"
    assert len((tmp_path / "logs" / "scalars.csv").read_text().splitlines()) == updates + 1
