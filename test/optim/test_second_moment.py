"""Batch-size-invariant Adam: its second moment is that of plain Adam at the reference, for any microbatches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import variable_batch_size as vbs
from helpers.fingerprint import compile_on_the_cpu
from helpers.properties import examples
from helpers.reference import ADAM, REF, Training, assert_equal, network, training, twin
from variable_batch_size.backend import Backend, LocalBackend
from variable_batch_size.optim.second_moment import SecondMoment
from variable_batch_size.testing import run_ranks
from variable_batch_size.world import World

KIND = vbs.InvariantAdamRuleOptimizer
LARGE = (100, 70, 64, 130, 9, 210)  # beside REF
BETA1, BETA2 = ADAM["betas"]


class Counts(NamedTuple):
    """A step of so many samples and microbatches."""

    batch_size: int
    num_microbatches: int


# ------------------------------------------------------------------------------------------------------ the equation


@examples(30)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(1, 20),
    st.floats(0.0, 3.0),
    st.integers(0, 2**31),
)
def test_the_second_moment_equals_the_formula(cuts: list[list[int]], reference: int, offset: float, seed: int) -> None:
    """Of ranks with any microbatches, from a second moment that is not 0."""
    sizes = [n for cut in cuts for n in cut]
    batch, number = sum(sizes), len(sizes)
    if batch > reference and number < 2:
        return
    rng = np.random.default_rng(seed)
    gradients = [rng.normal(size=5) + offset for _ in sizes]
    before = rng.uniform(size=5)
    whole = sum(n / batch * g for n, g in zip(sizes, gradients, strict=True))
    mean_square = sum(n / batch * g**2 for n, g in zip(sizes, gradients, strict=True))
    weight = (batch / reference - 1) / (number - 1) if batch > reference else 0.0
    beta = BETA2 ** (batch / reference)
    expected = beta * before + (1 - beta) * (whole**2 + weight * (mean_square - whole**2))
    starts = np.cumsum([0, *map(len, cuts)])

    def update(backend: Backend) -> Tensor:
        own = slice(*starts[backend.world.rank : backend.world.rank + 2])
        parameter = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        inner = torch.optim.AdamW([parameter], lr=0.0, betas=ADAM["betas"], weight_decay=0.0)
        parameter.grad = torch.zeros(5, dtype=torch.float64)
        inner.step()
        inner.state[parameter]["exp_avg_sq"].copy_(torch.from_numpy(before))
        moment = SecondMoment(inner, backend, reference)
        step: Any = Counts(batch, number)
        moment.batch_size = batch
        for n, gradient in zip(sizes[own], gradients[own], strict=True):
            moment.add({parameter: torch.from_numpy(gradient).square()}, n)
        backend.all_reduce_sum(moment.message([parameter]))
        parameter.grad = torch.from_numpy(whole)
        moment.settle(step)
        inner.param_groups[0]["betas"] = BETA1, beta
        moment.apply(step, [vbs.rules.InvariantAdamRule()])
        inner.step()
        return inner.state[parameter]["exp_avg_sq"]

    for found in run_ranks(update, len(cuts)):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("cut", [(8,) * 4, (16,) * 2, (4,) * 8, (2, 3, 4, 5, 6, 12), (1, 31)], ids=str)
def test_its_expectation_is_that_at_the_reference(cut: tuple[int, ...]) -> None:
    mean, deviation, number, reference = 0.3, 2.0, 200_000, 8
    generator = torch.Generator().manual_seed(len(cut))
    parameter = nn.Parameter(torch.zeros(number, dtype=torch.float64))
    inner = torch.optim.Adam([parameter], betas=(0.9, 0.5))
    moment = SecondMoment(inner, LocalBackend(), reference)
    step: Any = Counts(sum(cut), len(cut))
    moment.batch_size = sum(cut)
    whole = torch.zeros_like(parameter)
    for n in cut:
        noise = torch.randn(number, generator=generator, dtype=torch.float64) / n**0.5
        gradient = mean + deviation * noise
        moment.add({parameter: gradient.square()}, n)
        whole += n / sum(cut) * gradient
    parameter.grad = whole
    moment.settle(step)
    moment.apply(step, [vbs.rules.InvariantAdamRule()])
    inner.step()
    found = inner.state[parameter]["exp_avg_sq"] / (1 - 0.5)
    error = found.std() / number**0.5
    assert abs(found.mean() - (mean**2 + deviation**2 / reference)) < 4 * error
    assert found.min() >= 0
    assert abs((whole**2).mean() - found.mean()) > 100 * error  # which plain Adam would average


def moved(size: int, lr: float, kind: Any = KIND) -> np.ndarray[Any, Any]:
    """The weights after a time that is the same for every lr, which is small, like 1 - beta."""
    beta, updates = 1 - 40 * lr, round(0.128 / lr)
    hyperparameters = {"lr": lr, "betas": (beta, beta), "eps": 1e-8, "weight_decay": 0.1}
    options: dict[str, Any] = {"ref_batchsize": 4, "minibatch_size": 4, "dataset_size": 512}
    run = training(kind, [size], inner=torch.optim.AdamW, hyperparameters=hyperparameters, **options)
    return np.concatenate([own.ravel() for own in run.run(updates * 4 // size).weights()])


@pytest.mark.slow("makes many updates")
def test_an_update_of_k_references_is_k_updates_in_the_limit_of_small_rates() -> None:
    """With the reference as microbatch the noise is the same, too: what is left shrinks as lr does."""
    start = np.concatenate([parameter.detach().numpy().ravel() for parameter in network().parameters()])
    rates = 2e-3, 1e-3, 5e-4
    references = [moved(4, lr) for lr in rates]

    def errors(k: int, kind: Any) -> list[float]:
        pairs = zip(rates, references, strict=True)
        return [float(np.abs(moved(4 * k, lr, kind) - one).max() / np.abs(one - start).max()) for lr, one in pairs]

    for k in (2, 4):
        found = errors(k, KIND)
        assert found[-1] < 0.35 * found[0] < 0.03
        for other in (vbs.SqrtSDERuleOptimizer, vbs.LinearRuleOptimizer):
            assert min(errors(k, other)) > 0.15


# -------------------------------------------------------------------------------------------- trainings with the rule


def test_a_resumed_training_warns_of_other_microbatches() -> None:
    state = training(KIND, LARGE, dataset_size=300).run(2).optimizer.state_dict()
    other = training(KIND, LARGE, dataset_size=300, minibatch_size=5)
    with pytest.warns(UserWarning, match="Resumed with other settings: minibatch_size was 4 and is 5"):
        other.optimizer.load_state_dict(state)


def test_a_discarded_step_leaves_no_squares() -> None:
    run = training(KIND, LARGE, dataset_size=300)
    for number, _ in enumerate(run.steps()):
        if number == 3:
            break
    run.optimizer.discard_step()
    assert_equal(run.run(len(LARGE)).weights(), twin(KIND, LARGE, dataset_size=300))


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_device_that_compiles_graphs_computes_the_same(max_grad_norm: float | None) -> None:
    with compile_on_the_cpu():
        run = training(KIND, LARGE, dataset_size=300, world=World(0, 1), max_grad_norm=max_grad_norm)
        assert run.optimizer._backend.static_graph
        run.run(len(LARGE))
    fixed = {"fixed_shape": run.sampler.plan.fixed_shape}
    assert_equal(run.weights(), twin(KIND, LARGE, dataset_size=300, max_grad_norm=max_grad_norm, **fixed))


def test_a_rule_may_be_that_of_one_group() -> None:
    def grouped(rules: Any) -> Training:
        def inner(parameters: Any, **options: Any) -> torch.optim.Optimizer:
            first, *rest = parameters
            return torch.optim.Adam([{"params": [first]}, {"params": rest}], **options)

        options: dict[str, Any] = {"inner": inner, "hyperparameters": ADAM, "rule": rules}
        return training(vbs.CustomOptimizer, LARGE, dataset_size=300, **options)

    mixed, invariant, root = (
        grouped(rules).run(1) for rules in (("invariant-adam", "root"), "invariant-adam", ("root", "root"))
    )
    assert_equal(mixed.weights()[:1], invariant.weights()[:1])
    assert_equal(mixed.weights()[1:], root.weights()[1:], 1e-9)
    assert abs(mixed.weights()[0] - root.weights()[0]).max() > 1e-3


def test_half_precision_sums_in_float32() -> None:
    dtype = torch.bfloat16
    options: dict[str, Any] = {"dataset_size": 300, "dtype": dtype}
    run = training(KIND, LARGE, **options).run(1)
    whole = training(KIND, LARGE, dataset_size=300).run(1)
    for own, other in zip(run.optimizer.state.values(), whole.optimizer.state.values(), strict=True):
        assert own["exp_avg_sq"].dtype == dtype
        torch.testing.assert_close(own["exp_avg_sq"].double(), other["exp_avg_sq"], rtol=0.1, atol=0.02)


def test_below_the_reference_nothing_travels_but_the_gradient() -> None:
    def bytes_of(kind: Any) -> Any:
        def train(backend: Backend) -> int:
            run, sent = training(kind, [REF, REF], dataset_size=300, backend=backend), 0
            reduce = backend.all_reduce_sum

            def counted(tensors: Any) -> None:
                nonlocal sent
                sent += sum(tensor.nbytes for tensor in tensors)
                reduce(tensors)

            backend.all_reduce_sum = counted  # type: ignore[method-assign]
            run.run(2)
            return sent

        return run_ranks(train, 2)[0]

    assert bytes_of(KIND) == bytes_of(vbs.SqrtSDERuleOptimizer)


# --------------------------------------------------------------------------------------------------------- refusals


class OwnStep(torch.optim.Adam):
    """An Adam that normalizes its gradients first."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.NAdam, torch.optim.RMSprop, OwnStep])
def test_it_needs_adam(inner: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^a rule of Adam's second moment needs a torch\.optim\.Adam .*, got \w+; wrap"
    ):
        training(KIND, inner=inner, hyperparameters={"lr": 0.1})


def test_adamw_is_adam_when_dynamo_has_wrapped_it() -> None:
    torch.compile(lambda: None, backend="eager")()
    training(KIND, inner=torch.optim.AdamW, hyperparameters=ADAM).run(1)
    training(KIND, inner=torch.optim.Adam, hyperparameters=ADAM).run(1)


def test_float16_is_refused() -> None:
    with pytest.raises(ValueError, match=r"on one device, in float32, say, got float16, in which squares overflow; ch"):
        training(KIND, model=network(torch.float16), dtype=torch.float16)


@pytest.mark.parametrize("changes", [True, False])
def test_a_hook_that_changes_gradients_is_seen_before_the_weights_change(changes: bool) -> None:
    run, plain = training(KIND, LARGE, dataset_size=300), training(KIND, LARGE, dataset_size=300)

    def hook(optimizer: Any, arguments: Any, options: Any) -> None:
        if changes:
            nn.utils.clip_grad_norm_([*run.model.parameters()], 0.1)

    run.optimizer.inner.register_step_pre_hook(hook)
    before = run.weights()
    if changes:
        with pytest.raises(RuntimeError, match=r"no step_pre_hook may change gradients, .* clip with max_grad_norm="):
            run.run(1)
        assert_equal(run.weights(), before)
    else:
        assert_equal(run.run(3).weights(), plain.run(3).weights())


def test_a_single_microbatch_above_the_reference_is_refused() -> None:
    match = r"more than ref_batchsize=8 samples must have two or more microbatches, got minibatch_size=16; pass a small"
    with pytest.raises(ValueError, match=match):
        training(KIND, [48], ref_batchsize=8, minibatch_size=16)
    training(KIND, [8], ref_batchsize=8, minibatch_size=16).run(2)
    training(KIND, [48], ref_batchsize=16, minibatch_size=16).run(2)


def test_a_single_microbatch_that_arrives_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    moment = SecondMoment(torch.optim.Adam([parameter]), LocalBackend(), 8)
    rules, scalings = [vbs.rules.InvariantAdamRule()], [vbs.rules.Scaling()]
    step: Any = Counts(9, 1)
    with pytest.raises(ValueError, match="two or more microbatches, got one of 9 samples; pass a smaller minibatch_"):
        moment.check(step, rules, scalings)


def test_a_beta_that_vanishes_is_refused() -> None:
    run = training(KIND, [300], dataset_size=300, hyperparameters=ADAM | {"betas": (0.9, 1e-9)})
    with pytest.raises(
        ValueError, match=r"beta2 .* must stay above 9e-19, but a rule changes 1e-09, got .*; limit the"
    ):
        run.run(1)


def test_counts_are_refused() -> None:
    run = training(KIND, LARGE, dataset_size=300, reduction="sum")
    run.loss(next(iter(run.sampler))).backward()
    with pytest.raises(ValueError, match=r"^step\(count=\) needs gradients that nothing compares"):
        run.optimizer.step(count=3)
