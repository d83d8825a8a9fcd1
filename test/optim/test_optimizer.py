"""CustomOptimizer: its state, its arguments, and gradients that the user's loop clears, adds or omits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from helpers.reference import SIZES, Training, assert_equal, assert_same_state, network, training, twin
from variable_batch_size.backend import Backend
from variable_batch_size.testing import run_ranks

# ---------------------------------------------------------------------------------------------------------------- state


def test_a_plain_optimizers_state_raises_unless_strict_is_false() -> None:
    plain = torch.optim.SGD(network().parameters(), lr=0.3, momentum=0.5)
    run = training().run(2)
    before = copy.deepcopy(run.optimizer.state_dict())
    with pytest.raises(ValueError, match=r'"vbs".*pass strict=False to load the inner optimizer.s state only'):
        run.optimizer.load_state_dict(plain.state_dict())
    assert_same_state(run.optimizer.state_dict(), before)
    run.optimizer.load_state_dict(plain.state_dict(), strict=False)
    assert run.optimizer.param_groups[0]["lr"] == 0.3
    assert run.optimizer.param_groups is run.optimizer.inner.param_groups
    assert run.optimizer.state_dict()["vbs"] == before["vbs"]


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ({"dataset_size": 60}, "dataset_size was 60 and is 50"),
        ({"sampling": {"seed": 1}}, "seed was 1 and is 0"),
        ({"sizes": (20, 8)}, "the first 4 batch sizes of the trace are not the same"),
        ({"sampling": {"shuffle": False}}, "shuffle was False and is True"),
    ],
)
def test_a_state_of_other_samples_raises_and_changes_nothing(other: dict[str, Any], differs: str) -> None:
    run, state = training().run(2), training(**other).run(4).optimizer.state_dict()
    before, weights = copy.deepcopy(run.optimizer.state_dict()), run.weights()
    with pytest.raises(ValueError, match=f"{differs}.*strict=False"):
        run.optimizer.load_state_dict(state)
    assert_same_state(run.optimizer.state_dict(), before)
    run.optimizer.load_state_dict(state, strict=False)
    assert run.optimizer.updates == run.sampler.position.step == 4
    assert_equal(run.weights(), weights, 0)


def test_a_state_of_another_model_raises_and_changes_nothing() -> None:
    run, other = (
        training().run(2),
        training(inner=lambda ps, **options: torch.optim.SGD(list(ps)[:1], **options)).run(4),
    )
    before = copy.deepcopy(run.optimizer.state_dict())
    with pytest.raises(ValueError, match="as many parameters in each group as the optimizer"):
        run.optimizer.load_state_dict(other.optimizer.state_dict())
    assert_same_state(run.optimizer.state_dict(), before)


def test_loading_a_state_in_the_middle_of_a_step_discards_the_step() -> None:
    run = training(vbs.RootRuleOptimizer, SIZES)
    state = run.optimizer.state_dict()
    next(run.steps())
    run.optimizer.load_state_dict(state)
    assert_equal(run.run(4).weights(), twin(vbs.RootRuleOptimizer, SIZES[:4]))


def test_objects_say_in_a_shell_what_they_are() -> None:
    run = training(vbs.RootRuleOptimizer, [16, 5], hyperparameters={"lr": 0.1}).run(1)
    trace = 'BatchTrace("0:16 1:5", 2 steps, on_end="hold")'
    assert repr(run.sampler) == f"CustomSampler(50 samples, {trace}, rank 0 of 1, at epoch 0, step 1)"
    assert (run.sampler.rank, run.sampler.num_replicas) == (0, 1)
    first = repr(run.optimizer).splitlines()[0]
    made = "updates=1, samples=16, last_lr=0.05"  # half, as 16 is a quarter of 64
    assert first == f"RootRuleOptimizer(RootRule(), ref_batchsize=64, {made}) around SGD ("
    assert repr(next(iter(vbs.updates(run.sampler, run.optimizer)))) == "Update(2 microbatches)"


def test_names_that_are_close_are_suggested() -> None:
    with pytest.raises(TypeError, match=r"^LinearRuleOptimizer: got .* 'ref_batch_size'; did you mean ref_batchsize\?"):
        vbs.LinearRuleOptimizer(None, None, ref_batch_size=8)  # type: ignore[arg-type, call-arg]
    with pytest.raises(TypeError, match=r"^CustomSampler: got .* 'mini_batch_size'; did you mean minibatch_size\?"):
        vbs.CustomSampler(9, 3, mini_batch_size=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^ConstantOptimizer: missing a required argument: 'sampler'; it takes inn"):
        vbs.ConstantOptimizer(None)  # type: ignore[arg-type, call-arg]
    with pytest.raises(AttributeError, match=r"LinearOptimizer; did you mean LinearRuleOptimizer\?"):
        vbs.LinearOptimizer  # type: ignore[attr-defined] # noqa: B018


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_copying_and_pickling_raise(copied: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"cannot be copied or pickled; create another one and load its state_dict"):
        copied(training().optimizer)


# ------------------------------------------------------------------------------------------------------ the user's loop


def test_the_due_microbatch_gives_its_weight_in_a_mean() -> None:
    def weights(backend: Backend) -> list[int]:
        run, samples = training(sizes=SIZES, dataset_size=sum(SIZES), backend=backend), [0] * len(SIZES)
        for indices in run.sampler:
            due = run.optimizer.microbatch
            assert due.rows == len(indices) <= 4
            assert due.samples in (0, len(set(indices)))  # 0 in a replay
            samples[due.step] += due.samples
            run.loss(indices).backward()
            assert run.optimizer.microbatch == due
            assert run.optimizer.step() == due.ends_step
        return samples

    ranks = run_ranks(weights, 3)
    assert tuple(map(sum, zip(*ranks, strict=True))) == SIZES


@pytest.mark.parametrize("missing", [0, 1, 4, 5, 8])
def test_step_without_backward_raises(missing: int) -> None:
    run = training()
    steps = iter(run.sampler)
    for _ in range(missing):
        run.loss(next(steps)).backward()
        run.optimizer.step()
    next(steps)
    with pytest.raises(
        RuntimeError, match=r"no gradient has changed since the last step\(\); call loss\.backward\(\) first"
    ):
        run.optimizer.step()


def test_a_replay_may_skip_backward() -> None:
    def train(backend: Backend) -> Training:
        run = training(sizes=SIZES[:4], dataset_size=61, backend=backend)
        for indices in run.sampler:
            if run.optimizer.microbatch.samples:
                run.loss(indices).backward()
            run.optimizer.step()
        return run

    for run in run_ranks(train, 4):
        assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4], dataset_size=61))


@pytest.mark.parametrize(
    "clear",
    [
        lambda run: run.model.zero_grad(),
        lambda run: run.model[2].zero_grad(),
        lambda run: run.optimizer.inner.zero_grad(),
        lambda run: setattr(run.model[0].weight, "grad", torch.zeros(4, 3).double()),
    ],
    ids=["model", "layer", "inner", "replaced"],
)
def test_clearing_gradients_within_a_step_raises(clear: Callable[[Training], None]) -> None:
    run = training()
    steps = run.steps()
    while not next(steps):
        pass
    clear(run)  # between updates nothing is lost
    next(steps)
    clear(run)
    with pytest.raises(
        RuntimeError, match=r"must stay in \.grad .* but they were (cleared|replaced) .* remove zero_grad"
    ):
        next(steps)


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
def test_gradients_with_create_graph_accumulate() -> None:
    run = training()
    for indices in run.sampler:
        run.loss(indices).backward(create_graph=True)
        run.optimizer.step()
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"ref_batchsize": None}, ValueError, r"LinearRule\(\) needs ref_batchsize, .*; pass the batch size"),
        ({"ref_batchsize": 0}, ValueError, "ref_batchsize must be an integer >= 1, got 0; pass"),
        ({"ref_batchsize": 64.0}, TypeError, r"ref_batchsize must be an integer >= 1, got 64\.0 .*; pass"),
        ({"ref_batchsize": "64"}, TypeError, "ref_batchsize must be an integer >= 1, got '64' .*; pass"),
        ({"reduction": "none"}, ValueError, 'reduction must be "mean" or "sum".*, got \'none\'; pass'),
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm must be a finite number > 0, got 0.*; omit it"),
        ({"max_grad_norm": float("nan")}, ValueError, "max_grad_norm must be a finite number >= 0, got nan; omit it"),
        ({"max_grad_norm": "1"}, TypeError, r"max_grad_norm must be a finite number >= 0, got '1' \(str\); omit it"),
        ({"log_steps": 0}, ValueError, "log_steps must be an integer >= 1, got 0; pass"),
        ({"log_steps": 2.5}, TypeError, r"log_steps must be an integer >= 1, got 2\.5 .*; pass"),
        ({"tracker": "runs"}, TypeError, r"tracker must be a vbs\.Tracker, got 'runs'; pass one"),
        ({"backend": "gloo"}, TypeError, r"backend must be a vbs\.Backend, got 'gloo'; pass one"),
        ({"rule": vbs.rules.RootRule}, TypeError, r"rule must be a name, or a callable .*, got <class"),
        ({"rule": "lineal"}, ValueError, r"rule must be one of constant, linear, .*, got 'lineal'; pass one"),
        ({"sampler": [[0, 1]]}, TypeError, r"sampler must be the vbs\.CustomSampler .* got list; create one"),
        ({"sampler": vbs.CustomSampler(50, 20, 3, 2)}, ValueError, "deals for rank 2 of 3 .* is rank 0 of 1; pass"),
        ({"inner": nn.Linear(1, 1)}, TypeError, r"inner optimizer must be a torch\.optim\.Optimizer, got Linear; pass"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else str(value),
)
def test_a_wrong_argument_raises_with_a_remedy(options: dict[str, Any], error: type[Exception], text: str) -> None:
    right = {
        "inner": torch.optim.SGD(network().parameters()),
        "sampler": vbs.CustomSampler(50, 20, 1, 0),
        "ref_batchsize": 64,
        "rule": vbs.rules.LinearRule(),
    }
    with pytest.raises(error, match=text):
        vbs.CustomOptimizer(**(right | options))


def test_the_momentum_rule_accepts_only_sgd() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.SGD, got Adam; use the linear rule"):
        training(vbs.LinearRuleMomentumOptimizer, inner=torch.optim.Adam, hyperparameters={})


def test_the_maximum_norm_may_be_set_between_updates() -> None:
    run = training()
    assert run.optimizer.max_grad_norm is None
    run.optimizer.max_grad_norm = 0.5
    run.run(3)
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:3], max_grad_norm=0.5))
    assert float(run.optimizer.grad_norm) > 0
    with pytest.raises(ValueError, match="max_grad_norm must be a finite number > 0, got 0"):
        run.optimizer.max_grad_norm = 0
    assert run.optimizer.max_grad_norm == 0.5


def test_accepts_numpy_numbers() -> None:
    run = training(ref_batchsize=np.int32(64), max_grad_norm=np.float64(0.5)).run(3)
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:3], max_grad_norm=0.5))
    assert type(run.optimizer.ref_batchsize) is int


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        (vbs.RootRuleOptimizer, {}, r"rule was LinearRule\(\) and is RootRule\(\)"),
        (vbs.LinearRuleOptimizer, {"ref_batchsize": 16}, "ref_batchsize was 64 and is 16"),
        (vbs.CustomOptimizer, {"rule": "root", "ref_batchsize": 9}, r"RootRule\(\), ref_batchsize was 64 and is 9"),
    ],
)
def test_a_state_of_another_rule_tells_it(kind: type[vbs.CustomOptimizer], options: Any, told: str) -> None:
    state = training(vbs.LinearRuleOptimizer).run(2).optimizer.state_dict()
    run = training(kind, **options)
    with pytest.warns(UserWarning, match=f"^Resumed with other settings: .*{told}$"):
        run.optimizer.load_state_dict(state)
    assert run.optimizer.updates == 2


def test_an_exception_in_a_closure_interrupts_nothing() -> None:
    run = training()
    batches = iter(run.sampler)

    def closure() -> float:
        raise KeyError("planted")

    next(batches)
    with pytest.raises(KeyError, match="planted"):
        run.optimizer.step(closure)
    run.optimizer.discard_step()
    assert_equal(run.run(4).weights(), training().run(4).weights(), 0)


def test_a_grad_scaler_takes_no_closure() -> None:
    run, scaler = training(), torch.amp.GradScaler("cpu")
    indices = next(iter(run.sampler))
    run.optimizer.backward(run.loss(indices), scaler=scaler)
    with pytest.raises(RuntimeError, match=r"but a closure computes them in it; call optimizer\.backward\("):
        scaler.step(run.optimizer, lambda: 0.0)
