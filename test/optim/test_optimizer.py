"""CustomOptimizer: its state, its arguments, and gradients that the user's loop clears, adds or omits."""

import copy

import pytest
import torch

import variable_batch_size as vbs
from helpers.reference import SIZES, assert_equal, assert_same_state, network, training, twin
from variable_batch_size.testing import run_ranks

# ---------------------------------------------------------------------------------------------------------------- state


def test_a_plain_optimizers_state_raises_unless_strict_is_false():
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
def test_a_state_of_other_samples_raises_and_changes_nothing(other, differs):
    run, state = training().run(2), training(**other).run(4).optimizer.state_dict()
    before, weights = copy.deepcopy(run.optimizer.state_dict()), run.weights()
    with pytest.raises(ValueError, match=f"{differs}.*strict=False"):
        run.optimizer.load_state_dict(state)
    assert_same_state(run.optimizer.state_dict(), before)
    run.optimizer.load_state_dict(state, strict=False)
    assert run.optimizer.updates == run.sampler.position.step == 4
    assert_equal(run.weights(), weights, 0)


def test_objects_say_in_a_shell_what_they_are():
    run = training(vbs.RootRuleOptimizer, [16, 5], hyperparameters={"lr": 0.1}).run(1)
    trace = 'BatchTrace("0:16 1:5", 2 steps, on_end="hold")'
    assert repr(run.sampler) == f"CustomSampler(50 samples, {trace}, rank 0 of 1, at epoch 0, step 1)"
    assert (run.sampler.rank, run.sampler.num_replicas) == (0, 1)
    first = repr(run.optimizer).splitlines()[0]
    made = "updates=1, samples=16, last_lr=0.05"  # half, as 16 is a quarter of 64
    assert first == f"RootRuleOptimizer(RootRule(), ref_batchsize=64, {made}) around SGD ("
    assert repr(next(iter(vbs.updates(run.sampler, run.optimizer)))) == "Update(2 microbatches)"


# ------------------------------------------------------------------------------------------------------ the user's loop


def test_the_due_microbatch_gives_its_weight_in_a_mean():
    def weights(backend):
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
def test_step_without_backward_raises(missing):
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
def test_clearing_gradients_within_a_step_raises(clear):
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


def test_the_maximum_norm_may_be_set_between_updates():
    run = training()
    assert run.optimizer.max_grad_norm is None
    run.optimizer.max_grad_norm = 0.5
    run.run(3)
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:3], max_grad_norm=0.5))
    assert float(run.optimizer.grad_norm) > 0
    with pytest.raises(ValueError, match="max_grad_norm must be a finite number > 0, got 0"):
        run.optimizer.max_grad_norm = 0
    assert run.optimizer.max_grad_norm == 0.5


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        (vbs.RootRuleOptimizer, {}, r"rule was LinearRule\(\) and is RootRule\(\)"),
        (vbs.LinearRuleOptimizer, {"ref_batchsize": 16}, "ref_batchsize was 64 and is 16"),
        (vbs.CustomOptimizer, {"rule": "root", "ref_batchsize": 9}, r"RootRule\(\), ref_batchsize was 64 and is 9"),
    ],
)
def test_a_state_of_another_rule_tells_it(kind, options, told):
    state = training(vbs.LinearRuleOptimizer).run(2).optimizer.state_dict()
    run = training(kind, **options)
    with pytest.warns(UserWarning, match=f"^Resumed with other settings: .*{told}$"):
        run.optimizer.load_state_dict(state)
    assert run.optimizer.updates == 2


def test_an_exception_in_a_closure_interrupts_nothing():
    run = training()
    batches = iter(run.sampler)

    def closure():
        raise KeyError("planted")

    next(batches)
    with pytest.raises(KeyError, match="planted"):
        run.optimizer.step(closure)
    run.optimizer.discard_step()
    assert_equal(run.run(4).weights(), training().run(4).weights(), 0)


def test_a_grad_scaler_takes_no_closure():
    run, scaler = training(), torch.amp.GradScaler("cpu")
    indices = next(iter(run.sampler))
    run.optimizer.backward(run.loss(indices), scaler=scaler)
    with pytest.raises(RuntimeError, match=r"but a closure computes them in it; call optimizer\.backward\("):
        scaler.step(run.optimizer, lambda: 0.0)
