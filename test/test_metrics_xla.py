"""Means over a whole dataset on several XLA cores of this CPU: exact, lazy, and one graph."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

import variable_batch_size as vbs  # noqa: E402
from helpers.xla_graphs import quietly  # noqa: E402
from helpers.xla_training import counters  # noqa: E402
from variable_batch_size.backend.xla import launch  # noqa: E402


def evaluate(folder, minibatch_size, first, second):
    """Evaluate the numbers 0 .. `first` - 1 and then 0 .. `second` - 1: means on the device, and then on the host.

    Rank r writes the four results to `means<r>.pt`, with the compilations and transfers within the batches of the
    second evaluation, and the compilations of its read.
    """
    import torch_xla
    import torch_xla.debug.metrics as met

    backend, device = vbs.backend.XlaBackend(), torch_xla.device()
    found, counts = [], []

    def count():
        counts.append(quietly(backend, partial(counters, met)))

    for on_device in (True, False):
        for n in (first, second):
            sampler = vbs.EvaluationSampler(n, minibatch_size=minibatch_size)
            metrics = vbs.Accumulator(sampler)
            count()
            for indices in sampler:
                numbers = torch.tensor(indices).float()
                mean = numbers.to(device).mean() if on_device else numbers.mean().item()
                metrics.add(value=mean, double=2 * mean)
            count()
            found.append(metrics.read())
    begun, ended, read = counts[2:5]
    batches = {name: ended[name] - begun.get(name, 0) for name in ended}
    torch.save((found, batches, read["compiled"] - ended["compiled"]), folder / f"means{backend.world.rank}.pt")


@pytest.mark.nightly("launches another world")
def test_an_evaluation_is_exact_and_add_compiles_and_reads_nothing(tmp_path):
    launch(evaluate, (tmp_path, 8, 61, 44), cores=2)  # partial batches of 1 and 4 samples, and replays
    expected = [pytest.approx({"value": (n - 1) / 2, "double": n - 1, "samples": n}, rel=1e-6) for n in (61, 44)]
    for rank in range(2):
        found, batches, compiled = torch.load(tmp_path / f"means{rank}.pt")
        assert found == 2 * expected
        assert batches == dict.fromkeys(batches, 0)
        assert compiled == 0
