"""Who writes the checkpoints of a folder.

A writer creates the file `.writer-0003`, which only one can create, and the highest number writes: an earlier writer
raises when it next wants to save. As long as its process lives, the file is written again every minute: until it is ten
minutes old by the clock of the store, another job is refused, and the same one takes over. On a disk, a locked file
tells at once that the process has ended.
"""

from __future__ import annotations

import _thread
import os
import re
import socket
import threading
import weakref
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, final
from uuid import uuid4

from variable_batch_size.checkpoint.storage import DAMAGE, Storage, seal_json, unseal_json

SECONDS: Final = 600.0  # from the last write of a writer's file until another job may take the folder over
RENEWAL: Final = 60.0  # seconds between two writes of a writer's file

_NAME = re.compile(r"\.writer-(\d{4,})")
_own = set[tuple[int, str]]()  # process ids, and tokens of writers that were theirs
_open = weakref.WeakValueDictionary[str, "Writer"]()  # the writers of this process, by the real path of the folder


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
        newest: name of the newest checkpoint that all ranks had written when the file was written last; "" for none.
        best: names of the best ones at that time, with spaces between them.
    """

    run: str = ""
    process: str = "another writer"
    host: str = ""
    token: str = ""
    locked: bool = True
    ended: bool = False
    newest: str = ""
    best: str = ""


_UNREADABLE = Record()  # in the place of a file that is only half written, as a disk may have it


@final
class Writer:
    """The right of this process to write in a folder.

    Args:
        storage: the folder.
        run: name of the job. Default: `TORCHELASTIC_RUN_ID` or `SLURM_JOB_ID` of the environment.

    Attributes:
        number: number of this writer; 0 if it does not write.
    """

    _pid = 0  # until __init__ has created everything that __del__ needs: an interrupt may end it before

    def __init__(self, storage: Storage, run: str | None) -> None:
        """Prepare to write, which `acquire` begins; the number of a writer is 0 until then."""
        jobs = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")]
        self._key = os.path.realpath(storage.location) if storage.on_disk else storage.location
        self._storage = storage
        self._run = run or next((job for job in jobs if job not in ("", "none")), "")
        self.number, self._record = 0, _UNREADABLE
        self._file: int | None = None  # descriptor of the locked file
        # For the thread that renews the file. No Event: an interrupt within its set() would lock it for ever.
        self._ended, self._writing = SimpleQueue[None](), threading.Lock()
        self._pid = os.getpid()  # a forked process does not write

    def acquire(self, highest: int) -> None:
        """Become the writer.

        Args:
            highest: the highest number of a writer in the names of the checkpoints; the new number is above it.

        Raises:
            OSError: if another process writes there.
        """
        last_number, last = max(self._records().items(), default=(0, None))  # of the last writer: its number and record
        earlier_writer = _open.get(self._key)  # of this process, as when a notebook's cell runs again
        if earlier_writer is not None and earlier_writer._pid != os.getpid():  # of the process that was forked
            earlier_writer = None
        if earlier_writer is not None:
            earlier_writer._stop()
        try:
            locked = self._lock_file(last)
            # A writer of this process, which was stopped above or is garbage, needs no check.
            if last is not None and (os.getpid(), last.token) not in _own:
                self._check_free(last, last_number, locked)
            self.number, host = max(last_number, highest) + 1, socket.gethostname()
            newest, best = (last.newest, last.best) if last else ("", "")
            process = f"process {os.getpid()} on {host}"
            self._record = Record(self._run, process, host, uuid4().hex, locked, newest=newest, best=best)
            _own.add((os.getpid(), self._record.token))
            self._put(create=True)
            for earlier in self._numbers():
                if earlier < self.number:
                    self._storage.remove(_file_name(earlier))
        except BaseException as error:
            self._stop()
            if isinstance(error, FileExistsError):
                raise OSError(
                    f"Checkpoint folder {self._storage.location} is in use by a writer that has begun at the same "
                    f"time; choose another folder"
                ) from None
            raise
        _open[self._key] = self
        _thread.start_new_thread(_keep_alive, (weakref.ref(self), self._ended))

    @property
    def token(self) -> str:
        """A random text by which other ranks recognize the folder."""
        return self._record.token

    def is_known(self, token: str) -> bool:
        """Return whether the folder, as this process sees it, has a writer with this token."""
        with suppress(*DAMAGE):
            return any(record.token == token for record in self._records().values())
        return False

    def last_saved(self) -> tuple[str, list[str]]:
        """Return the names of the newest checkpoint, or "", and of the best ones that the last writer has recorded."""
        last = max(self._records().items(), default=(0, self._record))[1]
        return last.newest, last.best.split()

    def check(self) -> None:
        """Check that this process is the writer.

        Raises:
            RuntimeError: if it is not, or no longer.
        """
        folder = f"Checkpoint folder {self._storage.location}"
        if not self.number or self._pid != os.getpid():
            remedy = "use" if _open.get(self._key) else "create"
            raise RuntimeError(
                f"{folder} is not written by this Checkpoint, which was closed, is in a forked process, or was "
                f"followed by another one; {remedy} another Checkpoint"
            )
        records = self._records() or {self.number: self._record}  # all files were deleted: the next save begins anew
        last_number, last_record = max(records.items())  # the highest number, which writes, and its record
        if last_number > self.number:
            raise RuntimeError(
                f"{folder} was taken over by {last_record.process}, so that this process writes no checkpoint; end it"
            )
        if records.get(self.number, last_record).token not in ("", self.token):
            raise RuntimeError(
                f"{folder} was deleted, and created again by {last_record.process}, so that this process writes no "
                f"checkpoint; end it"
            )
        self._hold_lock()

    @property
    def writes(self) -> bool:
        """Whether this process is the writer; if the folder cannot be reached, whether it was when it last could."""
        try:
            self.check()
        except RuntimeError:
            return False
        except Exception:  # a store that cannot be reached
            return self.number > 0
        return True

    def renew(self, **changes: Any) -> None:
        """Write the file of this writer again, by which others see that it is alive; a failure is tried again later.

        Args:
            changes: entries of the record that change.
        """
        with suppress(Exception):  # which class it has depends on the store
            self.check()
            self._put(**changes)

    def release(self) -> None:
        """Let other processes write: at once if the folder can be reached, otherwise after `SECONDS`."""
        if self._pid == os.getpid():
            self.renew(ended=True)
        self._stop()

    def _stop(self) -> None:
        """Stop being the writer: end the thread that renews the file, and unlock the folder."""
        if self._pid != os.getpid():  # forked while the other thread held `_writing`, it would wait for ever
            return
        self._ended.put(None)
        with self._writing:
            self.number = 0
            if self._file is not None:
                # Forgotten before it is closed: after an interrupt, nothing closes this descriptor once more, which may
                # by then be the one of another file.
                file, self._file = self._file, None
                os.close(file)
        if _open.get(self._key) is self:
            del _open[self._key]

    __del__ = _stop

    def _lock_file(self, last: Record | None) -> bool:
        """Lock the file `.lock` of the folder, and return whether it is locked: a store and some disks have no locks.

        It is a POSIX lock, by `lockf`. Unlike one by `flock`, it ends with the process even if a child of the process
        continues to run, and network file systems support it.

        Args:
            last: the record of the last writer, for the message.

        Raises:
            OSError: if another process of this host has locked it.
        """
        if not self._storage.on_disk:
            return False
        try:
            import fcntl  # not on Windows
        except ImportError:
            return False
        self._file = os.open(self._storage.at(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file, self._file = self._file, None
            os.close(file)
            other_writer = last or _UNREADABLE
            # The lock of a process on another host may outlive it, so that the age of its file decides.
            on_this_host = other_writer.host in ("", socket.gethostname())
            if isinstance(error, (BlockingIOError, PermissionError)) and on_this_host:
                raise OSError(self._refusal(other_writer)) from None
            return False
        return True

    def _hold_lock(self) -> None:
        """Lock `.lock` again: a copy of the folder that this process has made has unlocked it, by closing the file."""
        with self._writing:  # not while `_stop` closes it
            if self._file is not None:
                import fcntl

                with suppress(OSError):  # another process was faster: its record says so
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _check_free(self, last: Record, number: int, locked: bool) -> None:
        """Check that no other process may still write to the folder.

        Args:
            last: the record of the last writer.
            number: its number.
            locked: whether this process has locked the folder, so that no running process has.

        Raises:
            OSError: if the last writer may still run and is of another job.
        """
        if last.ended or (locked and last.locked) or (self._run and last.run == self._run):
            return
        remaining = SECONDS
        with suppress(FileNotFoundError):  # a later writer, which runs, has just deleted it
            remaining -= self._storage.age(_file_name(number))  # its process would have written the file again
        if remaining > 0:
            raise OSError(self._refusal(last, f", wait for {remaining:.0f} s if it has ended"))

    def _refusal(self, other: Record, wait: str = "") -> str:
        """Return the message for a folder that another process writes to; `wait`: a further remedy, in words."""
        job, take_over = f' of the job "{other.run}"' if other.run else "", ""
        if other.run and other.run != self._run:
            take_over = f', pass run="{other.run}" to take over from an earlier process of that job'
        return (
            f"Checkpoint folder {self._storage.location} is in use by {other.process}{job}; end that process or "
            f"close() its Checkpoint{take_over}{wait}; another folder begins a different run"
        )

    def _numbers(self) -> list[int]:
        """Return the numbers of all writers that have a file."""
        return [int(match[1]) for name in self._storage.names() if (match := _NAME.fullmatch(name))]

    def _records(self) -> dict[int, Record]:
        """Return the records of all writers by number; that of a damaged file is `_UNREADABLE`."""
        records = dict[int, Record]()
        for number in self._numbers():
            with suppress(FileNotFoundError):  # a later writer has deleted it
                try:
                    entries = unseal_json(self._storage.read(_file_name(number)).decode())
                    records[number] = Record(**{name: entries[name] for name in Record._fields if name in entries})
                except (ValueError, TypeError, LookupError, AttributeError):
                    records[number] = _UNREADABLE
        return records

    def _put(self, *, create: bool = False, **changes: Any) -> None:
        """Write the record, with changes, unless the folder was released meanwhile."""
        with self._writing:
            if self.number:
                self._record = self._record._replace(**changes)
                self._storage.put(seal_json(self._record._asdict()), _file_name(self.number), create=create)


def _keep_alive(writer: weakref.ref[Writer], ended: SimpleQueue[None]) -> None:
    """Renew the file of a writer at intervals in a thread, until the writer has ended or is garbage.

    Args:
        writer: a weak reference, so that this thread does not keep the writer alive.
        ended: not empty when the writer has ended.
    """
    while True:
        try:
            ended.get(timeout=RENEWAL)
            return
        except Empty:
            alive = writer()
        if alive is None:
            return
        alive.renew()
        del alive  # else this thread would keep the writer alive while it waits


def _file_name(number: int) -> str:
    return f".writer-{number:04d}"
