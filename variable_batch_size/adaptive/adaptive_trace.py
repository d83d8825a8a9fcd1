"""A batch trace that a controller writes while the training goes on."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import MAX_INT, check_bounds, check_int, value_error, without_addresses
from variable_batch_size.adaptive.base import (
    ControlInput,
    Controller,
    check_controller,
    check_rule_of,
    needs_throughput,
)
from variable_batch_size.adaptive.plain import decision_of, plain_decision
from variable_batch_size.adaptive.stopwatch import UpdateStopwatch
from variable_batch_size.rules.adascale import measured_gain
from variable_batch_size.rules.base import Noise, Rule, needs_noise
from variable_batch_size.trace.growing import ADOPTED_AFTER, Decision, Decisions, Facts, Growth, Question, counting

UNKNOWN = Noise(math.nan, math.nan)  # before the first estimate


@final
@dataclass(frozen=True, slots=True)
class AdaptiveTrace:
    """The batch trace of a training whose controller chooses the batch size.

    Pass it as `trace` to `CustomSampler`, or to `simulate` in the place of a controller. The controller is asked at the
    beginning, and after each update t that is a multiple of `every`. Its answer, rounded to a multiple of `multiple_of`
    and limited to `bounds`, is the batch size from update t + `delay` on, so that what a loader has read by then stays
    right. In a training rank 0 asks it and tells the others; at the beginning and at a restart each rank asks.

    A training that restarts with as many ranks as before decides as if it had not stopped. With another number, or
    another controller, the questions whose answers count, or will count, are asked again. If the answer that counts
    changes, it does so with the first update after the restart.

    Source: Qiao et al. 2021, arXiv 2008.12260, section 3, whose trainings choose their batch size, too.

    >>> from variable_batch_size.adaptive import PerDevice
    >>> AdaptiveTrace(PerDevice(60), multiple_of=32).batch_size(ControlInput(devices=3))
    192

    Args:
        controller: chooses the batch size.
        start: batch size before the first answer, in samples; by default, the first answer counts at once.
        bounds: least and largest batch size, in samples; by default 1 and the size of the dataset.
        multiple_of: number of samples of which each batch size is a multiple; a controller that moves by less than half
            of it stays where it is.
        every: number of updates between two questions; None: the controller is asked only at the beginning, and in a
            world of another size.
        delay: number of updates from a question to the first update with its answer; in a training, more than 3 plus
            the updates that a loader reads ahead.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if a number is not in its range, or no multiple is within the bounds.
    """

    controller: Controller
    start: int | None = None
    bounds: tuple[int, int] | None = None
    multiple_of: int = 1
    every: int | None = 50
    delay: int = 16

    def __post_init__(self) -> None:
        check_controller(self.controller)
        if self.bounds is not None:
            object.__setattr__(self, "bounds", check_bounds(self.bounds))
        object.__setattr__(self, "multiple_of", check_int(self.multiple_of, "multiple_of", 1, MAX_INT))
        low, high = self._limits
        if low > high:
            requirement = f"the bounds must include a multiple of multiple_of={self.multiple_of}"
            raise value_error(requirement, self.bounds, "change one of them")
        if self.start is not None:
            object.__setattr__(
                self, "start", check_int(self.start, "start", low, high, "pass an integer within the bounds")
            )
            if self.start % self.multiple_of:
                requirement = f"start must be a multiple of multiple_of={self.multiple_of}"
                raise value_error(requirement, self.start, f"pass {self._allowed(self.start)}")
        if self.every is not None:
            object.__setattr__(self, "every", check_int(self.every, "every", 1, MAX_INT))
        object.__setattr__(self, "delay", check_int(self.delay, "delay", 0, MAX_INT))

    @property
    def _limits(self) -> tuple[int, int]:
        """The least and the largest multiple within the bounds."""
        low, high = self.bounds or (1, MAX_INT)
        return -(-low // self.multiple_of) * self.multiple_of, high // self.multiple_of * self.multiple_of

    # Decisions, which are the same in a simulation and in a training. -------------------------------------------------

    def batch_size(self, input: ControlInput) -> int:
        """Return the answer of the controller as a batch size: a multiple, within the bounds.

        Raises:
            TypeError, ValueError: if the answer is not an integer in [1, 2**53].
        """
        try:
            answer = self.controller(input)
        except (AttributeError, ValueError) as error:
            explained = _explained(error, self.controller, input)
            if explained is None:
                raise
            raise explained from error
        return self._allowed(check_int(answer, "the batch size of the controller", 1, MAX_INT))

    def _allowed(self, size: int) -> int:
        """Return the nearest multiple within the bounds."""
        (low, high), multiple = self._limits, self.multiple_of
        return min(max((size + multiple // 2) // multiple * multiple, low), high)

    def first(self, input: ControlInput) -> Decisions:
        """Return the decisions at the beginning of a training."""
        if self.start is None:
            return (Decision(input.updates, self.batch_size(input), input),)
        decisions = (Decision(input.updates, self.start),)
        return counting((*decisions, self.decided(decisions, input)), input.updates)

    def decided(self, decisions: Decisions, input: ControlInput) -> Decision:
        """Return the answer to a question.

        Args:
            decisions: the decision that counts, and later ones.
            input: what the controller gets, but for its `batch_size`: that of the last decision.
        """
        asked = replace(input, batch_size=decisions[-1].batch_size)
        return Decision(input.updates + self.delay, self.batch_size(asked), asked)

    def in_world(self, decisions: Decisions, devices: int, step: int, *, changed: bool = False) -> Decisions:
        """Return the decisions of a training that restarts on so many devices, and may change sizes from a step on.

        A controller that gives its old answers on these devices does not read them, and its decisions stay. Another one
        gets, as `batch_size`, the one that counts until then.

        Args:
            decisions: those of the training that stopped.
            devices: number of devices.
            step: the first step whose batch size may change.
            changed: whether another controller, or another one of its limits, decides from now on.
        """
        found: list[Decision] = []
        for decision in counting(decisions, step):
            asked = None if decision.input is None else self._noted(decision.input)
            if asked is None:
                allowed = self._allowed(decision.batch_size)
                decision = decision if allowed == decision.batch_size else Decision(step, allowed)
            elif changed or asked.devices != devices:
                asked = replace(asked, devices=devices)
                changed = changed or self.batch_size(asked) != decision.batch_size
                decision = replace(decision, input=asked)
                if changed:
                    present = found[-1].batch_size if found else decision.batch_size
                    asked = replace(asked, batch_size=present)
                    decision = Decision(max(decision.begins, step), self.batch_size(asked), asked)
            found.append(decision)
        return tuple(found)

    def _noted(self, asked: ControlInput) -> ControlInput:
        """Return an input that has a noise if the controller reads it: without an estimate, if none was measured."""
        return replace(asked, noise=UNKNOWN) if self.needs_noise and asked.noise is None else asked

    def is_due(self, updates: int) -> bool:
        """Return whether the controller is asked after so many updates."""
        return self.every is not None and updates % self.every == 0

    # In a training: `trace.growing.GrowingTrace`. ---------------------------------------------------------------------

    @property
    def description(self) -> str:
        """What decides, and when, in words that are the same on all ranks."""
        return f"{self._decides}, start={self.start}, {self._asked}"

    @property
    def _decides(self) -> str:
        return without_addresses(f"{self.controller!r}, bounds={self.bounds}, multiple_of={self.multiple_of}")

    @property
    def _asked(self) -> str:
        return f"every={self.every}, delay={self.delay}"

    @property
    def needs_noise(self) -> bool:
        """Whether the controller uses the gradient noise."""
        return needs_noise(self.controller)

    def check_rules(self, rules: Sequence[Rule]) -> None:
        """Raise ValueError if the batch sizes of the controller are not for these learning-rate rules."""
        for rule in rules:
            check_rule_of(self.controller, rule)

    @property
    def largest(self) -> int:
        """The largest batch size that may be chosen."""
        return self._limits[1]

    def for_training(self, dataset_size: int) -> AdaptiveTrace:
        """Return `within(dataset_size)`, if it can train.

        Raises:
            ModuleNotFoundError: if the controller needs the time of an update, and scipy is not installed.
            ValueError: if the upper bound exceeds the dataset, or `delay` is too small.
        """
        if self.every is not None and self.delay <= ADOPTED_AFTER:
            raise value_error(f"delay must be > {ADOPTED_AFTER} in a training", self.delay, "pass 16, the default")
        if needs_throughput(self.controller):
            import_extra("scipy.optimize", "evaluation")
        return self.within(dataset_size)

    def within(self, dataset_size: int) -> AdaptiveTrace:
        """Return the trace with batch sizes that the dataset has.

        Raises:
            ValueError: if the upper bound exceeds the dataset.
        """
        if self.bounds is None:
            for value, name in (self.multiple_of, "multiple_of"), (self.start or 1, "start"):
                if value > dataset_size:
                    requirement = f"{name} must be at most the dataset's size of {dataset_size} samples"
                    raise value_error(requirement, value, "lower it, or use a larger dataset")
            return replace(self, bounds=(1, dataset_size))
        if self.largest > dataset_size:
            requirement = f"the upper one of bounds must be at most the dataset's size of {dataset_size} samples"
            raise value_error(requirement, self.bounds[1], "lower it, or use a larger dataset")
        return self

    def begin(self, devices: int, minibatch_size: int, *, fixed_shape: bool) -> Growth:
        """Return the growth at the beginning of a training."""
        decisions = self.first(self._noted(ControlInput(devices, None, minibatch_size, fixed_shape=fixed_shape)))
        return Growth.of((), decisions, 0)

    def restored(self, state: dict[str, Any], devices: int, updates: int, step: int) -> Growth:
        """Return the growth of a training that goes on from the `state_of` another one, on so many devices.

        Args:
            state: the `state_of` the other one.
            devices: number of devices.
            updates: number of updates so far.
            step: the first step whose batch size may change.
        """
        changed = state["decides"] != self._decides
        decisions = self.in_world(tuple(map(decision_of, state["decisions"])), devices, step, changed=changed)
        growth = Growth.of([(first, size) for first, size in state["runs"]], decisions, step)
        asked = [Facts(**facts)._replace(devices=devices) for facts in state["questions"]]
        return replace(growth, questions=tuple(map(Question.of, asked)), asked=updates)

    def warn_if_changed(self, state: dict[str, Any]) -> None:
        """Warn if another controller decides than in the training whose `state_of` this is, or at other updates."""
        before, now = (state["decides"], state["asked"]), (self._decides, self._asked)
        if before != now:
            warnings.warn(
                f"The training goes on differently: its batch sizes were chosen by {', '.join(before)}, and are by "
                f"{', '.join(now)} from now on",
                UserWarning,
                stacklevel=5,
            )

    def constant_until(self, step: int) -> Growth:
        """Return the growth of a training that had the batch size `start` until a step.

        Raises:
            ValueError: if there is no `start`.
        """
        if self.start is None:
            requirement = "a training with a fixed trace can go on with a controller if its batch size is start"
            raise value_error(requirement, "start=None", "pass the batch size that it had")
        return Growth.of((), (Decision(0, self.start),), 0).moved_to(step)

    def state_of(self, growth: Growth) -> dict[str, Any]:
        """Return what `restored` needs, as plain numbers, strings, lists and dictionaries."""
        decisions = [plain_decision(decision) for decision in growth.decisions]
        questions = [question.read()._asdict() for question in growth.questions]
        runs = [list(run) for run in growth.runs]
        made = {"runs": runs, "decisions": decisions, "questions": questions}
        return {**made, "decides": self._decides, "asked": self._asked}

    def known_until(self, growth: Growth) -> int | None:
        """Return the first step whose batch size is not known; None if all are."""
        if growth.questions:
            return growth.questions[0].updates + self.delay
        return None if self.every is None else (growth.asked // self.every + 1) * self.every + self.delay

    def stopwatch(self) -> UpdateStopwatch | None:
        """Return what measures the seconds of updates, if the controller needs them."""
        return UpdateStopwatch() if needs_throughput(self.controller) else None

    def answer(self, growth: Growth, minibatch_size: int, stopwatch: Any, *, fixed_shape: bool) -> str:
        """Return the answer to the oldest question as text: a decision, or the error of the controller."""
        facts = growth.questions[0].read()
        try:
            throughput = None if stopwatch is None else stopwatch.throughput()
            noise = None if facts.noise is None else _noise(facts, growth.decisions[-1].batch_size)
            counts = facts.updates, facts.samples, facts.progress
            input = ControlInput(facts.devices, None, minibatch_size, *counts, noise, throughput, fixed_shape)
            return json.dumps(plain_decision(self.decided(growth.decisions, self._noted(input))))
        except Exception as error:
            return json.dumps({"error": f"{type(error).__name__}: {error}"})

    def told(self, growth: Growth, answer: str, updates: int) -> Growth:
        """Return the growth after so many updates, when an answer is known.

        Raises:
            RuntimeError: if the controller has failed.
        """
        found = json.loads(answer)
        if isinstance(found, dict):
            controller = without_addresses(str(self.controller))
            raise RuntimeError(
                f"the controller must choose a batch size, but after update {growth.questions[0].updates} it failed "
                f"with {found['error']}; correct {controller} and restore the last checkpoint"
            )
        return growth.answered(decision_of(found), updates)

    def scalars(self, decision: Decision) -> dict[str, float]:
        """Return a decision and what it was made from, by name."""
        input: ControlInput | None = decision.input
        found: dict[str, float] = {"batch_size": decision.batch_size, "begins": decision.begins}
        if input is None:
            return found
        found |= {name: getattr(input, name) for name in ("devices", "updates", "samples", "progress")}
        if input.noise is not None:
            found |= {name: float(getattr(input.noise, name)) for name in ("sigma2", "mu2", "noise_scale", "gain")}
            found["estimates"] = input.noise.updates
        if input.throughput is not None:
            parts = decision.batch_size, input.devices, input.minibatch_size
            cut = {"spread": not self.needs_noise, "fixed_shape": input.fixed_shape}
            found |= {"seconds": input.throughput.seconds(*parts, **cut), **asdict(input.throughput)}
        return found


def _explained(error: AttributeError | ValueError, controller: object, input: ControlInput) -> Exception | None:
    """Return the error of a controller that does not expect what is not known; None if it is another one."""
    name = without_addresses(str(controller))
    if isinstance(error, AttributeError):
        unknown = [part for part in ("noise", "throughput") if getattr(input, part) is None]
        if error.obj is None and unknown:
            requirement = f"{name} must say in its class what it reads: needs_noise = True, needs_throughput = True"
            return AttributeError(f"{requirement}, got None as {' and '.join(unknown)} ({error}); add it")
    elif input.noise is not None and math.isnan(input.noise.sigma2) and "NaN" in str(error):
        requirement = f"{name} must return a batch size before the first estimate of the noise, too, when it is nan"
        return value_error(requirement, error, "return input.batch_size, or a first size, if it is")
    return None


def _noise(facts: Facts, batch_size: int) -> Noise:
    """Return the noise of some facts, with the gain of an update of `batch_size`."""
    assert facts.noise is not None
    sigma2, mu2, updates = facts.noise
    gain = measured_gain(sigma2, mu2, batch_size, facts.ref_batchsize or batch_size)
    return Noise(sigma2, mu2, gain, int(updates))
