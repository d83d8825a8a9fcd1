"""Write the scalars of a training to TensorBoard and to a CSV file, and draw a progress bar in samples."""

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

# At exit, multiprocessing calls finalizers in descending priority. tensorboardX sends its events through a queue of
# multiprocessing, which is closed at priority 10.
_BEFORE_QUEUES = 100


@final
class Tracker:
    """A writer of scalars, to TensorBoard events and `scalars.csv` in one folder, with a progress bar.

    Files are opened at the first `log`, which an optimizer calls on rank 0 only. A training that resumes from an
    earlier update in the same folder replaces the rows after that update.

    Args:
        logdir: folder of the files. Default: no files are written.
        progress: whether to draw a progress bar for each epoch, in samples, if standard error is a terminal.
    """

    def __init__(self, logdir: str | os.PathLike[str] | None = None, *, progress: bool = True) -> None:
        self.logdir = None if logdir is None else Path(logdir)
        self._progress = progress
        self._files: tuple[SummaryWriter, TextIO] | None = None
        self._close_files: Finalize | None = None
        self._bar: tqdm[Any] | None = None
        self._epoch = -1

    def log(self, update: int, scalars: Mapping[str, float]) -> None:
        """Write one row of scalars.

        Args:
            update: number of the update, the x axis.
            scalars: tag -> value, with the same tags at every call. TensorBoard gets the finite ones only.

        Raises:
            ValueError: at the first call, if `scalars.csv` exists with other columns.
        """
        if self.logdir is None:
            return
        if self._files is None:
            self._files = self._open(self.logdir, update, ["update", *scalars])
            # If the user does not call close(): a process started by multiprocessing does not run atexit handlers.
            self._close_files = Finalize(self, _close, self._files, exitpriority=_BEFORE_QUEUES)
        writer, table = self._files
        for tag, value in scalars.items():
            if math.isfinite(value):  # for others tensorboardX prints a warning
                writer.add_scalar(tag, value, update)
        csv.writer(table, lineterminator="\n").writerow([update, *scalars.values()])
        table.flush()

    def show(self, epoch: int, samples: int, total: int) -> None:
        """Draw the progress bar of an epoch.

        Args:
            epoch: number of the epoch.
            samples: samples of the epoch that were trained on so far.
            total: samples of the epoch.
        """
        if not self._progress:
            return
        if self._bar is None or epoch != self._epoch:
            self._close_bar()
            self._epoch = epoch
            self._bar = tqdm(total=total, desc=f"epoch {epoch}", unit=" samples", unit_scale=True, disable=None)
        self._bar.update(samples - self._bar.n)

    def close(self) -> None:
        """Flush and close the files, and remove the progress bar."""
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
        """Open the files for rows from `update` on; earlier rows of `scalars.csv` are kept as they are."""
        from tensorboardX import SummaryWriter  # sets an environment variable when it is imported

        logdir.mkdir(parents=True, exist_ok=True)
        path, header = logdir / "scalars.csv", ",".join(columns)
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and lines[0] != header:
            raise ValueError(
                f"logdir must be new or hold the same scalars, but {path} has the columns {lines[0]} instead of "
                f"{header}; choose another logdir"
            )
        complete = [line for line in lines[1:] if line.count(",") == header.count(",")]  # the last may be truncated
        earlier = [line for line in complete if int(line.partition(",")[0]) < update]
        temporary = path.with_suffix(f".{os.getpid()}.part")
        temporary.write_text("".join(f"{line}\n" for line in (header, *earlier)))
        temporary.replace(path)
        writer = SummaryWriter(str(logdir), purge_step=update if lines else None)
        return writer, path.open("a", newline="")


def _close(writer: SummaryWriter, table: TextIO) -> None:
    writer.close()
    table.close()
