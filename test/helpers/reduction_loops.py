"""Odd loops with and without overlap, which the processes of test_reduction_loops.py run."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import variable_batch_size as vbs
from helpers.reduction_jobs import UPDATES, WORLDS, Gan, StopError, begin, create, deep, stop_in
from helpers.reference import Array, Training, training

Run = Callable[..., Training]  # creates a training, with or without overlap


def rank_dependent_groups(run: Run) -> list[Array]:
    """Rank 0 is in a group of its own, so that the ranks have not been in equally many groups."""
    dist.new_group([0])
    return run().iterate(UPDATES).weights()


def two_backwards_beside_an_idle_rank(run: Run) -> list[Array]:
    """From the first update on, in which only rank 0 has samples."""
    here = training(
        vbs.AdaScaleOptimizer,
        (4, 8, 20, 8, 33),
        model=deep(),
        dataset_size=73,
        backend=run().optimizer._backend,
        overlap=run().optimizer._updater.options.overlap,
        bucket_cap_mb=0,
    )
    for indices in here.sampler:
        for part in (0.25, 0.75):
            (here.loss(indices) * part).backward()
        here.optimizer.step()
    return here.weights()


def backward_of_rank_0_before_the_first_step(run: Run) -> list[Array]:
    here = run()
    if dist.get_rank() == 0:
        here.loss([1, 2]).backward()
        here.model.zero_grad()
    return here.iterate(UPDATES).weights()


def exception_in_the_first_backward(run: Run) -> list[Array]:
    """Of all ranks, some of which have more microbatches than others."""
    here = run()
    stop_in(here.model[4])  # type: ignore[index]
    while here.optimizer.updates < UPDATES:
        here.sampler.set_epoch(0)
        try:
            here.iterate(UPDATES)
        except StopError:
            here.optimizer.discard_step()
    return here.weights()


def two_optimizers_of_the_same_parameters(run: Run) -> list[Array]:
    model = deep()
    runs = run(model=model), run(model=model)
    iterators = [iter(one.sampler) for one in runs]
    for update in range(1, UPDATES + 1):
        for one, batches in zip(runs, iterators, strict=True):
            while one.optimizer.updates < update:
                one.loss(next(batches)).backward()
                one.optimizer.step()
    return runs[0].weights()


def grad_scaler_that_begins_late(run: Run) -> list[Array]:
    """In an update in which the ranks have unequal numbers of microbatches."""
    here, scaler = run(), torch.amp.GradScaler("cpu", init_scale=4.0)
    for indices in here.sampler:
        if here.optimizer.updates < 3:
            here.loss(indices).backward()
            here.optimizer.step()
        else:
            scaler.scale(here.loss(indices)).backward()
            scaler.step(here.optimizer)
            scaler.update()
    return here.weights()


def sum_of_the_user_and_a_discard_of_one_rank(run: Run) -> list[Array]:
    """The loop sums something else after each last backward; backward fails on rank 0."""
    here, failures = run(), {2, 4} if dist.get_rank() == 0 else set()
    while here.optimizer.updates < UPDATES:
        here.sampler.set_epoch(0)
        try:
            for indices in here.sampler:
                due = here.optimizer.microbatch
                if due.ends_step and due.step in failures:
                    failures.discard(due.step)
                    stop_in(here.model[4])  # type: ignore[index]
                here.loss(indices).backward()
                if due.ends_step:
                    dist.all_reduce(torch.ones(3))
                here.optimizer.step()
        except StopError:
            here.optimizer.discard_step()
    return here.weights()


def gan_with_a_discard_of_one_rank(run: Run) -> list[Array]:
    own, overlap = Gan(), run().optimizer._updater.options.overlap
    sampler = vbs.CustomSampler(40, [4, 12, 3, 9, 12], minibatch_size=2, on_end="hold", fixed_shape=False)
    d, g = (
        vbs.ConstantOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5), sampler, bucket_cap_mb=0, overlap=overlap
        )
        for module in (own.discriminator, own.generator)
    )
    failures = {2, 3} if dist.get_rank() == 0 else set()
    while d.updates < 5:
        sampler.set_epoch(0)
        try:
            for rows in sampler:
                own.loss_g(rows).backward(inputs=list(own.generator.parameters()))
                if d.microbatch.ends_step and d.updates in failures:
                    failures.discard(d.updates)
                    raise StopError
                own.loss_d(rows).backward()
                d.step()
                g.step()
        except StopError:
            d.discard_step()
            g.discard_step()
    return [
        parameter.detach().numpy() for module in (own.generator, own.discriminator) for parameter in module.parameters()
    ]


def state_without_an_order_is_loaded_after_backward(run: Run) -> list[Array]:
    """When the sums of some ranks are under way, and not those of others, which have more microbatches."""
    here = run()
    first = copy.deepcopy((here.model.state_dict(), here.optimizer.state_dict()))
    for stop in (1, 3, 5):
        here.iterate(stop)
        here.optimizer.discard_step()
        for indices in here.sampler:
            here.loss(indices).backward()
            break
        state = copy.deepcopy(first)
        here.model.load_state_dict(state[0])
        here.optimizer.load_state_dict(state[1])
    return here.iterate(UPDATES).weights()


def groups_that_are_added_after_dropped_gradients(run: Run) -> list[Array]:
    """Rank 0 has sent gradients that it drops before a parameter group is added."""
    model = deep()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]  # type: ignore[union-attr]
    model.requires_grad_(False)
    layers[0].requires_grad_(True)
    here = run(model=model, inner=lambda _, **rest: torch.optim.SGD(layers[0].parameters(), **rest))
    for indices in here.sampler:
        if not here.optimizer.inside_step and here.optimizer.updates in (2, 4):
            if dist.get_rank() == 0:
                here.loss([1, 2]).backward()
                here.optimizer.zero_grad()
            layer = layers[here.optimizer.updates]
            layer.requires_grad_(True)
            here.optimizer.add_param_group({"params": list(layer.parameters())})
        here.loss(indices).backward()
        here.optimizer.step()
    return here.weights()


def clipped(gradient: Tensor) -> None:
    gradient.data.clamp_(-0.05, 0.05)


def changed_after(first: int) -> Callable[[Run], list[Array]]:
    """Gradients that the loop changes without a version, from an update on, by ranks with one microbatch in a step."""

    def changed(run: Run) -> list[Array]:
        here = run(minibatch_size=64)
        for indices in here.sampler:
            here.loss(indices).backward()
            if here.optimizer.updates >= first:
                for parameter in here.model.parameters():
                    clipped(parameter.grad)  # type: ignore[arg-type]
            here.optimizer.step()
        return here.weights()

    changed.__name__ = f"changed_after_{first}"
    return changed


LOOPS: tuple[Callable[[Run], list[Array]], ...] = (
    rank_dependent_groups,
    two_backwards_beside_an_idle_rank,
    backward_of_rank_0_before_the_first_step,
    exception_in_the_first_backward,
    two_optimizers_of_the_same_parameters,
    grad_scaler_that_begins_late,
    sum_of_the_user_and_a_discard_of_one_rank,
    gan_with_a_discard_of_one_rank,
    state_without_an_order_is_loaded_after_backward,
    groups_that_are_added_after_dropped_gradients,
    changed_after(0),
    changed_after(3),
)


def resources() -> tuple[int, ...]:
    """Process groups, threads and open files of this process."""
    groups = len(dist.distributed_c10d._world.pg_map)
    return groups, *(len(list(Path("/proc/self", kind).iterdir())) for kind in ("task", "fd"))


def recreated() -> list[tuple[int, ...]]:
    """Optimizers that follow one another, with gradients that were never counted."""
    found = []
    for _ in range(15):
        run = create().iterate(2)
        run.loss([0, 1]).backward()
        dist.barrier()
        found.append(resources())
    return found


def run_loops(rank: int, folder: Path) -> None:
    """Run the loops in each world that this rank belongs to, and one of them with checks of `torch.distributed`."""
    torch.set_num_threads(1)
    os.dup2(os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    for size in WORLDS:
        if rank < size:
            begin(rank, size, folder / f"store{size}")
            found: dict[str, Any] = {
                one.__name__: {overlap: one(partial(create, overlap=overlap)) for overlap in (False, True)}
                for one in LOOPS
            }
            found["recreated"] = recreated() if size == 2 else []
            torch.save(found, folder / f"world{size}-rank{rank}.pt")
            dist.destroy_process_group()
    if rank < 2:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
        begin(rank, 2, folder / "store-detail")
        run = create()
        torch.save(run.iterate(UPDATES).weights(), folder / f"detail-rank{rank}.pt")
        assert not run.optimizer._backend.overlaps  # starting a sum would wait for the other ranks
        dist.destroy_process_group()


def one_rank_returns(rank: int, folder: Path) -> None:
    """Rank 1 returns from its script in the third update, with sums under way; rank 0 writes the error that it gets."""
    torch.set_num_threads(1)
    os.dup2(os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    begin(rank, 2, folder / "store")
    run = create()
    try:
        for indices in run.sampler:
            run.loss(indices).backward()
            if rank and run.optimizer.updates == 2:
                sys.exit(0)
            run.optimizer.step()
    except RuntimeError as error:
        (folder / "error").write_text(str(error))
