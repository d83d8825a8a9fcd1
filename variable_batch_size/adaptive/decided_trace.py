"""What was decided in a training so far: the batch sizes, and the questions that are still to be answered.

Any number of updates may lie between a question and the next one:

    update t              every rank keeps what is known (`ask`), without reading a device
    update t + 2          rank 0 reads it and asks the controller (`decide`); the others get the decision by the store
    update t + 3          every rank plans with the decision (`adopt`)
    update t + delay      the first update that has the batch size
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np

from variable_batch_size._extras import import_extra
from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import check_int, value_error
from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace, limit_to_dataset
from variable_batch_size.adaptive.base import ControlInput, describe_controller, needs_throughput
from variable_batch_size.adaptive.decisions import (
    Decision,
    Decisions,
    decide,
    decide_again,
    first_decisions,
    in_effect,
    with_noise,
)
from variable_batch_size.adaptive.throughput import Throughput
from variable_batch_size.rules.adascale import measured_gain
from variable_batch_size.rules.base import Noise
from variable_batch_size.trace.batch_trace import BatchTrace

READ_AFTER, ADOPTED_AFTER = 2, 3  # updates after a question; by then any device has computed what is read


@final
class Measurements(NamedTuple):
    """When a controller is asked, and a function that returns what was known then and may wait for a device.

    The result has the keys devices, updates, samples, progress, noise (sigma^2, mu^2 and the number of estimates, or
    None) and ref_batchsize (None if there is none).
    """

    updates: int
    read: Callable[[], dict[str, Any]]


@final
@dataclass(frozen=True, slots=True)
class DecidedTrace:
    """What was decided of an `AdaptiveTrace` in a training.

    Attributes:
        adaptive: has the controller.
        trace: all batch sizes that were chosen; the last one continues.
        decisions: the decision in effect, and pending ones.
        unanswered: what was known at the questions that are not answered yet, in their order.
        asked: number of updates at the last question, or at the beginning of what was trained since.
    """

    adaptive: AdaptiveTrace
    trace: BatchTrace
    decisions: Decisions
    unanswered: tuple[Measurements, ...] = ()
    asked: int = 0

    @classmethod
    def begin(cls, adaptive: AdaptiveTrace, devices: int, minibatch_size: int, *, fixed_shape: bool) -> DecidedTrace:
        """Return the decisions at the beginning of a training: `start`, if there is one, and the controller's first.

        Args:
            adaptive: the trace with the controller.
            devices: number of devices.
            minibatch_size: maximum number of rows of a microbatch.
            fixed_shape: whether every microbatch has exactly that many rows.
        """
        input = ControlInput(devices, None, minibatch_size, fixed_shape=fixed_shape)
        decisions = first_decisions(adaptive, with_noise(adaptive, input))
        return cls(adaptive, _join_runs((), decisions, 0), decisions)

    @classmethod
    def resume(
        cls, adaptive: AdaptiveTrace, state: dict[str, Any], devices: int | None, updates: int, step: int
    ) -> DecidedTrace:
        """Return the decisions of a training that continues from a `state_dict`.

        Args:
            adaptive: the trace with the controller.
            state: the `state_dict`.
            devices: number of devices; None: the number that each question has.
            updates: number of updates so far.
            step: the first step whose batch size may change.
        """
        changed = state["decides"] != _describe_parts(adaptive)[0]  # whether another controller decides now
        saved = tuple(map(Decision.from_plain, state["decisions"]))
        decisions = decide_again(adaptive, saved, devices, step, changed=changed)
        trace = _join_runs([(first, size) for first, size in state["runs"]], decisions, step)
        questions = ({**question, "devices": devices or question["devices"]} for question in state["questions"])
        unanswered = tuple(Measurements(question["updates"], partial(dict, question)) for question in questions)
        return cls(adaptive, trace, decisions, unanswered, asked=updates)

    @classmethod
    def after_constant(cls, adaptive: AdaptiveTrace, updates: int) -> DecidedTrace:
        """Return the decisions of a training that had the constant size `start`; raise ValueError without `start`."""
        if adaptive.start is None:
            requirement = "a run with a fixed trace can continue with a controller only if its batch size is start"
            raise value_error(requirement, "start=None", "pass the batch size that it had")
        decisions = (Decision(0, adaptive.start),)
        return cls(adaptive, _join_runs((), decisions, 0), decisions, asked=updates)

    @property
    def known_until(self) -> int | None:
        """The first step whose batch size is not known yet; None if the controller is not asked any more."""
        every, delay = self.adaptive.every, self.adaptive.delay
        if self.unanswered:
            return self.unanswered[0].updates + delay
        if every is None:
            return None
        next_question = (self.asked // every + 1) * every  # in updates
        return next_question + delay

    def so_far(self, updates: int) -> BatchTrace:
        """Return the batch sizes of the first `updates` steps, as a trace.

        Raises:
            AttributeError: if there are none; it is raised by a property, which `hasattr` then finds missing.
        """
        if updates == 0:
            raise AttributeError("the trace so far needs at least one update, but there was none; train first")
        first_step, size = self.trace.runs
        is_made = first_step < updates  # (runs,)
        return BatchTrace(first_step[is_made], size[is_made], updates)

    def ask(self, known: Measurements) -> DecidedTrace:
        """Return this object with a further question to the controller, which is answered some updates later.

        By then the device has computed what the controller reads, so that no update waits; see `decide` and `adopt`.

        Args:
            known: what is known of the training now.
        """
        return replace(self, unanswered=(*self.unanswered, known), asked=known.updates)

    def decide(self, minibatch_size: int, throughput: Throughput | None, *, fixed_shape: bool) -> Decision:
        """Return the controller's answer to the oldest question; raise whatever the controller raises.

        Args:
            minibatch_size: maximum number of rows of a microbatch.
            throughput: how long updates take, if it is known.
            fixed_shape: whether every microbatch has exactly `minibatch_size` rows.
        """
        known, noise = self.unanswered[0].read(), None
        if known["noise"] is not None:
            sigma2, mu2, estimates = known["noise"]
            size = self.decisions[-1].batch_size
            gain = measured_gain(sigma2, mu2, size, known["ref_batchsize"] or size)
            noise = Noise(sigma2, mu2, gain, int(estimates))
        counts = known["updates"], known["samples"], known["progress"]
        input = ControlInput(known["devices"], None, minibatch_size, *counts, noise, throughput, fixed_shape)
        return decide(self.adaptive, self.decisions, with_noise(self.adaptive, input))

    def adopt(self, decision: Decision, updates: int) -> DecidedTrace:
        """Return this object with the answer to the oldest question.

        Args:
            decision: the answer.
            updates: number of updates so far.
        """
        last = self.decisions[-1]
        trace = self.trace
        # A decision that begins at the same step or later was made before, and is replaced.
        earlier = tuple(known for known in self.decisions if known.begins < decision.begins)
        decisions = in_effect((*earlier, decision), updates)
        if decision.batch_size != last.batch_size or decision.begins <= last.begins:  # else the trace stays as it is
            trace = _join_runs(self._runs, decisions, updates)
        return replace(self, trace=trace, decisions=decisions, unanswered=self.unanswered[1:])

    def skip_to(self, updates: int) -> DecidedTrace:
        """Return the decisions of a training that skips to this number of updates; open questions are dropped."""
        return replace(self, decisions=in_effect(self.decisions, updates), unanswered=(), asked=updates)

    def state_dict(self) -> dict[str, Any]:
        """Return what `resume` needs, as plain numbers, strings, lists and dictionaries."""
        decides, asked = _describe_parts(self.adaptive)
        return {
            "runs": [list(run) for run in self._runs],
            "decisions": [decision.to_plain() for decision in self.decisions],
            "questions": [known.read() for known in self.unanswered],
            "decides": decides,
            "asked": asked,
        }

    def copy(self) -> DecidedTrace:
        """Return a copy that can be pickled: the numbers of its unanswered questions are read from the device now.

        A question to the controller holds a function that reads its measurements later. In the copy, this function
        returns a dict that is on the host already.
        """
        questions_on_host = []
        for question in self.unanswered:
            measurements = question.read()
            questions_on_host.append(Measurements(question.updates, partial(dict, measurements)))
        return replace(self, unanswered=tuple(questions_on_host))

    @property
    def _runs(self) -> list[tuple[int, int]]:
        """The first step and the batch size of each run of equal batch sizes."""
        first_step, size = self.trace.runs
        return list(zip(first_step.tolist(), size.tolist(), strict=True))


def prepare(adaptive: AdaptiveTrace, dataset_size: int) -> AdaptiveTrace:
    """Check that a trace can be used in a training, and return it with batch sizes of at most the dataset's size.

    Raises:
        ModuleNotFoundError: if the controller needs the time of an update, and scipy is not installed.
        ValueError: if the upper bound exceeds the dataset, or `delay` is too small.
    """
    if adaptive.every is not None and adaptive.delay <= ADOPTED_AFTER:
        raise value_error(f"delay must be > {ADOPTED_AFTER} for training", adaptive.delay, "pass 16, the default")
    if needs_throughput(adaptive.controller):
        import_extra("scipy.optimize", "evaluation")
    return limit_to_dataset(adaptive, check_int(dataset_size, "dataset_size", 1))


def describe(adaptive: AdaptiveTrace) -> str:
    """Return which controller decides, and when, in words that are the same on all ranks."""
    decides, asked = _describe_parts(adaptive)
    return f"{decides}, start={adaptive.start}, {asked}"


def warn_if_changed(adaptive: AdaptiveTrace, state: dict[str, Any]) -> None:
    """Warn if a run resumes with another controller, or asks it at other updates, than the run that was saved.

    Args:
        adaptive: the controller of this run, and when it is asked.
        state: what `DecidedTrace.state_dict` has returned in the saved run.
    """
    saved = (state["decides"], state["asked"])
    present = _describe_parts(adaptive)
    if saved != present:
        change = f"batch sizes were chosen by {', '.join(saved)}, and are by {', '.join(present)} from now on"
        message = f"Resumed with another AdaptiveTrace: {change}"
        warnings.warn(message, UserWarning, stacklevel=stacklevel_of_user())


def decision_scalars(decision: Decision) -> dict[str, float]:
    """Return the numbers of a decision and of its input, by the names under which they are logged."""
    input = decision.input
    scalars: dict[str, float] = {"batch_size": decision.batch_size, "begins": decision.begins}
    if input is None:
        return scalars
    scalars |= {name: getattr(input, name) for name in ("devices", "updates", "samples", "progress")}
    if input.noise is not None:
        scalars |= {name: float(getattr(input.noise, name)) for name in ("sigma2", "mu2", "noise_scale", "gain")}
        scalars["estimates"] = input.noise.updates
    if input.throughput is not None:
        sizes = decision.batch_size, input.devices, input.minibatch_size
        cut = {"spread": input.noise is None, "fixed_shape": input.fixed_shape}
        scalars |= {"seconds": input.throughput.seconds(*sizes, **cut), **asdict(input.throughput)}
    return scalars


def _describe_parts(adaptive: AdaptiveTrace) -> tuple[str, str]:
    """Return which controller decides, and when it is asked, as two texts that are the same on all ranks."""
    limits = f"bounds={adaptive.bounds}, multiple_of={adaptive.multiple_of}"
    return f"{describe_controller(adaptive.controller)}, {limits}", f"every={adaptive.every}, delay={adaptive.delay}"


def _join_runs(runs: Sequence[tuple[int, int]], decisions: Decisions, updates: int) -> BatchTrace:
    """Return the trace with the batch sizes of `runs` until decisions change them, at the earliest at step `updates`.

    Args:
        runs: first step and batch size of each run of equal sizes, in ascending order.
        decisions: the decision in effect, and pending ones.
        updates: number of updates so far.
    """
    # Of decisions that begin at the same step the last one counts.
    size_by_step = {max(decision.begins, updates): decision.batch_size for decision in decisions}
    all_runs = [*(run for run in runs if run[0] < min(size_by_step)), *sorted(size_by_step.items())]
    first_step, size = np.array(all_runs, np.int64).T  # (runs,), (runs,)
    return BatchTrace(first_step, size, None)
