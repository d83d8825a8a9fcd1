"""Scalars of a training, to TensorBoard and to a CSV, and a progress bar in samples."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, final

from tqdm import tqdm

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

_BEFORE_QUEUES = 100  # multiprocessing closes its queues, through which tensorboardX sends events, at priority 10


@final
class Tracker:
    """Writes scalars to `logdir`, as TensorBoard events and in `scalars.csv`, and draws a progress bar.

    Nothing is opened before the first value comes, and only rank 0 of a training sends any. A training that goes on
    in the same folder from an earlier update replaces the rows from there on.

    Args:
        logdir: folder of the files; None writes none.
        progress: whether to draw, where standard error is a terminal, a bar in samples for each epoch.
    """

    def __init__(self, logdir: str | os.PathLike[str] | None = None, *, progress: bool = True) -> None:
        self.logdir = None if logdir is None else Path(logdir)
        self._progress = progress
        self._files: tuple[SummaryWriter, TextIO] | None = None
        self._close_files: Finalize | None = None
        self._bar: tqdm[Any] | None = None
        self._epoch = -1

    def log(self, update: int, scalars: Mapping[str, float]) -> None:
        """Write a row of scalars, by tag, against the number of an update."""
        if self.logdir is None:
            return
        if self._files is None:
            self._files = self._open(self.logdir, update, ["update", *scalars])
            # Also when nobody calls close(): in a process that multiprocessing started, atexit is not heeded.
            self._close_files = Finalize(self, _close, self._files, exitpriority=_BEFORE_QUEUES)
        writer, table = self._files
        for tag, value in scalars.items():
            if math.isfinite(value):  # of others tensorboardX prints that they came
                writer.add_scalar(tag, value, update)
        csv.writer(table, lineterminator="\n").writerow([update, *scalars.values()])
        table.flush()

    def show(self, epoch: int, samples: int, total: int) -> None:
        """Draw how many samples of an epoch's total were used."""
        if not self._progress:
            return
        if self._bar is None or epoch != self._epoch:
            self._close_bar()
            self._epoch = epoch
            self._bar = tqdm(total=total, desc=f"epoch {epoch}", unit=" samples", unit_scale=True, disable=None)
        self._bar.update(samples - self._bar.n)

    def close(self) -> None:
        """Write out what is buffered and close the files."""
        self._close_bar()
        if self._close_files is not None:
            self._close_files()
            self._files = self._close_files = None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    @staticmethod
    def _open(logdir: Path, update: int, columns: Sequence[str]) -> tuple[SummaryWriter, TextIO]:
        from tensorboardX import SummaryWriter  # sets an environment variable when it is imported

        logdir.mkdir(parents=True, exist_ok=True)
        path, header = logdir / "scalars.csv", ",".join(columns)
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and lines[0] != header:
            raise ValueError(
                f"a log folder holds one kind of training, but {path} has the columns {lines[0]} instead of {header}; "
                f"choose another logdir"
            )
        whole = [line for line in lines[1:] if line.count(",") == header.count(",")]  # the last may have been cut off
        earlier = [line for line in whole if int(line.partition(",")[0]) < update]
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        unfinished.write_text("".join(f"{line}\n" for line in (header, *earlier)))
        unfinished.replace(path)
        writer = SummaryWriter(str(logdir), purge_step=update if lines else None)
        return writer, path.open("a", newline="")


def _close(writer: SummaryWriter, table: TextIO) -> None:
    writer.close()
    table.close()
