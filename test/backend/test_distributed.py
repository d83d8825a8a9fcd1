"""Real gloo processes: three are started once, and train as a world of 3 and then as a world of 2."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.models import Everything, Experts, Mixed, everything, shifted
from helpers.reference import EQUATIONS, REF, SIZES, Training, assert_equal, filled, network, training, twin

WORLDS = (3, 2)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """A training of law 1."""

    kind: type[vbs.CustomOptimizer]
    sizes: tuple[int, ...]
    dataset_size: int
    dtype: torch.dtype
    seed: int
    minibatch_size: int
    fixed_shape: bool
    reduction: str


def cases() -> list[Case]:
    rng, found = random.Random(0), []
    for kind in EQUATIONS:
        for dtype in (torch.float64, torch.float64, torch.float32):
            sizes = tuple(rng.randint(1, 300) for _ in range(3))
            choices = rng.getrandbits(64), rng.randint(1, 64), rng.random() < 0.5, rng.choice(["mean", "sum"])
            found.append(Case(kind, sizes, max(sizes) + rng.randint(0, 40), dtype, *choices))
    return found


CASES = cases()

# -------------------------------------------------------------------------------------- what every process goes through


def exact_batches(folder: Path) -> list[Any]:
    return [
        training(
            case.kind,
            case.sizes,
            case.dataset_size,
            minibatch_size=case.minibatch_size,
            reduction=case.reduction,
            dtype=case.dtype,
            sampling={"seed": case.seed, "fixed_shape": case.fixed_shape},
            backend=vbs.DistributedBackend(),
        )
        .run(len(case.sizes))
        .weights()
        for case in CASES
    ]


def the_world_by_itself(folder: Path) -> Any:
    """Neither the sampler nor the optimizer is told who they are."""
    model = network()
    sampler = vbs.CustomSampler(50, list(SIZES), minibatch_size=4, on_end="hold")
    optimizer = vbs.RootRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), sampler, REF)
    x, target = training().x, training().target
    run = Training(model, sampler, optimizer, x, target).run(len(SIZES))
    return sampler.world, run.weights()


@contextmanager
def counted() -> Any:
    """Counts the collectives by dtype."""
    calls: Counter[torch.dtype] = Counter()
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[tensor.dtype] += 1
        return real(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield calls
    finally:
        dist.all_reduce = real


def collectives(folder: Path) -> list[dict[torch.dtype, int]]:
    """Of each update but the first, in which ranks are compared: plain, and under a GradScaler."""
    found = []
    for enabled in (False, True):
        run = training(model=filled(Mixed(*DTYPES)), backend=vbs.DistributedBackend())
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=enabled)
        with counted() as calls:
            for indices in run.sampler:
                scaler.scale(run.loss(indices)).backward()
                updated = scaler.step(run.optimizer)
                scaler.update()
                if updated:
                    found.append(dict(calls))
                    calls.clear()
    return found


def half_precision(folder: Path) -> Any:
    return {
        dtype: training(vbs.RootRuleOptimizer, dtype=dtype, backend=vbs.DistributedBackend()).run(7).weights()
        for dtype in DTYPES
    }


def experts(folder: Path) -> Any:
    return training(model=filled(Experts()), backend=vbs.DistributedBackend()).run(len(SIZES)).weights()


def broadcast(folder: Path) -> Any:
    model = Everything(dist.get_rank())
    vbs.broadcast_parameters(model)
    return everything(model)


def train_by_a_function(folder: Path) -> int:
    """A rule whose repr has an address, another one in every process."""
    heap = [object() for _ in range(1000 * dist.get_rank())]
    rule: Callable[[vbs.RuleInput], vbs.Scaling] = lambda update: vbs.Scaling(lr=0.5)  # noqa: E731
    run = training(vbs.CustomOptimizer, rule=rule, backend=vbs.DistributedBackend()).run(2)
    return run.optimizer.updates + 0 * len(heap)


def overflow_on_rank_1(folder: Path) -> Any:
    run = training(vbs.RootRuleOptimizer, SIZES[:4], 61, backend=vbs.DistributedBackend())
    scaler = torch.amp.GradScaler("cpu")
    updates = 0
    for number, indices in enumerate(run.sampler):
        spoiled = torch.inf if (number, dist.get_rank()) == (0, 1) else 1.0
        scaler.scale(run.loss(indices) * spoiled).backward()
        updates += scaler.step(run.optimizer)
        scaler.update()
    return updates, run.weights()


def in_a_group(folder: Path) -> Any:
    """The last two ranks train by themselves."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([size - 2, size - 1])
    if rank < size - 2:
        return None
    backend = vbs.DistributedBackend(group)
    return backend.world, training(backend=backend).run(len(SIZES)).weights()


def stores(folder: Path) -> list[bytes]:
    """What the last rank leaves for the others: in the group's store, and in one that any backend can open."""
    backend, found = vbs.DistributedBackend(), []
    last = backend.world.rank == backend.world.size - 1
    for store in (backend.store(), vbs.Backend.store(backend)):
        if last:
            store.set("note", "found")
        found.append(store.get("note"))
        backend.exchange(b"")  # rank 0 has the server
    return found


def go_on(folder: Path) -> Any:
    """The first world trains for 3 updates, the second one goes on."""
    path, world = folder / "checkpoint.pt", dist.get_world_size()
    run = training(minibatch_size=4 if world == 3 else 6, backend=vbs.DistributedBackend())
    if world == WORLDS[0]:
        run.run(3)
        if dist.get_rank() == 0:
            torch.save((run.model.state_dict(), run.optimizer.state_dict()), path)
        return None
    model, optimizer = torch.load(path, weights_only=True)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    return run.run(len(SIZES) - 3).weights()


def refusals(folder: Path) -> dict[str, str]:
    """What each mistake is answered with."""
    rank, backend = dist.get_rank(), vbs.DistributedBackend()

    def wrapped_before() -> None:
        model = DistributedDataParallel(network())
        training(model=model, backend=backend).run(1)

    def wrapped_after() -> None:
        run = training(backend=backend)
        run.model = DistributedDataParallel(run.model)
        run.run(1)

    mistakes: dict[str, Callable[[], Any]] = {
        "weights": lambda: training(model=shifted(rank), backend=backend).run(1),
        "seed": lambda: training(sampling={"seed": rank}, backend=backend).run(1),
        "rule": lambda: training(vbs.CustomOptimizer, rule=vbs.RootRule() if rank else None, backend=backend).run(1),
        "wrapped before": wrapped_before,
        "wrapped after": wrapped_after,
        "broadcast": lambda: vbs.broadcast_parameters(DistributedDataParallel(nn.Linear(1, 1))),
        "world": lambda: vbs.ConstantOptimizer(
            torch.optim.SGD(network().parameters()), vbs.CustomSampler(50, 20, num_replicas=1, rank=0)
        ),
    }
    found = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
        except (RuntimeError, TypeError, ValueError) as error:
            found[name] = str(error)
    return found


SCENARIOS = (
    exact_batches,
    the_world_by_itself,
    collectives,
    half_precision,
    experts,
    broadcast,
    train_by_a_function,
    overflow_on_rank_1,
    in_a_group,
    stores,
    go_on,
    refusals,
)


def gains(folder: Path) -> tuple[list[list[float]], list[dict[torch.dtype, int]]]:
    """AdaScale's, in float64 and float32, and the collectives of each update but the first."""
    found, messages = [], []
    for dtype in (torch.float64, torch.float32):
        run = training(vbs.AdaScaleOptimizer, dtype=dtype, backend=vbs.DistributedBackend()).run(1)
        found.append([])
        for _ in SIZES[1:]:
            with counted() as calls:
                found[-1].append(run.run(1).optimizer.gain())
            messages.append(dict(calls))
    return found, messages


def process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    for size in (8, *WORLDS):
        if rank < size:
            store = dist.FileStore(str(folder / f"store{size}"), size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
            scenarios = (gains, *SCENARIOS) if size in WORLDS else (gains,)
            facts = {scenario.__name__: scenario(folder) for scenario in scenarios}
            torch.save(facts, folder / f"world{size}-rank{rank}.pt")
            dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------- what came out of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gloo")
    mp.spawn(process, (folder,), nprocs=8)
    return folder


@pytest.fixture(params=WORLDS, ids="world {}".format)
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    """The facts of every rank."""
    size = request.param
    return [torch.load(folder / f"world{size}-rank{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.mark.parametrize("size", [8, *WORLDS])
def test_gains_are_those_of_one_process_in_one_message(folder: Path, size: int) -> None:
    for rank in range(size):
        found, messages = torch.load(folder / f"world{size}-rank{rank}.pt", weights_only=False)["gains"]
        for dtype, tolerance, those in zip((torch.float64, torch.float32), (1e-12, 1e-4), found, strict=True):
            run = training(vbs.AdaScaleOptimizer, dtype=dtype).run(1)
            assert those == pytest.approx([run.run(1).optimizer.gain() for _ in SIZES[1:]], rel=tolerance)
        assert messages == (len(SIZES) - 1) * [{torch.float64: 1}] + (len(SIZES) - 1) * [{torch.float32: 1}]


def test_an_update_is_that_of_one_big_batch(ranks: list[dict[str, Any]]) -> None:
    for i, case in enumerate(CASES):
        cut: dict[str, Any] = {"minibatch_size": case.minibatch_size, "fixed_shape": case.fixed_shape}
        expected = twin(case.kind, case.sizes, case.dataset_size, dtype=case.dtype, seed=case.seed, **cut)
        for rank in ranks:
            assert_equal(rank["exact_batches"][i], expected, 1e-5 if case.dtype == torch.float32 else 1e-12)
            assert_equal(rank["exact_batches"][i], ranks[0]["exact_batches"][i], 0)


def test_the_world_is_found(ranks: list[dict[str, Any]]) -> None:
    for i, rank in enumerate(ranks):
        world, weights = rank["the_world_by_itself"]
        assert world == vbs.World(i, len(ranks))
        assert_equal(weights, ranks[0]["the_world_by_itself"][1], 0)


def test_ranks_find_what_others_have_left(ranks: list[dict[str, Any]]) -> None:
    assert [rank["stores"] for rank in ranks] == [2 * [b"found"]] * len(ranks)


def test_nobody_warns(folder: Path) -> None:
    """As torch's own threads do on standard error when a tensor that they free is held by somebody else."""
    for rank in range(max(WORLDS)):
        assert "Warning" not in (folder / f"stderr{rank}").read_text()


def test_an_update_has_one_collective_a_dtype(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for part in (rank["collectives"][1:4], rank["collectives"][5:]):
            assert part == [dict.fromkeys(DTYPES, 1)] * 3


def test_half_precision_trains(ranks: list[dict[str, Any]]) -> None:
    tolerances = dict(zip(DTYPES, (1e-5, 1e-12, 3e-2, 4e-3), strict=True))
    for dtype, tolerance in tolerances.items():
        for rank in ranks:
            assert_equal(rank["half_precision"][dtype], twin(vbs.RootRuleOptimizer, SIZES, dtype=dtype), tolerance)
            assert_equal(rank["half_precision"][dtype], ranks[0]["half_precision"][dtype], 0)


def test_a_parameter_that_some_ranks_use_trains(ranks: list[dict[str, Any]]) -> None:
    alone = training(model=filled(Experts())).run(len(SIZES)).weights()
    for rank in ranks:
        assert_equal(rank["experts"], alone)


def test_broadcasting_gives_every_rank_what_rank_0_has(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank["broadcast"], everything(Everything(0)), rtol=0, atol=0)


def test_a_rule_that_shows_its_address_is_the_same_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [rank["train_by_a_function"] for rank in ranks] == [2] * len(ranks)


def test_an_overflow_on_one_rank_skips_the_update_on_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        updates, weights = rank["overflow_on_rank_1"]
        assert updates == 3
        assert_equal(weights, twin(vbs.RootRuleOptimizer, SIZES[:4], 61, skipped={0}))


def test_some_ranks_may_train_by_themselves(ranks: list[dict[str, Any]]) -> None:
    for i, rank in enumerate(ranks[-2:]):
        world, weights = rank["in_a_group"]
        assert world == vbs.World(i, 2)
        assert_equal(weights, twin(vbs.LinearRuleOptimizer, SIZES))


def test_a_training_goes_on_in_another_world(folder: Path) -> None:
    for rank in range(WORLDS[1]):
        facts = torch.load(folder / f"world{WORLDS[1]}-rank{rank}.pt", weights_only=False)
        assert_equal(facts["go_on"], twin(vbs.LinearRuleOptimizer, SIZES))


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("weights", r"same parameters, but it is \d+ on rank 0 and \d+ on rank 1; call vbs\.broadcast_parameters"),
        ("seed", r"same seed, but it is 0 on rank 0 and 1 on rank 1; pass the same value on every rank"),
        ("rule", r"same rule, reduction, max_grad_norm and noise, but it is"),
        ("wrapped before", r"wrapped in DistributedDataParallel, which reduces them as well; train the bare module"),
        ("wrapped after", r"wrapped in DistributedDataParallel, which reduces them as well; train the bare module"),
        ("broadcast", r"wrapped in DistributedDataParallel, which reduces them as well; train the bare module"),
        ("world", r"deals for rank 0 of 1 and the optimizer's DistributedBackend is rank \d of \d; pass num_replicas"),
    ],
)
def test_a_mistake_is_refused_on_every_rank(ranks: list[dict[str, Any]], mistake: str, text: str) -> None:
    for rank in ranks:
        with pytest.raises(RuntimeError, match=text):
            raise RuntimeError(rank["refusals"].get(mistake, "it was not"))
