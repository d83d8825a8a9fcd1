"""`Overheads`: what happens when nodes leave or come; `Engine`: a training under them, from event to event."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, final

from variable_batch_size._validation import MAX_INT, check_int, check_number, check_positive, type_error
from variable_batch_size.adaptive.base import ControlInput
from variable_batch_size.lab.simulation.batch_sizes import BatchSizes
from variable_batch_size.lab.simulation.model import Model, SimulatedPosition
from variable_batch_size.lab.simulation.nodes import ROUNDING, Nodes, reached, snap

Cause: TypeAlias = Literal["start", "preemption", "growth"]
State: TypeAlias = Literal["productive", "redone", "restarting", "saving", "idle"]


@final
@dataclass(frozen=True, slots=True)
class Overheads:
    """The time that interruptions and checkpoints cost, in seconds.

    The training looks at the nodes when a restart, an update or a save ends, in this order:

    - Some of its nodes will leave within `notice` seconds: it saves, if an update was made since the last checkpoint,
      and restarts with those that stay. Nothing is lost.
    - There are more nodes, and `grow_every` seconds have passed since the last restart: it saves and restarts with
      them, or with those that are left after the save.
    - A save is due: it saves and continues.

    If nodes that it uses leave before, the training is killed. It restarts from the last checkpoint that was complete
    by then; the updates since and the part of the current one are lost. A restart is aborted, and begins again, when
    some of its nodes leave or are announced to leave. What ends at the time of a kill ended before it.

    Args:
        restart: seconds of a restart, >= 0; or a function of the number of nodes and of the cause, which is "start",
            "preemption" or "growth".
        save_every: seconds after which a save is due, > 0, since the end of the last restart or the moment at which the
            training continued after the last save; it begins when the current update ends. None: it saves only before
            it stops.
        save: seconds of writing a checkpoint, >= 0.
        blocking: whether the training waits while a checkpoint is written; otherwise the checkpoint is complete `save`
            seconds after the end of the update, and the next one does not begin before. Before a stop it always waits.
        notice: seconds from the announcement of a preemption to the preemption, >= 0; 0: it is killed at once.
        least_nodes: least number of nodes with which it trains, >= 1.
        grow_every: seconds since the end of the last restart before it restarts with more nodes, >= 0.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if it is not in its range.
    """

    restart: float | Callable[[int, Cause], float] = 0.0
    save_every: float | None = None
    save: float = 0.0
    blocking: bool = True
    notice: float = 0.0
    least_nodes: int = 1
    grow_every: float = 0.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        names = ["save", "notice", "grow_every"]
        names += [] if callable(self.restart) else ["restart"]
        for name in names:
            object.__setattr__(self, name, check_number(getattr(self, name), name, "pass seconds"))
        if self.save_every is not None:
            interval = check_positive(self.save_every, "save_every", "pass seconds, or None for no such saves")
            object.__setattr__(self, "save_every", interval)
        object.__setattr__(self, "least_nodes", check_int(self.least_nodes, "least_nodes", 1, MAX_INT))
        if not isinstance(self.blocking, bool):
            raise type_error("blocking must be a bool", self.blocking, "pass True or False")

    def restart_seconds(self, nodes: int, cause: Cause) -> float:
        """Return the seconds of a restart with a number of nodes.

        >>> Overheads(restart=lambda nodes, cause: 30 + nodes).restart_seconds(4, "growth")
        34.0

        Raises:
            TypeError, ValueError: if the function returns no number >= 0.
        """
        seconds = self.restart(nodes, cause) if callable(self.restart) else self.restart
        return check_number(seconds, "the seconds of a restart", "let the function return seconds")


@final
class Interval(NamedTuple):
    """A time interval of a simulated training in which its state does not change. Updates are those that end in it."""

    begin: float  # seconds
    end: float
    state: State
    nodes: int = 0  # that the training uses
    batch_size: int = 0
    updates: int = 0
    samples: int = 0
    progress: float = 0.0


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge neighboring intervals of the same state, nodes and batch size, so that a timeline has fewer rows."""
    merged: list[Interval] = []
    for interval in intervals:
        if merged and merged[-1][2:5] == interval[2:5]:  # state, nodes and batch size
            begin, *_, updates, samples, progress = merged.pop()
            sums = updates + interval.updates, samples + interval.samples, progress + interval.progress
            interval = Interval(begin, *interval[1:5], *sums)
        merged.append(interval)
    return merged


class _Saved(NamedTuple):
    """A checkpoint of the simulated training, to which it goes back after a kill."""

    complete: float  # time from which it can be restored
    position: SimulatedPosition
    intervals: int  # number of intervals of the engine when the checkpoint was begun
    runs: int  # number of its runs at that time


@final
@dataclass
class Engine:
    """The simulation of a training on nodes that come and leave. `Overheads` says what happens when they do.

    Events are changes of the nodes, notices, saves, decisions, changes of the noise, and the end. Between two of them
    the updates are equal, see `EqualUpdates`. Times and progress are those of an event plus a multiple of those of an
    update, so that rounding does not grow with the number of updates.

    Args:
        end: time at which the simulation ends.
        goal: a total, and its value at which the training ends.
        present: the nodes that are there.
        staying: those of them that will not leave within the notice.
        kills: whether nodes that leave kill the training.
        sizes: give the batch size of each update.
        model: gives the seconds and the progress of an update.
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
        """Begin before the first update, with an empty checkpoint that is complete."""
        self._position = SimulatedPosition(0, 0, 0.0, 0, ())
        self._saved = _Saved(0.0, self._position, 0, 0)  # the last complete checkpoint
        self._writing: _Saved | None = None  # the one that is being written while the training continues
        self._cause: Cause = "start"  # of the next restart

    def run(self) -> None:
        """Simulate the training, up to its goal or the end of the simulation."""
        least = self.overheads.least_nodes
        while not self._done:
            nodes = self.staying.at(self.now)
            if nodes < least:
                self._spend_time("idle", self.staying.time_at_least(least, self.now))
            elif self._restart(nodes):
                self._train(nodes)

    @property
    def position(self) -> SimulatedPosition:
        """How far the training is: updates, samples and progress that are kept."""
        return self._position

    @property
    def _done(self) -> bool:
        """Whether the training has reached its goal, the end of its batch sizes, or the end of the simulation."""
        unit, value = self.goal
        has_ended = getattr(self._position, unit) >= value or self._position.updates >= self.sizes.end
        return has_ended or self.now >= self.end

    def _snap(self, time: float) -> float:
        """Return the event, a change of nodes or the end, that equals `time` up to rounding; `time` without one.

        Sums of seconds have rounding errors, by which an update would end just before or after an event at the same
        time.
        """
        return snap(self.present.snap(self.staying.snap(time)), [self.end])

    def _spend_time(self, state: State, until: float, nodes: int = 0, batch_size: int = 0) -> None:
        """Advance the clock to `until`, or to the end of the simulation, and record an interval without an update."""
        begin = self.now
        self.now = min(until, self.end)
        if self.now > begin:
            self.intervals.append(Interval(begin, self.now, state, nodes, batch_size))

    def _restart(self, nodes: int) -> bool:
        """Restart the training with a number of nodes. Return False if some of them leave before the restart ends."""
        restart_end = self._snap(self.now + self.overheads.restart_seconds(nodes, self._cause))
        abort_time = self.staying.time_below(nodes, self.now)
        self.restarts += self._cause != "start"  # the first start is not counted
        self._spend_time("restarting", min(restart_end, abort_time), nodes)
        if abort_time < min(restart_end, self.end):
            self.preemptions = self.preemptions + 1
            self._cause = "preemption"
        return abort_time >= restart_end

    def _train(self, nodes: int) -> None:
        """Simulate the time from a restart on `nodes` nodes until the training stops, is killed or ends."""
        overheads, restarted, last_save, has_updated = self.overheads, self.now, self.now, False  # times in seconds
        kill = self.present.time_below(nodes, self.now) if self.kills else math.inf
        notice = self.staying.time_below(nodes, self.now)
        while not self._done:  # `now` is the end of a restart, an update or a save
            now = self.now
            self._finish_checkpoint(now)
            if now >= kill and not overheads.notice:
                return self._roll_back()
            staying = self.staying.at(now)
            may_grow = reached(now, restarted + overheads.grow_every)
            if staying < nodes or (staying > nodes and may_grow):
                return self._stop(nodes, kill)
            if notice <= now:  # the nodes that were to leave have been replaced
                notice = self.staying.time_below(nodes, now)
            due = math.inf if overheads.save_every is None else last_save + overheads.save_every
            due = max(due, self._writing.complete) if self._writing else due  # one checkpoint is written at a time
            if reached(now, due):
                if not self._save(nodes, kill, overheads.blocking):
                    return None
                last_save = self.now
                continue
            change = self.staying.time_other_than(nodes, max(now, restarted + overheads.grow_every))
            if not self._make_updates(nodes, min(notice, change, due), min(kill, self.end), not has_updated):
                return self._roll_back() if self.now < self.end else None
            has_updated = True
        return None

    def _make_updates(self, nodes: int, wanted: float, limit: float, restarted: bool) -> bool:
        """Make updates with the same batch size, up to the next event to which the training reacts.

        Returns:
            False if `limit` comes before the end of the first one, so that no update is made.

        Args:
            nodes: number of nodes that compute.
            wanted: time of this event, if it is not a change of the batch size or of the noise: the first update that
                ends then or later is the last one.
            limit: time at which its nodes leave, or the simulation ends.
            restarted: whether it is the first update after a restart.
        """
        before = self._position  # before these updates
        begin = self.now
        devices = nodes * self.model.devices_per_node
        decisions = self.sizes.advance(before.decisions, partial(self._control_input, devices), restarted)
        size = decisions[0].batch_size
        updates_alike = self.model.equal_updates(size, devices, before)
        updates = updates_alike.count_ended(begin, limit * (1 + ROUNDING))
        if updates == 0:
            self._spend_time("idle" if limit == self.end else "redone", limit, nodes, size)
            return False
        # Each event from here on may reduce the number of updates.
        unit, value = self.goal
        change = min(self.sizes.end, self.sizes.next_change(decisions, before.updates))
        updates = int(min(updates, change - before.updates))
        updates = updates_alike.first_with(lambda n: begin + updates_alike.seconds(n), wanted * (1 - ROUNDING), updates)
        noise_end = self.model.next_noise(before.progress)
        updates = updates_alike.first_with(lambda n: before.progress + updates_alike.progress(n), noise_end, updates)
        total, of_updates = getattr(before, unit), getattr(updates_alike, unit)
        updates = updates_alike.first_with(lambda n: total + of_updates(n), value, updates)
        self.now = self._snap(begin + updates_alike.seconds(updates))
        sums = updates, updates_alike.samples(updates), updates_alike.progress(updates)
        self.intervals.append(Interval(begin, self.now, "productive", nodes, size, *sums))
        self.runs.append((size, updates))
        self._position = before.after(updates_alike, updates, decisions)
        return True

    def _control_input(self, devices: int, chosen: int | None) -> ControlInput:
        """Return what a controller is told to choose the next batch size. `chosen` is the last one, None at first."""
        position, model = self._position, self.model
        noise = model.noise_at(position.progress, position.updates, chosen)
        counts = position.updates, position.samples, position.progress
        return ControlInput(devices, chosen, model.minibatch_size, *counts, noise, model.throughput, model.fixed_shape)

    def _save(self, nodes: int, kill: float, blocking: bool) -> bool:
        """Write a checkpoint; return False if the training waits for it, and does not get to its end.

        Args:
            nodes: number of nodes that compute.
            kill: time at which some of them leave.
            blocking: whether the training waits until the checkpoint is complete.
        """
        complete = self._snap(self.now + self.overheads.save)
        saved = _Saved(complete, self._position, len(self.intervals), len(self.runs))
        if not blocking:
            self._writing = saved
            return True
        self._spend_time("saving", min(complete, kill), nodes)
        if complete > min(kill, self.end):
            if kill < self.end:
                self._roll_back()
            return False
        self._saved, self._writing = saved, None
        return True

    def _stop(self, nodes: int, kill: float) -> None:
        """Stop the training, after a save of what is not saved, so that it restarts with another number of nodes.

        Args:
            nodes: number of nodes until now.
            kill: time at which some of them leave, in seconds.
        """
        if self._saved.position.updates == self._position.updates or self._save(nodes, kill, blocking=True):
            has_fewer_nodes = self.staying.at(self.now) < nodes
            self.preemptions = self.preemptions + has_fewer_nodes
            self._cause = "preemption" if has_fewer_nodes else "growth"

    def _finish_checkpoint(self, now: float) -> None:
        """Make the checkpoint that is being written the last complete one, if it is complete by now."""
        if self._writing and reached(now, self._writing.complete):
            self._saved, self._writing = self._writing, None

    def _roll_back(self) -> None:
        """Go back to the last complete checkpoint after a kill. The updates since are lost, and will be made again."""
        self._finish_checkpoint(self.now)
        self._writing = None
        for row in range(self._saved.intervals, len(self.intervals)):
            if self.intervals[row].state == "productive":
                self.intervals[row] = self.intervals[row]._replace(state="redone")
        del self.runs[self._saved.runs :]
        self._position = self._saved.position
        self._saved = self._saved._replace(intervals=len(self.intervals))
        self.preemptions = self.preemptions + 1
        self._cause = "preemption"
