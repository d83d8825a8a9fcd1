"""`vbs simulate` prints what `simulate` returns, for each policy."""

from __future__ import annotations

import re

import pandas as pd
import pytest

import variable_batch_size as vbs
from helpers.commands import run as command_run
from helpers.console import run_json, run_main
from helpers.pages import ROOT
from variable_batch_size.adaptive import ConstantBatch, PerDevice, Throughput
from variable_batch_size.adaptive.scalars import updates_in
from variable_batch_size.adaptive.table import parse_policy
from variable_batch_size.lab import cluster
from variable_batch_size.lab.simulation import NoiseCurve, Overheads, compare, means, simulate, sweep

LOG = ROOT / "traces" / "spot_example.json"
RATE = ("--samples-per-second", 20, "--ref-batchsize", 128)
COSTS = ("--restart", 60, "--save", 10, "--save-every", 600, "--notice", 20, "--least-nodes", 2, "--grow-every", 900)
MORE = ("--communication-seconds", 0.5, "--devices-per-node", 2, "--microbatch", 8, "--dataset-size", 5000)

NAMES = ["per-device:16", "constant:128"]


def policy_flags(names):
    return [word for name in names for word in ("--policy", name)]


def test_the_numbers_are_those_of_the_simulation(tmp_path):
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
    path = tmp_path / "new" / "trace.csv"
    status, out, err = run_main(*command, *one, "--trace-out", path)
    assert (status, err) == (0, "")
    assert f"{path}: {found['per-device:16']['updates']:,} updates" in out
    assert len(vbs.BatchTrace.from_csv(path)) == found["per-device:16"]["updates"]


@pytest.mark.parametrize(("flags", "every"), [([], 100), (["--every", 7], 7)])
@pytest.mark.parametrize(("bounds", "start"), [(None, 128), ((200, 4000), 200), ((1, 100), 100)])
def test_a_policy_that_reads_the_noise_is_asked_as_it_trains(flags, every, bounds, start, tmp_path):
    scalars = tmp_path / "scalars.csv"
    scalars.write_text("vbs/progress,vbs/sigma2,vbs/mu2\n0,100,1\n300,2000,1\n900,500,0\n")
    limits = [] if bounds is None else ["--bounds", *bounds]
    names = ["noise-scale:1.5", "norm-test:0.5", "goodput:64-2048", "constant:128"]
    command = [
        "simulate",
        LOG,
        *RATE,
        *COSTS,
        "--noise",
        scalars,
        "--rule",
        "adascale",
        *limits,
        *flags,
        "--max-progress",
        2000,
    ]
    found = run_json(*command, *policy_flags(names))
    for name in names:
        run = simulate(
            cluster.read(LOG),
            parse_policy(name),
            throughput=Throughput.simple(20),
            ref_batchsize=128,
            rule="adascale",
            noise=NoiseCurve.from_csv(scalars),
            start=start,
            bounds=bounds,
            every=every,
            overheads=Overheads(60, 600, 10, notice=20, least_nodes=2, grow_every=900),
            until=2000,
        )
        assert found[name] == dict(run.summary)


@pytest.mark.parametrize("policies", [1, 4])
def test_policies_share_a_picture(policies, tmp_path):
    picture = tmp_path / "run.svg"
    names = [f"constant:{64 + number}" for number in range(policies)]
    assert run_main("simulate", LOG, *RATE, *COSTS, *policy_flags(names), "--png", picture)[0] == 0
    title = f"{LOG.name}: {names[0]}" if policies == 1 else LOG.name
    assert f"<!-- {title} -->" in picture.read_text()


def test_the_times_of_a_part_of_the_log_and_of_the_overheads_are_scaled(tmp_path):
    scaled = tmp_path / "scaled.csv"
    cluster.read(LOG).slice(3600, 86400).scaled(0.25).to_csv(scaled)
    quarter = [
        value / 4 if name != "--least-nodes" else value for name, value in zip(COSTS[::2], COSTS[1::2], strict=True)
    ]
    costs = [word for pair in zip(COSTS[::2], quarter, strict=True) for word in pair]
    command = [*RATE, *policy_flags(NAMES)]
    part = ["--start", 3600, "--stop", 86400, "--scale-time", 0.25]
    assert run_json("simulate", LOG, *COSTS, *part, *command) == run_json("simulate", scaled, *costs, *command)


def test_a_log_is_read_as_by_capacity_convert(tmp_path):
    """With the same options; some of them need a LOG."""
    skypilot, gcloud, converted = tmp_path / "log.json", tmp_path / "log.txt", tmp_path / "capacity.csv"
    skypilot.write_text('{"metadata": {"gap_seconds": 600}, "data": [0, 3, 1, 4]}')
    gcloud.write_text("2021-12-10, 13:00:00, 2\n2021-12-10, 13:07:00, 8\n2021-12-10, 14:00:00, 3\n")
    command = [*RATE, *COSTS, *policy_flags(NAMES)]
    for log, flags in (
        (skypilot, ["--inverted", 5, "--format", "skypilot", "--min-nodes", 2]),
        (gcloud, ["--max-gap", 600, "--max-nodes", 4, "--start", 60]),
    ):
        assert run_main("capacity", "convert", log, *flags, "--out", converted)[0] == 0
        found = run_json("simulate", log, *flags, *command)
        assert found == run_json("simulate", converted, *command) != run_json("simulate", log, *command)


def test_what_a_preemption_loses_without_checkpoints_is_said():
    said = "No --save-every and no --notice: a preemption loses everything since the last stop.\n"
    command = ["simulate", LOG, *RATE, "--policy", NAMES[0]]
    assert run_main(*command, "--restart", 0)[2] == run_main(*command, "--save", 9)[2] == said
    assert run_main(*command, "--save-every", 60)[2] == run_main(*command, "--notice", 60)[2] == ""


def test_without_overheads_nothing_interrupts_the_training():
    """As in Python; any of their options is enough."""
    command = ["simulate", LOG, *RATE, "--policy", NAMES[0]]
    arguments = {"throughput": Throughput.simple(20), "ref_batchsize": 128}
    alone = simulate(cluster.read(LOG), PerDevice(16), **arguments)
    killed = simulate(cluster.read(LOG), PerDevice(16), **arguments, overheads=Overheads())
    assert alone.summary["redone"] == 0 < killed.summary["redone"]
    assert run_json(*command)[NAMES[0]] == dict(alone.summary)
    for option in ("--restart", "--save", "--grow-every", "--notice"):
        assert run_json(*command, option, 0)[NAMES[0]] == dict(killed.summary)
    assert run_json(*command, "--least-nodes", 1)[NAMES[0]] == dict(killed.summary)
    assert (
        run_main(*command)[2]
        == "No overheads such as --restart: changes of the nodes lose no update and cost no time.\n"
    )


def test_the_seconds_of_a_training(tmp_path):
    """--throughput fits them; its error is told, and that there are more devices than it has measured."""
    scalars = ROOT / "traces" / "throughput_example.csv"
    command = ["simulate", LOG, "--throughput", scalars, "--ref-batchsize", 128, *COSTS, "--policy", NAMES[0]]
    model, measured = Throughput.from_csv(scalars), updates_in(scalars)
    overheads = Overheads(60, 600, 10, notice=20, least_nodes=2, grow_every=900)
    run = simulate(cluster.read(LOG), PerDevice(16), throughput=model, ref_batchsize=128, overheads=overheads)
    assert run_json(*command)[NAMES[0]] == dict(run.summary)
    note = f"--throughput: the seconds are fitted to {model.error(measured):.1%} (rms), on 1 to 4 devices"
    rows = int(measured[:, 1].max())
    share = f"No --microbatch: a device computes its share at once, not the {rows} rows measured.\n"
    assert run_main(*command)[2] == f"{note}; the simulation has up to 8.\n{share}"
    assert run_main(*command, "--microbatch", 8)[2] == f"{note}; the simulation has up to 8.\n"
    few = tmp_path / "few.csv"
    cluster.read(LOG).clip(max=4).to_csv(few)
    assert run_main("simulate", few, *command[2:])[2] == f"{note}.\n{share}"
    table = pd.read_csv(scalars)
    table[table["vbs/world_size"] == 1].to_csv(tmp_path / "alone.csv", index=False)
    alone = run_main("simulate", few, "--throughput", tmp_path / "alone.csv", *command[4:])[2]
    assert " on 1 device; the simulation has up to 4.\n" in alone


def test_a_trace_on_standard_output_is_alone():
    command = ["vbs", "simulate", LOG, *RATE, *COSTS, "--policy", NAMES[0], "--max-progress", 3, "--trace-out", "-"]
    done = command_run(*map(str, command))
    assert done.stdout.splitlines()[:2] == ["step,batchsize", "0,96"]
    assert {line.count(",") for line in done.stdout.splitlines()} == {1}
    assert "preemptions" in done.stderr


def test_a_sweep_has_each_run_and_the_statistics():
    machines = {"nodes": 4, "mean_up": 600, "mean_down": 60, "duration": 9000}
    bulks = {"bulk_every": 900, "bulk_fraction": 0.5}
    flags = [word for name, value in (machines | bulks).items() for word in ("--" + name.replace("_", "-"), value)]
    command = [LOG, *flags, "--seeds", 3, *RATE, "--restart", 60, "--price", 0.5, *policy_flags(NAMES)]
    found = run_json("simulate", *command)
    traces = {str(LOG): cluster.read(LOG)}
    traces |= {f"seed {seed}": cluster.synthetic(*machines.values(), seed, **bulks) for seed in range(3)}
    arguments = {"throughput": Throughput.simple(20), "ref_batchsize": 128, "overheads": Overheads(60), "prices": 0.5}
    table = sweep(traces, {"per-device:16": PerDevice(16), "constant:128": ConstantBatch(128)}, **arguments)
    assert list(found["runs"]) == list(traces)
    for (trace, policy), row in table.iterrows():
        assert found["runs"][trace][policy] == dict(row)
        alone = simulate(traces[trace], parse_policy(policy), **arguments).summary
        assert {name: found["runs"][trace][policy][name] for name in alone} == dict(alone)
    for name, statistic in (("means", means), ("differences", compare)):
        for (policy, fact), row in statistic(table).iterrows():
            assert found[name][policy][fact] == dict(row)
    status, out, err = run_main("simulate", *command)
    assert (status, len(err.splitlines())) == (0, 2)
    mean, low, high = (found["means"]["constant:128"]["productive_share"][name] for name in ("mean", "low", "high"))
    assert f"{mean:.1%} ({max(0, 100 * low):.1f} to {min(100, 100 * high):.1f})" in out
    assert out.startswith("Means of 4 capacity traces, each counted once, with 95% t intervals:\n")
    assert "Paired differences to per-device:16, in percent of its means:" in out


def test_a_trace_without_an_update_is_shown(tmp_path):
    idle = tmp_path / "idle.csv"
    cluster.CapacityTrace([0], [0], 60).to_csv(idle)
    command = ["simulate", idle, LOG, *RATE, "--price", 1, *policy_flags(NAMES)]
    found = run_json(*command)
    assert found["runs"][str(idle)]["constant:128"]["cost_per_progress"] is None
    assert found["means"]["constant:128"]["cost_per_progress"] == {"mean": None, "low": None, "high": None}
    out = run_main(*command)[1]
    rows = {line.split("  ")[0]: line.split()[-2:] for line in out.splitlines()}
    assert rows["traces without an update"] == ["1", "1"]
    assert rows["cost per progress"] == ["progress", "-"]  # of the differences
    alone = run_main("simulate", idle, *RATE, *policy_flags(NAMES))
    assert alone[0] == 0
    assert "idle" in alone[1]
    assert alone[2].startswith("The training makes no update: it has at most 0 of 1 nodes.\n")


def test_a_training_without_an_update_is_told():
    command = ["simulate", LOG, "--ref-batchsize", 128, "--policy", NAMES[0], "--save-every", 9]
    few = run_main(*command, "--samples-per-second", 20, "--least-nodes", 9)
    assert (few[0], few[2]) == (0, "The training makes no update: it has at most 8 of 9 nodes.\n")
    assert "cost_per_progress" not in run_json(*command, *RATE[:2], "--least-nodes", 9, "--price", 1)[NAMES[0]]
    slow = run_main(*command, "--samples-per-second", 1e-5)
    assert slow[2] == "The training makes no update: none ends before a loss or the log does.\n"
    assert "makes no update" not in run_main(*command, *RATE[:2])[2]


def test_costs_are_named_and_divided_by_the_progress():
    command = ["simulate", LOG, *RATE, "--policy", NAMES[0], "--price", 2]
    summary = run_json(*command)[NAMES[0]]
    assert summary["cost_per_progress"] == summary["cost"] / summary["progress"]
    rows = [line.rsplit(maxsplit=1) for line in run_main(*command)[1].splitlines()[1:]]
    found = {name.strip(): float(value.replace(",", "")) for name, value in rows if "cost" in name}
    names = {"cost (in the unit of --price)": "cost", "cost per progress": "cost_per_progress"}
    assert found == pytest.approx({name: summary[fact] for name, fact in names.items()}, rel=1e-3)


def test_costs_may_have_a_currency(tmp_path):
    command = ["simulate", LOG, *RATE, "--policy", NAMES[0], "--price", 2, "--on-demand", 3, "--currency", "USD"]
    costs = [line.rsplit(maxsplit=1)[0].strip() for line in run_main(*command)[1].splitlines() if "cost" in line]
    assert costs == [f"{name} (USD)" for name in ("cost", "cost per progress", "on demand cost of the productive time")]
    other = tmp_path / "other.csv"
    cluster.read(LOG).slice(0, 90000).to_csv(other)
    assert "cost per hour (USD)" in run_main(*command, other)[1]


def test_printed_intervals_are_not_negative():
    """What they cannot be; those of differences can."""
    machines = ["--nodes", 1, "--mean-up", "1h", "--mean-down", "2h", "--duration", "3h", "--seeds", 2]
    command = ["simulate", *machines, *RATE, "--policy", NAMES[0], "--restart", 60, "--price", 1]
    found = run_json(*command)["means"][NAMES[0]]
    assert any(fact["low"] is not None and fact["low"] < 0 for fact in found.values())
    assert " (-" not in run_main(*command)[1]


@pytest.mark.slow("simulates many trainings")
def test_several_intervals_between_saves_are_compared(tmp_path):
    """Each beside the others, in order of the policies, as if it were given alone."""
    other = tmp_path / "other.csv"
    cluster.read(LOG).slice(0, 90000).to_csv(other)
    for logs in ([LOG], [LOG, other]):
        command = ["simulate", *logs, *RATE, "--save", 10, "--restart", "1m"]
        found = run_json(*command, *policy_flags(NAMES), "--save-every", "120,10m,.25h")
        labels = [f"{name} --save-every {interval}" for name in NAMES for interval in (120, 600, 900)]
        runs = list(found["runs"].values()) if len(logs) > 1 else [found]
        assert [list(run) for run in runs] == [labels] * len(logs)
        for label in labels:
            name, option, interval = label.split()
            alone = run_json(*command, "--policy", name, option, interval)
            alone = list(alone["runs"].values()) if len(logs) > 1 else [alone]
            assert [run[label] for run in runs] == [run[name] for run in alone]
        assert "differences" not in found or list(found["differences"]) == labels


def test_noise_chooses_the_rule(tmp_path):
    """Without it, every sample counts the same, which is said where policies are compared."""
    noise = ROOT / "traces" / "noise_example.csv"
    command = ["simulate", LOG, *RATE, *COSTS, *policy_flags(NAMES)]
    assert run_json(*command, "--noise", noise) == run_json(*command, "--noise", noise, "--rule", "adascale")
    assert run_json(*command) == run_json(*command, "--rule", "linear")
    said = "Progress is counted by the rule linear. For AdaScale's gain, pass --noise FILE.\n"
    assert run_main(*command)[2] == said
    assert run_main(*command, "--noise", noise)[2] == ""
    short = tmp_path / "scalars.csv"
    short.write_text("vbs/progress,vbs/sigma2,vbs/mu2\n0,100,1\n300,2000,1\n")
    assert re.fullmatch(
        r"--noise ends at a progress of 300 updates; its last row holds up to [0-9.e+]+\.\n",
        run_main(*command, "--noise", short)[2],
    )
    assert run_main("simulate", LOG, *RATE, *COSTS, "--policy", NAMES[0])[2] == ""
