"""What Slurm's `sacct` prints of jobs: when each had its nodes."""

from __future__ import annotations

from typing import Final, final

from variable_batch_size.lab.cluster.readers.base import Reader, ReaderOptions, Rows, Text, split_cells

COLUMNS: Final = ("JobID", "Start", "End", "NNodes")
FORM: Final = "must be a time such as 2026-11-24T10:00:00"
PRINT: Final = "print them with sacct -P -o JobID,Start,End,NNodes"
ABSENT: Final = ("Unknown", "None", "")  # the end of a job that runs, the start of one that waits


@final
class SacctReader(Reader):
    """`JobID|Start|End|NNodes`, of `sacct -P -o JobID,Start,End,NNodes`: the nodes that the jobs have together.

    The trace begins at the first start and ends at the last end, or at the last start if no job has ended. A job
    without an end runs until then, one without a start has no nodes, and steps of jobs, such as `12.batch`, are not
    read. Other columns are ignored.

    Source: the manual of Slurm's `sacct`, option `--parsable2`.
    """

    name = "sacct"
    example = "JobID|Start|End|NNodes"
    begins_at_first_row = True

    def recognizes(self, text: Text) -> bool:
        """Return whether the header has the four columns."""
        return set(COLUMNS) <= set(split_cells(text.lines[0][1], "|"))

    def read(self, text: Text, options: ReaderOptions) -> Rows:
        """Return how many nodes the jobs have together after each start and end of a job."""
        line, header = text.lines[0]
        if not self.recognizes(text):
            raise text.error(line, "the header must have JobID, Start, End and NNodes", header, PRINT)
        changes = self._changes(text)
        if not changes:
            line = text.lines[-1][0]
            raise text.error(line, "there must be a job that has started", header, "print those of another time")
        seconds, nodes, total = list[float](), list[int](), 0
        changes.sort(key=lambda change_at: (change_at[0], -change_at[1]))  # a job may end when it begins
        for moment, change in changes:
            total += change
            seconds.append(moment)
            nodes.append(total)
        return Rows(seconds[:-1], nodes[:-1], seconds[-1]) if len(changes) > 1 else Rows(seconds, nodes)

    def _changes(self, text: Text) -> list[tuple[float, int]]:
        """Return a (Unix time, change of nodes) for each start of a job, > 0, and for each end, < 0."""
        _, header = text.lines[0]
        column_indices = [split_cells(header, "|").index(name) for name in COLUMNS]
        changes: list[tuple[float, int]] = []
        for line, row in text.lines[1:]:
            cells = text.cells(line, row, header, "|")
            job, start, end, count = (cells[column] for column in column_indices)
            if "." in job or start in ABSENT:
                continue
            nodes = int(text.cell(line, "NNodes", count, whole=True))
            start_time = text.moment(line, f"Start {FORM}", start, "correct it")
            changes.append((start_time, nodes))
            if end not in ABSENT:
                changes.append((text.moment(line, f"End {FORM}", end, "correct it"), -nodes))
                if changes[-1][0] < start_time:
                    raise text.error(line, f"End must not be before Start, {start}", end, "correct it")
        return changes
