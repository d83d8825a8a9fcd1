"""Who writes the checkpoints of a folder.

A writer creates the file `.writer-0003`, which only one can create, and the highest number writes: an earlier writer
raises when it next wants to save. The file holds the names of the checkpoints that were there, so that every reader and
later writer leaves out what an earlier writer adds to them. As long as its process lives, it is written again every
minute: until it is ten minutes old by the clock of the store, another job is refused, and the same one takes over. On a
disk, a locked file tells at once that the process has ended.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import weakref
from contextlib import suppress
from typing import Final, NamedTuple, final
from uuid import uuid4

from variable_batch_size.checkpoint.seal import sealed, unsealed
from variable_batch_size.checkpoint.storage import DAMAGE, Storage

SECONDS: Final = 600.0  # after it was written last, until when a folder is its writer's own
RENEWAL: Final = 60.0  # seconds from one time that it is written to the next

_NAME = re.compile(r"\.writer-(\d{4,})")
_LOCK = ".lock"
_open = weakref.WeakValueDictionary[str, "Writer"]()  # those of this process, by the folder, without links


@final
class Record(NamedTuple):
    """The contents of the file of a writer.

    Attributes:
        run: name of the job.
        process: process and host, in words.
        host: name of the host.
        token: random text.
        locked: whether the writer has locked a file of the disk, by which others see that it has ended.
        ended: whether it has closed the folder.
        known: names of the checkpoints that were there; None until it has listed them.
    """

    run: str
    process: str
    host: str
    token: str
    locked: bool
    ended: bool
    known: list[str] | None


_UNREADABLE = Record("", "another writer", "", "", locked=True, ended=False, known=None)  # on a disk: half written


@final
class Writer:
    """The right of this process to write in a folder.

    Args:
        storage: the folder.
        run: name of the job. Default: `TORCHELASTIC_RUN_ID` or `SLURM_JOB_ID` of the environment.

    Attributes:
        number: of this writer; 0: it does not write.
    """

    def __init__(self, storage: Storage, run: str | None) -> None:
        jobs = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")]
        self._key = os.path.realpath(storage.location) if storage.on_disk else storage.location
        self._storage = storage
        self._run = run or next((job for job in jobs if job not in ("", "none")), "")
        self.number, self._record, self._pid = 0, _UNREADABLE, os.getpid()  # a forked process does not write
        self._file: int | None = None  # descriptor of the locked one
        self._ended, self._writing = threading.Event(), threading.Lock()  # of the thread that writes the file again

    def acquire(self, highest: int) -> None:
        """Become the writer, with a number above `highest`, which a checkpoint has; `record_known` has to follow.

        Raises:
            OSError: if another process writes there.
        """
        records = self._read_records()
        number, last = max(records.items(), default=(0, None))
        of_process = _open.get(self._key)
        of_process = of_process if of_process is not None and of_process._pid == os.getpid() else None
        if of_process is not None:  # as when a notebook's cell runs again
            of_process._stop()
        locked = self._lock_file(last)
        if last is not None and (of_process is None or of_process._record.token != last.token):
            self._check_free(last, number, locked)
        host = socket.gethostname()
        self.number = max(number, highest) + 1
        process = f"process {os.getpid()} on {host}"
        self._record = Record(self._run, process, host, uuid4().hex, locked, ended=False, known=None)
        try:
            self._put_record(self._record, create=True)
        except FileExistsError:
            self._stop()
            raise OSError(
                f"Checkpoint folder {self._storage.location} is in use by a writer that has begun at the same time; "
                f"choose another folder"
            ) from None
        except BaseException:
            self._stop()
            raise
        _open[self._key] = self
        threading.Thread(target=_keep_alive, args=(weakref.ref(self), self._ended), name="writer", daemon=True).start()

    def record_known(self, names: list[str]) -> None:
        """Record which checkpoints were there, and delete the files of earlier writers."""
        self._put_record(self._record._replace(known=names))
        for number in self._writer_numbers():
            if number < self.number:
                self._storage.remove(_file_name(number))

    @property
    def token(self) -> str:
        """A random text by which other ranks recognize the folder."""
        return self._record.token

    def is_known(self, token: str) -> bool:
        """Return whether the folder, as this process sees it, has a writer with this token."""
        with suppress(*DAMAGE):
            return any(record.token == token for record in self._read_records().values())
        return False

    def find_counting(self, numbers: list[int]) -> tuple[int, list[str]]:
        """Return the number of the writer from which on all checkpoints count, and names of earlier ones that do."""
        if self.number and self._record.known is not None:
            return self.number, self._record.known
        if max(self._writer_numbers(), default=0) <= min(numbers, default=0):
            return 0, []
        listed = [(number, record.known) for number, record in self._read_records().items() if record.known is not None]
        return max(listed, default=(0, []))

    def check(self) -> None:
        """Check that this process is the writer.

        Raises:
            RuntimeError: if it is not, or no longer.
        """
        if not self.number or self._pid != os.getpid():
            later = _open.get(self._key)
            raise RuntimeError(
                f"Checkpoint folder {self._storage.location} is not written by this Checkpoint, which was closed, is "
                f"in a forked process, or was followed by another one; {'use' if later else 'create'} another "
                "Checkpoint"
            )
        records = self._read_records()
        record = records.get(self.number, self._record)
        if record.token not in ("", self._record.token):
            raise RuntimeError(
                f"Checkpoint folder {self._storage.location} was deleted, and created again by {record.process}, so "
                "that this process writes no checkpoint; end it"
            )
        last, other = max(records.items(), default=(0, record))
        if last > self.number:
            raise RuntimeError(
                f"Checkpoint folder {self._storage.location} was taken over by {other.process}, so that this process "
                f"writes no checkpoint; end it"
            )

    @property
    def writes(self) -> bool:
        """Whether this process is the writer, as far as it can be seen."""
        try:
            self.check()
        except RuntimeError:
            return False
        except Exception:  # a store that cannot be reached
            return self.number > 0
        return True

    def renew(self) -> None:
        """Write the file again, as a sign of life; a folder that cannot be reached is tried again later."""
        with suppress(Exception):  # which class it has depends on the store
            self.check()
            self._put_record(None)

    def release(self) -> None:
        """Let other processes write, at once if the folder can be reached."""
        with suppress(Exception):
            if self.number and self._pid == os.getpid():
                self.check()
                self._put_record(self._record._replace(ended=True))
        self._stop()

    def _stop(self) -> None:
        """Write no longer: end the thread that renews, and unlock the file."""
        if self._pid != os.getpid():  # in a forked process, the other thread may have held the lock for ever
            return
        self._ended.set()
        with self._writing:
            self.number = 0
        if _open.get(self._key) is self:
            del _open[self._key]
        if self._file is not None:
            file, self._file = self._file, None  # first, so that an interrupt leaves no number that another file gets
            os.close(file)

    __del__ = _stop

    def _lock_file(self, last: Record | None) -> bool:
        """Lock a file of the disk, and return whether it is; in a store, and where a disk has no locks, it is not.

        Locks of POSIX, unlike those of `flock` and of libraries on it, end with the process although a child of it
        lives on, and network file systems know them.

        Raises:
            OSError: if another process of this host has locked it.
        """
        if not self._storage.on_disk:
            return False
        try:
            import fcntl  # not on Windows
        except ImportError:
            return False
        file = os.open(self._storage.at(_LOCK), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            other = last or _UNREADABLE
            is_here = other.host in ("", socket.gethostname())  # one on another host may have ended without a word
            if isinstance(error, (BlockingIOError, PermissionError)) and is_here:
                raise OSError(self._refusal(other)) from None
            return False
        self._file = file
        return True

    def _is_same_job(self, other: Record) -> bool:
        return self._run != "" and other.run == self._run

    def _check_free(self, last: Record, number: int, locked: bool) -> None:
        """Raise OSError if the last writer may still live: it has not ended, no lock tells, and it was renewed."""
        if last.ended or (locked and last.locked) or self._is_same_job(last):
            return
        left = SECONDS - self._storage.age(_file_name(number))
        if left > 0:
            self._stop()
            raise OSError(self._refusal(last, f", wait for {left:.0f} s if it has ended"))

    def _refusal(self, other: Record, wait: str = "") -> str:
        """Return the error of a folder that another process writes to; `wait`: what may help, in words."""
        of = f' of the job "{other.run}"' if other.run else ""
        named = bool(other.run) and other.run != self._run
        take_over = f', pass run="{other.run}" to take over from an earlier process of that job' if named else ""
        return (
            f"Checkpoint folder {self._storage.location} is in use by {other.process}{of}; end that "
            f"process or close() its Checkpoint{take_over}{wait}; another folder begins another training"
        )

    def _writer_numbers(self) -> list[int]:
        return [int(match[1]) for name in self._storage.names() if (match := _NAME.fullmatch(name))]

    def _read_records(self) -> dict[int, Record]:
        """Return the records of all writers by number; that of a damaged file is `_UNREADABLE`."""
        records = dict[int, Record]()
        for number in self._writer_numbers():
            with suppress(FileNotFoundError):  # a later writer has deleted it
                try:
                    records[number] = _parse_record(self._storage.read(_file_name(number)).decode())
                except (ValueError, TypeError, LookupError, AttributeError):
                    records[number] = _UNREADABLE
        return records

    def _put_record(self, record: Record | None, *, create: bool = False) -> None:
        """Write a record, or the last one again, if the folder was not released meanwhile."""
        with self._writing:
            self._record = record or self._record
            if self.number:
                self._storage.put(sealed(self._record._asdict()), _file_name(self.number), create=create)


def _keep_alive(writer: weakref.ref[Writer], ended: threading.Event) -> None:
    """Renew the file of a writer at intervals, until it has ended."""
    while not ended.wait(RENEWAL):
        if (alive := writer()) is None:
            return
        alive.renew()
        del alive


def _parse_record(text: str) -> Record:
    """Return the record in the text of a file; raise ValueError if it is damaged."""
    entries = unsealed(text)
    del entries["seal"]
    return Record(**entries)


def _file_name(number: int) -> str:
    return f".writer-{number:04d}"
