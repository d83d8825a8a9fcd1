"""How the time of a training was spent, from the events that its `Checkpoint` has recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, final


@final
class TimeSpent(NamedTuple):
    """How a training spent the seconds between the first and the last event that its checkpoints recorded.

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
    def from_events(events: Iterable[Mapping[str, Any]]) -> TimeSpent:
        """Compute how the time was spent from the recorded events of one training, the oldest first."""
        redone = saving = restoring = down = total = 0.0
        runs = saves = 0
        last: Mapping[str, Any] | None = None
        spans = list[_Span]()  # of updates that count
        for event in events:
            seconds = 0.0 if last is None else max(0.0, event["time"] - last["time"])
            if event["event"] == "start":
                runs += 1
                if last is not None and last["event"] == "end" and not last.get("error"):
                    seconds = 0.0  # the run before had finished: nothing was interrupted
                down += seconds
            elif event["event"] == "restore":
                restoring += event["seconds"]
            else:
                is_save = event["event"] == "save"
                seconds_saved = event["seconds"] if is_save else 0.0
                saving, saves = saving + seconds_saved, saves + is_save
                if last is not None and event["update"] > last["update"]:
                    seconds_lost, spans = _cut_spans(spans, last["update"])  # of updates that are now made again
                    redone += seconds_lost
                    spans.append(_Span(last["update"], event["update"], max(0.0, seconds - seconds_saved)))
            total = total + seconds
            last = event
        return TimeSpent(total - redone - saving - restoring - down, redone, saving, restoring, down, runs, saves)


@final
class _Span(NamedTuple):
    """Updates that a run has made, those after number `begin` up to number `end`, and the seconds that they took."""

    begin: int
    end: int
    seconds: float


def _cut_spans(spans: Iterable[_Span], update: int) -> tuple[float, list[_Span]]:
    """Cut off the updates after number `update`, which are made again. Return their seconds, and the spans before it.

    A span that is cut in two is assumed to have updates of equal length.
    """
    seconds_cut, kept_spans = 0.0, list[_Span]()
    for span in spans:
        end_kept = min(span.end, max(span.begin, update))
        share_kept = (end_kept - span.begin) / (span.end - span.begin)  # that is kept
        seconds_cut += (1 - share_kept) * span.seconds
        if share_kept:
            kept_spans.append(_Span(span.begin, end_kept, share_kept * span.seconds))
    return seconds_cut, kept_spans
