"""The commands and code blocks of the README run and do what the README claims; the tour does in all pages."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
from rule_pages import rule_table

import variable_batch_size as vbs
from helpers.commands import run
from helpers.pages import DOCS, PAGES, README, ROOT, TOUR, blocks, commands

SHORT = shlex.split("--epochs 1 --samples 12000 --trace 0:200 --microbatch 50 --target 0.5")


slow, nightly = pytest.mark.slow("trains MNIST in processes"), pytest.mark.nightly("trains MNIST")


def tours():
    """Return the command lines of the tour; those that use XLA if it is installed are marked `xla`."""
    lines = dict.fromkeys(line for page in PAGES for line in commands(page) if TOUR in line)
    lines = [line for line in lines if "--checkpoint" not in line]  # test_elastic.py runs others
    quick = next(line for line in lines if "--cores" in line)
    return [
        pytest.param(
            line,
            marks=[
                *([] if "--device" in line else [pytest.mark.xla]),
                *([] if line == quick else [slow if "torchrun" in line else nightly]),
            ],
        )
        for line in lines
    ]


def test_the_python_blocks_run_one_after_another(capsys):
    names = {}
    for block in blocks(README, "python"):
        exec(block, names)
    assert isinstance(names["optimizer"], vbs.CustomOptimizer)
    assert capsys.readouterr().out.splitlines()[2].startswith("2 ")


@pytest.mark.usefixtures("published_mnist")
@pytest.mark.parametrize("line", tours())
def test_the_tour_trains(line):
    words = shlex.split(line.replace("PJRT_DEVICE=TPU", ""))  # the same code, on the devices of this machine
    if words[0] == "torchrun":
        words.insert(1, "--standalone")  # by a port that is free
    elif "--cores" not in words:
        words += ["--cores", "2"]
    done = run(*words, *SHORT, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^best accuracy +[5-9]\d\.\d\d%$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^samples +12,000$", done.stdout, re.MULTILINE)


@pytest.mark.usefixtures("published_mnist")
@pytest.mark.nightly("trains MNIST twice")
@pytest.mark.torch
def test_the_tour_resumes_from_its_checkpoint_with_more_workers(tmp_path):
    flags = ["--device", "cpu", "--checkpoint", str(tmp_path), "--save-every", "25", "--rule", "adascale", "--cosine"]
    flags += [*SHORT, "--epochs", "2", "--trace", "0:200 90:100"]  # 150 updates, saved after every 25
    uninterrupted = run(sys.executable, TOUR, *flags, OMP_NUM_THREADS="1")
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    for later in sorted(tmp_path.glob("update-*"))[1:]:
        shutil.rmtree(later)
    resumed = run("torchrun", "--standalone", "--nproc-per-node=3", TOUR, *flags, OMP_NUM_THREADS="1")
    assert resumed.returncode == 0, resumed.stderr
    tables = [re.findall(r"^(updates.*|samples.*)$", done.stdout, re.MULTILINE) for done in (uninterrupted, resumed)]
    assert tables[0] == tables[1]
    assert len(tables[0]) == 3


@pytest.mark.usefixtures("published_mnist")
@pytest.mark.nightly("trains MNIST")
def test_the_tour_exits_with_21_below_its_target():
    done = run(sys.executable, TOUR, "--device", "cpu", *SHORT, "--target", "1.01", OMP_NUM_THREADS="1")
    assert done.returncode == 21, done.stderr
    assert "below the target" in done.stdout


@pytest.mark.parametrize("target", ["train", "test"])
def test_make_has_the_target(target):
    done = run("make", "-n", target)
    assert done.returncode == 0, done.stderr
    assert {"train": TOUR, "test": "pytest"}[target] in done.stdout


@pytest.mark.usefixtures("published_mnist")
@pytest.mark.nightly("trains MNIST")
@pytest.mark.xla
@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="make train would install an environment first")
def test_make_train_trains():
    done = run("make", "train", f"ARGS={shlex.join([*SHORT, '--cores', '2'])}")
    assert done.returncode == 0, done.stderr
    assert "best accuracy" in done.stdout


def test_the_page_of_rules_has_the_table_of_rules():
    assert rule_table() in (DOCS / "rules.md").read_text(), f"copy this into docs/rules.md:\n{rule_table()}"


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = README.read_text()
    assert text.count("\n") <= 100
    links = re.findall(r"\]\(([^)#]+)", text)
    assert not [link for link in links if not (ROOT / link).exists()]
    named = re.findall(r"vbs\.(\w+Optimizer)`", text)
    assert len(named) == 4
    assert not [name for name in named if not hasattr(vbs, name)]


def test_the_readme_says_what_the_records_say(monkeypatch):
    text, page = README.read_text(), (DOCS / "evaluations.md").read_text()
    rows = re.findall(r"^\| [\w ]+, [\w\-' ]+, \w+: Bamboo.*? \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    assert len(rows) == 4
    for constant, of_rules in rows:
        of_each = [f"constant {constant}", *of_rules.replace("`", "").split("; ")]
        lost = [f"{rule} {number}" for rule, *numbers in map(str.split, of_each) for number in numbers]
        assert len(lost) > 1
        assert not [one for one in lost if not re.search(re.escape(one.rstrip(",")) + r" [(|]", page)]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    records = import_module("records")
    what = "linear rule / accumulation by hand"
    found = [row for row in records.newest(records.read()) if row.what == what]
    text += (DOCS / "performance.md").read_text()
    claims = re.findall(r"(\d\.\d\d)\D*?(?:\([^)]*\))?\D*? on\s+a (CPU|GPU)", text)
    assert len(claims) == 4
    for most, device in claims:
        there = [row.value for row in found if ("NVIDIA" in row.where) == (device == "GPU")]
        assert max(there) <= float(most) + 0.005


def test_each_promise_has_a_test():
    page = DOCS / "guarantees.md"
    promises = re.split(r"^\d+\. \*\*", page.read_text(), flags=re.MULTILINE)[1:]
    assert len(promises) == 10
    for promise in promises:
        tests = re.findall(r"\]\((\.\./test/[^)]+)\)", promise)
        assert tests, f"{promise} needs a test"
        assert not [test for test in tests if not (DOCS / test).exists()]
