"""Ask for the batch sizes of a growing trace as a training goes on; `trace/growing.py` has the course of a question."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, final
from uuid import uuid4

import torch.distributed as dist

from variable_batch_size.backend import Backend
from variable_batch_size.data.plan import Step
from variable_batch_size.optim.loop import Loop
from variable_batch_size.optim.update import Updater
from variable_batch_size.optim.user_line import stacklevel_of_user
from variable_batch_size.trace.growing import ADOPTED_AFTER, READ_AFTER, Facts, GrowingTrace, Growth, Question
from variable_batch_size.tracker import Tracker

_KEPT = 64  # answers in the store; hosts of devices that execute later may be some updates apart
_REPEATED = 3  # questions without a new estimate of the noise, after which the user is warned


@final
class Deciding:
    """Has the batch sizes of later updates decided, if the sampler's trace is growing, and tells them to all ranks.

    Of several optimizers of a sampler, the one that makes an update first does it.

    Args:
        loop: the loop, which has the sampler.
        updater: the updater, which knows noise and progress.
        backend: how ranks communicate: by its store, so that no rank or device waits for another one.
        tracker: gets each decision, and what it was made from; None: nobody does.
    """

    def __init__(self, loop: Loop, updater: Updater, backend: Backend, tracker: Tracker | None) -> None:
        self._loop, self._updater, self._backend, self._tracker = loop, updater, backend, tracker
        growing = loop.sampler.planning.growing
        self._stopwatch = None if growing is None else growing.trace.stopwatch()
        self._store: dist.Store | None = None
        self._oldest: Question | None = None  # of those that are not answered, as it was after the last update
        self._number = 0  # of that one
        self._answer: str | None = None  # to it, on rank 0
        self._estimates: list[float] = []  # at the questions since the last new one
        self._begun = False  # whether it has looked after an update

    def after_update(self, step: Step) -> None:
        """Ask, answer and adopt what is due after an update.

        Raises:
            RuntimeError: on every rank, if the controller has failed.
        """
        planning, updates = self._loop.sampler.planning, self._loop.clock.step
        growing, growth = planning.growing, planning.growth
        if growing is None or growth is None or updates <= planning.decided_at:
            return
        planning.decided_at = updates
        planning.is_trained_here()
        world = self._backend.world
        if self._store is None and world.size > 1:
            token = self._backend.all_gather_bytes(uuid4().hex.encode())[0].decode()
            self._store = dist.PrefixStore(f"variable_batch_size/{token}", self._backend.store())
        if self._stopwatch is not None:
            rows = step.minibatch_size if step.fixed_shape else -(-step.batch_size // step.num_microbatches)
            self._stopwatch.after_update(world.size, rows, -(-step.num_microbatches // world.size))
        trace = growing.trace
        if not self._begun:  # what was decided at the beginning, or at a restart
            self._begun = True
            self._log(trace.scalars(growth.decisions[0]), updates)
        if trace.is_due(updates):
            growth = growth.with_question(Question(updates, self._facts()))
        while growth.questions and updates >= growth.questions[0].updates + READ_AFTER:
            self._tell(trace, growth)
            if updates < growth.questions[0].updates + ADOPTED_AFTER:
                break
            growth = self._adopt(trace, growth, updates)
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
        clock, updater, devices = self._loop.clock, self._updater, self._backend.world.size
        updates, samples, progress = clock.step, clock.samples, updater.progress.later()
        noise = None if updater.gradient_noise is None else updater.gradient_noise.later()
        reference = updater.ref_batchsize

        def read() -> Facts:
            found = None if noise is None else noise()
            estimates = None if found is None else [float(found.sigma2), float(found.mu2), int(found.updates)]
            return Facts(devices, updates, samples, float(progress()), estimates, reference)

        return read

    def _tell(self, trace: GrowingTrace, growth: Growth) -> None:
        """Answer the oldest question on rank 0, once, and put the answer where the others find it."""
        oldest = growth.questions[0]
        if oldest is not self._oldest:
            self._oldest, self._number, self._answer = oldest, self._number + 1, None
        if self._backend.world.rank == 0 and self._answer is None:
            plan = self._loop.sampler.plan
            self._answer = trace.answer(growth, plan.minibatch_size, self._stopwatch, fixed_shape=plan.fixed_shape)
            if self._store is not None:
                self._store.set(str(self._number), self._answer)
                self._store.delete_key(str(self._number - _KEPT))

    def _adopt(self, trace: GrowingTrace, growth: Growth, updates: int) -> Growth:
        """Return the growth with the answer to the oldest question, which rank 0 has told."""
        answer = self._answer
        if answer is None:
            assert self._store is not None
            answer = self._store.get(str(self._number)).decode()
        known = trace.told(growth, answer, updates)
        scalars = trace.scalars(known.decisions[-1])
        self._warn_if_unmeasured(scalars.get("estimates"))
        self._log(scalars, updates)
        return known

    def _log(self, scalars: Mapping[str, float], updates: int) -> None:
        """Log a decision and what it was made from, on rank 0."""
        if self._tracker is not None and self._backend.world.rank == 0:
            self._tracker.log(updates, {f"decision/{name}": value for name, value in scalars.items()})

    def _warn_if_unmeasured(self, estimates: float | None) -> None:
        """Warn once if a controller gets the same noise again and again, because nothing measures it any more."""
        if estimates is None or not estimates:
            return
        self._estimates = [*(known for known in self._estimates if known == estimates), estimates]
        if len(self._estimates) == _REPEATED + 1 and self._backend.world.rank == 0:
            warnings.warn(
                f"The controller got the same gradient noise {_REPEATED + 1} times, because no update since the first "
                f'of them had two microbatches; pass a smaller minibatch_size to the sampler, noise="differenced" to '
                f"the optimizer, or larger bounds to the AdaptiveTrace",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )
