"""Means of epochs, in a loop that is stopped and restored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.measured import Measured
from helpers.properties import examples
from helpers.reference import SIZES
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks


@given(stop=st.integers(0, 2 * len(SIZES)), world=st.sampled_from([1, 2]), then=st.sampled_from([1, 2]))
@examples(15)
def test_a_restored_loop_reports_the_means_of_each_epoch(stop: int, world: int, then: int) -> None:
    """Wherever it was stopped, also at an epoch's end, before the means of that epoch were read."""
    epochs, samples = 3, sum(SIZES)

    def train(backend: Backend, state: Any = None, until: int = -1) -> tuple[Any, dict[int, dict[str, float]]]:
        run, means = Measured([*SIZES, *SIZES, *SIZES], samples, backend=backend), {}
        if state is not None:
            run.optimizer.load_state_dict(state[0])
            run.metrics.load_state_dict(json.loads(state[1]))
        for epoch in range(run.optimizer.epoch, epochs):
            run.training.sampler.set_epoch(epoch)
            run.optimizer.set_epoch(epoch)
            run.metrics.set_epoch(epoch)
            for indices in run.training.sampler:
                if run.optimizer.updates == until and not run.optimizer.inside_step:
                    break
                run.microbatch(indices)
                if run.optimizer.updates == until and not run.optimizer.inside_step:
                    return (run.optimizer.state_dict(), json.dumps(run.metrics.state_dict())), means
            if run.optimizer.updates == until:
                return (run.optimizer.state_dict(), json.dumps(run.metrics.state_dict())), means
            means[epoch] = run.metrics.read()
        return None, means

    ((_, whole),) = run_ranks(train, 1)
    assert [epoch["samples"] for epoch in whole.values()] == [samples] * epochs
    saved = run_ranks(lambda backend: train(backend, until=stop), world)
    for state, before in run_ranks(lambda backend: train(backend, state=saved[0][0]), then):
        assert state is None
        for epoch, means in (saved[0][1] | before).items():
            assert means == pytest.approx(whole[epoch], rel=1e-12)


def test_set_epoch_of_the_accumulator() -> None:
    run = Measured().run(2)
    run.metrics.set_epoch(0)
    assert run.metrics.read()["samples"] == 0
    run.run(1)
    run.metrics.set_epoch(0)
    assert run.metrics.read()["samples"] == SIZES[2]
