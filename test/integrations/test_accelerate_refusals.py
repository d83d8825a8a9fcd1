"""What `prepare` and the accelerator refuse within a training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
)
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from helpers.accelerate_jobs import Loop, ordinary
from helpers.pages import ROOT
from helpers.trainer_cases import Case
from helpers.yardstick import (
    SAMPLES,
    TRACE,
    Samples,
    twin_of,
)
from variable_batch_size.integrations.accelerate import prepare
from variable_batch_size.integrations.accelerate.prepare import SETTINGS
from variable_batch_size.integrations.supported import table

pytestmark = pytest.mark.usefixtures("new_state")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_accumulation_steps": 4}, r"gradient_accumulation_steps must be 1, .*, got 4; create the Accel"),
        (
            {"dataloader": {"split_batches": True}},
            r"split_batches must be None or False, .*got True; create the Data",
        ),
        ({"dataloader": {"dispatch_batches": True}}, r"dispatch_batches must be None or False, .*got True"),
        ({"type": "FSDP", "fsdp_version": 1}, r"distributed_type must be NO, FSDP2, .*got FSDP1; leave .*see docs/tr"),
        ({"type": "DEEPSPEED"}, r"distributed_type must be NO, FSDP2, .*got DEEPSPEED; leave DeepSpeed"),
    ],
)
def test_accelerators_that_divide_the_work_otherwise(settings: dict[str, Any], message: str) -> None:
    kind, version, options = settings.pop("type", None), settings.pop("fsdp_version", None), dict(settings)
    if "dataloader" in options:
        options["dataloader_config"] = DataLoaderConfiguration(**options.pop("dataloader"))
    accelerator = Accelerator(cpu=True, **options)
    if kind is not None:
        accelerator.state.distributed_type = DistributedType[kind]  # what such a plugin would set on several GPUs
        accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=version)
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


def test_the_page_has_the_table_of_settings() -> None:
    page = ROOT / "docs" / "trainers" / "accelerate.md"
    assert table(SETTINGS) in page.read_text(), f"copy this into {page}:\n{table(SETTINGS)}"


def test_a_wrong_argument_may_be_corrected() -> None:
    """In a notebook, whose objects stay."""
    accelerator, objects = Accelerator(cpu=True), ordinary()
    with pytest.raises(ValueError, match="ref_batchsize"):
        prepare(accelerator, *objects, trace=TRACE, rule="root")
    prepare(accelerator, *objects, trace=TRACE, rule="root", ref_batchsize=16)


def test_a_second_optimizer_is_refused() -> None:
    """Accelerate would step it only at the ends of updates, with the gradients of all their microbatches."""
    loop = Loop(Case("sgd"))
    _, other, _ = ordinary()
    with pytest.raises(RuntimeError, match=r"must have one optimizer.*got another one; train several"):
        loop.accelerator.prepare(other)
    loop.accelerator.free_memory()
    loop.accelerator.prepare(other).step()


def test_a_loop_over_the_loader_that_was_passed() -> None:
    accelerator, (model, inner, plain) = Accelerator(cpu=True), ordinary()
    model, optimizer, _ = prepare(accelerator, model, inner, plain, trace=TRACE)
    x, target = next(iter(plain))
    accelerator.backward(cross_entropy(model(x), target))
    with pytest.raises(RuntimeError, match=r"the loader that prepare\(\) has returned.*iterate it, and not the one"):
        optimizer.step()


def test_values_of_partial_gradients_are_not_clipped() -> None:
    loop = Loop(Case("sgd"))
    x, target = next(iter(loop.loader))
    loop.accelerator.backward(cross_entropy(loop.model(x), target))
    with pytest.raises(RuntimeError, match=r"clip_grad_value_\(\) must see the whole gradient.*clip by the norm"):
        loop.accelerator.clip_grad_value_(loop.model.parameters(), 0.5)
    with pytest.raises(ValueError, match="norm_type must be 2 for the parameters of the training, got 1; leave it out"):
        loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1.0, 1)
    for some in loop.model[0].parameters(), next(loop.model.parameters()):
        with pytest.raises(ValueError, match=r"by the norm of all parameters of the training, got \d of 4; pass all"):
            loop.accelerator.clip_grad_norm_(some, 1.0)
    assert loop.accelerator.clip_grad_norm_(loop.model.parameters(), torch.tensor(1.0)) == 0
    other = twin_of(loop.model)
    other(x).sum().backward()
    assert loop.accelerator.clip_grad_norm_(other.parameters(), 1.0) > 1
    loop.accelerator.clip_grad_value_(other.parameters(), 0.01)
    assert max(float(parameter.grad.abs().max()) for parameter in other.parameters()) <= 0.01


def test_a_state_is_saved_between_updates(tmp_path: Path) -> None:
    loop = Loop(Case("sgd"))
    x, target = next(batches := iter(loop.loader))
    loop.accelerator.backward(cross_entropy(loop.model(x), target))
    assert loop.optimizer.step() is False
    with pytest.raises(RuntimeError, match=r"must be called between steps, but step 0 has accumulated"):
        loop.accelerator.save_state(str(tmp_path / "state"))
    assert not [*(tmp_path / "state").iterdir()]
    batches.close()


def test_microbatches_cannot_be_skipped(tmp_path: Path) -> None:
    loop = Loop(Case("sgd"))
    for skip in skip_first_batches, loop.accelerator.skip_first_batches:
        with pytest.raises(AttributeError, match=r"has no batch_sampler: .*continues with the next update after load"):
            skip(loop.loader, 3)
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
    with pytest.raises(RuntimeError, match=r"must reach optimizer.step\(\), but the loop asks for the next"):
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
        assert loop.accelerator.gradient_state.active_dataloader is loop.loader
        assert loop.accelerator.sync_gradients is loop.optimizer.microbatch.ends_step
        loop.accelerator.backward(cross_entropy(loop.model(x), target))
        loop.optimizer.step()
    assert loop.optimizer.updates == 11


@pytest.mark.parametrize("name", ["batch_size", "total_batch_size"])
def test_the_loader_has_no_batch_size(name: str) -> None:
    loop = Loop(Case())
    with pytest.raises(AttributeError, match=rf"has no {name}: batch sizes change; take optimizer.microbatch"):
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


def test_steps_per_update_that_are_refused() -> None:
    for steps in 0, 2, 1.5:
        with pytest.raises(ValueError, match=r"steps_per_update must be 1 or accelerator.num_processes, 1, got"):
            Loop(Case(), steps_per_update=steps)  # type: ignore[arg-type]


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

    with pytest.raises(RuntimeError, match=rf"must reach optimizer.step.* update {forgotten} is not complete"):
        train()
