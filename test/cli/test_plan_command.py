"""`vbs plan` prints what the samplers of all ranks then deal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.console import error_of, run_json, run_main
from variable_batch_size.adaptive import Throughput

SIZES = st.lists(st.integers(1, 24), min_size=1, max_size=9)
PLAN = ("--dataset-size", 50, "--microbatch", 4)


@given(SIZES, st.integers(24, 40), st.integers(1, 9), st.integers(1, 5), st.booleans(), st.booleans())
def test_the_numbers_are_those_of_the_samplers(
    tmp_path_factory,
    sizes,
    dataset,
    microbatch,
    world,
    fixed,
    drop_last,
):
    path = tmp_path_factory.mktemp("plan") / "trace.csv"
    vbs.BatchTrace.from_sizes(sizes).to_csv(path)
    command = ["plan", path, "--dataset-size", dataset, "--microbatch", microbatch, "--world", f"1,{world}"]
    found = run_json(*command, *["--fixed-shape"] * fixed, *["--drop-last"] * drop_last)
    ranks = []  # rows of each microbatch
    for rank in range(world):
        sampler = vbs.CustomSampler(
            dataset, path, world, rank, microbatch, on_end="stop", fixed_shape=fixed, drop_last=drop_last
        )
        ranks.append([])
        for epoch in range(len(sizes) + 1):  # each has at least a step
            sampler.set_epoch(epoch)
            ranks[-1] += [len(microbatch) for microbatch in sampler]
    load = found["worlds"][-1]
    idle = round(load["idle_ranks"]["mean"] * found["updates"])
    assert load["ranks"] == world
    assert load["microbatches"] + idle == sum(map(len, ranks))
    assert load["repeated_rows"] + found["samples"] == sum(map(sum, ranks))
    assert load["rounds"]["total"] == max(map(len, ranks)) == len(ranks[0])
    assert set(load["shapes"]) >= {rows for rank in ranks for rows in rank}
    epochs = found["updates_per_epoch"]
    assert found["updates"] == sum(run["updates"] * run["epochs"] for run in epochs) <= len(sizes)
    assert found["epochs"] == sum(run["epochs"] for run in epochs) - (found["ends_within_epoch"] is not None)


def test_predicted_seconds_are_those_of_the_updates():
    arguments = ("--samples-per-second", 8, "--communication-seconds", 0.5, "--world", "1,3", "--max-updates", 11)
    found = run_json("plan", "0:9 4:20", *PLAN, *arguments)
    simple = Throughput.simple(8, 0.5)
    for load, devices in zip(found["worlds"], (1, 3), strict=True):
        sampler = vbs.CustomSampler(50, "0:9 4:20", devices, 0, 4, fixed_shape=False, max_updates=11)
        sizes = [sampler.plan.step(epoch, step).batch_size for epoch, step in steps(sampler.plan)]
        assert load["seconds"] == pytest.approx(sum(simple.seconds(size, devices, 4) for size in sizes), rel=1e-12)


def steps(plan):
    epochs = [plan.epoch(number) for number in range(9)]
    return [(epoch, step) for epoch in epochs for step in range(epoch.first_step, epoch.end_step)]


def test_the_table_has_a_row_for_each_world():
    status, out, _ = run_main("plan", "0:9 4:20", *PLAN, "--world", "1-3,8", "--epochs", 2)
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[-4:]] == ["1", "2", "3", "8"]
    assert "epochs       2" in out
    assert "batch size   9 to 20, 4 different ones" in out


def test_the_end_of_the_trace_is_told(tmp_path):
    path = tmp_path / "trace.csv"
    vbs.BatchTrace.from_sizes([20, 20, 20, 20]).to_csv(path)
    assert "epochs       1, then 40.0% of epoch 1" in run_main("plan", path, *PLAN)[1]
    assert run_json("plan", path, *PLAN, "--on-end", "hold", "--epochs", 3)["updates"] == 9


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1-4097", "4097", "1,,2", "1.5", "²"])
def test_other_worlds_are_an_error(text):
    status, message = error_of("plan", "64", "--dataset-size", 64, "--microbatch", 8, "--epochs", 1, "--world", text)
    assert status == 2
    assert "'--world': they must be numbers of ranks from 1 to 4096, got " in message
