"""An exception in `step()` that the loop survives: nothing goes on by accident, and each way out works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import SIZES, Training, assert_equal, training, twin
from variable_batch_size.backend import LocalBackend
from variable_batch_size.optim.step_gradient import StepGradient

BEFORE = (
    r"step \d was interrupted by an exception; call optimizer\.discard_step\(\) and iterate the loader again, or load"
)
AFTER = (
    r"step \d was interrupted by an exception in the inner optimizer's step, or in a hook of it, so that the weights "
    r"may be half updated; restore the states of model and optimizer, as of the last checkpoint, or create both again$"
)


class PlantedError(Exception):
    """An exception that a test has planted."""


class Trap:
    """Raises at the n-th call of the function that it replaces, before or after it."""

    def __init__(self, function: Callable[..., Any], at: int, kind: type[BaseException], late: bool) -> None:
        self.function, self.left, self.kind, self.late = function, at, kind, late

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        result = self.function(*args, **kwargs) if self.left or self.late else None
        if self.left == 0:
            raise self.kind
        return result


# Where a step may be interrupted, before the inner step and in it or after it.
EARLY = ["the accumulation", "the all-reduce", "the rule", "a pre-hook"]
LATE = ["the inner step", "a post-hook"]


def plant(monkeypatch: pytest.MonkeyPatch, run: Training, where: str, at: int, kind: type[BaseException]) -> None:
    late = at % 2 == 0

    def trap(function: Callable[..., Any], number: int = at) -> Trap:
        return Trap(function, number, kind, late)

    optimizer, updates = run.optimizer, 1 + at % 3
    if where == "the accumulation":
        add = trap(StepGradient.add)
        monkeypatch.setattr(StepGradient, "add", lambda *args, **rest: add(*args, **rest))
    elif where == "the all-reduce":
        monkeypatch.setattr(LocalBackend, "all_reduce_sum", trap(lambda *_: None, updates))
    elif where == "the rule":
        rule = trap(run.optimizer.rules[0], updates)
        optimizer._updater.rules = (rule,)
    elif where == "a pre-hook":
        optimizer.register_step_pre_hook(trap(lambda *_: None, updates))
    elif where == "the inner step":
        monkeypatch.setattr(optimizer.inner, "step", trap(optimizer.inner.step, updates))
    else:
        optimizer.register_step_post_hook(trap(lambda *_: None, updates))


OTHER_CALLS: list[Callable[[Training], Any]] = [
    lambda run: run.optimizer.step(),
    lambda run: run.optimizer.state_dict(),
    lambda run: run.optimizer.set_epoch(0),
    lambda run: run.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]}),
]


@pytest.mark.slow("trains for each interrupted line")
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:Resumed with other settings. rule was .*Trap")
@given(
    where=st.sampled_from(EARLY + LATE),
    at=st.integers(1, 8),
    kind=st.sampled_from([PlantedError, KeyboardInterrupt, torch.OutOfMemoryError]),
    by_state=st.booleans(),
    options=st.sampled_from([{}, {"noise": "microbatches"}, {"noise": "differenced"}]),
)
@examples(120)
def test_nothing_goes_on_and_the_ways_out_lead_on(
    where: str, at: int, kind: type[BaseException], by_state: bool, options: dict[str, Any]
) -> None:
    run = training(**options)
    states = {0: copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))}
    run.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch, run, where, at, kind)
        with pytest.raises(kind):  # noqa: PT012
            for end in range(1, 5):
                run.iterate(end)
                states[end] = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    late = where in LATE or (where == "a pre-hook")
    before = run.optimizer.updates, run.optimizer.samples
    for call in OTHER_CALLS:
        with pytest.raises(RuntimeError, match=AFTER if late else BEFORE):
            call(run)
    assert (run.optimizer.updates, run.optimizer.samples) == before
    assert run.optimizer.inside_step
    if where == "the rule":
        run.optimizer._updater.rules = (vbs.rules.LinearRule(),)
    if late or by_state:
        if late:
            with pytest.raises(RuntimeError, match=AFTER):
                run.optimizer.discard_step()
        model, optimizer = states[run.optimizer.updates]
        run.model.load_state_dict(model)
        run.optimizer.load_state_dict(optimizer)
    else:
        run.optimizer.discard_step()
    run.iterate(4)
    assert (run.optimizer.updates, run.optimizer.samples) == (4, 50)
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]))


def test_a_checkpoint_is_not_saved_of_an_interrupted_step(tmp_path: Any) -> None:
    run = training()
    checkpoint = vbs.Checkpoint(tmp_path, model=run.model, optimizer=run.optimizer, every=1)
    run.iterate(2)
    run.optimizer.register_step_post_hook(Trap(lambda *_: None, 1, PlantedError, False))
    with pytest.raises(PlantedError):
        run.iterate(3)
    with pytest.raises(RuntimeError, match=AFTER):
        checkpoint.save()
    assert not checkpoint.step()
    checkpoint.close()
    assert checkpoint.latest is None


def test_a_microbatch_that_was_read_for_a_refused_step_is_lost() -> None:
    """Otherwise the second one of the iteration would be taken for the first."""
    run = training()
    batches = iter(run.sampler)
    run.loss(next(batches)).backward()
    with pytest.raises(ValueError, match="needs a loss that is summed"):
        run.optimizer.step(count=3)
    other = iter(run.sampler)
    run.loss(next(other)).backward()
    with pytest.raises(RuntimeError, match=BEFORE):
        run.optimizer.step()
    run.optimizer.discard_step()
    run.loss(next(other)).backward()
    with pytest.raises(RuntimeError, match="start a new loop over the loader"):
        run.optimizer.step()
    run.optimizer.discard_step()
    run.iterate(4)
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]))


def test_an_error_of_the_tracker_leaves_the_update_made() -> None:
    class Full(vbs.Tracker):  # type: ignore[misc]  # final
        def log(self, update: int, scalars: Any) -> None:
            raise OSError("the disk is full")

    run = training(tracker=Full(progress=False), log_steps=2)
    with pytest.raises(OSError, match="full"):
        run.iterate(2)
    assert run.optimizer.updates == 2
    assert run.optimizer.state_dict()["vbs"]["sampler"]["step"] == 2
