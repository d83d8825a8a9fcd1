"""What happened to the training in a folder, a JSON object a line.

`events.jsonl` is written by rank 0, beside the checkpoints; in an object store, to whose objects nothing can be added,
each run has a file of its own. Each line has `version`, `event`, `time` (seconds since 1970), `update` and `world`,
and: `start`: `every`, if the interval between saves is a number of updates; `restore`: `lost`, the updates that are
known to be repeated, and `seconds`; `save`: `seconds` for which updates waited, also where the write behind them fails
later; `skip`: the gradient of the update was not finite, or, with `large`, that many updates since the last such line
were skipped because of `skip_grad_norm` (a device that compiles graphs tells it later); `notice`: a signal that asks to
stop; `end`: `error`, the exception with which the training ended, or "". Between them, `progress` at the first
`Checkpoint.step()` and then at most once a minute.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final, final

from variable_batch_size.checkpoint.storage import Storage
from variable_batch_size.optim.properties import Commit
from variable_batch_size.world import World

VERSION: Final = 1
FILE: Final = "events.jsonl"
_PROGRESS_SECONDS = 60.0


@final
class Events:
    """Adds lines to the file of a folder, on rank 0.

    Attributes:
        large_told: how many updates that were skipped because of `skip_grad_norm` are in the file, or were skipped
            before this object was created or a checkpoint was restored.
    """

    def __init__(self, folder: Storage, world: World) -> None:
        """Read on rank 0 how far the run before this one came; other ranks read and write no events."""
        self._folder, self._world, self._lines = folder, world, list[str]()
        self._name = FILE if folder.on_disk else f"events-{time.time():.6f}.jsonl"
        earlier = list[dict[str, Any]]()
        with suppress(Exception):  # whatever a store raises: a training must not end because its events cannot be read
            earlier = [] if world.rank else read_events(folder)
        self._earlier = _newest_run(earlier)
        self._last, self._skipped, self.large_told = -math.inf, False, 0

    def add(self, event: str, update: int, **facts: float | str) -> None:
        """Add a line about an event to the file of the folder, on rank 0; other ranks do nothing.

        If it cannot be written, nothing is said: a training must not end because of its log.

        Args:
            event: the kind of the event, such as "save" or "restore".
            update: number of updates that were made.
            facts: further entries of the line.
        """
        if event not in ("start", "restore"):  # after which the first update is told at once
            self._last = time.monotonic()
        if self._world.rank:
            return
        entry = {"version": VERSION, "event": event, "time": time.time(), "update": update, "world": self._world.size}
        self._lines.append(json.dumps({**entry, **facts}) + "\n")
        with suppress(Exception):
            if self._folder.on_disk:
                with open(self._folder.at(self._name), "a", encoding="utf-8", newline="\n") as file:  # noqa: PTH123
                    file.write(self._lines.pop())
            else:  # an object of a store cannot grow: all lines of this run are written again
                self._folder.put("".join(self._lines), self._name)

    def lost(self, updates: int) -> tuple[int, int | None]:
        """Return between which numbers of updates the run before this one has lost, if it is restored to `updates`.

        The second is about right if the run called `step()` after each update, which a line after the first one shows,
        and was killed: it has then told its progress at most a minute before, and has saved after each `every` updates.
        Both bound what it has made since, the minute by its highest pace. Otherwise the second is None, not known.
        """
        if not self._earlier:
            return 0, 0
        first, last, pairs = self._earlier[0], self._earlier[-1], [*pairwise(self._earlier)]
        least = max(0, last["update"] - updates)
        if last["event"] == "end":
            return least, least
        if not any(_is_told_update(*pair) for pair in pairs):
            return least, None
        times = (  # a restore makes no updates
            (one["update"] - other["update"], one["time"] - other["time"])
            for other, one in pairs
            if one["event"] != "restore"
        )
        pace = max((made / seconds for made, seconds in times if made > 0 and seconds > 0), default=None)
        bounds = [first["every"]] if _is_number(first.get("every")) else []
        if pace is not None:
            bounds.append(math.ceil(pace * min(_PROGRESS_SECONDS, max(0.0, time.time() - last["time"]))))
        return least, least + min(bounds) if bounds else None

    def commit(self, commit: Commit) -> None:
        """Note whether an update was skipped; see `Observer`."""
        self._skipped = not commit.updated

    def discard(self) -> None:
        """See `Observer`."""

    def note_update(self, update: int, large: int) -> None:
        """Add an event if the last update was skipped, and otherwise one `progress` a minute.

        Args:
            update: number of updates that were made.
            large: how many updates of the training were skipped because of `skip_grad_norm`, as known now.
        """
        skipped, more_large = self._skipped, large - self.large_told
        self._skipped, self.large_told = False, large
        if more_large > 0:
            self.add("skip", update, large=more_large)
        elif skipped:
            self.add("skip", update)
        elif time.monotonic() - self._last >= _PROGRESS_SECONDS:
            self.add("progress", update)


def read_events(folder: Storage) -> list[dict[str, Any]]:
    """Return the events of a folder, the oldest first, without lines that were cut off or are of another version."""
    names, events = list[str](), list[dict[str, Any]]()
    with suppress(OSError):
        names = sorted(name for name in folder.names() if name.startswith("events") and name.endswith(".jsonl"))
        for line in (line for name in names for line in folder.read(name).decode(errors="replace").splitlines()):
            with suppress(ValueError, RecursionError, TypeError, LookupError):  # whatever a line holds that was cut off
                event = json.loads(line)
                keys = ["time", "update"]
                if event["event"] in ("save", "restore"):
                    keys.append("seconds")
                are_numbers = all(_is_number(event[key]) for key in keys)
                if event["version"] == VERSION and isinstance(event["event"], str) and are_numbers:
                    events.append(event)
    return events


def _newest_run(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of the newest run that has done something; of the newest one if none has."""
    begins = [index for index, event in enumerate(events) if event["event"] == "start"] or [0]
    runs = [list(events[begin:end]) for begin, end in zip(begins, [*begins[1:], len(events)], strict=True)]
    return next((run for run in reversed(runs) if _has_done_something(run)), runs[-1])


def _has_done_something(run: Sequence[dict[str, Any]]) -> bool:
    """Return whether a run has restored, saved or made updates."""
    return any(event["event"] in ("restore", "save") or event["update"] > run[0]["update"] for event in run)


def _is_told_update(before: dict[str, Any], event: dict[str, Any]) -> bool:
    """Return whether `Checkpoint.step()` has told of the first update of a run, after the event before it."""
    begins = before["event"] in ("start", "restore")
    return begins and event["event"] in ("progress", "skip") and event["update"] == before["update"] + 1


def _is_number(value: object) -> bool:
    """Return whether a value is a number of plausible size; NaN is none."""
    return isinstance(value, (int, float)) and abs(value) < 1e12
