"""What feeds an optimizer: a plan of a dataset's samples (`CustomSampler`), or batches that arrive."""

from __future__ import annotations

from abc import ABC
from typing import Any

from variable_batch_size._validation import check_int
from variable_batch_size.data.clock import Clock
from variable_batch_size.data.deal import Dealing
from variable_batch_size.data.feed import Feed
from variable_batch_size.data.plan import Plan
from variable_batch_size.world import World


class Source(ABC):
    """What an optimizer needs of what feeds it."""

    _feed: Feed

    @property
    def world(self) -> World:
        """This rank, and the number of ranks."""
        return self._feed.world

    @property
    def epochs(self) -> int | None:
        """The number of epochs that will be trained, if known."""
        return self._feed.epochs

    @property
    def clock(self) -> Clock:
        """The position of the next iteration; a commit of an optimizer moves it at the same moment."""
        return self._feed.clock

    @property
    def plan(self) -> Plan:
        """Which samples make up which update."""
        return self._feed.plans.plan

    @property
    def max_batch_size(self) -> int:
        """The largest batch size that an update may have, in samples."""
        return self._feed.plans.max_batch_size

    @property
    def dealing(self) -> Dealing:
        """How steps are split into microbatches and rounds."""
        return self._feed.dealing

    @property
    def epoch(self) -> int:
        """The epoch of the next update: the following one if all updates of an epoch are committed."""
        return self.clock.due_epoch

    def set_epoch(self, epoch: int) -> None:
        """Move to the first step of a later epoch; in the epoch under way, continue after the last committed update.

        Raises:
            ValueError: if the trace ends before the epoch does.
            RuntimeError: if the last iteration was read to its end without calls of `optimizer.step()`, or all updates
                of that epoch are committed.
        """
        self._feed.set_epoch(check_int(epoch, "epoch", 0, remedy="count epochs from 0"))

    def state_dict(self) -> dict[str, Any]:
        """Return the committed position and what determines its samples: plain numbers, without rank or world."""
        return self._feed.state_dict(self.clock)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Move to a saved position, unless an optimizer's clock already defines the position.

        The past of the trace must be that of the saved run; its future may change, with a UserWarning.

        Raises:
            ValueError: if the state was saved with another dataset size, seed or past of the trace, unless `strict` is
                False; or if there is no such position.
        """
        self._feed.load_state_dict(state_dict, strict=strict)
