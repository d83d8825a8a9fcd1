"""`updates(counts=)`: a loss whose terms have several denominators, which the ranks sum before the first forward."""

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import variable_batch_size as vbs
from helpers.arrivals import Arriving, whole
from helpers.denominators import DATASET, Divided, batches_of, plain, terms
from helpers.elastic_threads import ElasticThreads, Script
from helpers.mistakes import Mistake, check
from helpers.properties import examples
from helpers.reference import assert_equal, network, training
from variable_batch_size.backend.sent_numbers import SentNumbers
from variable_batch_size.testing import run_ranks

TOKENS = torch.tensor([3.0, 1, 4, 0, 5, 9, 0, 6, 5, 3] * 5, dtype=torch.float64)
ROWS = torch.ones(DATASET, dtype=torch.float64)
SIZES = [9, 4, 17, 1, 12]


def divided(numbers, sizes, **options):
    """A training in which each sample counts these numbers."""
    options = {"ref_batchsize": None, "dataset_size": DATASET, **options}
    return Divided(training(vbs.ConstantOptimizer, sizes, **options), numbers)


def usual(**options):
    return divided({"tokens": TOKENS, "rows": ROWS}, SIZES, **options)


def test_the_totals_are_those_of_all_ranks_and_take_one_sum_more():
    def train(backend):
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


@pytest.mark.parametrize("sampling", [{}, {"reproducible": True}], ids=["", "reproducible"])
@pytest.mark.parametrize("numbers", [{"rows": ROWS}, {"tokens": TOKENS, "rows": ROWS}], ids=" ".join)
def test_a_replay_needs_no_backward(sampling, numbers):
    """Nor does a rank that has nothing else in an update: its weights are those of the others."""
    sizes = [2, 5, 1, 3, 2]

    def train(backend):
        begun = divided(numbers, sizes, backend=backend, minibatch_size=2, sampling=sampling)

        def step(indices, totals):
            counts = begun.run.optimizer.microbatch.samples > 0
            return begun.step(indices, totals) if counts else begun.run.optimizer.step()

        begun.train(len(sizes), step)
        return begun.run.weights()

    for weights in run_ranks(train, 2):
        assert_equal(weights, plain(numbers, batches_of(sizes)), 1e-9)


@pytest.mark.parametrize("on_host", [True, False])
def test_totals_are_tensors_where_the_host_does_not_read(on_host):
    """On a device that compiles, an update without any count is made with a gradient of 0."""
    numbers = {"tokens": TOKENS, "rows": ROWS}
    backend = vbs.backend.LocalBackend(sent=SentNumbers("cpu"))
    begun = divided(numbers, SIZES, backend=backend)
    if on_host:
        own = begun.counts
        begun.counts = lambda indices: {name: number.item() for name, number in own(indices).items()}
    assert begun.train(len(SIZES)) == [True] * len(SIZES)
    assert_equal(begun.run.weights(), plain(numbers, batches_of(SIZES)))
    update = next(iter(begun.updates()))
    assert all(isinstance(total, Tensor) and total.dtype == torch.float64 for total in update.counts.values())
    empty = divided({"tokens": TOKENS * 0}, [9], backend=backend, hyperparameters={"lr": 0.02})
    before = [weight.copy() for weight in empty.run.weights()]
    assert empty.train(1) == [True]
    assert_equal(empty.run.weights(), before, 0)


def test_optimizers_of_one_loss_share_its_denominators():
    def train(backend):
        begun = usual(backend=backend)
        matrices = [one for one in begun.run.model.parameters() if one.ndim == 2]
        vectors = [one for one in begun.run.model.parameters() if one.ndim != 2]
        how = {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.01}
        first, second = (
            vbs.ConstantOptimizer(torch.optim.SGD(own, **how), begun.run.sampler, backend=backend)
            for own in (matrices, vectors)
        )
        begun.run.optimizer = first

        def step(indices, totals):
            first.backward(begun.loss(indices, totals), divided=True, others=[second])
            return bool(first.step() + second.step())

        begun.train(len(SIZES), step)
        return begun.run.weights()

    expected = plain({"tokens": TOKENS, "rows": ROWS}, batches_of(SIZES))
    for weights in run_ranks(train, 2):
        assert_equal(weights, expected)


@given(seed=st.integers(0, 10_000), world=st.integers(1, 3))
@examples(60)
def test_batches_that_arrive_have_counts(seed, world):
    case = replace(Arriving.drawn(seed, world), loss="sum of rows")

    def own(microbatch):
        return {"tokens": microbatch[2].double(), "rows": torch.ones(len(microbatch[0])).double()}

    def train(backend):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.02)
        optimizer = vbs.ConstantOptimizer(inner, case.source(backend), backend=backend)
        read = case.brought(backend.world.rank)

        def counts(microbatch):
            return {name: number.sum() for name, number in own(microbatch).items()}

        for update in vbs.updates(read, optimizer, counts=counts):
            for microbatch in update:
                sums = terms(model(microbatch[0]), microbatch[1], own(microbatch))
                loss = torch.stack([total / update.counts[name] for name, total in sums.items()]).sum()
                optimizer.backward(loss, divided=True)
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


# A step that starts over. ---------------------------------------------------------------------------------------------


def test_a_rank_that_has_discarded_a_step_alone_makes_the_same_update():
    """The others have its counts, and do not sum again."""

    def train(backend):
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


def test_an_update_that_is_read_again_must_count_the_same():
    def train(backend):
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
        found = re.search(
            r"update 0 was read again and counts \{'rows': \d\.0, 'tokens': (\d+)\.0\} on this rank, but the other "
            r"ranks have the totals with \{'rows': \d\.0, 'tokens': (\d+)\.0\}; let the counts depend on the samples",
            message,
        )
        assert found is not None
        assert int(found[1]) == 2 * int(found[2])


# Mistakes. ------------------------------------------------------------------------------------------------------------


def wrong(times, loader=iter):
    """A loop that calls `step()` this number of times for a microbatch, given its number and that of all."""

    def loop(begun):
        for update in vbs.updates(loader(begun.run.sampler), begun.run.optimizer, counts=begun.counts):
            for number, indices in enumerate(update):
                for _ in range(times(number, len(update))):
                    begun.step(indices, update.counts)

    return loop


def first(call, *, counts=True):
    """A loop that does something with the loss of the first microbatch."""

    def loop(begun):
        sampler = begun.run.sampler
        update = next(iter(begun.updates() if counts else vbs.updates(sampler, begun.run.optimizer)))
        indices = next(iter(update))
        call(begun.run.optimizer, begun.loss(indices, update.counts) if counts else begun.run.loss(indices))

    return loop


def by_torch(optimizer, loss):
    loss.backward()
    optimizer.step()


def counted_twice(optimizer, loss):
    optimizer.backward(loss, divided=True)
    optimizer.step(count=3)


def passing(counts=len, ahead=0):
    return lambda begun: vbs.updates(begun.run.sampler, begun.run.optimizer, ahead, counts=counts)


def returning(*results):
    """A function that returns something else for each microbatch."""
    found = iter(results)
    return lambda begun: next(iter(passing(lambda _: next(found))(begun)))


ONE = {"tokens": 1}
MISTAKES = [
    (wrong(lambda number, last: number + 1 < last), RuntimeError, "update 0 is not complete, but the loop asks"),
    (wrong(lambda *_: 2), RuntimeError, r"needs a microbatch, but update 0 has yielded \d yet"),
    (
        wrong(lambda *_: 1, lambda sampler: itertools.islice(sampler, 1, None)),
        RuntimeError,
        "the loader must yield the sampler's microbatches, but it ended with",
    ),
    (first(vbs.CustomOptimizer.backward), ValueError, "but backward.. came without divided=True; call"),
    (first(by_torch), RuntimeError, "but step.. came without optimizer.backward..; call"),
    (first(counted_twice), RuntimeError, "has count= in an update of vbs.updates.counts=.; omit count"),
    (
        first(lambda optimizer, loss: optimizer.backward(loss, divided=True), counts=False),
        ValueError,
        "divided=True. needs a loss .* but this update has none; loop",
    ),
    (
        lambda begun: next(iter(passing(None)(begun))).counts,
        RuntimeError,
        "update.counts needs counts, but vbs.updates.. has",
    ),
    (
        lambda begun: next(iter(passing(lambda _: {"b": 1, "a": 2})(begun))).counts["typo"],
        KeyError,
        "a name that counts= returns, got 'typo'; use a, b",
    ),
    (returning(3), TypeError, "must return a dict from names to numbers, got 3 .int.; return a dict such"),
    (returning({}), ValueError, "must return a dict from names to numbers, got an empty one; return"),
    (returning({1: 2}), TypeError, "whose keys are strings, got 1 .int.; return"),
    (returning(ONE, {"rows": 1}), ValueError, "same names .* got tokens, then rows; return 0"),
    (returning({**ONE, "rows": 1}, ONE), ValueError, "got rows, tokens, then tokens; return 0"),
    (returning({"tokens": "9"}), TypeError, "the count 'tokens' of a microbatch must be .* got '9'"),
    (returning({"tokens": torch.tensor(torch.nan)}), ValueError, "finite number >= 0, got nan; count"),
    (returning({"tokens": torch.ones(2)}), TypeError, "got a tensor of shape .2,.; pass its .sum"),
    (passing(ONE), TypeError, "counts must be a function of a microbatch, got .*; pass one"),
    (passing(ahead=1), ValueError, "with counts= ahead must be 0, got 1; read no update"),
]


@pytest.mark.parametrize(("call", "kind", "pattern"), MISTAKES, ids=[pattern for *_, pattern in MISTAKES])
def test_mistakes_are_said_in_one_sentence(call, kind, pattern):
    check(Mistake(lambda: call(usual()), kind, pattern))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (vbs.AdaScaleOptimizer, {}, r"counts= needs a rule that does not measure .*; choose"),
        (vbs.InvariantAdamRuleOptimizer, {}, r"counts= needs a rule that does not measure .*; choose"),
        (
            vbs.ConstantOptimizer,
            {"backend": ElasticThreads(Script(1, []), 0)},
            "counts= needs ranks that stay, got an elastic backend; divide by one count",
        ),
    ],
)
def test_what_cannot_have_counts(kind, options, message):
    run = training(kind, SIZES, **options)
    with pytest.raises(ValueError, match=message):
        vbs.updates(run.sampler, run.optimizer, counts=len)


@pytest.mark.parametrize("updates", [0, 6], ids=["at first", "in the second epoch"])
def test_ranks_that_differ_in_names_raise(updates):
    def train(backend):
        begun = usual(backend=backend)
        begun.train(updates)
        if backend.world.rank == 1:
            begun.numbers = {"tokens": TOKENS}
        with pytest.raises(RuntimeError) as caught:
            begun.train(updates + 1)
        return str(caught.value)

    for message in run_ranks(train, 2):
        assert "must return the same names on every rank, but rank 0 has rows, tokens and rank 1 has tokens" in message


def test_a_rank_that_counts_nothing_at_all_raises_on_all():
    def train(backend):
        begun = usual(backend=backend)
        train = begun.run.run if backend.world.rank else begun.train
        with pytest.raises(RuntimeError) as caught:
            train(1)
        return str(caught.value)

    for message in run_ranks(train, 2):
        assert "all ranks must make the same calls in the same order" in message
