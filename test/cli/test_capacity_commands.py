"""`vbs capacity`: what it shows and writes is what the package returns."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

import variable_batch_size as vbs
from helpers.console import run_json, run_main
from helpers.pages import ROOT
from variable_batch_size.adaptive import ConstantBatch, PerDevice, Throughput
from variable_batch_size.lab import cluster
from variable_batch_size.lab.simulation import to_batch_trace

LOG = ROOT / "traces" / "spot_example.json"


def test_the_facts_are_those_of_the_trace(tmp_path):
    capacity = cluster.read(LOG)
    facts = run_json("capacity", "show", LOG)
    assert (facts["seconds"], facts["mean"], facts["changes"]) == (capacity.end, capacity.mean, capacity.changes)
    assert (facts["min"], facts["max"]) == (0, 8)
    assert facts["seconds_without_nodes"] == capacity.lengths[capacity.nodes == 0].sum()
    status, out, err = run_main("capacity", "show", LOG, "--png", tmp_path / "log.png")
    assert (status, err) == (0, "")
    assert "duration        2 days (172,800 s)" in out
    assert f"nodes           0 to 8, mean {capacity.mean:.3f}" in out
    assert (tmp_path / "log.png").read_bytes().startswith(b"\x89PNG")


def test_prices_are_shown(tmp_path):
    path = tmp_path / "log.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 60}, "data": [1, 0], "prices": [0.5, 1.5]}))
    assert run_json("capacity", "show", path)["mean_price"] == 1.0
    assert "price           1 a node-hour, on average" in run_main("capacity", "show", path)[1]


def test_options_of_the_formats_are_passed_on(tmp_path):
    path = tmp_path / "log.json"
    path.write_text('{"metadata": {"gap_seconds": 60}, "data": [0, 3]}')
    assert run_json("capacity", "show", path, "--inverted", 4)["mean"] == 2.5
    assert run_json("capacity", "show", path, "--format", "skypilot")["mean"] == 1.5


def test_times_that_get_another_unit_are_not_warned_of(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("seconds,nodes\n" + "".join(f"{0.48 * row:.2f},{row % 3}\n" for row in range(180)))
    assert "if they are, pass --scale-time 3600" in run_main("capacity", "show", path)[2]
    for command in (("show",), ("convert", "--out", tmp_path / "trace.csv")):
        assert run_main("capacity", command[0], path, *command[1:], "--scale-time", 3600)[2] == ""


def test_a_part_is_shown_with_other_units_of_time():
    facts = run_json("capacity", "show", LOG, "--stop", "1d", "--scale-time", 3600)
    assert (facts["seconds"], facts["mean"]) == (3600 * 86_400, cluster.read(LOG).slice(0, 86_400).mean)


@pytest.mark.parametrize(
    ("policy", "controller"), [("per-device:16", PerDevice(16)), ("constant:128", ConstantBatch(128))]
)
def test_a_log_becomes_a_batch_trace(policy, controller, tmp_path):
    path = tmp_path / "trace.csv"
    options = ["--policy", policy, "--samples-per-second", 100, "--communication-seconds", 0.25, "--scale-time", 0.01]
    cut = ["--start", 3600, "--stop", 90000, "--min-nodes", 1, "--max-nodes", 6, "--devices-per-node", 2]
    status, out, err = run_main("capacity", "convert", LOG, "--out", path, *options, *cut, "--microbatch", 8)
    assert (status, err) == (0, "")
    capacity = cluster.read(LOG).slice(3600, 90000).clip(1, 6).scaled(0.01).devices(2)
    expected = to_batch_trace(capacity, controller, Throughput.simple(100, 0.25), minibatch_size=8)
    assert vbs.BatchTrace.from_csv(path) == expected
    assert out == f"{path}: {len(expected):,} updates, {expected.total_samples:,} samples, batch size at most " + (
        f"{expected.max_batch_size:,}\n"
    )
    run_main("capacity", "convert", LOG, "--out", path, *options, "--max-updates", 7)
    assert len(vbs.BatchTrace.from_csv(path)) == 7


def test_without_a_policy_the_capacity_is_written(tmp_path):
    path = tmp_path / "capacity.csv"
    assert run_main("capacity", "convert", LOG, "--out", path, "--resample", 3600)[0] == 0
    assert cluster.CapacityTrace.from_csv(path) == cluster.read(LOG).resampled(3600)


def test_synthetic_traces_are_written(tmp_path):
    path = tmp_path / "capacity.csv"
    machines = ["--nodes", 5, "--mean-up", 600, "--mean-down", 60, "--duration", 9000, "--seed", 3, "--out", path]
    assert run_main("capacity", "synthetic", *machines)[0] == 0
    assert cluster.CapacityTrace.from_csv(path) == cluster.synthetic(5, 600, 60, 9000, 3)
    run_main("capacity", "synthetic", *machines, "--bulk-every", 900, "--bulk-fraction", 0.5)
    bulk = cluster.synthetic(5, 600, 60, 9000, 3, bulk_every=900, bulk_fraction=0.5)
    assert cluster.CapacityTrace.from_csv(path) == bulk


def test_public_traces_are_listed():
    out = run_main("capacity", "fetch")[1]
    assert all(trace.name in out and trace.address in out for trace in cluster.PUBLIC.values())
    assert [trace["name"] for trace in run_json("capacity", "fetch")] == list(cluster.PUBLIC)


def test_cores_are_divided_into_machines(tmp_path):
    path, converted = tmp_path / "tpu.csv", tmp_path / "capacity.csv"
    path.write_text(",Time,TPU_cores\n0,1651064000,24\n1,1651064300,120\n2,1651064600,120\n")
    cores = ("--cores-per-node", 8)
    shown = run_json("capacity", "show", path, *cores)
    assert (shown["min"], shown["max"], run_json("capacity", "show", path)["max"]) == (3, 15, 120)
    assert run_main("capacity", "convert", path, *cores, "--devices-per-node", 8, "--out", converted)[0] == 0
    assert cluster.CapacityTrace.from_csv(converted) == cluster.read(path)
    costs = ("--policy", "constant:64", "--samples-per-second", 1, "--ref-batchsize", 64, "--price", 1)
    found = [run_json("simulate", path, *costs, *options)["constant:64"]["cost"] for options in ((), cores)]
    assert found[0] == pytest.approx(8 * found[1])


def test_a_log_on_standard_input():
    command = [sys.executable, "-m", "variable_batch_size", "capacity", "show", "-", "--json"]
    done = subprocess.run(command, input=LOG.read_bytes(), stdout=subprocess.PIPE, check=True, cwd=ROOT)
    assert json.loads(done.stdout) == run_json("capacity", "show", LOG)


def test_a_picture_has_the_name_of_the_log_and_whole_nodes(tmp_path):
    path = tmp_path / "log.svg"
    assert run_main("capacity", "show", LOG, "--png", path)[0] == 0
    comments = re.findall("<!-- (.*?) -->", path.read_text())
    assert LOG.name in comments
    assert not [text for text in comments if text.endswith(".5")]


def test_standard_output_that_is_appended_to_a_file_keeps_what_it_has(tmp_path):
    path = tmp_path / "both.csv"
    path.write_text("first\n")
    command = [sys.executable, "-m", "variable_batch_size", "capacity", "convert", str(LOG), "--out", "-"]
    with path.open("a") as file:
        subprocess.run(command, stdout=file, check=True, cwd=ROOT)
    first, second, *rows = path.read_text().splitlines()
    assert (first, second) == ("first", "seconds,nodes")
    assert rows
