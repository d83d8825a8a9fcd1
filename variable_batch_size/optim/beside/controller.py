"""Asks the controller of a sampler as a training runs; `adaptive/decided_trace.py` has the course of a question."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size.adaptive.base import describe_controller, needs_throughput
from variable_batch_size.adaptive.decided_trace import (
    ADOPTED_AFTER,
    READ_AFTER,
    DecidedTrace,
    Measurements,
    decision_scalars,
)
from variable_batch_size.adaptive.decisions import Decision, is_due
from variable_batch_size.adaptive.stopwatch import UpdateStopwatch
from variable_batch_size.backend import Backend, ElasticBackend
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.data.batches import Batch
from variable_batch_size.data.plan.state import check_entries
from variable_batch_size.data.training import Training
from variable_batch_size.optim.stage import LoopStage
from variable_batch_size.optim.update import Updater
from variable_batch_size.rules import Noise
from variable_batch_size.tracker import Tracker

_REPEATED = 3  # questions without a new estimate of the noise, after which the user is warned


class _Asked(NamedTuple):
    """The question that is to be answered next, as one value: an interrupt leaves the old one or the new one."""

    question: Measurements | None = None
    number: int = 0  # of the question; ranks exchange the answer by it
    answer: str | None = None  # on rank 0, once the controller has answered


@final
class ControllerRunner(LoopStage):
    """Asks the controller of the sampler on rank 0, and plans with its decisions on all ranks."""

    def __init__(
        self,
        updater: Updater,
        training: Training,
        backend: Backend,
        noise: Callable[[], Callable[[], Noise]] | None,
        tracker: Tracker | None,
    ) -> None:
        self._training, self._updater, self._noise, self._tracker = training, updater, noise, tracker
        self._backend = backend
        self._stopwatch: UpdateStopwatch | None = None  # once a controller needs it, or a state has its times
        self._asked, self._restores = _Asked(), 0  # `restores`: how often all ranks have restored a state
        self._same_estimates: list[float] = []  # at the questions since the last new one
        self._begun = False  # whether an update was made

    def follow_up(self, batch: Batch, agreement: Agreement, *, leads: bool) -> None:
        """After an update, ask the controller of batch sizes if it is time, and plan with an answer that is due.

        An answer is adopted some updates after its question, on all ranks after the same one, when no host has to wait.
        `leads`: whether this optimizer is the first of its sampler, which asks for all of them.
        """
        decided = before = self._training.batches.decided  # the batch sizes, with questions and answers; immutable
        if decided is None or not leads:
            return
        updates = self._training.position.step
        if self._restores != agreement.restores:  # until then ranks may have counted questions unequally
            self._restores, self._asked = agreement.restores, _Asked()
        if self._stopwatch is None and needs_throughput(decided.adaptive.controller):
            self._stopwatch = UpdateStopwatch()
        self._time_update(batch)
        if not self._begun:  # the first update of this run: log the decision that came before it
            self._begun = True
            self._log_decision(decision_scalars(decided.decisions[0]), updates)
        if is_due(decided.adaptive, updates) and decided.asked != updates:
            decided = decided.ask(Measurements(updates, self._measure_later()))
        while decided.unanswered and updates >= decided.unanswered[0].updates + READ_AFTER:
            if not isinstance(self._backend, ElasticBackend):
                self._publish_answer(decided, agreement)
            if updates < decided.unanswered[0].updates + ADOPTED_AFTER:
                break
            decided = self._adopt(decided, updates, agreement)
            if isinstance(self._backend, ElasticBackend):  # the sum of an update carries one answer only
                break
        if decided is not before:
            self._training.grow(decided)

    def _time_update(self, step: Batch) -> None:
        """Let the stopwatch, if the controller needs one, note that an update of this batch was made."""
        if self._stopwatch is not None:
            plan, ranks = self._training.batches.plan, self._backend.world.size
            rows = plan.minibatch_size if plan.fixed_shape else -(-step.batch_size // step.num_microbatches)
            microbatches_per_rank = -(-step.num_microbatches // ranks)  # rounded up
            self._stopwatch.after_update(ranks, rows, microbatches_per_rank)

    def post(self, backend: ElasticBackend) -> None:
        """With ranks that come and go, let the next sum over them carry the controller's answer that is due then."""
        decided, updates = self._training.batches.decided, self._training.position.step
        if decided is None or not decided.unanswered or not backend.leads:
            return
        if updates >= decided.unanswered[0].updates + READ_AFTER:
            backend.posted = self._answer_of_controller(decided)

    def state_dict(self) -> dict[str, Any]:
        """Return the times that the stopwatch has measured; an empty dict without one."""
        return {} if self._stopwatch is None else {"stopwatch": self._stopwatch.state_dict()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the entry of the stopwatch in a state is damaged."""
        if "stopwatch" in state:
            check_entries(state, {"stopwatch": (dict,)})
            check_entries(state["stopwatch"], {"seconds": (list,)}, "stopwatch.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the times that the stopwatch of an earlier run has measured; a later sampler may need them first."""
        if "stopwatch" in state:
            self._stopwatch = UpdateStopwatch()
            self._stopwatch.load_state_dict(state["stopwatch"])

    def _measure_later(self) -> Callable[[], dict[str, Any]]:
        """Return a function that returns what a controller decides by, as it is now: noise, progress, samples, ranks.

        Called some updates later, it does not wait for a device.
        """
        place, updater = self._training.place, self._updater
        on_host = {"devices": self._backend.world.size, "updates": place.position.step, "samples": place.samples}
        read_progress = updater.progress.reader()
        read_noise = None if self._noise is None else self._noise()
        reference = updater.ref_batchsize

        def read() -> dict[str, Any]:
            noise = None if read_noise is None else read_noise()
            estimates = None if noise is None else [float(noise.sigma2), float(noise.mu2), int(noise.updates)]
            return {**on_host, "progress": float(read_progress()), "noise": estimates, "ref_batchsize": reference}

        return read

    def _publish_answer(self, decided: DecidedTrace, agreement: Agreement) -> None:
        """On rank 0, let the controller answer the oldest question, once, and publish the answer for other ranks.

        On other ranks, only note the question, by whose number they will find the answer.
        """
        oldest = decided.unanswered[0]
        if oldest is not self._asked.question:  # all ranks count questions, to find the answer by its number
            self._asked = _Asked(oldest, self._asked.number + 1)
        if not self._backend.leads or self._asked.answer is not None:
            return
        answer = self._answer_of_controller(decided)
        agreement.publish("decision", self._asked.number, answer)
        self._asked = self._asked._replace(answer=answer)

    def _answer_of_controller(self, decided: DecidedTrace) -> str:
        """Return the controller's answer to the oldest question, as JSON, or its error, which every rank raises."""
        plan, stopwatch = self._training.batches.plan, self._stopwatch
        try:
            throughput = None if stopwatch is None else stopwatch.throughput()
            decision = decided.decide(plan.minibatch_size, throughput, fixed_shape=plan.fixed_shape)
            return json.dumps(decision.to_plain())
        except Exception as error:
            return json.dumps({"error": f"{type(error).__name__}: {error}"[:500]})

    def _adopt(self, decided: DecidedTrace, updates: int, agreement: Agreement) -> DecidedTrace:
        """Return the batch sizes with the controller's answer, which other ranks get from rank 0; raise its error."""
        asked = self._asked
        if isinstance(self._backend, ElasticBackend):  # its sum has brought the answer to the first rank of each job
            answer = self._backend.received if agreement.world.rank == 0 else None
            asked = self._asked = _Asked(None, asked.number + 1, answer)
            if answer is not None:
                agreement.publish("decision", asked.number, answer)
        text = agreement.wait_for("decision", asked.number) if asked.answer is None else asked.answer
        answer = json.loads(text)
        if isinstance(answer, dict):  # an error, because a decision is a list
            controller = describe_controller(decided.adaptive.controller)
            raise RuntimeError(
                f"the controller must choose a batch size, but after update {decided.unanswered[0].updates} it failed "
                f"with {answer['error']}; correct {controller} and restore the last checkpoint"
            )
        decided = decided.adopt(Decision.from_plain(answer), updates)
        scalars = decision_scalars(decided.decisions[-1])
        self._warn_if_unmeasured(scalars.get("estimates"))
        self._log_decision(scalars, updates)
        return decided

    def _log_decision(self, scalars: Mapping[str, float], updates: int) -> None:
        """Log what the controller has decided, on rank 0; `updates`: made so far with the present sampler."""
        if self._tracker is not None and self._backend.leads:
            updates += self._training.earlier.updates
            self._tracker.log(updates, {f"decision/{name}": value for name, value in scalars.items()})

    def _warn_if_unmeasured(self, estimates: float | None) -> None:
        """Warn once if a controller gets the same gradient noise in several questions: no update measures it any more.

        `estimates`: the number of estimates in the noise; None if the controller does not use it.
        """
        if estimates is None or not estimates:
            return
        # One entry for each question with this number; a new number, as of a new estimate, begins the list again.
        self._same_estimates = [*(earlier for earlier in self._same_estimates if earlier == estimates), estimates]
        if len(self._same_estimates) == _REPEATED + 1 and self._backend.leads:
            times = _REPEATED + 1
            warnings.warn(
                f"The controller got the same gradient noise {times} times, because no update had two microbatches; "
                'pass a smaller minibatch_size, noise="differenced" to the optimizer, or larger bounds to the trace',
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )
