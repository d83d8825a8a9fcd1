"""Forwards and backwards between two updates that are none of the training: within `optimizer.outside()`."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from itertools import count

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.interrupts import Interrupt
from helpers.processes import run_job
from variable_batch_size.testing import run_ranks

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SIZES = [9, 2, 14, 7, 1, 5, 2]


def new(by):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 1)).double().eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.cos(number + torch.arange(float(parameter.numel()))).view_as(parameter))
    model[0].train()
    return model, DistributedDataParallel(model) if by == "ddp" else fully_shard(model) if by == "fsdp" else model


def probe(model, optimizer, how):
    """A backward of another kind: of the whole loss, of a gradient's norm, of one rank alone, or of rounds by rank."""
    if how == "penalty":
        (gradient,) = torch.autograd.grad(model(X[:4]).sum(), [next(model.parameters())], create_graph=True)
        gradient.square().sum().backward()
        return
    times = optimizer.backend.world.rank if how == "unequal" else 2
    for _ in range(times):
        model(X[:5]).square().sum().backward()
    if times:
        assert all(parameter.grad is not None for parameter in model.parameters())


def train(backend, by, how, outside, kind="AdaScale", reproducible=False, **others):
    """Train, with a probe before each update that has the number of an odd one, and after the last one."""
    model, module = new(by)
    world = backend.world
    sampler = vbs.CustomSampler(
        40, SIZES, world.size, world.rank, 4, shuffle=False, fixed_shape=False, reproducible=reproducible
    )
    options = {"model": module, **others} if by != "plain" else {}
    wrapper = vbs.AdaScaleOptimizer if kind == "AdaScale" else vbs.LinearRuleOptimizer
    optimizer = wrapper(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), sampler, 8, backend=backend, **options
    )
    for update in vbs.updates(DataLoader(TensorDataset(X), batch_sampler=sampler), optimizer):
        if how and optimizer.updates % 2:
            with optimizer.outside() if outside else nullcontext():
                probe(module, optimizer, how)
            assert all(parameter.grad is None for parameter in model.parameters()) or not outside
        for (rows,) in update:
            loss = module(rows).square().mean()
            loss.backward() if kind == "raw" else optimizer.backward(loss)
            optimizer.step()
    weights = [p.full_tensor() if by == "fsdp" else p for p in model.parameters()]
    return [weight.tolist() for weight in weights], optimizer.lr_factor()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["AdaScale", "linear", "raw"])
@pytest.mark.parametrize("how", ["rounds", "penalty", "unequal"])
def test_a_probe_changes_nothing(how, kind, ranks):
    expected = run_ranks(lambda backend: train(backend, "plain", None, True, kind), ranks)
    assert run_ranks(lambda backend: train(backend, "plain", how, True, kind), ranks) == expected


def test_a_probe_changes_no_bit():
    expected = train(vbs.backend.LocalBackend(), "plain", None, True, "linear", True)
    assert train(vbs.backend.LocalBackend(), "plain", "rounds", True, "linear", True) == expected


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("by", ["ddp", "fsdp"])
@pytest.mark.parametrize("how", ["rounds", "unequal"])
def test_a_probe_is_none_of_a_module_that_sums(by, how):
    """Of a DistributedDataParallel it may be of one rank only; FSDP2 gathers from all of them."""
    if (by, how) == ("fsdp", "unequal"):
        how = "rounds"
    expected = run_job("gloo", train, by, None, True, ranks=2)
    assert run_job("gloo", train, by, how, True, ranks=2) == expected


def test_it_is_entered_between_two_steps():
    model, module = new("plain")
    sampler = vbs.CustomSampler(40, 8, 1, 0, 4, shuffle=False)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), sampler)
    for rows in sampler:
        begins = not optimizer.inside_step
        optimizer.backward(module(X[rows]).mean())
        too_early = "a backward.* has come that no step" if begins else "must be called between steps"
        with pytest.raises(RuntimeError, match=too_early), optimizer.outside():
            pass
        if optimizer.step():
            with optimizer.outside():
                for call in (lambda: optimizer.backward(torch.ones(())), optimizer.step, optimizer.state_dict):
                    with pytest.raises(RuntimeError, match=r"waits while optimizer\.outside"):
                        call()
        if optimizer.updates == 2:
            break
    assert optimizer.state_dict()["vbs"]["sampler"]["step"] == 2


def test_an_exception_within_leaves_the_training_as_it_was():
    run = train(vbs.backend.LocalBackend(), "plain", None, True, "linear")
    model, module = new("plain")
    sampler = vbs.CustomSampler(40, SIZES, 1, 0, 4, shuffle=False, fixed_shape=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, 8)
    for update in vbs.updates(DataLoader(TensorDataset(X), batch_sampler=sampler), optimizer):
        with suppress(KeyError), optimizer.outside():
            module(X[:3]).sum().backward()
            raise KeyError
        for (rows,) in update:
            optimizer.backward(module(rows).square().mean())
            optimizer.step()
    assert ([weight.tolist() for weight in model.parameters()], optimizer.lr_factor()) == run


def test_an_interrupt_of_its_beginning_leaves_the_training_as_it_was():
    model, _ = new("plain")
    sampler = vbs.CustomSampler(40, SIZES, 1, 0, 4, shuffle=False, fixed_shape=False)
    *trained, other = model.parameters()
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(trained, lr=0.01), sampler, 8, model=model)
    gradient = other.grad = torch.ones_like(other)
    for line in count(1):
        block = optimizer.outside()
        try:
            with Interrupt(line, "optim/loops/outside.py"):
                block.__enter__()
        except KeyboardInterrupt:
            assert other.grad is gradient
            optimizer.state_dict()
        else:
            block.__exit__(None, None, None)
            break
    assert line > 10


def train_whole(backend, how):
    return train(backend, "fsdp", how, True, "linear", sharded_accumulation=False)


@pytest.mark.slow("starts processes")
def test_a_probe_leaves_nothing_with_ranks_that_keep_whole_gradients():
    assert run_job("gloo", train_whole, "rounds", ranks=2) == run_job("gloo", train_whole, None, ranks=2)


def test_gradients_of_parameters_in_no_group_are_put_back_where_the_model_is_known():
    body, head = nn.Linear(3, 4), nn.Linear(4, 1)
    model = nn.Sequential(body, head)
    sampler = vbs.CustomSampler(40, 8, 1, 0, 8)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(head.parameters(), lr=0.01), sampler, model=model)
    other = torch.optim.SGD(body.parameters(), lr=0.01)  # which steps more rarely
    for rows in sampler:
        optimizer.backward(model(torch.ones(len(rows), 3)).mean())
        optimizer.step()
        before = body.weight.grad.clone()
        with optimizer.outside():
            model(torch.ones(2, 3)).square().sum().backward()
        assert body.weight.grad.equal(before)
    other.step()


def test_a_probe_within_an_update_draws_none_of_its_random_numbers():
    def run(probes):
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        sampler = vbs.CustomSampler(40, SIZES, 1, 0, 4, reproducible=True)
        optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), sampler, 8)
        for update in vbs.updates(DataLoader(TensorDataset(X), batch_sampler=sampler), optimizer):
            for (rows,) in update:
                if probes and not optimizer.inside_step:
                    with optimizer.outside():
                        model(X[:3]).sum().backward()
                optimizer.backward(model(rows).square().mean())
                optimizer.step()
        return [parameter.tolist() for parameter in model.parameters()]

    assert run(True) == run(False)
