"""Names of an `Accumulator` that differ between ranks."""

from __future__ import annotations

import pytest

import variable_batch_size as vbs
from helpers.reference import training
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks


@pytest.mark.parametrize("names", [["loss", "accuracy"], ["loss", ""], ["", "loss"]])
def test_other_names_on_another_rank_raise_on_every_rank(names: list[str]) -> None:
    def train(backend: Backend) -> str:
        run = training(backend=backend)
        metrics, own = vbs.Accumulator(run.optimizer), names[backend.world.rank]
        for indices in run.sampler:
            if own:
                metrics.add(**{own: 1.0})
            run.loss(indices).backward()
            run.optimizer.step()
        with pytest.raises(RuntimeError, match="every rank must add values under the same names") as caught:
            metrics.read()
        with pytest.raises(RuntimeError, match="under the same names"):
            metrics.state_dict()
        return str(caught.value)

    first, second = run_ranks(train, 2)
    assert first == second
    assert all((name or "none") in first for name in names)
