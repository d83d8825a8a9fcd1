"""One pass over the rest of an epoch: what a loader has read of it, and what has reached `step()`.

A sampler sees when microbatches are read, and an optimizer when they reach `step()`. In between a loader may prefetch.
"""

from __future__ import annotations

import threading

from variable_batch_size.data.batches import Position


class Pass:
    """Counts the reads of an iteration, and the microbatches of it that reached `step()`.

    Attributes:
        start: the position of its first step.
        first_round: the round of that step at which it starts.
        resumed: whether its loader may have resumed from a snapshot before the optimizer's position.
        reads: number of reads, with those that met the end.
        yielded: number of microbatches that were read.
        exhausted: whether a read has met the end.
        thread: the one that reads, 0 before.
        by_updates: whether `vbs.updates` reads it, which compares its hand-out with the reads.
        loaded: whether its loader has said where it begins.
        stale: whether its next microbatch is not the one that is due, because an optimizer has moved since.
    """

    def __init__(self, start: Position) -> None:
        self.start, self.first_round = start, 0
        self.reads = self.yielded = self.thread = 0
        self.exhausted = self.by_updates = self.stale = self.loaded = self.resumed = False
        self._stepped: dict[object, int] = {}  # by optimizer: microbatches that reached its step()
        self._lead: int | None = None  # of the reads over what the loop has received, at the first one
        self._left_at = 0  # reads when `set_epoch` has said that the loop is left

    @property
    def stepped(self) -> int:
        """The number of microbatches that reached the `step()` of all optimizers."""
        return min(self._stepped.values(), default=0)

    def count_step(self, optimizer: object, received: int, step: int, *, begins_update: bool) -> None:
        """Count a microbatch that reached the `step()` of an optimizer after `received` others, for an update.

        The first call measures how far the loader is ahead, so that a microbatch that is skipped before is noticed only
        when the loop has ended.

        Raises:
            RuntimeError: if the loop has skipped microbatches or called `step()` too often, as far as it is known; or
                if it is the first of an update, and another optimizer has not got all those before it.
        """
        if begins_update and len(self._stepped) > 1 and self.stepped < received:
            raise RuntimeError(
                f"step() of all optimizers of a sampler must be called once per microbatch, but one has got "
                f"{self.stepped} when another begins an update after {received}; call each for every microbatch, and "
                f"give an optimizer that steps more rarely a sampler of its own"
            )
        self._stepped[optimizer] = received + 1
        skipped = 0 if self.by_updates else self.count_lost(received)
        if skipped:
            lost = (
                f"{skipped} of those that were read did not reach step() before step {step} continued"
                if skipped > 0
                else f"step() was called {-skipped} times more than microbatches were read"
            )
            raise RuntimeError(
                f"step() must follow the backward() of every microbatch, but {lost}; call it once per microbatch, skip "
                f"none (after an exception call discard_step() and iterate the loader again), pass the sampler to the "
                f"loader as batch_sampler, give an optimizer that steps more rarely a sampler of its own, and read "
                f"several at once only by vbs.updates"
            )

    def count_lost(self, received: int) -> int:
        """Return how many microbatches were lost between sampler and loop, by one that comes after `received` others.

        A loader that reads in the thread of the loop is ahead by a constant number of reads: 1 without workers, and
        num_workers * prefetch_factor + 1 with some. If that lead grows, microbatches were left out; if it shrinks
        before the end, some came twice (negative). The first call measures it. Nothing is known of a loader that reads
        in another thread.
        """
        if self._in_thread:
            return 0
        lead = self.reads - received
        self._lead = lead if self._lead is None else self._lead
        return 0 if lead < self._lead and self.exhausted else lead - self._lead  # at the end a loader reads no more

    def note_leaving(self) -> None:
        """Note that the loop is left on purpose, unless it reads on."""
        self._left_at = self.reads

    def has_left_over(self, *, ended: bool) -> bool:
        """Return whether the loop has ended, and a microbatch that it got did not reach `step()`.

        With a loader that prefetches, a loop that leaves with the last microbatch in hand counts as one that skips it.
        If a loader reads in a thread of its own, all that was read counts as received.

        Args:
            ended: whether the loop has ended, also if its loader does not tell.
        """
        if self.stale or self.by_updates or not self.exhausted or self._left_at == self.reads:
            return False
        if 0 < self.stepped == self.yielded:
            return False
        if self._lead is None or self._in_thread:
            return ended
        taken = self.reads - self._lead + 1
        return taken > self.yielded or (ended and self._lead > 1 and taken == self.yielded)

    @property
    def _in_thread(self) -> bool:
        return self.thread != threading.get_ident()
