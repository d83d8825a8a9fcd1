"""The wrapper around every optimizer of torch, and what its constructor rejects."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

import variable_batch_size as vbs
from helpers.checkpoints import save_checkpoint
from helpers.processes import run_job
from helpers.reference import REF, SIZES, assert_equal, batches, network, training
from variable_batch_size.testing import run_ranks


def label(value):
    return value.__name__ if isinstance(value, type) else "-".join(value)


EVERY = {thing for thing in vars(torch.optim).values() if isinstance(thing, type) and issubclass(thing, Optimizer)}
REJECTED = {torch.optim.LBFGS, torch.optim.SparseAdam}
STEPPING = sorted(EVERY - REJECTED - {Optimizer}, key=label)
VARIANTS = [
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    (torch.optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"maximize": True, "dampening": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": torch.tensor(0.02, dtype=torch.float64)}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.Adam, {"amsgrad": True, "lr": torch.tensor(0.02)}),
    (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(0.02)}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
]


def by_hand(make, hyperparameters, scaled):
    """The linear or constant rule around a plain optimizer, as a user would write it: one big batch an update."""
    run = training(vbs.ConstantOptimizer, inner=make, hyperparameters=hyperparameters)
    inner, lr = make(run.model.parameters(), **hyperparameters), hyperparameters["lr"]
    for batch in batches(SIZES, 50):
        run.loss(batch.tolist()).backward()
        inner.param_groups[0]["lr"] = lr * (len(batch) / REF if scaled else 1)
        inner.step()
        inner.zero_grad()
    return run.weights()


@pytest.mark.parametrize(("kind", "options"), [(kind, {}) for kind in STEPPING] + VARIANTS, ids=label)
def test_every_torch_optimizer_steps_as_it_does_unwrapped(kind, options):
    def make(parameters, **hyperparameters):
        return kind([p for p in parameters if p.ndim == 2 or kind is not torch.optim.Muon], **hyperparameters)

    hyperparameters, scaled = {"lr": 0.02} | options, kind not in (torch.optim.ASGD, torch.optim.Rprop)
    wrapper = vbs.LinearRuleOptimizer if scaled else vbs.ConstantOptimizer
    run = training(wrapper, inner=make, hyperparameters=hyperparameters).run(len(SIZES))
    tolerance = 1e-2 if kind is torch.optim.Muon else 1e-10  # Muon's iteration runs in bfloat16
    assert_equal(run.weights(), by_hand(make, hyperparameters, scaled), tolerance)
    assert run.optimizer.param_groups[0]["lr"] is hyperparameters["lr"]
    samples = sum(map(len, batches(SIZES, 50)))
    assert run.optimizer.progress == pytest.approx(samples / REF if scaled else len(SIZES))


class Modes(torch.optim.SGD):
    """Has two modes, and weighs by the largest rate, as schedule-free optimizers do."""

    mode = "train"

    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.param_groups[0] |= {"lr_max": -1.0, "weight_sum": 0.0}

    def eval(self):
        self.mode = "eval"


def test_modes_of_an_optimizer_are_forwarded_and_its_rate_is_not_scaled():
    run = training(vbs.ConstantOptimizer, inner=Modes, hyperparameters={"lr": 0.1}).run(1)
    run.optimizer.eval()
    assert run.optimizer.inner.mode == "eval"
    assert not hasattr(run.optimizer, "train")
    with pytest.raises(TypeError, match=r"Modes weighs all later ones by the largest that it has seen; use"):
        training(vbs.RootRuleOptimizer, inner=Modes, hyperparameters={"lr": 0.1})


class OwnRate(torch.optim.SGD):
    """Finds its own learning rate, as Adafactor can."""

    def step(self, closure=None):
        self.param_groups[0]["lr"] = 0.1
        super().step()
        self.param_groups[0]["lr"] = None


def test_an_optimizer_without_a_rate_has_nothing_to_scale():
    def begin(kind):
        run = training(kind, inner=OwnRate, hyperparameters={"lr": 0.1})
        run.optimizer.param_groups[0]["lr"] = None
        return run

    run = begin(vbs.ConstantOptimizer).run(3)
    assert_equal(
        run.weights(),
        training(vbs.ConstantOptimizer, hyperparameters={"lr": 0.1}, inner=torch.optim.SGD).run(3).weights(),
    )
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    with pytest.raises(ValueError, match=r"needs one in each parameter group, got None in group 0; pass a numb"):
        begin(vbs.RootRuleOptimizer).run(3)


class Sliced(torch.optim.Optimizer):
    """Keeps the momentum of its own rows on each rank, as nanochat's distributed Muon and AdamW do.

    Source: github.com/karpathy/nanochat, nanochat/optim.py, and github.com/KellerJordan/modded-nanogpt.
    """

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for p in group["params"]:
                own = slice(rank * (p.shape[0] // world), (rank + 1) * (p.shape[0] // world))
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p.grad[own]))
                momentum.mul_(group["beta"]).add_(p.grad[own])
                parts = list(torch.empty_like(p).chunk(world))
                dist.all_gather(parts, p[own] - group["lr"] * momentum)
                p.copy_(torch.cat(parts))


def of_ranks(backend, folder):
    """Optimizers that keep a part of their state on each rank: their updates are exact, and no checkpoint has them."""
    told = []
    makes = {"sliced": Sliced, "zero": partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD)}
    for name, make in makes.items():
        run = training(vbs.ConstantOptimizer, inner=make, hyperparameters={"lr": 0.01}, backend=backend).run(len(SIZES))
        momentum = {"momentum": 0.9 if name == "sliced" else 0.0}
        plain = training(vbs.ConstantOptimizer, inner=torch.optim.SGD, hyperparameters={"lr": 0.01, **momentum})
        assert_equal(run.weights(), plain.run(len(SIZES)).weights())
        try:
            save_checkpoint(folder / name, run)
        except (RuntimeError, TypeError) as error:
            told.append(str(error))
    return told


@pytest.mark.slow("starts processes")
def test_optimizers_that_keep_a_part_of_their_state_are_exact_and_not_saved(tmp_path):
    for sliced, zero in run_job("gloo", of_ranks, tmp_path, ranks=2):
        assert "state/0.weight/exp_avg of the optimizer (ConstantOptimizer) on rank 1 is another one than on" in sliced
        assert "optimizer must have its state on each rank, or in parameters that are sharded, got Zero" in zero


def test_named_parameters_are_kept():
    run = training(inner=lambda _, **options: torch.optim.SGD(network().named_parameters(), **options))
    assert run.optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_parameter_groups_that_are_assigned_train():
    """As a resumed fine-tuning assigns those of layers that were unfrozen."""

    def first_layer(parameters, **hyperparameters):
        return torch.optim.SGD(list(parameters)[:2], **hyperparameters)

    def train(backend=None):
        run = training(vbs.RootRuleOptimizer, SIZES, inner=first_layer, backend=backend).run(2)
        group = {"params": list(run.model.parameters())[2:], "lr": 0.1}
        if backend is None:
            run.optimizer.add_param_group(group)
        else:
            first = run.optimizer.param_groups[0]
            run.optimizer.param_groups = [first, {**first, **group}]
        assert len(run.optimizer.rules) == 2
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        run.run(2)
        run.optimizer.param_groups = run.optimizer.param_groups[1:]  # freezes the first layer
        return run.run(1)

    expected = train()
    for rank in run_ranks(train, 2):
        assert_equal(rank.weights(), expected.weights())
        assert len(rank.optimizer.rules) == 1


def test_add_param_group_raises_in_the_middle_of_a_step():
    run = training()
    next(run.steps())
    with pytest.raises(RuntimeError, match=r"^add_param_group\(\) must be called between steps"):
        run.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    with pytest.raises(RuntimeError, match=r"^the setter of param_groups must be called between steps"):
        run.optimizer.param_groups = []
    assert len(run.optimizer.param_groups) == 1
