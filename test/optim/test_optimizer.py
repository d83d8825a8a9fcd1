"""CustomOptimizer: its state, also a damaged one, and gradients that the user's loop clears, adds or omits."""

import copy
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import SIZES, Training, assert_equal, assert_same_state, network, training, twin
from variable_batch_size.adaptive import NoiseScale
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


def test_a_state_of_other_samples_raises_and_changes_nothing():
    run, state = training().run(2), training(sampling={"seed": 1}).run(4).optimizer.state_dict()
    before, weights = copy.deepcopy(run.optimizer.state_dict()), run.weights()
    with pytest.raises(ValueError, match=r"seed was 1 and is 0.*strict=False"):
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
    assert repr(next(iter(vbs.updates(run.sampler, run.optimizer)))) == "Update(batch_size=5, 2 microbatches)"


def test_the_size_of_the_update_is_known_before_and_after_it():
    run = training(sizes=SIZES, dataset_size=sum(SIZES))
    assert run.optimizer.last_batch is None
    for update, size in zip(vbs.updates(run.sampler, run.optimizer), SIZES, strict=True):
        assert update.batch_size == run.optimizer.batch.batch_size == size
        for indices in update:
            run.step(indices)
        assert run.optimizer.last_batch.batch_size == size


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
    with pytest.raises(RuntimeError, match=r"no gradient has changed since the last; call loss\.backward\(\) first"):
        run.optimizer.step()


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


# States that lack an entry, or of which one is damaged, or that are of something else: nothing changes. ---------------


OPTIONS = [
    {},
    {"noise": "differenced"},
    {"kind": vbs.SqrtSDERuleOptimizer},
    {"sizes": vbs.AdaptiveTrace(NoiseScale(), start=4, every=1, bounds=(1, 8))},
]
DAMAGE = [None, "nonsense", [], {}, [None], {"x": 1}, 1.5, -3]


def of(options):
    options = dict(options)
    kind, sizes = options.pop("kind", vbs.LinearRuleOptimizer), options.pop("sizes", [8, 3, 5])
    if isinstance(sizes, vbs.AdaptiveTrace):
        run = training(kind, [4], dataset_size=60)
        sampler = vbs.CustomSampler(60, sizes, 1, 0, minibatch_size=4, fixed_shape=False)
        optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(run.model.parameters(), lr=0.01), sampler, 4)
        return Training(run.model, sampler, optimizer, run.x, run.target)
    return training(kind, sizes, dataset_size=60, **options)


def places(state, at=()):
    """The paths of all entries of nested dictionaries."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield (*at, key)
            yield from places(value, (*at, key))


@pytest.mark.filterwarnings("ignore:(Resumed with other|The batch trace differs)")
@given(st.sampled_from(OPTIONS), st.sampled_from(["drop", *DAMAGE]), st.data())
@examples(150)
def test_a_damaged_state_is_refused_or_is_as_good(options, damage, data):
    state = copy.deepcopy(of(options).run(3).optimizer.state_dict())
    own = {"vbs": state["vbs"], "param_groups": {}, "state": {}}
    path = data.draw(st.sampled_from(sorted(places(own), key=str)), label="entry")
    parent = state
    for key in path[:-1]:
        parent = parent[key]
    if damage == "drop":
        del parent[path[-1]]
    else:
        parent[path[-1]] = damage
    run = of(options).run(2)
    before, weights = copy.deepcopy(run.optimizer.state_dict()), run.weights()
    try:
        run.optimizer.load_state_dict(state)
    except ValueError:
        assert repr(run.optimizer.state_dict()) == repr(before)
        assert_equal(run.weights(), weights)
        assert run.sampler.position.step == run.optimizer.updates == 2
        run.run(2)
        return
    run.run(1)  # what was lost or changed can be done without


@pytest.mark.parametrize(
    ("name", "value"),
    [("progress", math.nan), ("progress", -1.0), ("samples", 17), ("first_step", 4), ("epoch_samples", 61)],
)
def test_numbers_that_do_not_agree_are_refused(name, value):
    """Each has the right type, but no training has them together."""
    state, run = of({}).run(3).optimizer.state_dict(), of({}).run(1)
    (state["vbs"] if name == "progress" else state["vbs"]["sampler"])[name] = value
    with pytest.raises(ValueError, match=r"must agree with one another, got|must be a finite number >= 0, got"):
        run.optimizer.load_state_dict(state)
    assert run.optimizer.updates == 1


def test_averages_whose_bias_is_corrected_cannot_be_lost():
    options = {"kind": vbs.SqrtSDERuleOptimizer}
    state, run = of(options).run(3).optimizer.state_dict(), of(options).run(1)
    state["state"] = {}
    with pytest.raises(ValueError, match="must hold the averages whose bias a rule corrects, but it has none of param"):
        run.optimizer.load_state_dict(state)
    assert run.optimizer.updates == 1


@pytest.mark.parametrize("name", ["noise", "minibatch_size"])
def test_a_measured_noise_cannot_be_lost(name):
    state, run = of({"noise": "differenced"}).run(3).optimizer.state_dict(), of({"noise": "differenced"})
    del state["vbs"][name]
    with pytest.raises(
        ValueError, match=rf"must hold {name}, of type \w+, but this one lacks it; restore one as it was"
    ):
        run.optimizer.load_state_dict(state)


def test_an_inner_state_that_torch_cannot_load_changes_nothing():
    of_adam = {"inner": torch.optim.Adam, "hyperparameters": {"lr": 0.01}}
    state = copy.deepcopy(training(vbs.AdamScaleOptimizer, **of_adam).run(3).optimizer.state_dict())
    run = training(vbs.AdamScaleOptimizer, **of_adam).run(1)
    before, weights = copy.deepcopy(run.optimizer.state_dict()), run.weights()
    del state["state"][0]["step"]
    with pytest.raises(ValueError, match=r"as Adam has saved it, but its load_state_dict\(\) raises KeyError: 'step'"):
        run.optimizer.load_state_dict(state)
    assert repr(run.optimizer.state_dict()) == repr(before)
    assert_equal(run.weights(), weights)
    run.run(2)


def test_a_state_of_another_version_names_both():
    state, run = of({}).run(1).optimizer.state_dict(), of({})
    state["vbs"]["sampler"]["version"] = 7
    with pytest.raises(ValueError, match="must be of version 2, got one of version 7; load it with the release"):
        run.optimizer.load_state_dict(state)
    del state["vbs"]["sampler"]["version"]
    with pytest.raises(ValueError, match="got one of version unknown"):
        run.optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="got one of version unknown"):
        run.sampler.load_state_dict(state["vbs"]["sampler"])


KINDS = [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax, torch.optim.RAdam]


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("here", KINDS)
def test_the_state_of_another_kind_of_optimizer_is_refused(saved, here):
    state = training(inner=saved, hyperparameters={}).run(2).optimizer.state_dict()
    run = training(inner=here, hyperparameters={})
    if saved is here:
        run.optimizer.load_state_dict(state)
        return
    before = copy.deepcopy(run.optimizer.state_dict())
    match = (
        f"state was saved of {saved.__name__}, but this optimizer is {here.__name__}; create the optimizer that was "
        "saved, or pass strict=False"
    )
    with pytest.raises(ValueError, match=match):
        run.optimizer.load_state_dict(state)
    assert repr(run.optimizer.state_dict()) == repr(before)


def test_other_groups_are_told_with_their_sizes():
    """As by a training that resumes after it has unfrozen some."""
    run, other = training(), training()
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    sizes = [[len(group["params"]) for group in one.optimizer.param_groups] for one in (run, other)]
    for one, another, (saved, here) in ((run, other, sizes), (other, run, sizes[::-1])):
        match = re.escape(f"but it has {saved} and the optimizer {here}; create the same groups before")
        with pytest.raises(ValueError, match=match):
            another.optimizer.load_state_dict(one.optimizer.state_dict())


def test_a_dataset_is_given_by_its_size_or_itself():
    assert vbs.CustomSampler(torch.tensor(64), 8, 1, 0).plan.dataset_size == 64
    assert vbs.CustomSampler(np.array(64), 8, 1, 0).plan.dataset_size == 64
    assert vbs.CustomSampler(torch.zeros(64, 3), 8, 1, 0).plan.dataset_size == 64
    with pytest.raises(TypeError, match=r"must be a number of samples, or the dataset, got '64' \(str\); pass an int"):
        vbs.CustomSampler("64", 8, 1, 0)
    loader = torch.utils.data.DataLoader(torch.zeros(64), batch_size=4)
    with pytest.raises(TypeError, match=r"must be a number of samples, or the dataset, got .*; pass loader.dataset"):
        vbs.CustomSampler(loader, 8, 1, 0)
