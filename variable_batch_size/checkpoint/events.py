"""What happened to the training in a folder, a JSON object a line.

`events.jsonl` is written by rank 0, beside the checkpoints; in an object store, to whose objects nothing can be added,
each run has a file of its own. Each line has `version`, `event`, `time` (seconds since 1970), `update` and `world`,
and: `restore`: `lost`, the updates that are known to be made again, and `seconds`; `save`: `seconds` for which updates
waited, also where the write behind them fails later; `skip`: the gradient of the update was not finite, or, with
`large`, that many updates since the last such line were skipped because of `skip_grad_norm` (a device that compiles
graphs tells it later); `notice`: a signal that asks to stop; `end`: `error`, the exception with which the training
ended, or "". Between them, `progress` at most once a minute.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
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
        reached: the last update in the file of the run before this one; 0 if there was none.
        ended: whether that run has told its end; otherwise it may have made more updates.
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
        self.reached = earlier[-1]["update"] if earlier else 0
        self.ended = not earlier or earlier[-1]["event"] == "end"
        self._last, self._skipped, self.large_told = time.monotonic(), False, 0

    def add(self, event: str, update: int, **facts: float | str) -> None:
        """Add a line about an event to the file of the folder, on rank 0; other ranks do nothing.

        If it cannot be written, nothing is said: a training must not end because of its log.

        Args:
            event: the kind of the event, such as "save" or "restore".
            update: number of updates that were made.
            facts: further entries of the line.
        """
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


def _is_number(value: object) -> bool:
    """Return whether a value is a number of plausible size; NaN is none."""
    return isinstance(value, (int, float)) and abs(value) < 1e12
