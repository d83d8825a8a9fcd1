"""The functions that the processes of test_distributed.py run, in a module that a child process can import."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.models import Everything, Experts, Mixed, everything, shifted
from helpers.reference import EQUATIONS, REF, SIZES, Training, filled, network, training

WORLDS = (2, 3)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """Arguments of a training whose updates are compared with those of one big batch."""

    kind: type[vbs.CustomOptimizer]
    sizes: tuple[int, ...]
    dataset_size: int
    dtype: torch.dtype
    seed: int
    minibatch_size: int
    fixed_shape: bool
    reduction: str


def random_cases() -> list[Case]:
    rng, cases = random.Random(0), []
    for kind in EQUATIONS:
        for dtype in (torch.float64, torch.float64, torch.float32):
            sizes = tuple(rng.randint(1, 300) for _ in range(3))
            case = Case(
                kind=kind,
                sizes=sizes,
                seed=rng.getrandbits(64),
                minibatch_size=rng.randint(1, 64),
                fixed_shape=rng.random() < 0.5,
                reduction=rng.choice(["mean", "sum"]),
                dataset_size=max(sizes) + rng.randint(0, 40),
                dtype=dtype,
            )
            cases.append(case)
    return cases


CASES = random_cases()


def exact_batches(folder: Path) -> list[Any]:
    return [
        training(
            case.kind,
            case.sizes,
            dataset_size=case.dataset_size,
            minibatch_size=case.minibatch_size,
            reduction=case.reduction,
            dtype=case.dtype,
            sampling={"seed": case.seed, "fixed_shape": case.fixed_shape},
            backend=vbs.backend.DistributedBackend(),
        )
        .run(len(case.sizes))
        .weights()
        for case in CASES
    ]


def detected_world(folder: Path) -> Any:
    """Train without passing a world or a backend to the sampler and the optimizer."""
    model = network()
    sampler = vbs.CustomSampler(50, list(SIZES), minibatch_size=4, on_end="hold")
    optimizer = vbs.RootRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), sampler, REF)
    x, target = training().x, training().target
    run = Training(model, sampler, optimizer, x, target).run(len(SIZES))
    return sampler.world, run.weights()


@contextmanager
def count_collectives() -> Iterator[Counter[torch.dtype]]:
    """Count the all-reduces by dtype."""
    calls: Counter[torch.dtype] = Counter()
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[tensor.dtype] += 1
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield calls
    finally:
        dist.all_reduce = original


def evaluation(folder: Path) -> list[dict[str, float]]:
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


def collectives(folder: Path) -> list[dict[torch.dtype, int]]:
    """Return the collectives of each update, without and with a GradScaler; the first one also compares the ranks."""
    counts = []
    for enabled in (False, True):
        run = training(model=filled(Mixed(*DTYPES)), backend=vbs.backend.DistributedBackend())
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=enabled)
        with count_collectives() as calls:
            for indices in run.sampler:
                run.optimizer.backward(run.loss(indices), scaler=scaler)
                updated = scaler.step(run.optimizer)
                scaler.update()
                if updated:
                    counts.append(dict(calls))
                    calls.clear()
    return counts


def half_precision(folder: Path) -> Any:
    return {
        dtype: training(vbs.RootRuleOptimizer, dtype=dtype, backend=vbs.backend.DistributedBackend()).run(7).weights()
        for dtype in DTYPES
    }


def experts(folder: Path) -> Any:
    run = training(model=filled(Experts()), backend=vbs.backend.DistributedBackend(), find_unused_parameters=True)
    return run.run(len(SIZES)).weights()


def broadcast(folder: Path) -> Any:
    model = Everything(dist.get_rank())
    vbs.broadcast_parameters(model)
    return everything(model)


def rule_with_an_address_in_its_repr(folder: Path) -> int:
    """Train with a lambda, whose address differs between processes."""
    heap = [object() for _ in range(1000 * dist.get_rank())]  # shifts the addresses of later objects
    rule: Callable[[vbs.rules.RuleInput], vbs.rules.Scaling] = lambda update: vbs.rules.Scaling(lr=0.5)  # noqa: E731
    run = training(vbs.CustomOptimizer, rule=rule, backend=vbs.backend.DistributedBackend()).run(2)
    return run.optimizer.updates + 0 * len(heap)


def overflow_on_rank_1(folder: Path) -> Any:
    run = training(vbs.RootRuleOptimizer, SIZES[:4], dataset_size=61, backend=vbs.backend.DistributedBackend())
    scaler = torch.amp.GradScaler("cpu")
    updates = 0
    for number, indices in enumerate(run.sampler):
        factor = torch.inf if (number, dist.get_rank()) == (0, 1) else 1.0
        run.optimizer.backward(run.loss(indices) * factor, scaler=scaler)
        updates += scaler.step(run.optimizer)
        scaler.update()
    return updates, run.weights()


def subgroup(folder: Path) -> Any:
    """Train on the last two ranks only."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([size - 2, size - 1])
    if rank < size - 2:
        return None
    backend = vbs.backend.DistributedBackend(group)
    return backend.world, training(backend=backend).run(len(SIZES)).weights()


def stores(folder: Path) -> list[bytes]:
    """Return what the last rank has written: to the group's store, and to the default store of any backend."""
    backend, values = vbs.backend.DistributedBackend(), []
    last = backend.world.rank == backend.world.size - 1
    for store in (backend.store(), vbs.backend.Backend.store(backend)):
        if last:
            store.set("key", "value of the last rank")
        values.append(store.get("key"))
        backend._gather_bytes(b"")  # rank 0, which has the server, must not drop it earlier
    return values


def resume_in_another_world(folder: Path) -> Any:
    """Train for 3 updates in the first world; resume in the second one."""
    path, world = folder / "checkpoint.pt", dist.get_world_size()
    run = training(minibatch_size=4 if world == 3 else 6, backend=vbs.backend.DistributedBackend())
    if world == WORLDS[0]:
        run.run(3)
        if dist.get_rank() == 0:
            torch.save((run.model.state_dict(), run.optimizer.state_dict()), path)
        return None
    model, optimizer = torch.load(path, weights_only=True)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    return run.run(len(SIZES) - 3).weights()


def error_messages(folder: Path) -> dict[str, str]:
    """Return the error message of each mistake."""
    rank, backend = dist.get_rank(), vbs.backend.DistributedBackend()

    def wrapped(*, ours: bool, **options: Any) -> None:
        """In every backward of a DistributedDataParallel that the optimizer does not know."""
        run = training(sizes=[50], backend=backend)
        run.model = DistributedDataParallel(run.model, **options)
        for indices in run.sampler:
            loss = run.loss(indices)
            run.optimizer.backward(loss) if ours else loss.backward()
            run.optimizer.step()

    mistakes: dict[str, Callable[[], Any]] = {
        "weights": lambda: training(model=shifted(rank), backend=backend).run(1),
        "seed": lambda: training(sampling={"seed": rank}, backend=backend).run(1),
        "rule": lambda: training(vbs.CustomOptimizer, rule="root" if rank else "constant", backend=backend).run(1),
        "wrapped": lambda: wrapped(ours=False),
        "wrapped, with views": lambda: wrapped(ours=False, gradient_as_bucket_view=True),
        "wrapped, optimizer.backward": lambda: wrapped(ours=True),
        "wrapped, optimizer.backward, with views": lambda: wrapped(ours=True, gradient_as_bucket_view=True),
        "world": lambda: vbs.ConstantOptimizer(
            torch.optim.SGD(network().parameters()), vbs.CustomSampler(50, 20, num_replicas=1, rank=0)
        ),
    }
    messages = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
        except (RuntimeError, TypeError, ValueError) as error:
            messages[name] = str(error)
    return messages


SCENARIOS = (
    exact_batches,
    detected_world,
    evaluation,
    collectives,
    half_precision,
    experts,
    broadcast,
    rule_with_an_address_in_its_repr,
    overflow_on_rank_1,
    subgroup,
    stores,
    resume_in_another_world,
    error_messages,
)


def gains(folder: Path) -> tuple[list[list[float]], list[dict[torch.dtype, int]]]:
    """Return AdaScale's gains in float64 and float32, and the collectives of each update but the first."""
    found, messages = [], []
    for dtype in (torch.float64, torch.float32):
        run = training(vbs.AdaScaleOptimizer, dtype=dtype, backend=vbs.backend.DistributedBackend()).run(1)
        found.append([])
        for _ in SIZES[1:]:
            with count_collectives() as calls:
                found[-1].append(run.run(1).optimizer.lr_factor())
            messages.append(dict(calls))
    return found, messages


def run_scenarios(backend: vbs.backend.Backend, folder: Path) -> dict[str, Any]:
    """The results of the scenarios by name."""
    scenarios = (gains, *SCENARIOS) if backend.world.size in WORLDS else (gains,)
    return {scenario.__name__: scenario(folder) for scenario in scenarios}
