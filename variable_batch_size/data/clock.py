"""The position in a training: the next update, along the epochs of a plan."""

from __future__ import annotations

from typing import Any, NamedTuple, final

from variable_batch_size._validation import check_int
from variable_batch_size.data.plan import Plan


@final
class Position(NamedTuple):
    """The next update: its epoch, and its step in the trace."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step}"


@final
class Clock:
    """A position that advances by one update, or moves to the beginning of an epoch.

    The sampler has a clock, at which its iterations begin, and the optimizer has one, which counts committed updates.
    A commit advances both.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.epoch = plan.epoch(0)
        self.step = self.epoch.first_step
        self._just_set = True  # no update was committed since the clock was set

    @property
    def position(self) -> Position:
        """The next update."""
        return Position(self.epoch.number, self.step)

    @property
    def samples(self) -> int:
        """The samples of all updates before this position."""
        return self.plan.samples_before(self.epoch, self.step)

    @property
    def finished(self) -> bool:
        """Whether the last update of the epoch is committed."""
        return self.step == self.epoch.end_step

    @property
    def finished_now(self) -> bool:
        """Whether the last update of the epoch was committed in this run, so that reading on would be a mistake."""
        return self.finished and not self._just_set

    def set_epoch(self, number: int) -> None:
        """Move to the first step of an epoch; stay if the clock was just set to a step of that epoch.

        Raises:
            TypeError: if the number is not an integer.
            ValueError: if it is negative, or the trace ends before the epoch does.
        """
        number = check_int(number, "epoch", remedy="count epochs from 0")
        if self._just_set and number == self.epoch.number:
            return
        self.epoch = self.plan.epoch(number)
        self.step = self.epoch.first_step
        self._just_set = True

    def advance(self) -> None:
        """Commit the next update."""
        self.step += 1
        self._just_set = False

    def follow(self, other: Clock) -> None:
        """Take the position of another clock on the same plan."""
        self.epoch, self.step, self._just_set = other.epoch, other.step, other._just_set

    def state_dict(self) -> dict[str, int]:
        """Return the position as plain integers, valid in every world."""
        return self.position._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a saved position.

        Raises:
            ValueError: if this plan has no such position.
        """
        position = Position(check_int(state["epoch"], "epoch"), check_int(state["step"], "step"))
        epoch = self.plan.epoch(position.epoch)
        if not epoch.first_step <= position.step <= epoch.end_step:
            raise ValueError(
                f"a saved position must exist in the plan that resumes, but here epoch {position.epoch} has the steps "
                f"{epoch.first_step} to {epoch.end_step - 1} and the state is at step {position.step}; restore it "
                f"with the trace and the dataset size that it was saved with"
            )
        self.epoch, self.step, self._just_set = epoch, position.step, True
