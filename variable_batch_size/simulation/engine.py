"""The course of a training under a capacity trace, from event to event."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, final

from variable_batch_size._validation import MAX_INT, value_error
from variable_batch_size.adaptive.base import ControlInput
from variable_batch_size.simulation.batch_sizes import BatchSizes
from variable_batch_size.simulation.interval import Interval, State
from variable_batch_size.simulation.model import Model
from variable_batch_size.simulation.nodes import Nodes
from variable_batch_size.simulation.overheads import Cause, Overheads
from variable_batch_size.simulation.position import Position
from variable_batch_size.simulation.rounding import ROUNDING, reached, snapped


@final
class Checkpoint(NamedTuple):
    """A checkpoint, complete from a time on; `intervals` and `runs` were there when it was begun."""

    complete: float
    position: Position
    intervals: int
    runs: int


@final
@dataclass
class Engine:
    """The course of a training, from event to event; `Overheads` says what happens.

    Events are changes of the nodes, notices, saves, decisions, changes of the noise, and the end. Between two of them
    the updates are equal, and a `Course` counts them. Times and progress are those of an event plus a number of updates
    times that of one, so that rounding does not grow with the number of updates.

    Args:
        end: time at which the simulation ends.
        goal: the end of the training: the total that counts, and its value.
        present: the nodes that are there.
        staying: the nodes that are there and will not leave within the notice.
        kills: whether nodes that leave kill the training.
        sizes: the batch sizes.
        model: seconds and progress of an update.
        overheads: what interruptions cost.
    """

    end: float
    goal: tuple[Literal["updates", "samples", "progress"], float]
    present: Nodes
    staying: Nodes
    kills: bool
    sizes: BatchSizes
    model: Model
    overheads: Overheads
    now: float = 0.0
    intervals: list[Interval] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)  # batch size and number of the kept updates
    preemptions: int = 0
    restarts: int = 0

    def __post_init__(self) -> None:
        self._position = Position(0, 0, 0.0, 0, ())
        self._saved = Checkpoint(0.0, self._position, 0, 0)
        self._writing: Checkpoint | None = None
        self._cause: Cause = "start"

    def run(self) -> None:
        """Simulate the training."""
        least = self.overheads.least_nodes
        while not self._done:
            nodes = self.staying.at(self.now)
            if nodes < least:
                self._spend("idle", self.staying.at_least(least, self.now))
            elif self._restart(nodes):
                self._train(nodes)

    @property
    def position(self) -> Position:
        """How far the training is."""
        return self._position

    @property
    def _done(self) -> bool:
        unit, value = self.goal
        reached = getattr(self._position, unit) >= value or self._position.updates >= self.sizes.end
        return reached or self.now >= self.end

    def _snapped(self, time: float) -> float:
        """Return the time of the change of the nodes, or of the end, that a time is equal to up to rounding."""
        return snapped(self.present.snapped(self.staying.snapped(time)), [self.end])

    def _spend(self, state: State, until: float, nodes: int = 0, batch_size: int = 0) -> None:
        """Add an interval, of which the simulation may end before `until`."""
        begin, self.now = self.now, min(until, self.end)
        if self.now > begin:
            self.intervals.append(Interval(begin, self.now, state, nodes, batch_size))

    def _restart(self, nodes: int) -> bool:
        """Start the training; return False if nodes leave before it has started."""
        started = self._snapped(self.now + self.overheads.restart_seconds(nodes, self._cause))
        aborted = self.staying.below(nodes, self.now)
        self.restarts += self._cause != "start"
        self._spend("restarting", min(started, aborted), nodes)
        if aborted < min(started, self.end):
            self.preemptions, self._cause = self.preemptions + 1, "preemption"
        return aborted >= started

    def _train(self, nodes: int) -> None:
        """Train with these nodes until the training stops, is killed or ends."""
        overheads, restarted, continued, asked = self.overheads, self.now, self.now, False
        kill = self.present.below(nodes, self.now) if self.kills else math.inf
        notice = self.staying.below(nodes, self.now)
        while not self._done:  # `now` is the end of a restart, an update or a save
            now = self.now
            self._complete(now)
            if now >= kill and not overheads.notice:
                return self._die()
            staying, may_grow = self.staying.at(now), reached(now, restarted + overheads.grow_every)
            if staying < nodes or (staying > nodes and may_grow):
                return self._stop(nodes, kill)
            if notice <= now:  # the nodes are there again
                notice = self.staying.below(nodes, now)
            due = math.inf if overheads.save_every is None else continued + overheads.save_every
            due = max(due, self._writing.complete) if self._writing else due
            if reached(now, due):
                if not self._save(nodes, kill, overheads.blocking):
                    return None
                continued = self.now
                continue
            change = self.staying.other_than(nodes, max(now, restarted + overheads.grow_every))
            if not self._update(nodes, min(notice, change, due), min(kill, self.end), not asked):
                return self._die() if self.now < self.end else None
            asked = True
        return None

    def _update(self, nodes: int, wanted: float, limit: float, restarted: bool) -> bool:
        """Make equal updates up to the first one that ends at `wanted` or later.

        Returns:
            False if `limit` comes before the end of the first one: its nodes leave, or the simulation ends.
        """
        before, begin, devices = self._position, self.now, self.model.devices(nodes)
        decisions = self.sizes.decisions(before.decisions, partial(self._input, devices), restarted)
        size = decisions[0].batch_size
        course = self.model.course(size, devices, before)
        updates = course.ended_by(begin, limit * (1 + ROUNDING))
        if updates == 0:
            self._spend("idle" if limit == self.end else "redone", limit, nodes, size)
            return False
        unit, value = self.goal
        ends = min(self.sizes.end, self.sizes.changes(decisions, before.updates))
        updates = int(min(updates, ends - before.updates))
        updates = course.until(lambda n: begin + course.seconds(n), wanted * (1 - ROUNDING), updates)
        updates = course.until(
            lambda n: before.progress + course.progress(n), self.model.noise_until(before.progress), updates
        )
        updates = course.until(lambda n: getattr(before, unit) + getattr(course, unit)(n), value, updates)
        self.now = self._snapped(begin + course.seconds(updates))
        made = updates, course.samples(updates), course.progress(updates)
        self.intervals.append(Interval(begin, self.now, "productive", nodes, size, *made))
        self.runs.append((size, updates))
        self._position = before.after(course, updates, decisions)
        if self._position.updates >= MAX_INT:
            requirement, found = "a training must have fewer than 2**53 updates", f"as many in {self.now:.6g} seconds"
            raise value_error(requirement, found, "check the throughput and the seconds")
        return True

    def _input(self, devices: int, chosen: int | None) -> ControlInput:
        done, model = self._position, self.model
        noise = model.noise_of(done.progress, done.updates, chosen)
        counts = done.updates, done.samples, done.progress
        return ControlInput(devices, chosen, model.minibatch_size, *counts, noise, model.throughput, model.fixed_shape)

    def _save(self, nodes: int, kill: float, blocking: bool) -> bool:
        """Write a checkpoint; return False if the training is killed before it is complete, and waits for it."""
        complete = self._snapped(self.now + self.overheads.save)
        saved = Checkpoint(complete, self._position, len(self.intervals), len(self.runs))
        if not blocking:
            self._writing = saved
            return True
        self._spend("saving", min(complete, kill), nodes)
        if complete > min(kill, self.end):
            if kill < self.end:
                self._die()
            return False
        self._saved, self._writing = saved, None
        return True

    def _stop(self, nodes: int, kill: float) -> None:
        """Save what is not saved, and stop; the training restarts with other nodes."""
        if self._saved.position.updates == self._position.updates or self._save(nodes, kill, blocking=True):
            fewer = self.staying.at(self.now) < nodes
            self.preemptions, self._cause = self.preemptions + fewer, "preemption" if fewer else "growth"

    def _complete(self, now: float) -> None:
        """Replace the checkpoint by the one that is being written, if that is complete."""
        if self._writing and reached(now, self._writing.complete):
            self._saved, self._writing = self._writing, None

    def _die(self) -> None:
        """Go back to the last complete checkpoint."""
        self._complete(self.now)
        self._writing = None
        for row in range(self._saved.intervals, len(self.intervals)):
            if self.intervals[row].state == "productive":
                self.intervals[row] = self.intervals[row]._replace(state="redone")
        del self.runs[self._saved.runs :]
        self._position = self._saved.position
        self._saved = self._saved._replace(intervals=len(self.intervals))
        self.preemptions, self._cause = self.preemptions + 1, "preemption"
