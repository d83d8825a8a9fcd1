"""`updates(counts=)`: a loss whose terms have several denominators, which the ranks sum before the first forward."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import variable_batch_size as vbs
from helpers.arrivals import Arriving, whole
from helpers.denominators import Divided, plain, terms
from helpers.elastic_threads import ElasticThreads, Script
from helpers.mistakes import Mistake, check
from helpers.processes import run_job
from helpers.properties import examples
from helpers.reference import Array, assert_equal, network, training
from helpers.tokens import DATASET, batches_of
from helpers.worlds import Layout, Place, load, state_of
from variable_batch_size.backend.sent_numbers import SentNumbers
from variable_batch_size.testing import run_ranks

TOKENS = torch.tensor([3.0, 1, 4, 0, 5, 9, 0, 6, 5, 3] * 5, dtype=torch.float64)
ROWS = torch.ones(DATASET, dtype=torch.float64)
SIZES = [9, 4, 17, 1, 12]


def divided(numbers: dict[str, Tensor], sizes: list[int], **options: Any) -> Divided:
    """A training in which each sample counts these numbers."""
    options = {"ref_batchsize": None, "dataset_size": DATASET, **options}
    return Divided(training(vbs.ConstantOptimizer, sizes, **options), numbers)


def usual(**options: Any) -> Divided:
    return divided({"tokens": TOKENS, "rows": ROWS}, SIZES, **options)


sparse = st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.25, 1.5]), min_size=DATASET, max_size=DATASET)
ragged = st.lists(st.one_of(st.just(0), st.integers(0, 30)), min_size=DATASET, max_size=DATASET)
some_sizes = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@given(
    tokens=ragged,
    marked=sparse,
    rows=st.booleans(),
    sizes=some_sizes,
    world=st.integers(1, 3),
    other=st.integers(1, 3),
    stop=st.integers(0, 5),
    minibatch_size=st.integers(1, 9),
    fixed_shape=st.booleans(),
    max_grad_norm=st.sampled_from([None, 0.5]),
    reduction=st.sampled_from(["mean", "sum"]),
)
@examples(80)
def test_an_update_is_that_of_the_sum_of_means_over_all_that_each_term_counts(
    tokens: list[int],
    marked: list[float],
    rows: bool,
    sizes: list[int],
    world: int,
    other: int,
    stop: int,
    minibatch_size: int,
    fixed_shape: bool,
    max_grad_norm: float | None,
    reduction: str,
) -> None:
    """Also where a microbatch, a rank or an update has none of them, and where it resumes in another world."""
    numbers = {"tokens": torch.tensor(tokens).double(), "marked": torch.tensor(marked).double()}
    numbers |= {"rows": ROWS} if rows else {}
    options: dict[str, Any] = {"max_grad_norm": max_grad_norm, "reduction": reduction}
    options |= {"minibatch_size": minibatch_size, "sampling": {"fixed_shape": fixed_shape}}
    stop = min(stop, len(sizes))

    def begin(backend: vbs.backend.Backend) -> tuple[list[bool], Any]:
        begun = divided(numbers, sizes, backend=backend, **options)
        made = begun.train(stop)
        return made, copy.deepcopy((begun.run.model.state_dict(), begun.run.optimizer.state_dict()))

    def resume(backend: vbs.backend.Backend) -> tuple[list[bool], list[Array]]:
        resumed = divided(numbers, sizes, backend=backend, **options)
        resumed.run.model.load_state_dict(state[0])
        resumed.run.optimizer.load_state_dict(copy.deepcopy(state[1]))
        return first + resumed.train(len(sizes)), resumed.run.weights()

    batches = batches_of(sizes)
    expected = plain(numbers, batches, max_grad_norm)
    first, state = run_ranks(begin, world)[0]
    for made, weights in run_ranks(resume, other):
        assert made == [any(number[batch].sum() > 0 for number in numbers.values()) for batch in batches]
        assert_equal(weights, expected, 1e-11)


def drawn(seed: int) -> tuple[dict[str, Tensor], list[int], dict[str, Any]]:
    """The numbers of the samples, a trace, and the arguments of a training."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    numbers = {"tokens": torch.randint(0, 9, (DATASET,), generator=generator).double()}
    numbers["marked"] = (torch.rand(DATASET, generator=generator).double() - 0.8).clamp(min=0)
    numbers |= {"rows": ROWS} if rng.random() < 0.5 else {}
    sizes = [rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 40)]) for _ in range(6)]
    options: dict[str, Any] = {"max_grad_norm": rng.choice([None, 0.5]), "minibatch_size": rng.randint(1, 9)}
    options |= {"reduction": rng.choice(["mean", "sum"]), "sampling": {"fixed_shape": rng.random() < 0.5}}
    return numbers, sizes, options


def train_drawn(backend: vbs.backend.Backend, layout: Layout) -> list[list[Array]]:
    """The weights of trainings that each resume once."""
    found, place = [], Place.of(layout, backend)
    for seed in range(12):
        numbers, sizes, options = drawn(seed)

        def begin() -> Divided:
            run = place.training(vbs.ConstantOptimizer, sizes, ref_batchsize=None, **options)  # noqa: B023
            return Divided(run, numbers)  # noqa: B023

        begun, resumed = begin(), begin()
        begun.train(seed % len(sizes))
        load(resumed.run, state_of(begun.run))
        resumed.train(len(sizes))
        found.append([weight.numpy() for weight in state_of(resumed.run)[0].values()])
    return found


@pytest.mark.slow("starts processes")
@pytest.mark.torch
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("by", ["plain", "ddp", "fsdp"])
def test_processes_divide_the_terms_of_random_traces(by: Any, ranks: int) -> None:
    layout = Layout(shards=ranks) if by == "fsdp" else Layout(ranks, by=by)
    for found in run_job("gloo", train_drawn, layout, ranks=ranks):
        for seed, weights in enumerate(found):
            numbers, sizes, options = drawn(seed)
            assert_equal(weights, plain(numbers, batches_of(sizes), options["max_grad_norm"]))


def test_means_of_microbatches_are_another_gradient() -> None:
    """The error that this is for: each microbatch divides its terms by its own counts, and the step averages."""
    wrong = usual(minibatch_size=2)
    while wrong.run.optimizer.updates < len(SIZES):
        for indices in wrong.run.sampler:
            counts = {name: max(float(number), 1.0) for name, number in wrong.counts(indices).items()}
            wrong.run.optimizer.backward(wrong.loss(indices, counts))
            wrong.run.optimizer.step()
            if wrong.run.optimizer.updates == len(SIZES):
                break
    expected = plain(wrong.numbers, batches_of(SIZES))
    assert max(np.abs(a - b).max() for a, b in zip(wrong.run.weights(), expected, strict=True)) > 1e-3


def test_the_totals_are_those_of_all_ranks_and_take_one_sum_more() -> None:
    def train(backend: Any) -> list[tuple[dict[str, float], int]]:
        begun, found = usual(backend=backend), []
        for update in begun.updates():
            before = backend.collectives
            for indices in update:
                begun.step(indices, update.counts)
            found.append((dict(update.counts), backend.collectives - before))
        return found

    right = [{"rows": len(batch), "tokens": TOKENS[batch].sum().item() or math.inf} for batch in batches_of(SIZES)]
    for found in run_ranks(train, 3):
        assert [totals for totals, _ in found[:5]] == right
        assert {sums for _, sums in found} == {1}  # that of the counts comes when the update is read


def test_the_loss_of_an_update_is_logged() -> None:
    """By values that are its part of a mean over the samples."""

    def train(backend: vbs.backend.Backend) -> list[float]:
        begun, found = usual(backend=backend, sampling={"fixed_shape": True}), []

        def step(indices: list[int], totals: Any) -> bool:
            loss = begun.loss(indices, totals)
            begun.run.optimizer.backward(loss, weighted=True)
            begun.run.optimizer.log(loss=loss * begun.run.optimizer.batch.batch_size / len(indices))
            return begun.run.optimizer.step()

        for update in range(1, 4):
            begun.train(update, step)
            found.append(begun.run.optimizer.logged["loss"].item())
        return found

    whole, right = usual(minibatch_size=DATASET), []
    for update in whole.updates():
        for indices in update:
            right.append(whole.loss(indices, update.counts).item())
            whole.step(indices, update.counts)
    for found in run_ranks(train, 3):
        assert found == pytest.approx(right[:3], rel=1e-12)


def test_a_count_of_0_leaves_its_term_out() -> None:
    begun = divided({"tokens": TOKENS * 0, "rows": ROWS}, [9, 9])
    found = []

    def step(indices: list[int], totals: Any) -> bool:
        found.append(totals["tokens"])
        loss = begun.loss(indices, totals) + begun.run.model(begun.run.x[indices]).square().sum() / totals["tokens"]
        begun.run.optimizer.backward(loss, weighted=True)
        return begun.run.optimizer.step()

    begun.train(2, step)
    assert set(found) == {math.inf}
    assert_equal(begun.run.weights(), plain({"rows": ROWS}, batches_of([9, 9])))


def test_an_update_that_counts_nothing_is_skipped_like_one_without_tokens() -> None:
    begun = divided({"tokens": TOKENS * 0, "marked": TOKENS * 0}, [9, 4], max_grad_norm=1.0)
    before = [weight.copy() for weight in begun.run.weights()]
    assert begun.train(2) == [False, False]
    assert_equal(begun.run.weights(), before, 0)
    assert begun.run.optimizer.samples == 13
    assert begun.run.optimizer.progress == 0
    assert begun.run.optimizer.grad_norm is not None
    assert begun.run.optimizer.grad_norm.isnan()


@pytest.mark.parametrize("on_host", [True, False])
def test_totals_are_tensors_where_the_host_does_not_read(on_host: bool) -> None:
    """On a device that compiles, an update without any count is made with a gradient of 0."""
    numbers = {"tokens": TOKENS, "rows": ROWS}
    backend = vbs.backend.LocalBackend(sent=SentNumbers("cpu"))
    begun = divided(numbers, SIZES, backend=backend)
    if on_host:
        own = begun.counts
        begun.counts = lambda indices: {name: number.item() for name, number in own(indices).items()}  # type: ignore[method-assign]
    assert begun.train(len(SIZES)) == [True] * len(SIZES)
    assert_equal(begun.run.weights(), plain(numbers, batches_of(SIZES)))
    update = next(iter(begun.updates()))
    assert all(isinstance(total, Tensor) and total.dtype == torch.float64 for total in update.counts.values())
    empty = divided({"tokens": TOKENS * 0}, [9], backend=backend, hyperparameters={"lr": 0.02})
    before = [weight.copy() for weight in empty.run.weights()]
    assert empty.train(1) == [True]
    assert_equal(empty.run.weights(), before, 0)


def test_a_grad_scaler_scales_what_is_divided() -> None:
    begun = usual()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(indices: list[int], totals: Any) -> bool:
        begun.run.optimizer.backward(begun.loss(indices, totals), weighted=True, scaler=scaler)
        made = scaler.step(begun.run.optimizer)
        scaler.update()
        return bool(made)

    begun.train(len(SIZES), step)
    assert_equal(begun.run.weights(), plain(begun.numbers, batches_of(SIZES)))


def test_half_precision_is_added_in_float32() -> None:
    narrow = usual(dtype=torch.bfloat16, sampling={"fixed_shape": True})
    narrow.train(3)
    expected = usual()
    expected.run.model.load_state_dict(network(torch.bfloat16).double().state_dict())
    expected.run.x, expected.run.target = (own.double() for own in (narrow.run.x, narrow.run.target))
    expected.train(3)
    weights = [parameter.detach().double().numpy() for parameter in narrow.run.model.parameters()]
    assert_equal(weights, expected.run.weights(), 3e-2)


def test_optimizers_of_one_loss_share_its_denominators() -> None:
    def train(backend: vbs.backend.Backend) -> list[Array]:
        begun = usual(backend=backend)
        matrices = [one for one in begun.run.model.parameters() if one.ndim == 2]
        vectors = [one for one in begun.run.model.parameters() if one.ndim != 2]
        how: dict[str, Any] = {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.01}
        first, second = (
            vbs.ConstantOptimizer(torch.optim.SGD(own, **how), begun.run.sampler, backend=backend)
            for own in (matrices, vectors)
        )
        begun.run.optimizer = first

        def step(indices: list[int], totals: Any) -> bool:
            first.backward(begun.loss(indices, totals), weighted=True, others=[second])
            return bool(first.step() + second.step())

        begun.train(len(SIZES), step)
        return begun.run.weights()

    expected = plain({"tokens": TOKENS, "rows": ROWS}, batches_of(SIZES))
    for weights in run_ranks(train, 2):
        assert_equal(weights, expected)


@given(seed=st.integers(0, 10_000), world=st.integers(1, 3))
@examples(60)
def test_batches_that_arrive_have_counts(seed: int, world: int) -> None:
    case = replace(Arriving.drawn(seed, world), loss="sum of rows")

    def own(microbatch: Any) -> dict[str, Tensor]:
        return {"tokens": microbatch[2].double(), "rows": torch.ones(len(microbatch[0])).double()}

    def train(backend: vbs.backend.Backend) -> list[Array]:
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.02)
        optimizer = vbs.ConstantOptimizer(inner, case.source(backend), backend=backend)
        read = case.brought(backend.world.rank)

        def counts(microbatch: Any) -> dict[str, Tensor]:
            return {name: number.sum() for name, number in own(microbatch).items()}

        for update in vbs.updates(read, optimizer, counts=counts):
            for microbatch in update:
                sums = terms(model(microbatch[0]), microbatch[1], own(microbatch))
                loss = torch.stack([total / update.counts[name] for name, total in sums.items()]).sum()
                optimizer.backward(loss, weighted=True)
                optimizer.step()
        return [parameter.detach().numpy() for parameter in model.parameters()]

    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.02)
    for batch in map(whole, case.batches()):
        numbers = {name: number for name, number in own(batch).items() if number.sum()}
        if numbers:
            inner.zero_grad()
            sums = terms(model(batch[0]), batch[1], numbers)
            torch.stack([total / numbers[name].sum() for name, total in sums.items()]).sum().backward()
            inner.step()
    for weights in run_ranks(train, world):
        assert_equal(weights, [parameter.detach().numpy() for parameter in model.parameters()], 1e-11)


def test_a_controller_may_choose_the_batch_sizes() -> None:
    sizes = vbs.AdaptiveTrace(vbs.adaptive.ConstantBatch(12), start=6, every=2, delay=4)
    begun = divided({"tokens": TOKENS, "rows": ROWS}, sizes)  # type: ignore[arg-type]
    begun.train(10)
    assert begun.run.optimizer.sampler.plan.trace.batch_size(9) == 12


# A step that starts over. ---------------------------------------------------------------------------------------------


def test_a_rank_that_has_discarded_a_step_alone_makes_the_same_update() -> None:
    """The others have its counts, and do not sum again."""

    def train(backend: vbs.backend.Backend) -> list[Array]:
        begun = usual(backend=backend)
        if backend.world.rank == 1:
            for update in begun.updates():
                if begun.run.optimizer.updates == 2:
                    next(iter(update))
                    break
                for indices in update:
                    begun.step(indices, update.counts)
            begun.run.optimizer.discard_step()
        begun.train(len(SIZES))
        return begun.run.weights()

    expected = plain({"tokens": TOKENS, "rows": ROWS}, batches_of(SIZES))
    for weights in run_ranks(train, 2):
        assert_equal(weights, expected)


def test_an_update_that_is_read_again_must_count_the_same() -> None:
    def train(backend: vbs.backend.Backend) -> str:
        begun = usual(backend=backend)
        next(iter(begun.updates()))
        begun.run.optimizer.discard_step()
        begun.numbers = {"tokens": TOKENS * 2, "rows": ROWS}
        with pytest.raises(RuntimeError) as caught:
            next(iter(begun.updates()))
        begun.numbers = {"tokens": TOKENS, "rows": ROWS}
        begun.run.optimizer.load_state_dict(begun.run.optimizer.state_dict())
        begun.numbers = {"tokens": TOKENS * 2, "rows": ROWS}
        next(iter(begun.updates()))  # every rank has loaded a state
        return str(caught.value)

    for message in run_ranks(train, 2):
        assert "an update that is read again must count the same" in message


# Mistakes. ------------------------------------------------------------------------------------------------------------


def skipping(begun: Divided) -> None:
    for update in begun.updates():
        for indices in itertools.islice(update, len(update) - 1):
            begun.step(indices, update.counts)


def repeating(begun: Divided) -> None:
    for update in begun.updates():
        indices = next(iter(update))
        begun.step(indices, update.counts)
        begun.step(indices, update.counts)


def losing(begun: Divided) -> None:
    """A loader that leaves out a microbatch of each update."""
    loader: Any = itertools.islice(begun.run.sampler, 1, None)
    for update in vbs.updates(loader, begun.run.optimizer, counts=begun.counts):
        for indices in update:
            begun.step(indices, update.counts)


def unweighted(begun: Divided) -> None:
    update = next(iter(begun.updates()))
    begun.run.optimizer.backward(begun.loss(next(iter(update)), update.counts))


def by_torch(begun: Divided) -> None:
    update = next(iter(begun.updates()))
    begun.loss(next(iter(update)), update.counts).backward()  # type: ignore[no-untyped-call]
    begun.run.optimizer.step()


def counted_twice(begun: Divided) -> None:
    update = next(iter(begun.updates()))
    begun.run.optimizer.backward(begun.loss(next(iter(update)), update.counts), weighted=True)
    begun.run.optimizer.step(count=3)


def without_counts(begun: Divided) -> None:
    for update in vbs.updates(begun.run.sampler, begun.run.optimizer):  # type: ignore[arg-type]
        begun.run.optimizer.backward(begun.run.loss(next(iter(update))), weighted=True)


def reading_counts(begun: Divided) -> None:
    next(iter(vbs.updates(begun.run.sampler, begun.run.optimizer))).counts  # type: ignore[arg-type]  # noqa: B018


def reading_others(begun: Divided) -> None:
    run = begun.run
    next(iter(vbs.updates(run.sampler, run.optimizer, counts=lambda _: {"b": 1, "a": 2}))).counts["typo"]  # type: ignore[arg-type]


def returning(*results: Any) -> Callable[[Divided], object]:
    """A function that returns something else for each microbatch."""
    found = iter(results)
    return lambda begun: next(iter(vbs.updates(begun.run.sampler, begun.run.optimizer, counts=lambda _: next(found))))  # type: ignore[arg-type, call-overload]


def passing(counts: Any = len, ahead: int = 0) -> Callable[[Divided], object]:
    return lambda begun: vbs.updates(begun.run.sampler, begun.run.optimizer, ahead, counts=counts)  # type: ignore[arg-type]


ONE = {"tokens": 1}
MISTAKES: dict[str, tuple[Callable[[Divided], object], type[Exception], str]] = {
    "a microbatch is skipped": (skipping, RuntimeError, "every microbatch of an update must reach"),
    "a microbatch is repeated": (repeating, RuntimeError, "must be called once for each microbatch that vbs.updates"),
    "the loader loses one": (losing, RuntimeError, "the loader must yield the microbatches of the optimizer's sampler"),
    "a loss is not weighted": (unweighted, ValueError, "but backward.. came without weighted=True; call"),
    "a loss of torch": (by_torch, RuntimeError, "but step.. came without optimizer.backward..; call"),
    "two kinds of counts": (counted_twice, RuntimeError, "has count= in an update of vbs.updates.counts=.; omit count"),
    "nothing is counted": (without_counts, ValueError, "weighted=True. needs a loss .* but this update has none; loop"),
    "counts are read that are none": (
        reading_counts,
        RuntimeError,
        "update.counts needs counts, but vbs.updates.. has",
    ),
    "another count is read": (reading_others, KeyError, "a name that counts= returns, got 'typo'; use a, b"),
    "no dict": (returning(3), TypeError, "must return a dict from names to numbers, got 3 .int.; return a dict such"),
    "no names": (returning({}), ValueError, "must return a dict from names to numbers, got an empty one; return"),
    "no string": (returning({1: 2}), TypeError, "whose keys are strings, got 1 .int.; return"),
    "other names": (returning(ONE, {"rows": 1}), ValueError, "same names .* got tokens, then rows; return 0"),
    "fewer names": (returning({**ONE, "rows": 1}, ONE), ValueError, "got rows, tokens, then tokens; return 0"),
    "no number": (returning({"tokens": "9"}), TypeError, "the count 'tokens' of a microbatch must be .* got '9'"),
    "a bool": (returning({"tokens": torch.tensor(True)}), TypeError, "got True .bool.; count"),
    "a negative number": (returning({"tokens": -1}), ValueError, "'tokens' .* finite number >= 0, got -1; count its"),
    "not finite": (returning({"tokens": torch.tensor(torch.nan)}), ValueError, "finite number >= 0, got nan; count"),
    "several": (returning({"tokens": torch.ones(2)}), TypeError, "got a tensor of shape .2,.; pass its .sum"),
    "no function": (passing(ONE), TypeError, "counts must be a function of a microbatch, got .*; pass one"),
    "read ahead": (passing(ahead=1), ValueError, "with counts= ahead must be 0, got 1; read no update"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_said_in_one_sentence(name: str) -> None:
    call, kind, pattern = MISTAKES[name]
    begun = usual()
    check(Mistake(lambda: call(begun), kind, pattern))


@pytest.mark.parametrize("kind", [vbs.AdaScaleOptimizer, vbs.InvariantAdamRuleOptimizer])
def test_rules_that_compare_microbatches_cannot_have_counts(kind: type[vbs.CustomOptimizer]) -> None:
    run = training(kind, SIZES)
    with pytest.raises(ValueError, match=r"counts= needs a rule that does not measure .*; choose"):
        vbs.updates(run.sampler, run.optimizer, counts=len)  # type: ignore[arg-type, return-value]


def test_a_world_that_may_change_cannot_have_counts() -> None:
    run = training(vbs.ConstantOptimizer, SIZES, backend=ElasticThreads(Script(1, []), 0))
    with pytest.raises(ValueError, match=r"counts= needs ranks that stay, got an elastic backend; divide by one count"):
        vbs.updates(run.sampler, run.optimizer, counts=len)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("updates", [0, 6], ids=["at first", "in the second epoch"])
def test_ranks_that_differ_in_names_raise(updates: int) -> None:
    def train(backend: vbs.backend.Backend) -> str:
        begun = usual(backend=backend)
        begun.train(updates)
        if backend.world.rank == 1:
            begun.numbers = {"tokens": TOKENS}
        with pytest.raises(RuntimeError) as caught:
            begun.train(updates + 1)
        return str(caught.value)

    for message in run_ranks(train, 2):
        assert "must return the same names on every rank, but rank 0 has rows, tokens and rank 1 has tokens" in message


def test_a_rank_that_counts_nothing_at_all_raises_on_all() -> None:
    def train(backend: vbs.backend.Backend) -> str:
        begun = usual(backend=backend)
        train = begun.run.run if backend.world.rank else begun.train
        with pytest.raises(RuntimeError) as caught:
            train(1)
        return str(caught.value)

    for message in run_ranks(train, 2):
        assert "all ranks must make the same calls in the same order" in message
