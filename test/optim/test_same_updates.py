"""Ranks that differ in an update raise one sentence in the same update: before it, or some later on a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import training
from variable_batch_size.backend import LocalBackend
from variable_batch_size.backend.sent_numbers import SentNumbers
from variable_batch_size.optim.checks.same_updates import RanksDifferError, SameUpdates, modulus, numbers_of_groups
from variable_batch_size.optim.message import Message
from variable_batch_size.optim.stage import UpdateUnderWay
from variable_batch_size.optim.tensors.late import READ_EVERY
from variable_batch_size.optim.tensors.parameters import Parameters
from variable_batch_size.testing import run_ranks
from variable_batch_size.world import World

WORLDS = range(2, 4097)
LATE = 2 * READ_EVERY  # updates, after which the host has read of every one


def test_the_modulus_is_the_largest_for_which_float32_holds_the_sum_of_the_squares():
    for ranks in WORLDS:
        assert ranks * (modulus(ranks) - 1) ** 2 <= 2**24 < ranks * modulus(ranks) ** 2


def sums_of(numbers):
    """[sum x, sum x^2] in float32, added one after another as ranks may do it."""
    pairs = np.stack([numbers, numbers**2]).astype(np.float32)
    return np.add.accumulate(pairs, axis=1, dtype=np.float32)[:, -1]


def same_updates(ranks, device):
    """What compares so many ranks, of which this is one."""
    backend = LocalBackend(sent=None if device is None else SentNumbers(device))
    backend.world = World(0, ranks)
    return SameUpdates(torch.optim.SGD([torch.zeros(1)]), backend)


def under_way(step=0):
    """An update of no parameters."""
    parts = (), Parameters(()), {"step": step}, Message()
    return UpdateUnderWay(None, vbs.rules.RuleInput(1, 1, step, 0), *parts)


def differ(ranks, sums, *, on_device):
    """Whether so many ranks are told that they differ, by these sums of their numbers."""
    same = same_updates(ranks, "cpu" if on_device else None)
    same.begin(update := under_way())
    same.part([torch.zeros(1)])
    update.message._sums = {same.name: [torch.tensor(sums, dtype=torch.float32)]}
    try:
        same.reduce(update)
        same.state_dict()
    except RanksDifferError:
        return True
    return False


@examples(300)
@given(st.data(), st.integers(2, 4096), st.booleans())
def test_ranks_differ_if_and_only_if_one_of_their_numbers_does(data, ranks, on_device):
    largest = modulus(ranks) - 1
    x = data.draw(st.sampled_from([0, 1, largest // 2, largest - 1, largest]) | st.integers(0, largest))
    numbers = np.full(ranks, x)
    assert not differ(ranks, sums_of(numbers), on_device=on_device)
    other = data.draw(st.integers(0, largest - 1))
    other += other >= x
    for value in {other, x - 1 if x else 1}:
        numbers[data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1, unique=True))] = value
        assert differ(ranks, sums_of(numbers), on_device=on_device)
        assert sums_of(numbers).tolist() == [numbers.sum(), (numbers**2).sum()]


@pytest.mark.parametrize("on_device", [False, True])
def test_in_no_world_the_largest_numbers_are_mistaken(on_device):
    for ranks in WORLDS:
        x = modulus(ranks) - 1
        sums = np.array([ranks * x, ranks * x * x])
        assert not differ(ranks, sums, on_device=on_device)
        assert differ(ranks, sums - [1, 2 * x - 1], on_device=on_device)  # one of them is x - 1


def test_the_host_reads_a_device_every_few_updates_only():
    """Each read of the device "meta" raises."""
    same = same_updates(2, "meta")

    def update():
        same.begin(made := under_way(1))
        made.message._sums = {same.name: same.part([torch.zeros(1, device="meta")])}
        same.reduce(made)

    for _ in range(LATE - 1):
        update()
    with pytest.raises(NotImplementedError, match="meta"):
        update()


def test_equal_numbers_are_equal_facts():
    groups = [{"lr": 1, "betas": (0, 0.9), "nesterov": False, "params": [], "note": "a", "t": torch.ones(())}]
    same = [{"nesterov": 0, "betas": (-0.0, 0.9), "lr": 1.0, "params": [torch.ones(1)]}]
    assert repr(numbers_of_groups(groups)) == repr(numbers_of_groups(same))
    assert [*numbers_of_groups(groups)] == [f"{name} of parameter group 0" for name in ("betas", "lr", "nesterov")]


# --------------------------------------------------------------------------------------------------------- of trainings


def train(backend, name, *, on_device, updates, back=False):
    """Let the last rank change a hyperparameter after three updates; `back`: for one update."""
    if on_device:
        backend._sent = SentNumbers("cpu")
    run = training(vbs.ConstantOptimizer, [9], hyperparameters={"lr": 0.02} | {name: 0.02}, backend=backend).run(3)
    group = run.optimizer.param_groups[0]
    odd = backend.world.rank == backend.world.size - 1
    group[name] = 0.01 if odd else 0.02
    try:
        run.run(1)
        group[name] = 0.02 if back else group[name]
        run.run(updates)
        run.optimizer.state_dict()
    except RuntimeError as error:
        return run.optimizer.updates, str(error)
    raise AssertionError("the ranks have not heard that they differ")


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["lr", "weight_decay", "momentum"])
def test_ranks_whose_hyperparameters_part_raise_before_the_weights_change(name, world):
    """As those of a scheduler that goes by a value of one rank."""
    found = run_ranks(lambda backend: train(backend, name, on_device=False, updates=9), world)
    assert found == world * found[:1]
    assert found[0] == (
        3,
        f"all ranks must train with the same {name} of parameter group 0, but it is 0.02 on rank 0 and 0.01 on rank "
        f"{world - 1}; set it to one value on all ranks",
    )


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", ["lr", "momentum"])
def test_on_a_device_a_difference_of_one_update_is_named_later(name, back):
    found = run_ranks(lambda backend: train(backend, name, on_device=True, updates=LATE, back=back), 2)
    assert found == 2 * found[:1]
    updates, sentence = found[0]
    assert READ_EVERY < updates < 3 + LATE
    assert sentence == (
        f"all ranks must train with the same {name} of parameter group 0, but it is 0.02 on rank 0 and 0.01 on rank 1; "
        f"set it to one value on all ranks, and restore a checkpoint of at most 3 updates: the weights differ since"
    )


def test_a_state_is_not_taken_of_ranks_that_have_differed_on_a_device():
    found = run_ranks(lambda backend: train(backend, "lr", on_device=True, updates=2), 2)
    assert [updates for updates, _ in found] == [6, 6]
    assert all("all ranks must make the same updates, but they differ in" in sentence for _, sentence in found)


@pytest.mark.parametrize("on_device", [False, True])
def test_ranks_that_do_not_differ_hear_nothing(on_device):
    """Also if hyperparameters change in each update, are not finite, or are whole numbers on one rank."""

    def train(backend):
        if on_device:
            backend._sent = SentNumbers("cpu")
        run = training(vbs.ConstantOptimizer, [9], hyperparameters={"lr": 0.02}, backend=backend)
        group = run.optimizer.param_groups[0]
        group["unused"] = 0.0
        for update in range(3 * READ_EVERY):
            group["unused"] = [float("nan"), float("inf"), 1 if backend.world.rank else 1.0][update // READ_EVERY]
            group["lr"] = 0.02 / (update + 1)
            run.run(1)
        return run.optimizer.updates

    assert run_ranks(train, 3) == 3 * [3 * READ_EVERY]
