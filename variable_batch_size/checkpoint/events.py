"""What happened to the training in a folder, a JSON object a line; and which share of the time it trained.

`events.jsonl` is written by rank 0, beside the checkpoints; in an object store, to whose objects nothing can be added,
each run has a file of its own. Each line has `version`, `event`, `time` (seconds since 1970), `update` and `world`,
and: `restore`: `lost`, the updates that were made and are made again, and `seconds`; `save`: `seconds` for which
updates waited; `skip`: the gradient of the update was not finite; `notice`: a signal that asks to stop; `end`: `error`,
the exception with which the training ended, or "". Between them, `progress` at most once a minute.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from variable_batch_size.checkpoint.manifest import is_on_disk, read_text
from variable_batch_size.world import World

VERSION: Final = 1
FILE: Final = "events.jsonl"
_PROGRESS_SECONDS = 60.0


@final
class Events:
    """Adds lines to the file of a folder, on rank 0.

    Attributes:
        reached: the last update of the run before this one, of which the file tells; 0 if there was none.
        ended: whether that run has told its end; otherwise it may have made more updates.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self._path, self._world, self._lines = folder / FILE, world, list[str]()
        self._adds = is_on_disk(folder)
        if not self._adds:
            self._path = folder / f"events-{time.time():.6f}.jsonl"
        self.reached, self.ended = 0, True
        with suppress(Exception):  # of a store any: a training does not end for its events
            earlier = [] if world.rank else read(folder)
            if earlier:
                self.reached, self.ended = earlier[-1]["update"], earlier[-1]["event"] == "end"
        self._last, self._skipped = time.monotonic(), False

    def add(self, event: str, update: int, **facts: float | str) -> None:
        """Add an event; without a word, if that cannot be written."""
        self._last = time.monotonic()
        if self._world.rank:
            return
        known = {"version": VERSION, "event": event, "time": time.time(), "update": update, "world": self._world.size}
        self._lines.append(json.dumps({**known, **facts}) + "\n")
        with suppress(Exception):
            if self._adds:
                with self._path.open("a", encoding="utf-8", newline="\n") as file:
                    file.write(self._lines.pop())
            else:
                self._path.write_text("".join(self._lines))

    @contextmanager
    def timed(self, event: str, update: int) -> Iterator[None]:
        """Add an event with the seconds of a block, if that does not raise."""
        began = time.monotonic()
        yield
        self.add(event, update, seconds=time.monotonic() - began)

    def commit(self, *, updated: bool) -> None:
        """Take whether an update was skipped; see `Watcher`."""
        self._skipped = not updated

    def discard(self) -> None:
        """See `Watcher`."""

    def progress(self, update: int) -> None:
        """Add that an update was made, at most once a minute, or that it was skipped."""
        if self._skipped:
            self._skipped = False
            self.add("skip", update)
        elif time.monotonic() - self._last >= _PROGRESS_SECONDS:
            self.add("progress", update)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a folder, the oldest first, without lines that were cut off or are of another version."""
    found = []
    with suppress(OSError):
        files = [path for path in folder.iterdir() if path.name.startswith("events") and path.name.endswith(".jsonl")]
        for path in sorted(files, key=lambda path: path.name):
            for line in read_text(path, errors="replace").splitlines():
                with suppress(ValueError, RecursionError):
                    event = json.loads(line)
                    if isinstance(event, dict) and event.get("version") == VERSION and _is_event(event):
                        found.append(event)
    return found


def _is_event(event: Mapping[str, Any]) -> bool:
    """Return whether all numbers are there, and finite."""
    timed = event.get("event") in ("save", "restore")
    numbers = [event.get(name) for name in ("time", "update", *["seconds"] * timed)]
    known = [number for number in numbers if isinstance(number, (int, float)) and abs(number) < 1e12]
    return isinstance(event.get("event"), str) and len(known) == len(numbers)


@final
class Goodput(NamedTuple):
    """How the time between the first and the last event was spent, in seconds.

    Attributes:
        productive: updates that count.
        redone: updates that a later run made again, because it resumed, or began, before them.
        saving: updates waited for a save.
        restoring: checkpoints were read.
        down: no run was there, after one that had not finished.
        runs: number of runs.
        saves: number of saves.
    """

    productive: float
    redone: float
    saving: float
    restoring: float
    down: float
    runs: int
    saves: int

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(self[:5])

    @property
    def restart(self) -> float:
        """Mean seconds between the last event of a run and the end of the restore of the next one."""
        return (self.down + self.restoring) / max(1, self.runs - 1)

    @property
    def save(self) -> float:
        """Mean seconds of a save."""
        return self.saving / max(1, self.saves)

    @staticmethod
    def of(events: Iterable[Mapping[str, Any]]) -> Goodput:
        """Return how the time was spent.

        Args:
            events: of one training, the oldest first.
        """
        redone = saving = restoring = down = total = 0.0
        runs = saves = 0
        last: Mapping[str, Any] | None = None
        spans = list[_Span]()  # of updates that count
        for event in events:
            seconds = 0.0 if last is None else max(0.0, event["time"] - last["time"])
            if event["event"] == "start":
                runs += 1
                finished = last is not None and last["event"] == "end" and not last.get("error")
                seconds = 0.0 if finished else seconds
                down += seconds
            elif event["event"] == "restore":
                restoring += event["seconds"]
            else:
                saved = event["seconds"] if event["event"] == "save" else 0.0
                saving, saves = saving + saved, saves + (event["event"] == "save")
                if last is not None and event["update"] > last["update"]:
                    lost, spans = _cut(spans, last["update"])
                    redone += lost
                    spans.append(_Span(last["update"], event["update"], max(0.0, seconds - saved)))
            total, last = total + seconds, event
        return Goodput(total - redone - saving - restoring - down, redone, saving, restoring, down, runs, saves)


@final
class _Span(NamedTuple):
    """Updates that a run has made, from one number of updates to another, and the seconds that they took."""

    begin: int
    end: int
    seconds: float


def _cut(spans: Iterable[_Span], update: int) -> tuple[float, list[_Span]]:
    """Return the seconds of what is after an update, which is made again, and what is left."""
    lost, left = 0.0, list[_Span]()
    for span in spans:
        kept = min(span.end, max(span.begin, update))
        share = (kept - span.begin) / (span.end - span.begin)
        lost += (1 - share) * span.seconds
        if share:
            left.append(_Span(span.begin, kept, share * span.seconds))
    return lost, left
