"""An interrupt at any line of `step()`: before the commit nothing has happened, after it everything has."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.interrupts import Interrupt
from helpers.properties import examples
from helpers.reference import Training, assert_equal, training

HALF_UPDATED = "interrupted by an exception in the inner optimizer's step"
SIZES = (8, 3, 9)
UPDATES = 3
LINES = 10**9  # more than any step has
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.5, "rule": vbs.rules.RootRule()},
    "noise": {"noise": "microbatches"},
    "differenced": {"noise": "differenced"},
}


class Trial:
    """A training with metrics, of which one call of `step()` is interrupted."""

    def __init__(self, options: dict[str, Any]) -> None:
        kind = vbs.CustomOptimizer if "rule" in options else vbs.LinearRuleOptimizer
        self.run: Training = training(kind, SIZES, dataset_size=400, **options)
        self.metrics = vbs.Accumulator(self.run.optimizer)
        self.states: dict[int, Any] = {}
        self.calls = 0
        self._keep()

    def _keep(self) -> None:
        run = self.run
        state = run.model.state_dict(), run.optimizer.state_dict(), self.metrics.state_dict()
        self.states[run.optimizer.updates] = copy.deepcopy(state)

    def train(self, call: int = 0, interrupt: Interrupt | None = None) -> None:
        run, optimizer = self.run, self.run.optimizer
        for indices in run.sampler:
            loss = run.loss(indices)
            loss.backward()
            self.metrics.add(loss=loss.detach())
            self.calls += 1
            if self.calls == call and interrupt is not None:
                with interrupt:
                    optimizer.step()
            else:
                optimizer.step()
            if not optimizer.inside_step:
                self._keep()
            if optimizer.updates == UPDATES:
                return

    def recover(self, by_state: bool) -> None:
        run, optimizer = self.run, self.run.optimizer
        here, samples = optimizer.updates, optimizer.samples
        assert (run.sampler.position.step, run.sampler.place.samples) == (here, samples)
        assert self.metrics.read()["samples"] == samples
        if not by_state:
            try:
                optimizer.discard_step()
            except RuntimeError as error:
                assert HALF_UPDATED in str(error)  # noqa: PT017
                by_state = True
        if by_state:
            model, state, metrics = self.states.get(here) or (None, None, None)
            if model is None:  # the update was made
                assert not optimizer.inside_step
                self._keep()
                model, state, metrics = self.states[here]
            run.model.load_state_dict(model)
            optimizer.load_state_dict(state)
            self.metrics.load_state_dict(metrics)
        assert (optimizer.updates, optimizer.samples, optimizer.inside_step) == (here, samples, False)
        assert self.metrics.read()["samples"] == samples
        assert optimizer.progress == pytest.approx(self.expected[here])

    expected: dict[int, float] = {}


@functools.cache
def clean(kind: str) -> Trial:
    trial = Trial(OPTIONS[kind])
    trial.train()
    return trial


@functools.cache
def lines_of(kind: str, call: int) -> int:
    """How many lines of the package the call executes."""
    interrupt = Interrupt(LINES)
    Trial(OPTIONS[kind]).train(call, interrupt)
    return LINES - interrupt.left


def check(kind: str, call: int, line: int, by_state: bool) -> None:
    reference, trial = clean(kind), Trial(OPTIONS[kind])
    trial.expected = {number: state[1]["vbs"]["progress"] for number, state in reference.states.items()}
    with pytest.raises(KeyboardInterrupt) as caught:
        trial.train(call, Interrupt(line))
    print("interrupted at", caught.value)
    trial.recover(by_state)
    trial.train()
    assert_equal(trial.run.weights(), reference.run.weights())
    own, other = trial.run.optimizer, reference.run.optimizer
    assert (own.updates, own.samples) == (other.updates, other.samples)
    assert trial.metrics.read() == pytest.approx(reference.metrics.read())


@given(
    kind=st.sampled_from(sorted(OPTIONS)),
    call=st.integers(1, 6),
    fraction=st.floats(0, 1, exclude_max=True),
    by_state=st.booleans(),
)
@examples(100)
def test_an_interrupted_step_has_happened_or_not(kind: str, call: int, fraction: float, by_state: bool) -> None:
    check(kind, call, 1 + int(fraction * lines_of(kind, call)), by_state)


@pytest.mark.nightly("trains for each of some hundred lines")
@pytest.mark.parametrize(("kind", "call"), [("plain", 5), ("differenced", 3)])  # within a step; a single microbatch
def test_every_third_line_of_a_step(kind: str, call: int) -> None:
    lines = lines_of(kind, call)
    assert lines > 50
    for line in range(1 + call % 3, lines + 1, 3):
        check(kind, call, line, line % 2 == 0)


def test_a_state_that_a_hook_asks_for_names_the_hook() -> None:
    run = training(sizes=SIZES, dataset_size=400)
    run.optimizer.register_step_post_hook(lambda *_: run.optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"called within it, as by a hook of the inner optimizer; call it after"):
        run.iterate(1)
