"""`vbs simulate` prints what `simulate` returns, for each policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import variable_batch_size as vbs
from helpers.console import error_of, run_json, run_main
from helpers.pages import ROOT
from variable_batch_size import cluster
from variable_batch_size.adaptive import ConstantBatch, PerDevice, Throughput
from variable_batch_size.simulation import Overheads, simulate

LOG = ROOT / "traces" / "spot_example.json"
RATE = ("--samples-per-second", 20, "--ref-batchsize", 128)
COSTS = ("--restart", 60, "--save", 10, "--save-every", 600, "--notice", 20, "--least-nodes", 2, "--grow-every", 900)
MORE = ("--communication-seconds", 0.5, "--devices-per-node", 2, "--microbatch", 8, "--dataset-size", 5000)


def test_the_numbers_are_those_of_the_simulation(tmp_path: Path) -> None:
    one = ["--policy", "per-device:16"]
    command = ["simulate", LOG, *RATE, *COSTS, *MORE, "--price", 0.5, "--max-progress", 9000, "--rule", "root"]
    found = run_json(*command, *one, "--policy", "constant:128")
    for name, controller in (("per-device:16", PerDevice(16)), ("constant:128", ConstantBatch(128))):
        run = simulate(
            cluster.read(LOG),
            controller,
            throughput=Throughput.simple(20, 0.5),
            ref_batchsize=128,
            rule="root",
            minibatch_size=8,
            dataset_size=5000,
            devices_per_node=2,
            overheads=Overheads(60, 600, 10, notice=20, least_nodes=2, grow_every=900),
            prices=0.5,
            until=9000,
        )
        assert found[name] == dict(run.summary)
    path, picture = tmp_path / "new" / "trace.csv", tmp_path / "run.png"
    status, out, err = run_main(*command, *one, "--trace-out", path, "--png", picture)
    assert (status, err) == (0, "")
    assert f"{path}: {found['per-device:16']['updates']:,} updates" in out
    assert len(vbs.BatchTrace.from_csv(path)) == found["per-device:16"]["updates"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--policy", "linear:3"], 1, "a policy must be per-device:SAMPLES or constant:SAMPLES"),
        (["--policy", "constant:3", "--rule", "adascale"], 1, "AdaScaleRule() needs the gradient noise, got"),
        (
            ["--policy", "constant:3", "--policy", "constant:4", "--png", "a.png"],
            1,
            "--trace-out and --png are for one",
        ),
        (["--policy", "constant:3", "--least-nodes", 0], 2, "Invalid value for '--least-nodes'"),
        ([], 2, "Missing option '--policy'"),
    ],
)
def test_errors_are_one_line(arguments: list[Any], status: int, message: str) -> None:
    found = error_of("simulate", LOG, *RATE, *arguments)
    assert found[0] == status
    assert found[1].startswith(message), found[1]
