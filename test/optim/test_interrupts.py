"""An interrupt at any line of `step()`: `discard_step()` or a state repairs what it leaves; exceptions."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.interrupts import Interrupt
from helpers.properties import examples
from helpers.reference import SIZES, assert_equal, training, twin

HALF_UPDATED = "interrupted by an exception in the inner optimizer's step"
TRACE = (8, 3, 9)
UPDATES = 3
LINES = 10**9  # more than any step has
OPTIONS = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.5, "rule": vbs.rules.RootRule()},
    "noise": {"noise": "microbatches"},
    "differenced": {"noise": "differenced"},
    "skipping": {"skip_grad_norm": 1e-9},
}


class Trial:
    """A training with metrics, of which one call of `step()` is interrupted."""

    def __init__(self, options):
        kind = vbs.CustomOptimizer if "rule" in options else vbs.LinearRuleOptimizer
        self.run = training(kind, TRACE, dataset_size=400, **options)
        self.metrics = vbs.Accumulator(self.run.optimizer)
        self.states = {}
        self.calls = 0
        self._keep()

    def _keep(self):
        run = self.run
        counted = self.metrics.read()["samples"] if run.optimizer.updates else 0  # without those of skipped updates
        state = run.model.state_dict(), run.optimizer.state_dict(), self.metrics.state_dict(), counted
        self.states[run.optimizer.updates] = copy.deepcopy(state)

    def train(self, call=0, interrupt=None):
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

    def recover(self, by_state):
        """Restore the state after the last update that is known to be complete, or discard the step."""
        run, optimizer = self.run, self.run.optimizer
        if not by_state:
            try:
                optimizer.discard_step()
            except RuntimeError as error:
                assert HALF_UPDATED in str(error)  # noqa: PT017
        if not optimizer.inside_step and optimizer.updates not in self.states:
            self._keep()  # the update was made, and all know of it
        if optimizer.inside_step or by_state:
            model, state, metrics, _ = self.states[max(self.states)]
            run.model.load_state_dict(model)
            optimizer.load_state_dict(state)
            self.metrics.load_state_dict(metrics)
        here = optimizer.updates
        assert here == max(self.states)
        assert (run.sampler.position.step, run.sampler.place.samples) == (here, optimizer.samples)
        assert not optimizer.inside_step
        assert self.metrics.read()["samples"] == self.counted[here]
        assert optimizer.progress == pytest.approx(self.expected[here])

    expected: dict[int, float] = {}
    counted: dict[int, int] = {}


@functools.cache
def clean(kind):
    trial = Trial(OPTIONS[kind])
    trial.train()
    return trial


@functools.cache
def lines_of(kind, call):
    """How many lines of the package the call executes."""
    interrupt = Interrupt(LINES)
    Trial(OPTIONS[kind]).train(call, interrupt)
    return LINES - interrupt.left


def check(kind, call, line, by_state):
    reference, trial = clean(kind), Trial(OPTIONS[kind])
    trial.expected = {number: state[1]["vbs"]["progress"] for number, state in reference.states.items()}
    trial.counted = {number: counted for number, (*_, counted) in reference.states.items()}
    with pytest.raises(KeyboardInterrupt) as caught:
        trial.train(call, Interrupt(line))
    print("interrupted at", caught.value)
    trial.recover(by_state)
    trial.train()
    assert_equal(trial.run.weights(), reference.run.weights())
    own, other = trial.run.optimizer, reference.run.optimizer
    assert (own.updates, own.samples, own.skipped) == (other.updates, other.samples, other.skipped)
    assert trial.metrics.read() == pytest.approx(reference.metrics.read())


@given(
    kind=st.sampled_from(sorted(OPTIONS)),
    call=st.integers(1, 6),
    fraction=st.floats(0, 1, exclude_max=True),
    by_state=st.booleans(),
)
@examples(100)
def test_an_interrupted_step_is_discarded_or_restored(kind, call, fraction, by_state):
    check(kind, call, 1 + int(fraction * lines_of(kind, call)), by_state)


@pytest.mark.nightly("trains for each of some hundred lines")
@pytest.mark.parametrize(("kind", "call"), [("plain", 5), ("skipping", 3), ("differenced", 3)])
def test_each_line_of_a_step(kind, call):
    lines = lines_of(kind, call)
    assert lines > 50
    for line in range(1, lines + 1):
        check(kind, call, line, line % 2 == 0)


def test_each_of_the_last_lines_of_a_step():
    """In which it notes that it has ended."""
    lines = lines_of("plain", 5)
    for line in range(lines - 40, lines + 1):
        check("plain", 5, line, by_state=True)


def test_a_state_that_a_hook_asks_for_names_the_hook():
    run = training(sizes=TRACE, dataset_size=400)
    run.optimizer.register_step_post_hook(lambda *_: run.optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"called within it, as by a hook of the inner optimizer; call it after"):
        run.iterate(1)


# An exception that the loop survives: nothing goes on by accident, and each way out works. ----------------------------


BEFORE = (
    r"step \d was interrupted by an exception; call optimizer\.discard_step\(\) and iterate the loader again, or load"
)
AFTER = (
    r"step \d was interrupted by an exception in the inner optimizer's step, or in a hook of it, so that the weights "
    r"may be half updated; restore the states of model and optimizer, as of the last checkpoint, or create both again$"
)


class PlantedError(Exception):
    """An exception that a test has planted."""


def fail(*_):
    raise PlantedError


OTHER_CALLS = [
    lambda run: run.optimizer.step(),
    lambda run: run.optimizer.state_dict(),
    lambda run: run.optimizer.set_epoch(0),
    lambda run: run.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]}),
]


@pytest.mark.parametrize("by_state", [False, True])
@pytest.mark.parametrize("where", ["rule", "pre-hook", "inner step", "post-hook"])
def test_nothing_goes_on_and_the_ways_out_lead_on(where, by_state):
    run = training().iterate(2)
    states = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    with pytest.MonkeyPatch.context() as monkeypatch:
        if where == "rule":
            monkeypatch.setattr(run.optimizer._updater, "rules", (fail,))
        elif where == "inner step":
            monkeypatch.setattr(run.optimizer.inner, "step", fail)
        else:
            before = where == "pre-hook"
            hook = (run.optimizer.register_step_pre_hook if before else run.optimizer.register_step_post_hook)(fail)
        with pytest.raises(PlantedError):
            run.iterate(3)
        for call in OTHER_CALLS:
            with pytest.raises(RuntimeError, match=BEFORE if where == "rule" else AFTER):
                call(run)
    assert (run.optimizer.updates, run.optimizer.samples) == (2, 27)
    if "hook" in where:
        hook.remove()
    if where == "rule" and not by_state:
        run.optimizer.discard_step()
    else:
        if where != "rule":
            with pytest.raises(RuntimeError, match=AFTER):
                run.optimizer.discard_step()
        run.model.load_state_dict(states[0])
        run.optimizer.load_state_dict(states[1])
    run.iterate(4)
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]))


def test_a_checkpoint_is_not_saved_of_an_interrupted_step(tmp_path):
    run = training()
    checkpoint = vbs.Checkpoint(tmp_path, model=run.model, optimizer=run.optimizer, every=1)
    run.iterate(2)
    run.optimizer.register_step_post_hook(fail)
    with pytest.raises(PlantedError):
        run.iterate(3)
    with pytest.raises(RuntimeError, match=AFTER):
        checkpoint.save()
    assert not checkpoint.step()
    checkpoint.close()
    assert checkpoint.latest is None


def test_a_microbatch_that_was_read_for_a_refused_step_is_lost():
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
    with pytest.raises(RuntimeError, match=r"this loop over the loader was begun before; start a new one after"):
        run.optimizer.step()
    run.optimizer.discard_step()
    run.iterate(4)
    assert_equal(run.weights(), twin(vbs.LinearRuleOptimizer, SIZES[:4]))


def test_an_error_of_the_tracker_leaves_the_update_made():
    class Full(vbs.Tracker):  # final
        def log(self, update, scalars):
            raise OSError("the disk is full")

    run = training(tracker=Full(progress=False), log_steps=2)
    with pytest.raises(OSError, match="full"):
        run.iterate(2)
    assert run.optimizer.updates == 2
    assert run.optimizer.state_dict()["vbs"]["sampler"]["step"] == 2
