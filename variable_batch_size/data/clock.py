"""Where a training stands: the update that is due, along the epochs of a plan."""

from __future__ import annotations

from typing import Any, NamedTuple, final

from variable_batch_size._validation import check_int
from variable_batch_size.data.plan import Plan


@final
class Position(NamedTuple):
    """The update that is due: its epoch, and its step in the trace."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step}"


@final
class Clock:
    """A position that moves by one update at a time, or jumps to where an epoch begins.

    The sampler has one, which says where an iteration begins, and the optimizer has one, which counts what was
    committed; committing moves both.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.epoch = plan.epoch(0)
        self.step = self.epoch.first_step
        self._untouched = True  # no update was committed since the clock was set

    @property
    def position(self) -> Position:
        """The update that is due."""
        return Position(self.epoch.number, self.step)

    @property
    def samples(self) -> int:
        """Samples of all updates before this position."""
        return self.plan.samples_before(self.epoch, self.step)

    @property
    def finished(self) -> bool:
        """Whether the epoch's last update was committed."""
        return self.step == self.epoch.end_step

    @property
    def ran_out(self) -> bool:
        """Whether the epoch's last update was committed in this run, so that reading on would be a mistake."""
        return self.finished and not self._untouched

    def set_epoch(self, number: int) -> None:
        """Go to the first step of an epoch; stay where the clock is, if it was just set into that epoch."""
        number = check_int(number, "epoch", remedy="count epochs from 0")
        if self._untouched and number == self.epoch.number:
            return
        self.epoch = self.plan.epoch(number)
        self.step = self.epoch.first_step
        self._untouched = True

    def advance(self) -> None:
        """Commit the update that is due."""
        self.step += 1
        self._untouched = False

    def follow(self, other: Clock) -> None:
        """Take the position of a clock on the same plan."""
        self.epoch, self.step, self._untouched = other.epoch, other.step, other._untouched

    def state_dict(self) -> dict[str, int]:
        """The position as plain integers, which hold for every world."""
        return self.position._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where `state_dict` was taken.

        Raises:
            ValueError: when this plan has no such position.
        """
        position = Position(check_int(state["epoch"], "epoch"), check_int(state["step"], "step"))
        epoch = self.plan.epoch(position.epoch)
        if not epoch.first_step <= position.step <= epoch.end_step:
            raise ValueError(
                f"a saved position must exist in the plan that goes on, but here epoch {position.epoch} has the steps "
                f"{epoch.first_step} to {epoch.end_step - 1} and the state stands at step {position.step}; restore "
                f"with the trace and the dataset that the state was saved with"
            )
        self.epoch, self.step, self._untouched = epoch, position.step, True
