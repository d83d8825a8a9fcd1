"""A real elastic training under a capacity trace, and one process under the simulated batch trace."""

from __future__ import annotations

import itertools

import pytest

from helpers.elastic_cluster import assert_replayed, replay
from variable_batch_size.adaptive import ConstantBatch, Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.simulation import Overheads, simulate

BATCH_SIZE = 8000  # seven updates and a half of an epoch
FLAGS = ["--microbatch=1000", "--width=4", "--save-every=0.01"]


@pytest.mark.nightly("restarts torchrun several times")
@pytest.mark.torch
@pytest.mark.parametrize("notice", [25])
def test_one_process_makes_the_updates_of_an_elastic_training_under_the_simulated_trace(tmp_path, notice):
    """The clock of the capacity trace is the number of rows in the journals, so that no time matters.

    A notice is 25 updates long, some seconds: ranks look for a request to stop every half a second.
    """
    capacity = CapacityTrace(seconds=[0, 4, 40], nodes=[1, 2, 1], end=46)

    def rows():
        return sum(len(path.read_text().splitlines()) for path in elastic.glob("journal-*"))

    elastic = tmp_path / "elastic"
    elastic.mkdir()
    starts = replay(capacity, elastic, [*FLAGS, f"--trace=0:{BATCH_SIZE}"], notice=notice, clock=rows)
    assert [(start.cause, start.nodes) for start in starts] == [("start", 1), ("growth", 2), ("preemption", 1)]
    assert [start.killed is not None for start in starts] == [False, not notice, False]
    for before, after in itertools.pairwise(starts):
        lost = before.updates[-1] - after.updates[0]
        assert lost == 0 if before.killed is None else lost >= 0
    made = max(start.updates[-1] for start in starts)
    run = simulate(
        capacity.scaled(100),
        ConstantBatch(BATCH_SIZE),
        throughput=Throughput.simple(BATCH_SIZE),
        ref_batchsize=BATCH_SIZE,
        dataset_size=60_000,
        overheads=Overheads(restart=1, save_every=1, notice=notice),
        until=made,
        by="updates",
    )
    updates, difference = assert_replayed(run.trace, elastic, tmp_path / "alone", FLAGS)
    assert updates > starts[1].updates[0]  # the checkpoint is of a start with two processes, or of a later one
    assert difference < 1e-12
