"""The position in a training: the next update, along the epochs of a plan."""

from __future__ import annotations

from typing import Any, NamedTuple, final

from variable_batch_size._validation import check_int
from variable_batch_size.data.plan import Epoch, Plan


@final
class Position(NamedTuple):
    """The next update: its epoch, and its step in the trace."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step}"


@final
class Skipped(NamedTuple):
    """What a clock left out when it moved forward without training."""

    updates: int
    samples: int


class _State(NamedTuple):
    """What a clock shows, as one value: an interrupt finds the old one or the new one."""

    plan: Plan
    epoch: Epoch  # the epoch under way; or the one that has just ended
    step: int  # the next update in the trace
    samples: int  # of the committed updates, over all ranks
    committed: tuple[Epoch, int]  # epoch and step from which on `set_epoch` may choose
    just_loaded: bool = True  # whether no update was committed since the clock was made or loaded
    end_pending: bool = False  # whether the epoch has ended, but what the loop does at its end is to come
    commits: int = 0  # of this clock


@final
class Clock:
    """A position in the training, which only a commit moves on and only `load_state_dict` moves back.

    There are two kinds: the sampler's clock says where its next iteration begins, and each optimizer's clock counts
    its own committed updates. They are separate because several optimizers may share a sampler, as the two of a GAN do:
    one of them commits a step before the other. A commit of any of them advances the sampler's clock.
    """

    def __init__(self, plan: Plan) -> None:
        epoch = plan.epoch(plan.first_epoch)
        self._state = _State(plan, epoch, epoch.first_step, 0, (epoch, epoch.first_step))

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self._state.plan

    @property
    def epoch(self) -> Epoch:
        """The epoch under way; or the one that has just ended."""
        return self._state.epoch

    @property
    def step(self) -> int:
        """The next update in the trace."""
        return self._state.step

    @property
    def samples(self) -> int:
        """The number of samples of the committed updates, over all ranks."""
        return self._state.samples

    @property
    def just_loaded(self) -> bool:
        """Whether no update was committed since the clock was made or loaded."""
        return self._state.just_loaded

    @property
    def end_pending(self) -> bool:
        """Whether the epoch has ended, but what the loop does at its end is to come.

        The state was saved in the loop, after the last update.
        """
        return self._state.end_pending

    @property
    def commits(self) -> int:
        """How many updates this clock itself has committed."""
        return self._state.commits

    @property
    def position(self) -> Position:
        """The next update; after the last one of an epoch, the end of that epoch."""
        return Position(self.epoch.number, self.step)

    @property
    def due_epoch(self) -> int:
        """The epoch of the next update: the following one if an epoch has ended, unless its end is pending."""
        return self.epoch.number + (self.finished and not self.end_pending)

    @property
    def finished(self) -> bool:
        """Whether the last update of the epoch is committed."""
        return self.step == self.epoch.end_step

    @property
    def finished_now(self) -> bool:
        """Whether the last update of the epoch was committed in this run, so that reading on would be a mistake."""
        return self.finished and not self.just_loaded and self.epoch.end_step > self.epoch.first_step

    @property
    def done(self) -> bool:
        """Whether the training has ended: by the `max_updates` or `max_samples` of the plan, or with its trace."""
        return self.finished and self.plan.ends_with(self.epoch)

    def set_epoch(self, number: int) -> Skipped:
        """Move to the first step of a later epoch; in the epoch under way, to the update after the last committed one.

        Returns:
            What lies between the last committed update and the new position.

        Raises:
            TypeError: if the number is not an integer.
            ValueError: if it is negative, or the trace ends before the epoch does.
            RuntimeError: if all updates of that epoch are committed.
        """
        number = check_int(number, "epoch", 0, remedy="count epochs from 0")
        epoch, step = self._state.committed
        if number > epoch.number:
            before, later = self.plan.samples_before(epoch, step), self.plan.epoch(number)
            self._state = self._state._replace(epoch=later, step=later.first_step, end_pending=False)
            return Skipped(later.first_step - step, later.samples_before - before)
        if number < epoch.number or (step == epoch.end_step and not self.end_pending):
            due = epoch.number + (step == epoch.end_step)
            raise RuntimeError(
                f"set_epoch() can choose the epoch under way or a later one, but epoch {number} is over and the next "
                f"update is in epoch {due}; loop over range(optimizer.epoch, epochs), and to go back load an earlier "
                f"state, or create sampler and optimizer again"
            )
        self._state = self._state._replace(epoch=epoch, step=step)
        return Skipped(0, 0)

    def advance(self, samples: int) -> None:
        """Commit the next update, which has this number of samples."""
        now, step = self._state, self.step + 1
        ahead, total = (now.epoch, step), now.samples + samples
        self._state = _State(now.plan, *ahead, total, ahead, just_loaded=False, commits=now.commits + 1)

    def follow(self, other: Clock) -> None:
        """Take the plan and the position of another clock."""
        self._state = other._state._replace(commits=self.commits)

    def end(self) -> None:
        """Note that what the loop does at the end of the epoch has begun."""
        self._state = self._state._replace(end_pending=False)

    def replan(self, plan: Plan) -> None:
        """Go on in a plan that has the same past."""
        begun, step = self._state.committed
        begun = plan.epoch(begun.number) if begun.number >= plan.first_epoch else begun
        self._state = self._state._replace(plan=plan, epoch=plan.epoch(self.epoch.number), committed=(begun, step))

    def state_dict(self) -> dict[str, int]:
        """Return the position, the samples and the past of the epoch as plain integers, valid in every world."""
        epoch = self.epoch
        used = self.plan.samples_before(epoch, self.step) - epoch.samples_before
        past = {"first_step": epoch.first_step, "samples_before": epoch.samples_before, "epoch_samples": used}
        ended = {"ended": self.finished and epoch.complete, "end_pending": self.end_pending}
        return {**self.position._asdict(), "samples": self.samples, **past, **ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a saved position, in a plan that `Plan.resume` has returned for it.

        Raises:
            ValueError: if this plan has no such position.
        """
        position = Position(check_int(state["epoch"], "epoch"), check_int(state["step"], "step"))
        epoch = self.plan.epoch(position.epoch)
        if not epoch.first_step <= position.step <= epoch.end_step:
            raise ValueError(
                f"a saved position must exist in the plan that resumes, but here epoch {position.epoch} begins at step "
                f"{epoch.first_step} and ends before step {epoch.end_step}, and the state is at step {position.step}; "
                f"restore it with the trace and the dataset size that it was saved with"
            )
        samples = check_int(state["samples"], "samples")
        pending = position.step == epoch.end_step and bool(state["end_pending"])  # only at the end of an epoch
        committed = epoch, position.step
        self._state = _State(
            self.plan, epoch, position.step, samples, committed, end_pending=pending, commits=self.commits
        )
