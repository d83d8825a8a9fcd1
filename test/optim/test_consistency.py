"""Compare what ranks must have in common, and broadcast parameters. The ranks are threads of this process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import variable_batch_size as vbs
from helpers.models import Everything, everything, shifted
from helpers.reference import REF, training
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.optim.checks.consistency import check_same_facts
from variable_batch_size.testing import run_ranks


@pytest.mark.parametrize("world", [1, 2, 5])
def test_broadcast_parameters_copies_rank_0_in_place(world):
    def broadcast(backend):
        model = Everything(backend.world.rank)
        before = [(tensor.data_ptr(), tensor.dtype) for tensor in model.state_dict().values()]
        vbs.broadcast_parameters(model, backend)
        assert [(tensor.data_ptr(), tensor.dtype) for tensor in model.state_dict().values()] == before
        return model

    expected = Everything(0)
    for model in run_ranks(broadcast, world):
        torch.testing.assert_close(everything(model), everything(expected), rtol=0, atol=0)
        assert torch.equal(model.complex, expected.complex)


def test_of_long_values_an_error_shows_where_they_differ():
    def message(backend):
        with pytest.raises(RuntimeError) as raised:
            check_same_facts("test", {"rule": f"{1000 * 'a'}{backend.world.rank}{100 * 'b'}"}, Agreement(backend))
        return str(raised.value)

    first, other = (f"...{60 * 'a'}{rank}{59 * 'b'}..." for rank in range(2))
    expected = f"same rule, but it is {first} on rank 0 and {other} on rank 1; pass"
    assert [expected in found for found in run_ranks(message, 2)] == [True, True]


# ---------------------------------------------------------------------------------------------- at the first update


@dataclass(frozen=True)
class Halve:
    """A rule with a parameter, which its repr shows."""

    factor: float

    def __call__(self, update):
        return vbs.rules.Scaling(lr=self.factor)


class WithoutRepr:
    """A rule whose repr is that of `object`, with a memory address."""

    def __call__(self, update):
        return vbs.rules.Scaling()


def first_update(backend, options_of, epoch=0):
    """Train for one update with options that depend on the rank; return the error message, if any."""
    run = training(**({"kind": vbs.CustomOptimizer, "backend": backend} | options_of(backend.world.rank)))
    for part in (run.sampler, run.optimizer):
        part.set_epoch(epoch)
    try:
        run.run(1)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options_of", "name", "remedy"),
    [
        (lambda rank: {"model": shifted(rank)}, "parameters", r"call vbs\.broadcast_parameters\(model\) before"),
        (lambda rank: {"sampling": {"seed": rank}}, "seed", "pass the same value"),
        (lambda rank: {"sampling": {"shuffle": rank == 0}}, "shuffle", "pass the same value"),
        (lambda rank: {"sampling": {"drop_last": rank == 0}}, "drop_last", "pass the same value"),
        (lambda rank: {"sampling": {"fixed_shape": rank == 0}}, "fixed_shape", "pass the same value"),
        (lambda rank: {"minibatch_size": 4 + rank}, "minibatch_size", "pass the same value"),
        (lambda rank: {"dataset_size": 50 + rank}, "dataset_size", "pass the same value"),
        (lambda rank: {"sizes": (20, 7 + rank)}, "trace", "pass the same value"),
        (lambda rank: {"ref_batchsize": REF + rank}, "ref_batchsize", "pass the same value"),
        (lambda rank: {"rule": Halve(1 + rank)}, "rule, but it is .*factor=1", "pass the same value"),
        (lambda rank: {"reduction": ("mean", "sum", "sum")[rank]}, "reduction, but it is mean", "pass the same"),
        (lambda rank: {"noise": (None, "microbatches", None)[rank]}, "noise", "pass the same value"),
        (lambda rank: {"skip_grad_norm": 2.0 + rank}, "skip_grad_norm", "pass the same value"),
        (lambda rank: {"max_grad_norm": 1.0 + rank}, r"max_grad_norm, but it is 1\.0", "pass the same value"),
        (
            lambda rank: {"inner": lambda ps, **o: torch.optim.SGD(list(ps)[: 3 + (rank == 0)], **o)},
            "number of",
            "pass",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_first_update_raises_on_all_ranks_if_they_differ(options_of, name, remedy):
    found = run_ranks(lambda backend: first_update(backend, options_of), 3)
    assert found == [found[0]] * 3
    with pytest.raises(RuntimeError, match=f"must train with the same {name}.* on rank 0 and .* on rank 1; {remedy}"):
        raise RuntimeError(found[0])


@pytest.mark.filterwarnings("ignore:set_epoch")
def test_the_first_update_raises_if_the_epochs_differ():
    found = run_ranks(lambda backend: first_update(backend, lambda rank: {}, epoch=backend.world.rank), 2)
    text = "same epoch, but it is 0 on rank 0 and 1 on rank 1; call set_epoch with the same epoch on every rank"
    assert [text in message for message in found] == [True, True]


@pytest.mark.parametrize(
    "rule",
    [lambda: WithoutRepr(), lambda: lambda update: vbs.rules.Scaling(), lambda: vbs.rules.LinearRule().__call__],
    ids=["object", "lambda", "method"],
)
def test_a_rule_with_an_address_in_its_repr_equals_itself_on_all_ranks(rule):
    assert run_ranks(lambda backend: first_update(backend, lambda rank: {"rule": rule()}), 2) == ["", ""]


def test_a_rank_that_fails_or_returns_does_not_block_the_others(monkeypatch):
    monkeypatch.setattr("variable_batch_size.testing.ranks._TIMEOUT", 0.3)

    def fail(backend):
        if backend.world.rank == 1:
            raise LookupError("rank 1")
        backend.all_reduce_sum([torch.ones(1)])

    def end(backend):
        if backend.world.rank != 1:
            backend.all_reduce_sum([torch.ones(1)])

    with pytest.raises(LookupError, match="rank 1"):
        run_ranks(fail, 3)
    with pytest.raises(
        RuntimeError, match=r"every rank must take part in every all-reduce, but rank \d waited for one that"
    ):
        run_ranks(end, 3)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"lr": 0.03}, r"lr of parameter group 0, but it is 0\.02 on rank 0 and 0\.03 on rank 1"),
        ({"weight_decay": 0.1}, r"weight_decay of parameter group 0, but it is 0 on rank 0 and 0\.1 on rank 1"),
        ({"inner": torch.optim.RMSprop}, r"inner optimizer, but it is SGD on rank 0 and RMSprop on rank 1"),
        ({"lr": torch.tensor(0.5)}, r"lr of parameter group 0, but it is 0\.02 on rank 0 and 0\.5 on rank 1"),
    ],
)
def test_other_inner_optimizers_raise_on_every_rank(option, sentence):
    def train(backend):
        own = {"lr": 0.02, **(option if backend.world.rank else {})}
        inner = own.pop("inner", torch.optim.SGD)
        run = training(vbs.ConstantOptimizer, inner=inner, hyperparameters=own, backend=backend)
        with pytest.raises(RuntimeError, match=f"^all ranks must train with the same {sentence}; pass the same"):
            run.run(1)
        return 1

    assert run_ranks(train, 2) == [1, 1]


def test_a_norm_that_one_rank_sets_later_is_told():
    def train(backend):
        run = training(backend=backend, max_grad_norm=1.0).run(1)
        if backend.world.rank == 1:
            run.optimizer.max_grad_norm = 0.1
        with pytest.raises(RuntimeError, match=r"same max_grad_norm, but it is 1\.0 on rank 0 and 0\.1 on rank 1"):
            run.run(1)

    run_ranks(train, 2)
