"""The commands of docs/language_model.md: both trainings learn, in any world, also if they are stopped."""

from __future__ import annotations

import csv
import importlib
import os
import re
import runpy
import shlex
import signal
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from side_by_side import FOLDER, SCRIPTS, changed, section

from helpers.checkpoints import told
from helpers.commands import run
from helpers.pages import DOCS, ROOT, blocks, commands

PAGE = DOCS / "language_model.md"
LINES = [line for line in commands(PAGE) if f"{FOLDER.relative_to(ROOT)}/" in line]
PLAIN, VARIABLE, PLAIN_ON_TWO, VARIABLE_ON_TWO, STOPPED, RESUMED, EVALUATE = LINES
LOSS = r"\d+\.\d+"
TRACE = ["--trace", "0:8 8:16 16:24"]


@pytest.fixture
def short(tmp_path):
    """Flags of a training with 256 blocks, twice, and 32 to validate with."""
    path = tmp_path / "text"
    path.write_bytes("".join(topics.values()).encode()[: 64 * 289])
    return ["--text", str(path), "--epochs", "2", "--batch", "16", "--microbatch", "4", "--float32"]


def run_here(monkeypatch, line, *flags):
    """Run the script of a line in this process, where a warning is an error."""
    script, *words = shlex.split(line.partition("python ")[2])
    monkeypatch.setattr(sys, "argv", [script, *words, *map(str, flags)])
    monkeypatch.syspath_prepend(FOLDER)
    runpy.run_path(str(ROOT / script), run_name="__main__")


def run_processes(line, *flags):
    """Run a line of torchrun; return what is printed."""
    command = [*shlex.split(line.replace("torchrun", "torchrun --standalone")), *map(str, flags)]
    done = run(*command, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stderr + done.stdout


def scalars(folder):
    """Return the losses and batch sizes of a training, by update."""
    with (folder / "scalars.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = "loss", "val_loss", "vbs/global_batch_size"
    return {name: [float(row[name]) for row in rows if row[name]] for name in names}


def assert_same(folder, expected):
    found = scalars(folder)
    for name, values in scalars(expected).items():
        assert found[name] == pytest.approx(values, rel=1e-3), name


def assert_prints(printed, shown):
    """Check that the same is printed, but for losses that differ a little: other Pythons have another text."""
    assert re.sub(LOSS, "", printed) == re.sub(LOSS, "", shown)
    found, expected = (list(map(float, re.findall(LOSS, text))) for text in (printed, shown))
    assert found == pytest.approx(expected, abs=0.15)


def test_lines_that_are_not_highlighted_are_the_same_in_both_scripts():
    names = re.findall(r"^```{side-by-side} (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(names) == 8
    for name in names:
        plain, variable = (section((FOLDER / script).read_text(), name) for script in SCRIPTS)
        assert common(plain, variable) == common(variable, plain), name


def common(lines, others):
    highlighted = changed(lines, others)
    same = [line.strip() for number, line in enumerate(lines, 1) if number not in highlighted]
    return [line for line in same if line]


@pytest.mark.nightly("trains for its page")
@pytest.mark.torch
def test_both_print_what_the_page_shows_and_learn(tmp_path, monkeypatch, capsys):
    for line, shown in zip((PLAIN, VARIABLE), blocks(PAGE, "text"), strict=True):
        run_here(monkeypatch, line, "--folder", tmp_path / Path(line).stem)
        printed = capsys.readouterr().out
        assert_prints(printed, shown)
        assert float(re.findall(LOSS, printed)[-1]) < 3.0  # the frequencies of bytes alone give 3.12
    run_here(monkeypatch, EVALUATE, "--folder", tmp_path / "variable")
    assert_prints(capsys.readouterr().out, f"validation loss {re.findall(LOSS, printed)[-1]}\n")


@pytest.mark.nightly("trains twice")
@pytest.mark.torch
def test_with_batches_of_one_size_both_learn_equally_well(tmp_path, short, monkeypatch, capsys):
    run_here(monkeypatch, VARIABLE, *short, "--trace", 16, "--folder", tmp_path / "variable")
    variable = float(re.findall(LOSS, capsys.readouterr().out)[-1])
    printed = run_processes(PLAIN_ON_TWO, *short, "--folder", tmp_path / "plain")
    assert float(re.findall(LOSS, printed)[-1]) == pytest.approx(variable, abs=0.15)  # the order of samples differs
    run_here(monkeypatch, PLAIN, *short, "--epochs", 3, "--folder", tmp_path / "plain")  # resumes from its checkpoint
    assert re.findall(r"^epoch \d+", capsys.readouterr().out, re.MULTILINE) == ["epoch 2"]


@pytest.mark.nightly("starts three trainings")
@pytest.mark.torch
def test_two_processes_make_the_updates_of_one_also_after_a_stop(tmp_path, short, monkeypatch, caplog):
    alone, together, stopped = (tmp_path / name for name in ("alone", "together", "stopped"))
    run_here(monkeypatch, VARIABLE, *short, *TRACE, "--folder", alone)
    run_processes(VARIABLE_ON_TWO, *short, *TRACE, "--folder", together)
    assert_same(together, alone)

    told(caplog)
    send_in_microbatch(50, monkeypatch)
    with pytest.raises(SystemExit, match="143"):
        run_here(monkeypatch, STOPPED, *short, *TRACE, "--folder", stopped)
    saved = re.match(r"Checkpoint (update-\S+) saved \d+\.\d\d s after SIGTERM; exiting with 143\.$", told(caplog)[-1])
    assert saved is not None
    printed = run_processes(RESUMED, *short, *TRACE, "--folder", stopped)
    assert re.search(
        rf"Checkpoint {saved[1]} restored: world 1 -> 2, .*epoch 0, \d+ samples, lost 0 updates\.$",
        printed,
        re.MULTILINE,
    ), printed
    assert_same(stopped, alone)


def send_in_microbatch(number, monkeypatch):
    """Send this process a SIGTERM in its microbatch with that number."""
    monkeypatch.syspath_prepend(FOLDER)
    gpt = importlib.import_module("gpt")
    original, calls = gpt.loss_of, []

    def loss_of(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(gpt, "loss_of", loss_of)
