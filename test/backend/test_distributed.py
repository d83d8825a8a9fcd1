"""What processes of a gloo group find out, send and refuse; test/optim/test_laws.py has their updates.

A world runs every job once, and the tests read the results of each rank.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist

import variable_batch_size as vbs
from helpers.mistakes import OnEveryRank
from helpers.models import Everything, Mixed, everything, shifted
from helpers.processes import run_job
from helpers.reference import REF, SIZES, Training, assert_equal, filled, network, training, twin
from helpers.worlds import Layout, Place
from variable_batch_size.backend import Backend, DistributedBackend, World

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WORLDS = [2, pytest.param(3, marks=[pytest.mark.slow("starts another world"), pytest.mark.torch])]
JOBS = []


def job(function):
    JOBS.append(function)
    return function


@job
def detected_world(place):
    """Train without passing a world or a backend to the sampler and the optimizer."""
    model = network()
    sampler = vbs.CustomSampler(50, list(SIZES), minibatch_size=4, on_end="hold")
    optimizer = vbs.RootRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), sampler, REF)
    x, target = training().x, training().target
    run = Training(model, sampler, optimizer, x, target).run(len(SIZES))
    return sampler.world, run.weights()


@job
def evaluation(place):
    """Return the means of the numbers 0 to 9: of tensors in inference mode, and of numbers; the world is detected."""
    sampler, found = vbs.EvaluationSampler(10, minibatch_size=2), []
    metrics = vbs.Accumulator(sampler)
    for inference in (True, False):
        with torch.inference_mode(inference):
            for indices in sampler:
                mean = torch.tensor(indices).double().mean()
                metrics.add(value=mean if inference else mean.item())
            found.append(metrics.read())
    return found


@contextmanager
def count_collectives():
    """Count the all-reduces by dtype."""
    calls = Counter()
    original = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        calls[tensor.dtype] += 1
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield calls
    finally:
        dist.all_reduce = original


@job
def collectives(place):
    """Return the collectives of each update but the first: by dtype, with a GradScaler, and of a rule that measures."""
    counts = []
    for kind, model, enabled in (
        (vbs.LinearRuleOptimizer, filled(Mixed(*DTYPES)), False),
        (vbs.LinearRuleOptimizer, filled(Mixed(*DTYPES)), True),
        (vbs.AdaScaleOptimizer, network(), False),
    ):
        run, scaler = place.training(kind, SIZES, model=model), torch.amp.GradScaler("cpu", 1.0, enabled=enabled)
        with count_collectives() as calls:
            for indices in run.sampler:
                run.optimizer.backward(run.loss(indices), scaler=scaler)
                if scaler.step(run.optimizer):
                    counts += [dict(calls)] * (run.optimizer.updates > 1)
                    calls.clear()
                scaler.update()
    return counts


@job
def broadcast(place):
    model = Everything(dist.get_rank())
    vbs.broadcast_parameters(model)
    return everything(model)


@job
def subgroup(place):
    """Train on the last two ranks only."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([size - 2, size - 1])
    if rank < size - 2:
        return None
    backend = DistributedBackend(group)
    return backend.world, training(backend=backend).run(len(SIZES)).weights()


@job
def stores(place):
    """Return what the last rank has written: to the group's store, and to the default store of any backend."""
    backend, values = DistributedBackend(), []
    last = backend.world.rank == backend.world.size - 1
    for store in (backend.store(), Backend.store(backend)):
        if last:
            store.set("key", "value of the last rank")
        values.append(store.get("key"))
        backend._gather_bytes(b"")  # rank 0, which has the server, must not drop it earlier
    return values


raises = OnEveryRank()


@raises(r"same parameters, but it is \d+ on rank 0 and \d+ on rank 1; call vbs\.broadcast_parameters")
def weights(place):
    place.training(model=shifted(place.world.rank)).run(1)


@raises(r"the same speeds, but it is \[1, 3.* on rank 0 and \[3, 1.* on rank 1; pass the same value")
def speeds(place):
    own = (3, 1, 2) if place.world.rank else (1, 3, 2)
    place.training(sampling={"speeds": own[: place.world.size]}).run(1)


@raises(r"deals for rank 0 of 1, but the optimizer's DistributedBackend is rank \d of \d; pass num_replicas")
def world(place):
    vbs.ConstantOptimizer(torch.optim.SGD(network().parameters()), vbs.CustomSampler(50, 20, num_replicas=1, rank=0))


def run_jobs(backend):
    place = Place.of(Layout(backend.world.size, by="plain"), backend)
    return {one.__name__: one(place) for one in JOBS} | {"mistakes": raises.messages(place)}


@cache
def ran(size):
    """The results of each rank, and what they have written to standard error."""
    with TemporaryDirectory() as folder:
        ranks = run_job("gloo", run_jobs, ranks=size, folder=Path(folder))
        return ranks, "".join(path.read_text() for path in Path(folder).glob("stderr*"))


@pytest.fixture(params=WORLDS, ids="world {}".format)
def ranks(request):
    return ran(request.param)[0]


def test_the_sampler_and_the_optimizer_detect_the_world(ranks):
    for i, rank in enumerate(ranks):
        found, weights = rank["detected_world"]
        assert found == World(i, len(ranks))
        assert_equal(weights, ranks[0]["detected_world"][1], 0)


@pytest.mark.parametrize(("config", "kind"), [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu")])
def test_ranks_communicate_on_a_device_of_the_process_group(config, kind, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert DistributedBackend().device.type == kind


def test_an_evaluation_detects_the_world(ranks):
    assert [rank["evaluation"] for rank in ranks] == len(ranks) * [2 * [{"value": 4.5, "samples": 10}]]


def test_all_ranks_share_a_store(ranks):
    assert [rank["stores"] for rank in ranks] == [2 * [b"value of the last rank"]] * len(ranks)


@pytest.mark.parametrize("size", WORLDS)
def test_no_process_prints_a_warning(size):
    """Torch's own threads would, on standard error, if a tensor that they free still had another reference."""
    assert "Warning" not in ran(size)[1]


def test_an_update_takes_one_collective_per_dtype(ranks):
    for rank in ranks:
        assert rank["collectives"] == [dict.fromkeys(DTYPES, 1)] * 6 + [{torch.float64: 1}] * 3


def test_broadcast_parameters_copies_rank_0_to_every_rank(ranks):
    for rank in ranks:
        torch.testing.assert_close(rank["broadcast"], everything(Everything(0)), rtol=0, atol=0)


def test_a_subgroup_trains_alone(ranks):
    for i, rank in enumerate(ranks[-2:]):
        found, weights = rank["subgroup"]
        assert found == World(i, 2)
        assert_equal(weights, twin(vbs.LinearRuleOptimizer, SIZES))


@pytest.mark.parametrize("mistake", raises.patterns)
def test_a_mistake_raises_on_every_rank(ranks, mistake):
    raises.check(mistake, [rank["mistakes"] for rank in ranks])
