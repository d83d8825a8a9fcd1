"""What compiles (law 6) on PyTorch/XLA: nothing after the third update that follows the first accumulation."""

import itertools
import random

import pytest
import torch

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

from helpers.xla_graphs import MINIBATCH_SIZE, REF, Training, count, late  # noqa: E402
from variable_batch_size.backend.xla import launch  # noqa: E402


def run(trainings, cores, folder):
    launch(count, (folder, trainings), cores=cores)
    return torch.load(folder / "updates.pt", weights_only=False)


def trace(seed, cores):
    """Ten updates of one microbatch a rank, then spells of several and of one again."""
    rng = random.Random(seed)
    one = [size * cores for size in (1, 2, MINIBATCH_SIZE)]
    several = range(MINIBATCH_SIZE * cores + 1, 8 * MINIBATCH_SIZE)
    spells = [rng.choices(one if number % 2 else several, k=rng.randint(1, 3)) for number in range(5)]
    return (*rng.choices(one, k=10), *itertools.chain(*spells))


@pytest.mark.nightly("compiles graphs of nine trainings")
@pytest.mark.parametrize("cores", [2])
def test_nothing_compiles_late_on_traces_that_begin_with_one_microbatch_a_rank(cores, tmp_path):
    variants = [
        {"options": {"reduction": "sum"}, "hyperparameters": {"momentum": 0.9}},
        {"loop": "zero_grad"},
        {"options": {"max_grad_norm": 0.5}, "kind": "AdamW", "loop": "reads"},
        {"options": {"max_grad_norm": 0.5, "reduction": "sum"}, "rule": "adascale", "loop": "reads"},
        {"options": {"noise": "differenced"}, "rule": "adascale"},
        {"options": {"find_unused_parameters": True}, "dtype": torch.float64},
        {"controlled": True, "rule": "adascale"},
        {"controlled": True},
        {"rule": "invariant-adam", "kind": "AdamW", "lrs": (0.01, 0.01)},
    ]
    trainings = [Training(trace(seed, cores), **variant) for seed, variant in enumerate(variants)]
    found = run(trainings, cores, tmp_path)
    for updates in found:
        assert {update.rounds for update in updates[:10]} == {1}
        assert any(update.rounds > 1 for update in updates)
    assert list(map(late, found)) == [{}] * len(found)


@pytest.mark.slow("launches XLA")
@pytest.mark.parametrize("cores", [2, pytest.param(1, marks=pytest.mark.nightly("launches another world"))])
def test_nothing_compiles_late_when_one_microbatch_a_rank_comes_after_several(cores, tmp_path):
    several, one, single = 4 * MINIBATCH_SIZE * cores, MINIBATCH_SIZE * cores, MINIBATCH_SIZE
    sizes = (*4 * (several,), *2 * (one,), several, single, several + 1, one)
    variants = [
        {"loop": "log"},
        {"loop": "log", "options": {"max_grad_norm": 0.5}},
        {"loop": "log", "rule": "adascale"},
        {"options": {"noise": "differenced"}, "rule": "adascale"},
        {"options": {"noise": "microbatches"}},
    ]
    found = run([Training(sizes, **variant) for variant in variants], cores, tmp_path)
    assert list(map(late, found)) == [{}] * len(found)


def words():
    """All sequences of ten updates that have one microbatch on each rank, or three."""
    return [tuple(MINIBATCH_SIZE * rounds for rounds in word) for word in itertools.product((1, 3), repeat=10)]


@pytest.mark.slow("launches XLA")
@pytest.mark.parametrize(
    "number", [8, pytest.param(2**10, marks=pytest.mark.nightly("compiles graphs of a thousand trainings"))]
)
def test_nothing_compiles_late_whatever_the_order_of_rounds_is(number, tmp_path):
    only_the_first = tuple(MINIBATCH_SIZE * rounds for rounds in (3, *[1] * 5, 3, 1, 3, 1))
    chosen = [only_the_first, *random.Random(number).sample(words(), number - 1)]
    trainings = [Training(sizes) for sizes in chosen]
    one_comes_late = tuple(MINIBATCH_SIZE * rounds for rounds in (3, 3, 3, 3, 3, 3, 1, 3, 1, 1))
    variants = [{"rule": "invariant-adam", "kind": "AdamW", "lrs": (0.01, 0.01)}, {"dtype": torch.bfloat16}]
    trainings += [Training(one_comes_late, **variant) for variant in variants]
    found = run(trainings, 1, tmp_path)
    wrong = {str(one): late(updates) for one, updates in zip(trainings, found, strict=True) if late(updates)}
    assert wrong == {}


@pytest.mark.slow("launches XLA")
def test_a_first_update_of_one_microbatch_compiles_nothing_whose_backward_is_the_optimizers(tmp_path):
    sizes = tuple(MINIBATCH_SIZE * rounds for rounds in (*[3] * 6, 1, 3, 1, 1))
    variants = [{}, {"rule": "adascale"}, {"rule": "root", "kind": "AdamW", "options": {"max_grad_norm": 0.5}}]
    found = run([Training(sizes, loop="backward", **variant) for variant in variants], 1, tmp_path)
    assert list(map(late, found)) == [{}] * len(found)


@pytest.mark.slow("launches XLA")
def test_numbers_of_the_host_that_are_0_or_1_compile_nothing(tmp_path):
    sizes = (20, 17, 30, 9, 2, 3, 8, 33, 16, 25, 41, 4)
    options = {"options": {"reduction": "sum"}}
    found = run([Training(sizes, loop="tensors", **options), Training(sizes, loop="log tensors")], 2, tmp_path)
    assert list(map(late, found)) == [{}] * len(found)


@pytest.mark.nightly("compiles graphs of twelve trainings")
def test_numbers_that_coincide_in_some_updates_compile_nothing(tmp_path):
    sizes = (20, 17, 30, 9, 2, 3, REF, 33, 2 * REF, 25, 41, REF // 2, 12, REF, 9)
    two_rules = ("linear", "root")
    trainings = [
        Training(sizes, two_rules, hyperparameters={"momentum": 0.9}),  # equal rates if B = ref
        Training(sizes, two_rules, hyperparameters={"momentum": 0.9}, dtype=torch.bfloat16),
        Training(sizes, two_rules, "AdamW"),  # and equal to 1 - beta1
        Training(sizes, ("sqrt-sde", "root"), "AdamW", (0.01, 0.01)),  # betas that are equal if B = ref
        Training(sizes, "constant", "SGD", (0.1, 0.2), schedule=(1.0, 0.5, 0.7, 0.3, 0.0, 5.0, 9.0, -5.0)),
        # Factors 1 - lr weight_decay that are all 1, and equal to others that are 1.
        Training(sizes, "constant", "AdamW", (0.1, 0.2), schedule=(1.0, 0.5, 0.7, 0.3, 0.0, 1e-9, 1e-7)),
        Training(
            sizes, "linear-momentum", "SGD", (0.1, 0.1), {"momentum": 0.5, "weight_decay": 0.25, "nesterov": True}
        ),
        Training(sizes, "sqrt-sde", "RMSprop", (0.1, 0.1), {"momentum": 0.9, "alpha": 0.9}),
        Training(sizes, ("root-half-life", "root"), "AdamW", (0.01, 0.01)),
        Training(sizes, "root-half-life", "RMSprop", (0.1, 0.1), {"momentum": 0.9, "alpha": 0.9}),
        Training(sizes, ("invariant-adam", "root"), "AdamW", (0.01, 0.01), options={"max_grad_norm": 0.5}),
        Training(sizes, "surge", "AdamW"),  # numbers in the rule's own arithmetic
    ]
    found = run(trainings, 2, tmp_path)
    assert list(map(late, found)) == [{}] * len(found)


@pytest.mark.nightly("compiles graphs of nine optimizers")
def test_of_torchs_optimizers_only_radam_compiles_late_and_once(tmp_path):
    kinds = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RMSprop", "Adagrad", "Adadelta", "RAdam")
    sizes = (20, 17, 30, 9, 2, 3, 8, 33, 16, 25, 41, 4)
    found = run([Training(sizes, kind=kind) for kind in kinds], 1, tmp_path)
    compiled = dict(zip(kinds, map(late, found), strict=True))
    assert compiled.pop("RAdam") == {6: 1}  # its rectification begins, by a branch on the host
    assert not any(compiled.values())
