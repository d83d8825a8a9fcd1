"""Which microbatch is due, and whether the user's loop brings the one that its sampler dealt."""

from __future__ import annotations

from typing import Protocol, final
from weakref import WeakSet

from variable_batch_size.backend import Backend
from variable_batch_size.data.clock import Clock
from variable_batch_size.data.plan import Microbatch, Step
from variable_batch_size.data.sampler import CustomSampler, Iteration


class Watcher(Protocol):
    """What counts microbatches too, and has to know which of them count."""

    def commit(self) -> None:
        """The step that was accumulated was committed."""

    def discard(self) -> None:
        """A step, if one was accumulated, begins again, or never."""


@final
class Loop:
    """Counts the microbatches that come from a sampler, along the sampler's plan.

    It reads the plan and counts for itself, because what the sampler has yielded may only have been prefetched.
    """

    def __init__(self, sampler: CustomSampler, backend: Backend) -> None:
        self.sampler = _checked(sampler, backend)
        self.clock: Clock = sampler.attach()
        self.watchers: WeakSet[Watcher] = WeakSet()
        self._world = backend.world
        self._turn = 0  # microbatches of the due step that came
        self._step: Step | None = None
        self._cut: dict[int, Microbatch] = {}  # of the due step, by turn: each is asked for several times
        self._iteration: Iteration | None = None
        self._came = 0  # microbatches of the iteration that came

    @property
    def inside_step(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._turn > 0

    @property
    def step(self) -> Step:
        """The update that is due."""
        if self._step is None:
            self._step = self.clock.plan.step(self.clock.epoch, self.clock.step)
        return self._step

    def microbatch(self, ahead: int = 0) -> Microbatch:
        """The microbatch that is due, or a later one of the same step.

        Raises:
            RuntimeError: when the epoch has had all of its updates.
        """
        if self.clock.finished:
            epoch = self.clock.epoch.number
            raise RuntimeError(
                f"a microbatch is due until the epoch's last update, but epoch {epoch} has had all of them; call "
                f"set_epoch({epoch + 1}) on the sampler and on the optimizer"
            )
        turn = self._turn + ahead
        if turn not in self._cut:
            self._cut[turn] = self.step.microbatch(turn, self._world)
        return self._cut[turn]

    def arrive(self) -> Microbatch:
        """Count the microbatch that is due as come.

        Raises:
            RuntimeError: when it cannot be the one that the sampler dealt.
        """
        microbatch = self.microbatch()
        iteration = self.sampler.iteration
        if iteration is not None and iteration is not self._iteration:
            self._came = self._begin(iteration)
            self._iteration = iteration
        if iteration is None or self._came >= iteration.yielded:
            raise RuntimeError(
                f"each step() takes one microbatch of the optimizer's own sampler, but that sampler has yielded "
                f"{0 if iteration is None else iteration.yielded} and this is number {self._came + 1}; give the same "
                f"CustomSampler to the optimizer and, as batch_sampler, to the loader, and call step() once a "
                f"microbatch"
            )
        if left_out := iteration.arrive(self._came):
            raise RuntimeError(
                f"step() must follow the backward() of every microbatch, but {left_out} of those that were read did "
                f"not come to it before step {microbatch.step} went on; call it once a microbatch, leave none out, and "
                f"give the sampler to the loader as batch_sampler"
            )
        self._came += 1
        return microbatch

    def next_turn(self) -> None:
        """Be due for the next microbatch of the same step."""
        self._cut.pop(self._turn, None)
        self._turn += 1

    def commit(self) -> None:
        """Be due for the next step; the sampler's clock follows."""
        self.clock.advance()
        self.sampler.follow(self.clock)
        self._turn, self._step, self._cut = 0, None, {}
        for watcher in self.watchers:
            watcher.commit()

    def restart(self) -> None:
        """Be due for the first microbatch of the step where the clock stands, from a new iteration."""
        if self._iteration is not None:
            self._iteration.void = True
        self._turn, self._step, self._cut, self._iteration = 0, None, {}, None
        for watcher in self.watchers:
            watcher.discard()

    def _begin(self, iteration: Iteration) -> int:
        """How many microbatches an iteration has before the one that is due, which it must lead to."""
        here, start = self.clock.position, iteration.start
        if iteration.void:
            raise RuntimeError(
                f"a step that begins again needs a new iteration, but this one was read further before {here} was "
                f"gone to; iterate the loader anew after set_epoch(), discard_step() or load_state_dict()"
            )
        iteration.void = True  # where it is refused, the microbatch that it gave is lost
        if self.inside_step:
            raise RuntimeError(
                f"a step must get all its microbatches from one iteration, but step {here.step} had {self._turn} of "
                f"{self.step.rounds(self._world)} when the loader was iterated anew; call optimizer.discard_step() "
                f"before it to begin the step again, or set_epoch on both"
            )
        begins_here = start == here and iteration.first_turn == 0
        # A loader that restores its iterator may have read on from an older snapshot, up to where we stand.
        leads_here = iteration.resumed and start.epoch == here.epoch and start.step < here.step
        if not (begins_here or leads_here):
            raise RuntimeError(
                f"the sampler and the optimizer must stand at the same update, but the sampler's iteration began at "
                f"{start} and the optimizer stands at {here}; call set_epoch with the same epoch on both, or restore "
                f"both"
            )
        iteration.void = False
        steps = (self.clock.plan.step(self.clock.epoch, number) for number in range(start.step, here.step))
        return sum(step.rounds(self._world) for step in steps) - iteration.first_turn


def _checked(sampler: CustomSampler, backend: Backend) -> CustomSampler:
    if not isinstance(sampler, CustomSampler):
        raise TypeError(
            f"the sampler must be the vbs.CustomSampler that feeds the loop, got {type(sampler).__name__}; make one "
            f"and give it to the loader as batch_sampler"
        )
    world = backend.world
    if sampler.world != world:
        raise ValueError(
            f"the sampler must deal for the rank that the optimizer runs on, but it deals for rank "
            f"{sampler.world.rank} of {sampler.world.size} and the optimizer's {type(backend).__name__} is rank "
            f"{world.rank} of {world.size}; pass num_replicas and rank of this process, and start torch.distributed "
            f"(or move the model to its XLA device) before the optimizer is made"
        )
    return sampler
