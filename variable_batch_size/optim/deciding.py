"""Ask for the batch sizes of a growing trace as a training goes on; `trace/growing.py` has the course of a question."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

from variable_batch_size.backend import Agreement, Backend
from variable_batch_size.data.plan import Step
from variable_batch_size.optim.loop import Loop
from variable_batch_size.optim.update import Updater
from variable_batch_size.optim.user_line import stacklevel_of_user
from variable_batch_size.trace.growing import ADOPTED_AFTER, READ_AFTER, Facts, GrowingTrace, Growth, Question
from variable_batch_size.tracker import Tracker

_REPEATED = 3  # questions without a new estimate of the noise, after which the user is warned


class _Asked(NamedTuple):
    """The oldest question that was not answered after the last update, as one value."""

    question: Question | None = None
    number: int = 0
    answer: str | None = None  # on rank 0


@final
class Deciding:
    """Has the batch sizes of later updates decided, if the sampler's trace is growing, and tells them to all ranks.

    Of several optimizers of a sampler, the one that makes an update first does it.

    Args:
        updater: the updater, which knows noise and progress.
        loop: the loop, which has the sampler.
        backend: of the ranks that share a batch.
        tracker: gets each decision, and what it was made from; None: nobody does.
    """

    def __init__(self, updater: Updater, loop: Loop, backend: Backend, tracker: Tracker | None) -> None:
        self._loop, self._updater, self._tracker = loop, updater, tracker
        self._world, self._leads = backend.world, backend.job.world.rank == 0
        growing = loop.sampler.planning.growing
        self._stopwatch = None if growing is None else growing.trace.stopwatch()
        self._asked = _Asked()
        self._estimates: list[float] = []  # at the questions since the last new one
        self._begun = False  # whether it has looked after an update

    def after_update(self, step: Step, agreement: Agreement) -> None:
        """Ask, answer and adopt what is due after an update.

        Args:
            step: the step of the update.
            agreement: tells the answers to all ranks, none of which waits for another before it needs one.

        Raises:
            RuntimeError: on every rank, if the controller has failed.
        """
        planning, updates = self._loop.sampler.planning, self._loop.clock.step
        if planning.growing is None or updates <= (before := planning.decided_at):
            return
        try:
            planning.decided_at = updates  # also if the controller has failed
            self._decide(step, agreement, updates)
        except Exception:
            raise
        except BaseException:  # an interrupt: what is due is done later
            planning.decided_at = before
            raise

    def _decide(self, step: Step, agreement: Agreement, updates: int) -> None:
        planning = self._loop.sampler.planning
        growing, growth = planning.growing, planning.growth
        assert growing is not None
        assert growth is not None
        planning.is_trained_here()
        world = self._world
        if self._stopwatch is not None:
            rows = step.minibatch_size if step.fixed_shape else -(-step.batch_size // step.num_microbatches)
            self._stopwatch.after_update(world.size, rows, -(-step.num_microbatches // world.size))
        trace = growing.trace
        if not self._begun:  # what was decided at the beginning, or at a restart
            self._begun = True
            self._log(trace.scalars(growth.decisions[0]), updates)
        if trace.is_due(updates) and growth.asked != updates:
            growth = growth.with_question(Question(updates, self._facts()))
        while growth.questions and updates >= growth.questions[0].updates + READ_AFTER:
            self._tell(trace, growth, agreement)
            if updates < growth.questions[0].updates + ADOPTED_AFTER:
                break
            growth = self._adopt(trace, growth, updates, agreement)
        if growth is not growing.growth:
            planning.grow(growth)

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured, if anything is."""
        return {} if self._stopwatch is None else {"stopwatch": self._stopwatch.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what an earlier run has measured."""
        if self._stopwatch is not None and "stopwatch" in state:
            self._stopwatch.load_state_dict(state["stopwatch"])

    def _facts(self) -> Callable[[], Facts]:
        """Return a function that returns what is known now; calling it later avoids a wait for a device."""
        clock, updater, devices = self._loop.clock, self._updater, self._world.size
        updates, samples, progress = clock.step, clock.samples, updater.progress.later()
        noise = None if updater.gradient_noise is None else updater.gradient_noise.later()
        reference = updater.ref_batchsize

        def read() -> Facts:
            found = None if noise is None else noise()
            estimates = None if found is None else [float(found.sigma2), float(found.mu2), int(found.updates)]
            return Facts(devices, updates, samples, float(progress()), estimates, reference)

        return read

    def _tell(self, trace: GrowingTrace, growth: Growth, agreement: Agreement) -> None:
        """Answer the oldest question on rank 0, once, and tell the answer to the others."""
        oldest = growth.questions[0]
        if oldest is not self._asked.question:
            self._asked = _Asked(oldest, self._asked.number + 1)
        if self._leads and self._asked.answer is None:
            plan = self._loop.sampler.plan
            answer = trace.answer(growth, plan.minibatch_size, self._stopwatch, fixed_shape=plan.fixed_shape)
            agreement.tell("decision", self._asked.number, answer)
            self._asked = self._asked._replace(answer=answer)

    def _adopt(self, trace: GrowingTrace, growth: Growth, updates: int, agreement: Agreement) -> Growth:
        """Return the growth with the answer to the oldest question, which rank 0 has told."""
        asked = self._asked
        answer = agreement.told("decision", asked.number) if asked.answer is None else asked.answer
        known = trace.told(growth, answer, updates)
        scalars = trace.scalars(known.decisions[-1])
        self._warn_if_unmeasured(scalars.get("estimates"))
        self._log(scalars, updates)
        return known

    def _log(self, scalars: Mapping[str, float], updates: int) -> None:
        """Log a decision and what it was made from, on rank 0."""
        if self._tracker is not None and self._leads:
            self._tracker.log(updates, {f"decision/{name}": value for name, value in scalars.items()})

    def _warn_if_unmeasured(self, estimates: float | None) -> None:
        """Warn once if a controller gets the same noise again and again, because nothing measures it any more."""
        if estimates is None or not estimates:
            return
        self._estimates = [*(known for known in self._estimates if known == estimates), estimates]
        if len(self._estimates) == _REPEATED + 1 and self._leads:
            warnings.warn(
                f"The controller got the same gradient noise {_REPEATED + 1} times, because no update since the first "
                f'of them had two microbatches; pass a smaller minibatch_size to the sampler, noise="differenced" to '
                f"the optimizer, or larger bounds to the AdaptiveTrace",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )
