"""`step(count=)`: the gradient of the sum of the losses over the sum of the counts, for example of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import Training, assert_equal, training
from helpers.tokens import DATASET, batches_of, plain
from variable_batch_size.backend.sent_numbers import SentNumbers
from variable_batch_size.testing import run_ranks


@dataclass(frozen=True)
class Texts:
    """A training whose samples have several tokens each, or none."""

    run: Training
    lengths: Tensor  # (samples,)

    def sums(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """The loss summed over the tokens of these rows, and their number."""
        run, lengths = self.run, self.lengths[indices]
        of_token = (run.model(run.x[indices]) - run.target[indices]).square().sum(dim=1)
        return (of_token * lengths).sum(), lengths.sum()

    def train(self, updates: int, *, on_host: bool = False) -> list[bool]:
        results: list[bool] = []
        run = self.run
        while len(results) < updates:
            run.sampler.set_epoch(run.optimizer.epoch)
            run.optimizer.set_epoch(run.optimizer.epoch)
            for indices in run.sampler:
                due = run.optimizer.microbatch
                loss, tokens = self.sums(indices)
                loss.backward()
                run.optimizer.log(loss=loss / tokens, ones=1.0)
                result = run.optimizer.step(count=int(tokens) if on_host else tokens)
                if due.ends_step:
                    results.append(result)
                    if len(results) == updates:
                        break
        return results


def texts(lengths: list[int], sizes: list[int], **options: Any) -> Texts:
    run = training(vbs.ConstantOptimizer, sizes, reduction="sum", ref_batchsize=None, dataset_size=DATASET, **options)
    return Texts(run, torch.tensor(lengths, dtype=torch.float64))


ragged = st.lists(st.one_of(st.just(0), st.integers(0, 30)), min_size=DATASET, max_size=DATASET)
some_sizes = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@given(
    lengths=ragged,
    sizes=some_sizes,
    world=st.integers(1, 4),
    minibatch_size=st.integers(1, 9),
    fixed_shape=st.booleans(),
    max_grad_norm=st.sampled_from([None, 0.5]),
    on_host=st.booleans(),
)
@examples(120)
def test_an_update_is_that_of_the_mean_over_all_tokens(
    lengths: list[int],
    sizes: list[int],
    world: int,
    minibatch_size: int,
    fixed_shape: bool,
    max_grad_norm: float | None,
    on_host: bool,
) -> None:
    """Also if a microbatch, a rank or a whole step has no token; such a step changes nothing."""

    def train(backend: vbs.backend.Backend) -> tuple[list[bool], list[Any], dict[str, Tensor]]:
        options: dict[str, Any] = {"max_grad_norm": max_grad_norm}
        begun = texts(
            lengths,
            sizes,
            minibatch_size=minibatch_size,
            backend=backend,
            sampling={"fixed_shape": fixed_shape},
            **options,
        )
        return begun.train(len(sizes), on_host=on_host), begun.run.weights(), begun.run.optimizer.logged

    batches = batches_of(sizes)
    expected = plain(lengths, batches, max_grad_norm)
    for results, weights, logged in run_ranks(train, world):
        assert results == [sum(lengths[i] for i in batch) > 0 for batch in batches]
        assert_equal(weights, expected, 1e-11)
        if results[-1]:
            assert logged["ones"].item() == pytest.approx(1)


def test_a_mean_of_means_is_another_gradient() -> None:
    """The error that this is for: one long and one short text in a microbatch each."""
    lengths = [1, 30] * (DATASET // 2)
    begun = texts(lengths, [8, 8], minibatch_size=1)
    begun.train(2)
    wrong = training(vbs.ConstantOptimizer, [8, 8], ref_batchsize=None, minibatch_size=1)
    run = Texts(wrong, begun.lengths)
    for indices in wrong.sampler:
        loss, tokens = run.sums(indices)
        (loss / tokens).backward()
        wrong.optimizer.step()
        if wrong.optimizer.updates == 2:
            break
    assert_equal(begun.run.weights(), plain(lengths, batches_of([8, 8])), 1e-12)
    assert max(np.abs(a - b).max() for a, b in zip(begun.run.weights(), wrong.weights(), strict=True)) > 1e-3


def test_the_mean_loss_of_the_tokens_is_logged() -> None:
    lengths = [1, 7, 0, 5, 2] * 10
    begun = texts(lengths, [9], minibatch_size=2)
    (batch,) = batches_of([9])
    loss, tokens = begun.sums(batch)
    begun.train(1)
    assert begun.run.optimizer.logged["loss"].item() == pytest.approx((loss / tokens).item())
    assert begun.run.optimizer.count is not None
    assert begun.run.optimizer.count.item() == tokens


def test_an_update_without_tokens_has_no_norm() -> None:
    begun = texts([0] * DATASET, [4], minibatch_size=2, max_grad_norm=1.0)
    assert begun.train(1) == [False]
    assert begun.run.optimizer.grad_norm is not None
    assert begun.run.optimizer.grad_norm.isnan()


def test_an_update_without_tokens_changes_nothing_where_the_host_does_not_read() -> None:
    """On a device that compiles, the update is made, with a gradient of 0, and the next one counts again."""
    backend = vbs.backend.LocalBackend(sent=SentNumbers("cpu"))
    begun = texts([0] * DATASET, [4], minibatch_size=2, backend=backend, hyperparameters={"lr": 0.02})
    before = [weight.copy() for weight in begun.run.weights()]
    assert begun.train(1) == [True]
    assert_equal(begun.run.weights(), before, 0)
    begun.lengths.fill_(1)
    begun.train(1)
    assert all(np.isfinite(weight).all() for weight in begun.run.weights())
    assert not np.array_equal(begun.run.weights()[0], before[0])


def test_a_grad_scaler_passes_the_count_on() -> None:
    lengths = [3, 1, 4, 1, 5] * 10
    begun = texts(lengths, [9, 12], minibatch_size=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for indices in begun.run.sampler:
        loss, tokens = begun.sums(indices)
        begun.run.optimizer.backward(loss, scaler=scaler)
        scaler.step(begun.run.optimizer, count=tokens)
        scaler.update()
        if begun.run.optimizer.updates == 2:
            break
    assert_equal(begun.run.weights(), plain(lengths, batches_of([9, 12])), 1e-11)


# ------------------------------------------------------------------------------------------------------------- mistakes


def attempt(begun: Texts, **arguments: Any) -> bool:
    loss, _ = begun.sums(next(iter(begun.run.sampler)))
    loss.backward()
    return begun.run.optimizer.step(**arguments)


@pytest.mark.parametrize(
    ("count", "error", "found"),
    [
        ("9", TypeError, "got '9'"),
        (-1, ValueError, "got -1"),
        (float("nan"), ValueError, "got nan"),
        (torch.tensor(-2), ValueError, "got -2"),
        (torch.ones(2), TypeError, r"shape \(2,\)"),
        (True, TypeError, "got True"),
    ],
)
def test_rejects_a_wrong_count(count: Any, error: type[Exception], found: str) -> None:
    with pytest.raises(error, match=rf"count must be .*{found}"):
        attempt(texts([1] * DATASET, [9]), count=count)


def test_rejects_a_mean_loss_and_a_measured_noise() -> None:
    run = training(vbs.ConstantOptimizer, [9], ref_batchsize=None)
    with pytest.raises(ValueError, match=r"step\(count=\) needs a loss that is summed .* got reduction='mean'; pass"):
        attempt(Texts(run, torch.ones(DATASET)), count=3)
    run = training(vbs.AdaScaleOptimizer, [9], reduction="sum")
    with pytest.raises(ValueError, match=r"step\(count=\) needs gradients that nothing compares"):
        attempt(Texts(run, torch.ones(DATASET)), count=3)


@pytest.mark.parametrize("first", [True, False])
def test_some_steps_with_a_count_and_others_without_raise(first: bool) -> None:
    begun = texts([1] * DATASET, [9])
    batches = iter(begun.run.sampler)
    for counted in (first, not first):
        loss, tokens = begun.sums(next(batches))
        loss.backward()
        options = {"count": tokens} if counted else {}
        if counted == first:
            begun.run.optimizer.step(**options)
            continue
        with pytest.raises(
            RuntimeError, match=rf"has a count, or none, but this one has {'one' if counted else 'none'}"
        ):
            begun.run.optimizer.step(**options)


def test_a_resumed_run_that_forgets_the_counts_raises() -> None:
    begun = texts([1] * DATASET, [4, 4])
    begun.train(1)
    resumed = texts([1] * DATASET, [4, 4])
    resumed.run.optimizer.load_state_dict(begun.run.optimizer.state_dict())
    with pytest.raises(RuntimeError, match="or none, but this one has none"):
        attempt(resumed)


def test_a_count_in_the_place_of_the_closure_raises() -> None:
    with pytest.raises(TypeError, match=r"closure must be a function, got .*; pass a count as step\(count=...\)"):
        attempt(texts([1] * DATASET, [4]), closure=torch.tensor(3))


def test_ranks_that_do_not_agree_on_counts_raise() -> None:
    def train(backend: vbs.backend.Backend) -> str:
        begun = texts([1] * DATASET, [1], backend=backend)
        try:
            attempt(begun, **({"count": 1} if backend.world.rank else {}))
        except RuntimeError as error:
            return str(error)
        return ""

    for message in run_ranks(train, 2):
        assert "all ranks must train with the same count= in step()" in message
