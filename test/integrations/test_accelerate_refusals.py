"""What `prepare` and the accelerator refuse within a training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
)
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from helpers import accelerate_jobs as jobs
from helpers.accelerate_jobs import Loop, ordinary
from helpers.trainer_cases import Case
from helpers.yardstick import (
    SAMPLES,
    TRACE,
    Samples,
    twin_of,
)
from variable_batch_size.integrations.accelerate import prepare

pytestmark = pytest.mark.usefixtures("new_state")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_accumulation_steps": 4}, r"gradient_accumulation_steps must be 1, .*, got 4; create the Accel"),
        ({"dataloader": {"split_batches": True}}, r"split_batches must be left out, .*without split_batches"),
        ({"dataloader": {"dispatch_batches": True}}, r"dispatch_batches must be left out, .*got True"),
        ({"comm_hook": "fp16"}, r"comm_hook must be left out, because the optimizer sums the gradients"),
        ({"type": "FSDP"}, r"every process must train the whole model, .*got FSDP; leave the FSDP"),
        ({"type": "DEEPSPEED"}, r"every process must train the whole model, .*got DEEPSPEED"),
    ],
)
def test_accelerators_that_divide_the_work_otherwise(settings: dict[str, Any], message: str) -> None:
    kind, options = settings.pop("type", None), dict(settings)
    if "dataloader" in options:
        options["dataloader_config"] = DataLoaderConfiguration(**options.pop("dataloader"))
    if options.pop("comm_hook", None):
        options["kwargs_handlers"] = [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)]
    accelerator = Accelerator(cpu=True, **options)
    if kind is not None:
        accelerator.state.distributed_type = DistributedType[kind]  # what such a plugin would set on several GPUs
    with pytest.raises(ValueError, match=message):
        prepare(accelerator, *ordinary(), trace=TRACE)


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


def test_objects_that_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model, inner, loader = ordinary()
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    batches = torch.utils.data.BatchSampler(range(SAMPLES), 4, drop_last=False)
    other = Accelerator(cpu=True)
    for objects, error, message in [
        ((model, inner), ValueError, r"one optimizer, and the loader .*got 1 models, 1 optimizers and 0 loaders"),
        ((model, inner, inner, loader), ValueError, r"got 1 models, 2 optimizers and 1 loaders"),
        ((model, other.prepare(inner), loader), TypeError, r"(?s)as they were created.*instead of accelerator.prepare"),
        ((model, inner, other.prepare(loader)), TypeError, r"as they were created"),
        ((model, inner, DataLoader(Stream())), TypeError, r"the dataset must have an index"),
        ((model, inner, DataLoader(Samples(), sampler=weighted)), TypeError, r"each sample once.*Weighted.*Subset"),
        ((model, inner, DataLoader(Samples(), batch_sampler=batches)), ValueError, r"must have a batch_size"),
    ]:
        with pytest.raises(error, match=message):
            prepare(accelerator, *objects, trace=TRACE)
    with pytest.raises(TypeError, match=r"(?s)accelerator must be an Accelerator, .*pass the accelerator, then the"):
        prepare(model, inner, loader, trace=TRACE)
    with pytest.raises(ValueError, match=r"sampler_options must be what no setting .* got minibatch_size"):
        prepare(accelerator, *ordinary(), trace=TRACE, sampler_options={"minibatch_size": 3})
    with pytest.raises(ValueError, match=r"ref_batchsize"):
        prepare(accelerator, *ordinary(), trace=TRACE, rule="root")
    with pytest.raises(TypeError, match="trace"):
        prepare(accelerator, *ordinary())  # type: ignore[call-arg]


def test_a_second_optimizer_is_refused() -> None:
    """Accelerate would step it only at the ends of updates, with the gradients of all their microbatches."""
    loop = Loop(Case("sgd"))
    _, other, _ = ordinary()
    with pytest.raises(RuntimeError, match=r"must have one optimizer.*got another one after prepare\(\); train sev"):
        loop.accelerator.prepare(other)
    loop.accelerator.free_memory()
    prepared = loop.accelerator.prepare(other)
    with pytest.raises(RuntimeError, match=r"must have one optimizer.*got another one before prepare\(\); train sev"):
        prepare(loop.accelerator, *ordinary(), trace=TRACE)
    prepared.step()


def test_a_loop_over_the_loader_that_was_passed() -> None:
    accelerator, (model, inner, plain) = Accelerator(cpu=True), ordinary()
    model, optimizer, _ = prepare(accelerator, model, inner, plain, trace=TRACE)
    x, target = next(iter(plain))
    accelerator.backward(cross_entropy(model(x), target))
    with pytest.raises(RuntimeError, match=r"the loader that prepare\(\) has returned.*iterate it, and not the one"):
        optimizer.step()


def test_partial_gradients_are_not_clipped() -> None:
    loop = Loop(Case("sgd"))
    x, target = next(iter(loop.loader))
    loop.accelerator.backward(cross_entropy(loop.model(x), target))
    message = (
        r"accelerator.clip_grad_norm_\(\) must see the whole gradient .*optimizer_options=\{\"max_grad_norm\": 1.0\}"
    )
    with pytest.raises(RuntimeError, match=message):
        loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=r"accelerator.clip_grad_value_\(\) must see the whole gradient"):
        loop.accelerator.clip_grad_value_(next(loop.model.parameters()), 0.5)
    other = twin_of(loop.model)
    other(x).sum().backward()
    assert loop.accelerator.clip_grad_norm_(other.parameters(), 1.0) > 1
    loop.accelerator.clip_grad_value_(other.parameters(), 0.01)
    assert max(float(parameter.grad.abs().max()) for parameter in other.parameters()) <= 0.01


def test_the_loss_is_not_divided() -> None:
    loop = Loop(Case("sgd"))
    x, target = next(iter(loop.loader))
    loop.accelerator.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps must be 1"):
        loop.accelerator.backward(cross_entropy(loop.model(x), target))


def test_a_state_is_saved_between_updates(tmp_path: Path) -> None:
    loop = Loop(Case("sgd"))
    x, target = next(batches := iter(loop.loader))
    loop.accelerator.backward(cross_entropy(loop.model(x), target))
    assert loop.optimizer.step() is False
    with pytest.raises(RuntimeError, match=r"save_state\(\) must be called between updates.*update 0 are accumul"):
        loop.accelerator.save_state(str(tmp_path / "state"))
    assert not (tmp_path / "state").exists()
    batches.close()


def test_microbatches_cannot_be_skipped(tmp_path: Path) -> None:
    loop = Loop(Case("sgd"))
    assert loop.accelerator.skip_first_batches(loop.loader) is loop.loader
    with pytest.raises(RuntimeError, match=r"must yield all microbatches .*asked to skip 3; iterate the loader"):
        loop.accelerator.skip_first_batches(loop.loader, 3)
    with pytest.raises(AttributeError, match=r"must all come from its own loader, but its batch_sampler was asked"):
        skip_first_batches(loop.loader, 3)
    test = loop.accelerator.prepare(DataLoader(Samples(), 50))
    assert len(list(loop.accelerator.skip_first_batches(test, 3))) == 2


def test_a_loop_over_finished_epochs_raises(tmp_path: Path) -> None:
    """`for epoch in range(3)` with `loader.set_epoch(epoch)` after a restore."""
    loop = Loop(Case())
    loop.run(lambda updates: tmp_path / "state" if updates == 14 else None, until=14)
    loop = Loop(Case())
    loop.accelerator.load_state(str(tmp_path / "state"))
    with pytest.raises(RuntimeError, match=r"epoch 0 is over .*loop over range\(optimizer.epoch, epochs\)"):
        loop.loader.set_epoch(0)


def test_an_evaluation_with_the_loader_of_the_training_raises() -> None:
    loop = Loop(Case())
    with pytest.raises(RuntimeError, match=r"must reach optimizer.step\(\) before the next one is read.*evaluate with"):
        list(loop.loader)


@pytest.mark.parametrize("inside", [False, True])
def test_a_loop_within_a_loop_raises(inside: bool) -> None:
    """It shows a batch after an update, or within one."""
    loop = Loop(Case("sgd"))

    def train() -> None:
        for x, target in loop.loader:
            loop.accelerator.backward(cross_entropy(loop.model(x), target))
            loop.optimizer.step()
            if loop.optimizer.updates == 3 and loop.optimizer.inside_step is inside:
                next(iter(loop.loader))

    message = r"a loop over the training's loader must end before another one begins.*as next\(iter\(loader\)\) does"
    with pytest.raises(RuntimeError, match=message):
        train()
    assert loop.optimizer.updates == 3


def test_a_loop_that_was_left_may_be_released_later() -> None:
    """Its end changes nothing for the loop that is under way."""
    loop = Loop(Case())
    left = iter(loop.loader)
    next(left)
    for x, target in loop.loader:
        left.close()
        assert loop.loader.under_way
        assert loop.accelerator.gradient_state.active_dataloader is loop.loader
        assert loop.accelerator.sync_gradients is loop.optimizer.microbatch.ends_step
        loop.accelerator.backward(cross_entropy(loop.model(x), target))
        loop.optimizer.step()
    assert loop.optimizer.updates == 11


@pytest.mark.parametrize("name", ["batch_size", "total_batch_size"])
def test_the_loader_has_no_batch_size(name: str) -> None:
    loop = Loop(Case())
    with pytest.raises(AttributeError, match=rf"has no {name}, because batch sizes change; take optimizer.microbatch"):
        getattr(loop.loader, name)
    x, _ = next(microbatches := iter(loop.loader))
    assert len(x) == loop.optimizer.microbatch.rows
    microbatches.close()
    assert loop.loader.drop_last is False


def test_the_loader_of_an_evaluation_comes_after_that_of_the_training() -> None:
    model, inner, loader = ordinary()
    objects = prepare(
        accelerator := Accelerator(cpu=True), model, inner, DataLoader(Samples(), 50), loader, trace=TRACE
    )
    model, optimizer, _, loader = objects
    x, target = next(iter(loader))
    accelerator.backward(cross_entropy(model(x), target))
    with pytest.raises(RuntimeError, match=r"the first DataLoader that prepare\(\) got.*loaders of evaluations after"):
        optimizer.step()


def test_steps_per_update_that_are_refused(tmp_path: Path) -> None:
    for steps, error in (0, ValueError), (1.5, TypeError):
        with pytest.raises(error, match=r"steps_per_update must be an integer >= 1.*pass 1 or accelerator.num_proc"):
            Loop(Case(), steps_per_update=steps)  # type: ignore[arg-type]
    settings = {"cpu": True, "step_scheduler_with_optimizer": False}
    with pytest.raises(ValueError, match=r"must be 1 with step_scheduler_with_optimizer=False.*got 2; leave it out"):
        Loop(Case(), settings=settings, steps_per_update=2)
    jobs.reset()
    for saved, other in (1, 2), (2, 1):
        folder = str(tmp_path / str(saved))
        Loop(Case(), steps_per_update=saved).accelerator.save_state(folder)
        loop = Loop(Case(), steps_per_update=other)
        message = rf"as it was saved, with {saved} steps per update, got {other}; pass steps_per_update={saved} to"
        with pytest.raises(ValueError, match=message):
            loop.accelerator.load_state(folder)


def test_an_epoch_that_a_growing_plan_has_forgotten() -> None:
    loop = Loop(Case(adaptive=True)).run(until=25)
    with pytest.raises(ValueError, match=r"the plan of a run that was resumed, or whose trace grows, knows its epochs"):
        loop.optimizer.sampler.plan.epoch(0)


@pytest.mark.parametrize("forgotten", [1, 10])
def test_a_forgotten_step_raises(forgotten: int) -> None:
    """Also that of the last update of an epoch."""
    loop = Loop(Case())

    def train() -> None:
        for x, target in loop.loader:
            loop.accelerator.backward(cross_entropy(loop.model(x), target))
            if loop.optimizer.updates < forgotten or not loop.accelerator.sync_gradients:
                loop.optimizer.step()

    with pytest.raises(RuntimeError, match=rf"before the next one is read, but one of update {forgotten} did not"):
        train()
