"""A loop of Accelerate with the objects of the library: the laws of all trainers, and what is Accelerate's own."""

from __future__ import annotations

import re

import pytest
import torch
from accelerate import Accelerator
from conformance import Conformance
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers.accelerate_adapter import Accelerate, reset
from helpers.trainer_examples import run_script
from helpers.trainings import TrainerCase, expected
from helpers.yardstick import EPOCHS, MICROBATCH, REF, TRACE, UPDATES, Samples, difference, in_processes, network


class TestAccelerate(Conformance):
    adapter = Accelerate()
    features = frozenset({"to the last bit", "controller", "tokens", "evaluation", "ddp", "fsdp2"})


@pytest.fixture(autouse=True)
def _new_state():
    """Leave no state of Accelerate, which it keeps for a whole process, to other tests."""
    reset()
    yield
    reset()


def objects(case, accelerator):
    """A model, its optimizer, and the loader of the training."""
    model = accelerator.prepare_model(case.model())
    sampler = vbs.CustomSampler(Samples(), TRACE, minibatch_size=MICROBATCH)
    optimizer = vbs.CustomOptimizer(case.optimizer(model), sampler, REF, rule=case.rule, model=model)
    return model, optimizer, DataLoader(Samples(), batch_sampler=sampler)


def train(model, optimizer, loader):
    for _ in range(EPOCHS):
        for x, target in loader:
            optimizer.backward(cross_entropy(model(x), target))
            optimizer.step()


# A loader that Accelerate has prepared. --------------------------------------------------------------------------


def prepare_loader():
    """Neither a plain loop nor `vbs.updates` reads what Accelerate deals once more."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = objects(TrainerCase(), accelerator)
    for read in list, lambda prepared: list(vbs.updates(prepared, optimizer)):
        with pytest.raises(RuntimeError, match=r"own microbatches, but .* once more, as by accelerator.prepare\("):
            read(accelerator.prepare(loader))
    assert optimizer.updates == 0
    train(model, optimizer, loader)
    assert difference(model, expected(TrainerCase()).weights) < 1e-12


def test_a_prepared_loader_is_refused_on_several_processes():
    in_processes(prepare_loader, 2)


def test_a_prepared_loader_deals_right_on_one_process():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = objects(TrainerCase(), accelerator)
    train(model, optimizer, accelerator.prepare(loader))
    assert difference(model, expected(TrainerCase()).weights) < 1e-12
    reset()
    model, optimizer, loader = objects(TrainerCase(), accelerator := Accelerator(cpu=True))
    loader = accelerator.prepare(loader)
    while optimizer.updates < UPDATES:
        for update in vbs.updates(loader, optimizer):
            for x, target in update:
                optimizer.backward(cross_entropy(model(x), target))
                optimizer.step()
    assert difference(model, expected(TrainerCase()).weights) < 1e-12


# What accelerators do. -------------------------------------------------------------------------------------------


def test_bfloat16():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare_model(network().float())
    sampler = vbs.CustomSampler(Samples(), TRACE, minibatch_size=MICROBATCH)
    optimizer = vbs.CustomOptimizer(TrainerCase().optimizer(model), sampler, REF, rule="root", model=model)
    losses = []
    for _ in range(EPOCHS):
        for x, target in DataLoader(Samples(), batch_sampler=sampler):
            loss = cross_entropy(model(x.float()), target)
            assert loss.dtype == torch.float32
            optimizer.backward(loss)
            optimizer.log(loss=loss)
            if optimizer.step():
                losses.append(float(optimizer.logged["loss"]))
    assert losses == pytest.approx(expected(TrainerCase()).losses, rel=2e-2)


def test_an_overflow_skips_the_update():
    """With a GradScaler, as "fp16" brings one on an accelerator; the overflow is in the third update."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, optimizer, loader = objects(TrainerCase(), accelerator)
    updated = []
    for x, target in loader:
        loss = cross_entropy(model(x), target) * (torch.inf if optimizer.updates == 2 else 1)
        ends = optimizer.microbatch.ends_step
        optimizer.backward(loss, scaler=accelerator.scaler)
        found = accelerator.scaler.step(optimizer)
        accelerator.scaler.update()
        if ends:
            updated.append(bool(found))
    assert updated == [number != 2 for number in range(11)]
    assert accelerator.scaler.get_scale() < 8


def test_the_example_runs_and_resumes(tmp_path, capsys):
    def last(*flags):
        reset()
        run_script("accelerate_classifier.py", *flags)
        return capsys.readouterr().out.splitlines()[-1]

    whole = last("--epochs", "2")
    assert last("--epochs", "1", "--folder", str(tmp_path))
    assert last("--epochs", "2", "--folder", str(tmp_path), "--resume") == whole
    assert re.match(r"epoch 1: 40 updates, accuracy 0\.[89]", whole)
