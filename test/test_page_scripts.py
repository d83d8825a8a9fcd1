"""The scripts of docs/ddp.md, docs/sharded.md and docs/devices.md print what their pages show, in any world."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from helpers.commands import run
from helpers.pages import DOCS, blocks, commands


def printed(page, processes, *flags):
    """Run the script of a page in so many processes; return the lines of numbers: gloo prints others, too."""
    (line,) = commands(DOCS / page)
    words = line.replace("--nproc-per-node=2", f"--standalone --nproc-per-node={processes}").split()
    done = run(*words, *flags, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    return re.findall(r"(?:\d+ )+\d\.\d{4}$", done.stdout, re.MULTILINE)


def shown(page, number=0):
    return blocks(DOCS / page, "text")[number].splitlines()


@pytest.mark.nightly("starts processes")
@pytest.mark.torch
@pytest.mark.parametrize("processes", [1, 2])
def test_data_parallel_on_any_number_of_processes(processes):
    assert printed("ddp.md", processes) == shown("ddp.md")


@pytest.mark.nightly("trains a GPT")
@pytest.mark.torch
def test_a_sharded_training_that_stops_and_resumes_elsewhere(tmp_path):
    folder = f"--folder={tmp_path}"
    assert printed("sharded.md", 3, folder, "--updates=50") + printed("sharded.md", 2, folder) == shown("sharded.md")


@pytest.mark.slow("starts processes")
def test_a_sharded_training_in_bfloat16_stays_near():
    (found,) = printed("sharded.md", 2, "--updates=20", "--bfloat16")
    assert float(found.split()[-1]) == pytest.approx(float(shown("sharded.md")[0].split()[-1]), abs=2e-3)


@pytest.mark.nightly("starts XLA")
@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")
@pytest.mark.parametrize(("number", "name"), [(0, "xla"), (1, "spmd")])
def test_the_examples_on_xla(number, name):
    (line,) = (line for line in commands(DOCS / "devices.md") if f"examples/{name}.py" in line and "CPU" in line)
    *settings, _, script = line.split()
    done = run(sys.executable, script, **dict(setting.split("=") for setting in settings))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == shown("devices.md", number)
