"""Means of a log on XLA's cores: exact for a constant, and nan where a value is missing."""

import json

import pytest

torch_xla = pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

import torch  # noqa: E402

import variable_batch_size as vbs  # noqa: E402
from helpers.reference import training  # noqa: E402
from variable_batch_size.backend.xla import XlaBackend, launch  # noqa: E402

MISSING = {(1, None), (2, 1)}  # (update, microbatch) without a call of log(); None: all microbatches


def train(folder, reproducible):
    backend = XlaBackend()
    options = {"reproducible": reproducible, "fixed_shape": True}
    run = training(
        vbs.LinearRuleOptimizer,
        [40, 12, 12, 9],
        sampling=options,
        minibatch_size=1 if backend.world.size == 1 else 4,
        backend=backend,
        device=torch_xla.device(),
        dtype=torch.float32,
        dataset_size=73,
    )
    rows = []
    for number, update in enumerate(vbs.updates(run.sampler, run.optimizer)):
        for index, indices in enumerate(update):
            run.optimizer.backward(run.loss(indices))
            if not {(number, None), (number, index)} & MISSING or (backend.world.size > 1 and number == 2):
                run.optimizer.log(one=1, constant=torch.tensor(0.5, device=torch_xla.device()))
            run.optimizer.step()
        rows.append([float(value) for value in run.optimizer.logged.values()])
    (folder / f"{reproducible}-{backend.world.size}-{backend.world.rank}").write_text(json.dumps(rows))


@pytest.mark.slow("compiles")
@pytest.mark.parametrize("cores", [1, 2])
def test_the_mean_of_a_constant_is_the_constant_and_without_values_nan(tmp_path, cores):
    launch(train, (tmp_path, True), cores=cores)
    if cores > 1:  # in one process, the host raises if a microbatch has no value
        launch(train, (tmp_path, False), cores=cores)
    paths = [*tmp_path.iterdir()]
    assert len(paths) == cores * cores
    for path in paths:
        first, second, third, last = json.loads(path.read_text())
        assert first == last == [0.5, 1.0]
        assert str(second) == "[nan, nan]"
        assert str(third) == ("[nan, nan]" if cores == 1 else "[0.5, 1.0]")
