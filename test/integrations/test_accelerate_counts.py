"""What loaders, schedulers and losses of Accelerate count, on one process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from helpers.accelerate_jobs import Loop
from helpers.reference import batches
from helpers.trainer_cases import Case, expected
from helpers.yardstick import (
    EPOCHS,
    MAX_GRAD_NORM,
    MICROBATCH,
    SAMPLES,
    SIZES,
    TRACE,
    UPDATES,
    Samples,
    difference,
    network,
    weights,
)
from variable_batch_size.integrations.accelerate import prepare

pytestmark = pytest.mark.usefixtures("new_state")


def test_sizes_and_ends_of_the_loader() -> None:
    loop = Loop(Case(schedule=False))
    ends, lengths = [], []
    for epoch in range(2):
        loop.loader.set_epoch(epoch)  # as scripts for a DistributedSampler do
        lengths.append(len(loop.loader))
        count = 0
        for x, target in loop.loader:
            count += 1
            with loop.accelerator.no_sync(loop.model):
                loop.accelerator.backward(cross_entropy(loop.model(x), target))
            loop.optimizer.step()
            ends.append(loop.accelerator.gradient_state.end_of_dataloader)
        assert count == lengths[-1]
        assert ends[-1]
    assert sum(ends) == 2


def test_the_length_of_the_loader_is_what_it_yields(tmp_path: Path) -> None:
    """Also after an iteration that was left, or that was not read beyond its last microbatch, and after a resume."""
    loop = Loop(Case())

    def train(microbatches: int | None = None) -> int:
        batches = iter(loop.loader)
        ahead = len(loop.loader)
        for _ in range(ahead if microbatches is None else microbatches):
            x, target = next(batches)
            loop.accelerator.backward(cross_entropy(loop.model(x), target))
            loop.optimizer.step()
            assert len(loop.loader) == ahead
        return ahead

    train(13)
    loop.accelerator.save_state(str(tmp_path / "state"))
    left = len(loop.loader)
    assert train() == len(loop.loader) == left == 31 - 13
    assert loop.optimizer.updates == 11
    assert train() == len(loop.loader) == 33
    assert loop.optimizer.updates == 21
    assert train() == len(loop.loader) == 29
    assert loop.optimizer.updates == UPDATES
    loop.accelerator.load_state(str(tmp_path / "state"))
    assert len(loop.loader) == left
    loop = Loop(Case())
    loop.accelerator.load_state(str(tmp_path / "state"))
    assert len(loop.loader) == left


@pytest.mark.parametrize("options", [{}, {"max_updates": 15}, {"max_samples": 609}], ids=str)
def test_a_mean_by_the_length_of_the_loader(options: dict[str, int]) -> None:
    """As scripts compute it after the loop over an epoch, also if no epoch follows; before it begins, for the next."""
    loop = Loop(Case(schedule=False), sampler_options=options)
    yielded = []
    while not loop.optimizer.done and len(yielded) < EPOCHS:
        loop.loader.set_epoch(loop.optimizer.epoch)
        ahead, count = len(loop.loader), 0
        for x, target in loop.loader:
            count += 1
            loop.accelerator.backward(cross_entropy(loop.model(x), target))
            loop.optimizer.step()
        assert count == ahead == len(loop.loader)
        yielded.append(count)
    assert yielded == ([31, 11] if "max_updates" in options else [31, 33, 29])


@pytest.mark.parametrize("scaled", [False, True])
def test_means_over_the_tokens_of_an_update(scaled: bool) -> None:
    """Labels of -100 are not counted; the mean over rows of means over tokens would be another one."""
    accelerator, model, data = Accelerator(cpu=True), network(), Samples()
    if scaled:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data.target[::3] = -100
    inner, loader = SGD(model.parameters(), lr=0.1), DataLoader(data, MICROBATCH, shuffle=True)
    model, optimizer, loader = prepare(
        accelerator, model, inner, loader, trace=TRACE, optimizer_options={"reduction": "sum"}
    )
    twin = network()
    by_token = SGD(twin.parameters(), lr=0.1)
    for batch in itertools.islice(batches(SIZES, SAMPLES, 0), 11):
        by_token.zero_grad()
        cross_entropy(twin(data.x[batch]), data.target[batch]).backward()
        by_token.step()
    for x, target in loader:
        accelerator.backward(cross_entropy(model(x), target, reduction="sum"))
        optimizer.step(count=(target != -100).sum())
    assert optimizer.updates == 11
    assert difference(model, weights(twin)) < 1e-12


def test_schedulers_step_once_per_update_or_when_told() -> None:
    loop = Loop(Case(schedule=False), settings={"cpu": True, "step_scheduler_with_optimizer": False})
    later = loop.accelerator.prepare(StepLR(loop.optimizer.inner, 1, 0.5))
    plateau = loop.accelerator.prepare(ReduceLROnPlateau(loop.optimizer.inner, patience=0))
    loop.run(until=1)
    later.step()
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    for loss in 1.0, 2.0:
        plateau.step(loss)
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.0005)


def test_a_schedule_that_ends_with_the_updates(tmp_path: Path) -> None:
    """OneCycleLR raises if it makes a step too many; also after a resume."""

    def new() -> tuple[Loop, Any]:
        loop = Loop(Case("sgd", schedule=False), steps_per_update=None)
        loop.scheduler = loop.accelerator.prepare(OneCycleLR(loop.optimizer.inner, 0.1, total_steps=UPDATES))
        return loop, loop.scheduler.scheduler

    loop, scheduler = new()
    loop.run(lambda updates: tmp_path / "state" if updates == 14 else None)
    assert scheduler.last_epoch == UPDATES
    resumed, scheduler = new()
    resumed.accelerator.load_state(str(tmp_path / "state"))
    assert scheduler.last_epoch == 14
    resumed.run()
    assert difference(resumed.model, weights(loop.model)) < 1e-12


def test_a_schedule_that_counts_batches_gets_a_warning() -> None:
    """As examples of Accelerate compute it: len(loader) * epochs."""
    loop = Loop(Case("sgd", schedule=False))
    batches = 2 * -(-SAMPLES // MICROBATCH)
    loop.scheduler = loop.accelerator.prepare(CosineAnnealingLR(loop.optimizer.inner, T_max=batches))
    with pytest.warns(UserWarning, match=f"T_max={batches} is the number of batches of 2 epochs.*makes 21 steps"):
        loop.run(until=1)
    loop.run(until=3)  # once


def test_two_trainings_in_a_loop_have_schedules_of_their_own() -> None:
    """`sync_gradients` is shared by all Accelerators of a process."""
    for sizes in (8, 24), (35, 10):
        loops = []
        for size in sizes:
            accelerator, model = Accelerator(cpu=True), network()
            inner = SGD(model.parameters(), lr=0.1)
            loader = DataLoader(Samples(), MICROBATCH, shuffle=True)
            objects = accelerator, model, inner, loader, StepLR(inner, 10**6)
            loops.append((accelerator, *prepare(*objects, trace=size)))
        for together in zip(*(loop[3] for loop in loops), strict=False):
            for (accelerator, model, optimizer, _, scheduler), (x, target) in zip(loops, together, strict=True):
                accelerator.backward(cross_entropy(model(x), target))
                optimizer.step()
                scheduler.step()
        for _, _, optimizer, _, scheduler in loops:
            assert scheduler.scheduler.last_epoch == optimizer.updates > 3


def test_a_loader_of_fewer_samples_than_a_batch() -> None:
    data, model = torch.utils.data.Subset(Samples(), range(50)), network()
    inner, loader = SGD(model.parameters(), lr=0.1), DataLoader(data, 64, drop_last=True)
    objects = model, inner, loader, CosineAnnealingLR(inner, T_max=9)
    model, optimizer, loader, scheduler = prepare(accelerator := Accelerator(cpu=True), *objects, trace=20)
    for x, target in loader:
        accelerator.backward(cross_entropy(model(x), target))
        optimizer.step()
        scheduler.step()
    assert optimizer.updates == 2


def test_the_loop_may_clip() -> None:
    """`accelerator.clip_grad_norm_` in its usual places: it sets the maximum of the update."""
    for at_ends in True, False:
        loop = Loop(Case("sgd", clip=None))
        accelerator, norms = loop.accelerator, []
        for _ in range(EPOCHS):
            for x, target in loop.loader:
                accelerator.backward(cross_entropy(loop.model(x), target))
                if accelerator.sync_gradients or not at_ends:
                    norms.append(float(accelerator.clip_grad_norm_(loop.model.parameters(), MAX_GRAD_NORM)))
                loop.optimizer.step()
                loop.scheduler.step()
                loop.optimizer.zero_grad()
        assert difference(loop.model, expected(Case("sgd", clip=MAX_GRAD_NORM))[0]) < 1e-12
        assert norms[0] == 0
        assert max(norms) > MAX_GRAD_NORM
