"""Write the scalars of a training to TensorBoard and to a CSV file, and draw a progress bar in samples."""

from __future__ import annotations

import csv
import io
import math
import numbers
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, final

from tqdm import tqdm

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import check_int, suggests, type_error

SCALARS = "scalars.csv"
DELAY = 2  # updates after which any device has computed a number, so that reading it does not wait
FLUSH = 30.0  # seconds between two writes of TensorBoard's events to the disk

_IN_BAR = {"loss": "loss", "vbs/global_batch_size": "B", "vbs/lr_effective": "lr"}  # tag -> name in the progress bar

# The charts of the tab "Custom scalars" of TensorBoard.
_LAYOUT = {
    "training": {
        "batch size": ["Multiline", ["vbs/global_batch_size"]],
        "learning rate": ["Multiline", ["vbs/lr_effective"]],
        "loss": ["Multiline", ["loss"]],
    }
}


@final
class _WrittenTable(NamedTuple):
    """What is known of the file on the disk.

    Attributes:
        file: the open file, without a buffer; its position is the end.
        columns: names of the columns.
        start: position at which the last row begins.
        last: the last row, cells by the names of their columns.
    """

    file: io.FileIO
    columns: list[str]
    start: int
    last: dict[str, str]


@final
class ScalarsFile:
    """A CSV file with one row for each update and one column for each tag; a cell without a value is empty.

    An existing file is continued. Rows are appended. Only a new column, an update before the last one, or other values
    of the last one that take less space, write the file anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        columns, rows = read_scalars(path)
        self.continued = bool(rows)  # whether the file had rows, of an earlier run
        self._table = self._write_anew(columns, rows)
        self._known = True  # whether `_table` describes the file; not after an interrupt of `add`

    def drop_after(self, update: int) -> None:
        """Drop the rows after an update."""
        columns, rows = read_scalars(self._path)
        self._replace(columns, [row for row in rows if int(row["update"]) <= update])

    def add(self, update: int, scalars: Mapping[str, float]) -> None:
        """Write the values of an update to its row, beside those that the row has already."""
        cells = {"update": str(update), **{tag: str(value) for tag, value in scalars.items()}}
        if not self._known:
            self._replace(*read_scalars(self._path))
        _, columns, start, last = self._table
        last_update = int(last["update"]) if last else update - 1
        row = last | cells if update == last_update else cells
        is_longer = update > last_update or len(_line(columns, row)) >= len(_line(columns, last))
        if update < last_update or not is_longer or not row.keys() <= {*columns}:  # change the whole file
            rows = {int(row["update"]): row for row in read_scalars(self._path)[1]}
            rows[update] = rows.get(update, {}) | cells
            columns = [*columns, *(tag for tag in cells if tag not in columns)]
            self._replace(columns, [rows[number] for number in sorted(rows)])
        else:  # the last row is overwritten by more values, so that no kill can lose it
            self._write_last(start if update == last_update else None, row)

    def close(self) -> None:
        """Close the file."""
        self._table.file.close()

    def _write_last(self, start: int | None, row: dict[str, str]) -> None:
        """Write a row over the last one, which begins at `start`, or append it if that is None."""
        file, columns, _, _ = self._table
        self._known = False
        start = file.tell() if start is None else file.seek(start)
        _write(file, _line(columns, row))
        self._table = _WrittenTable(file, columns, start, row)
        self._known = True

    def _replace(self, columns: list[str], rows: Sequence[dict[str, str]]) -> None:
        """Replace the file by one with these columns and rows, and append later rows to it."""
        self._known = False
        self._table.file.close()
        self._table = self._write_anew(columns, rows)
        self._known = True

    def _write_anew(self, columns: list[str], rows: Sequence[dict[str, str]]) -> _WrittenTable:
        """Write a file with these columns and rows in the place of the present one.

        It is written under another name first, so that a killed process leaves the old one or the new one.
        """
        temporary = self._path.with_suffix(f".{os.getpid()}.part")
        file = temporary.open("wb", buffering=0)
        try:
            lines = [_line(columns, dict(zip(columns, columns, strict=True))), *(_line(columns, row) for row in rows)]
            text = b"".join(lines)
            _write(file, text)
            temporary.replace(self._path)
            return _WrittenTable(file, columns, len(text) - len(lines[-1]), dict(rows[-1]) if rows else {})
        except BaseException:
            file.close()
            raise


def _line(columns: Sequence[str], row: Mapping[str, str]) -> bytes:
    """Return a row of a CSV file; `row` has cells by the names of their columns."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([row.get(name, "") for name in columns])
    return text.getvalue().encode()


def _write(file: io.FileIO, text: bytes) -> None:
    """Write all of a text, at once if the disk has room for it."""
    while text:
        text = text[file.write(text) :]


def read_scalars(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and the rows of a `ScalarsFile`; a truncated last row is left out, a missing file has no rows.

    A row has only the cells that are not empty. Raise ValueError if the file is none of a Tracker.
    """
    if not path.exists():
        return ["update"], []
    text = path.read_text(encoding="utf-8", errors="replace")
    complete = text[: text.rfind("\n") + 1]  # a killed process may leave a part of a row
    found = "text that is no CSV"  # what the error says if this is as far as the checks come
    try:
        header, *rows = csv.reader(io.StringIO(complete), strict=True) if complete else [["update"]]
        found = f"the columns {', '.join(header)}"
        if header[:1] == ["update"] and len(set(header)) == len(header):
            for number, row in enumerate(rows, 1):
                found = f"the row {','.join(row)!r:.80}, its number {number}"
                if len(row) != len(header) or not row[0].isascii() or not row[0].isdecimal():
                    raise ValueError
                list(map(float, filter(None, row[1:])))  # raises ValueError if a cell is no number
            return header, [{tag: cell for tag, cell in zip(header, row, strict=True) if cell} for row in rows]
    except (ValueError, csv.Error):
        pass
    raise ValueError(
        f"logdir must be new or hold the scalars of a Tracker, but {path} has {found}; choose another logdir"
    )


@final
class EventsFile:
    """A file of TensorBoard's events; a full disk ends it, with a warning, and not the training.

    It has no thread and no queue, which tensorboardX's SummaryWriter has: a process waits for such a thread for ever
    if the disk has ended it.

    Args:
        logdir: the folder.
    """

    def __init__(self, logdir: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter  # sets an environment variable when it is imported
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import custom_scalars, scalar

        self._event, self._scalar = Event, scalar
        self._tags: dict[str, str] = {}  # tag -> as TensorBoard allows it
        self._logdir, self._update = logdir, 0
        self._disk_is_full = False
        self._last_flush = -math.inf  # seconds of the monotonic clock
        # The name of the file ends with nanoseconds, so that two runs that begin in one second have two files.
        self._writer = EventsWriter(str(logdir / "events"), f".{time.time_ns()}")
        self._writer.write_event(Event(wall_time=time.time(), summary=custom_scalars(_LAYOUT)))

    def hide_after(self, update: int) -> None:
        """Let TensorBoard hide the events of earlier runs after an update."""
        from tensorboardX.proto.event_pb2 import SessionLog

        event = self._event(step=update + 1, session_log=SessionLog(status=SessionLog.START))
        self._write_unless_full(self._writer.write_event, event)

    def add(self, update: int, scalars: Mapping[str, float]) -> None:
        """Write the finite values of an update as one event; every half minute the events go to the disk."""
        self._update = update
        event = self._event(wall_time=time.time(), step=update)
        for tag, value in scalars.items():
            if math.isfinite(value):
                if tag not in self._tags:  # `scalar` takes ten times as long as to add a value
                    self._tags[tag] = self._scalar(tag, value).value[0].tag
                event.summary.value.add(tag=self._tags[tag], simple_value=value)
        self._write_unless_full(self._writer.write_event, event)
        if time.monotonic() > self._last_flush + FLUSH:
            self.flush()

    def flush(self) -> None:
        """Write TensorBoard's events that are still in memory to the disk."""
        self._write_unless_full(self._writer.flush)
        self._last_flush = time.monotonic()

    def close(self) -> None:
        """Write the events that are in memory, and close the file."""
        self._write_unless_full(self._writer.close)

    def _write_unless_full(self, write: Callable[..., object], *arguments: object) -> None:
        """Call a function that writes. If it raises OSError, as on a full disk, warn, and write nothing after that."""
        if self._disk_is_full:
            return
        try:
            write(*arguments)
        except OSError as error:
            self._disk_is_full = True
            warnings.warn(
                f"The events of TensorBoard in {self._logdir} end at about update {self._update}, because they could "
                f"not be written ({error}); free disk space, and resume the training ({SCALARS} is still written)",
                RuntimeWarning,
                stacklevel=stacklevel_of_user(),
            )


@final
class Tracker:
    """A writer of scalars, to TensorBoard events and `scalars.csv` in one folder, with a progress bar.

    Files are opened at the first `log`, which an optimizer calls on rank 0 only; on other ranks, the `tracker` of an
    optimizer writes nothing. Call `close()` at the end, or use it in a `with` statement: rows of the last updates wait
    for a device until then. A run that resumes from an earlier update in the same folder or process replaces the rows
    after that update. Without an optimizer that loads a state, the first update after 0 replaces the rows from it on.

    Args:
        logdir: folder of the files. Default: no files are written.
        progress: whether to draw a progress bar for each epoch, in samples, if standard error is a terminal.
    """

    @suggests
    def __init__(self, logdir: str | os.PathLike[str] | None = None, *, progress: bool = True) -> None:
        self.logdir = None if logdir is None else Path(logdir)
        self._progress = progress
        self._files: tuple[EventsFile, ScalarsFile] | None = None
        self._close_files: Finalize | None = None
        self._restored: int | None = None  # the update after which rows of an earlier run are dropped; None: not known
        self._replaces = True  # whether the run may make updates again that the files have
        self._bar: tqdm[Any] | None = None
        self._epoch = -1
        self._latest: dict[str, float] = {}  # tag -> the last value
        self._pending: deque[tuple[int, Callable[[], Mapping[str, float]]]] = deque()  # rows by update

    def mute(self) -> None:
        """Close the files, and write and draw nothing from now on, because another rank does."""
        self.close()
        self.logdir, self._progress = None, False

    def check(self) -> None:
        """Check that a training can be logged here, before it begins. Nothing is written.

        Raises:
            ValueError: if `scalars.csv` exists and is no file of a Tracker.
        """
        if self.logdir is not None:
            read_scalars(self.logdir / SCALARS)

    def last_before(self, update: int, tag: str) -> float:
        """Return the last value of a tag in `scalars.csv` before an update, as of an earlier run; 0 without one."""
        rows = [] if self.logdir is None else read_scalars(self.logdir / SCALARS)[1]
        values = (float(row[tag]) for row in reversed(rows) if tag in row and int(row["update"]) < update)
        return next(values, 0.0)

    def log(self, update: int, scalars: Mapping[str, float]) -> None:
        """Write scalars of an update; several calls for one update share a row.

        Args:
            update: number of the update, >= 0, the x axis.
            scalars: tag -> value. Tags may differ between calls: a new one is a new column, which is empty in the rows
                of others. TensorBoard gets the finite values only.

        Raises:
            TypeError: if the update is not an integer, or a value is not a number.
            ValueError: if a tag is empty or "update"; at the first call, if `scalars.csv` exists and is no file of a
                Tracker.
        """
        update = check_int(update, "update", 0, remedy="pass optimizer.updates")
        values = {tag: _checked_number(tag, value) for tag, value in scalars.items()}
        self._latest |= values
        if self.logdir is None:
            return
        if self._files is None:
            self.logdir.mkdir(parents=True, exist_ok=True)
            table = ScalarsFile(self.logdir / SCALARS)
            self._files = EventsFile(self.logdir), table
            self._replaces &= table.continued
            # If the user does not call close(): a process started by multiprocessing does not run atexit handlers.
            self._close_files = Finalize(self, _close_files_of, self._files, exitpriority=0)
        events, table = self._files
        if self._replaces and (update > 0 or self._restored is not None):  # hyperparameters are logged at 0
            last = update - 1 if self._restored is None else self._restored
            events.hide_after(last)
            table.drop_after(last)
            self._replaces, self._restored = False, None
        table.add(update, values)
        events.add(update, values)

    def log_later(self, update: int, read: Callable[[], Mapping[str, float]]) -> None:
        """Write the scalars that `read` returns some updates later, when a device has computed them; see `log`.

        What is left is written by `close()`.
        """
        self._pending.append((update, read))

    def write_pending(self, update: int) -> None:
        """Write the scalars of `log_later` that are `DELAY` updates old, so that reading them waits for no device."""
        while self._pending:
            oldest, _ = self._pending[0]
            if update - DELAY < oldest <= update:  # not old enough; a later one was made before a restore
                return
            self._write_oldest()

    def show(self, epoch: int, samples: int, total: int, seconds_left: float | None = None) -> None:
        """Draw the progress bar of an epoch, with the loss, the batch size and the learning rate of the last row.

        Args:
            epoch: number of the epoch.
            samples: samples of the epoch that were trained on so far.
            total: samples of the epoch.
            seconds_left: time left of the whole training, if known.
        """
        if not self._progress:
            return
        if self._bar is None or epoch != self._epoch:
            self._close_bar()
            self._epoch = epoch
            self._bar = tqdm(total=total, desc=f"epoch {epoch}", unit=" samples", unit_scale=True, disable=None)
        entries = [f"{name}={self._latest[tag]:.4g}" for tag, name in _IN_BAR.items() if tag in self._latest]
        if seconds_left is not None:
            entries.append(f"left={tqdm.format_interval(seconds_left)}")
        self._bar.set_postfix_str(", ".join(entries), refresh=False)
        self._bar.update(samples - self._bar.n)  # `n`: what the bar shows so far

    def flush(self) -> None:
        """Write what is left of `log_later`, and the events, to the disk.

        Each `state_dict()` of the optimizer does so. Otherwise TensorBoard shows an update after half a minute.
        """
        while self._pending:
            self._write_oldest()
        if self._files is not None:
            self._files[0].flush()

    def close(self) -> None:
        """Write what is left of `log_later`, close the files, and remove the progress bar.

        A later `log` opens the files again, and continues them.
        """
        self.flush()
        self._close_bar()
        close, self._close_files, self._files = self._close_files, None, None
        if close is not None:
            close()

    def rewind(self, update: int | None) -> None:
        """Close the files; the next `log` drops the rows after this update, from which a restored run continues.

        None: not known; it drops the rows from its own update on.
        """
        self.close()
        self._replaces, self._restored = True, update

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write_oldest(self) -> None:
        """Write the oldest row of `log_later`; one that an interrupt stops is still there for the next call."""
        update, read = self._pending.popleft()
        try:
            self.log(update, read())
        except KeyboardInterrupt:
            self._pending.appendleft((update, read))
            raise

    def _close_bar(self) -> None:
        """Remove the progress bar, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _checked_number(tag: str, value: Any) -> float:
    """Return the value of a tag as an int or a float; raise an error if it is none, or the tag is not allowed."""
    if tag in ("update", ""):
        raise ValueError(
            f'a tag must not be empty or "update", the column of the update, got {tag!r}; choose another tag'
        )
    try:
        number = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError) as error:  # a tensor or an array of several elements
        raise type_error(f"the value of {tag} must be a number", value, "pass a float") from error
    if isinstance(number, int):
        return int(number)
    if not isinstance(number, numbers.Real):
        raise type_error(f"the value of {tag} must be a number", value, "pass a float")
    return float(number)


def _close_files_of(events: EventsFile, table: ScalarsFile) -> None:
    """Close both files; a function, because the finalizer of a Tracker must not refer to the Tracker."""
    events.close()
    table.close()
