"""A lock of a folder that does not end with its process.

It is a file `.lock-00000003` that is created only if no other writer has created it, and whose number is that of the
writer. The highest number counts: its writer gives signs of life in the file, and another one takes over, with the next
number, at once if it belongs to the same job or knows that the writer has ended, and otherwise `SECONDS` after the last
sign.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, final
from uuid import uuid4

from variable_batch_size.checkpoint.manifest import is_on_disk, read_text

SECONDS = 600.0  # after the last sign of life of a writer, until when the folder is its own
_RENEWAL = 60.0  # seconds between signs of life
_NAME = re.compile(r"\.lock-([0-9]{8,})")


@final
class LostLockError(RuntimeError):
    """Another writer has locked the folder."""


@final
class Holder(NamedTuple):
    """The contents of a lock.

    Attributes:
        number: of the writer; later ones have higher ones.
        token: random text.
        run: name of the job.
        process: process and host, in words.
        host: name of the host.
        renewed: seconds since 1970 at the last sign of life; 0: released.
        flock: whether the writer has locked a file of a disk, too, by which others see that it has ended.
        known: names of the checkpoints that there were when it was locked.
    """

    number: int
    token: str
    run: str
    process: str
    host: str
    renewed: float
    flock: bool
    known: list[str]


@final
class Lease:
    """The lock of a folder, as one process sees it.

    Args:
        folder: path of the folder.
        run: name of the job. Default: `TORCHELASTIC_RUN_ID` or `SLURM_JOB_ID` of the environment.
    """

    def __init__(self, folder: Path, run: str | None) -> None:
        jobs = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")]
        self._folder, self._run = folder, run or next((job for job in jobs if job not in ("", "none")), "")
        self._own: Holder | None = None
        self._joined: int | None = None  # number of the writer of which this process is a rank
        self._pid = os.getpid()  # a forked process has no lock
        self._tried = 0.0  # when it was last tried to give a sign of life

    def acquire(self, known: Sequence[str] = (), *, flock: bool = False) -> str:
        """Lock the folder, and return a token.

        Args:
            known: names of the checkpoints that are there.
            flock: whether this process has locked the file of the disk, so that an earlier writer that had has ended.

        Raises:
            OSError: if another writer has locked it.
        """
        last = self.holder(names := self._names())
        ended = last is None or (flock and last.flock)
        left = 0.0 if last is None or ended else last.renewed + SECONDS - time.time()
        if last is not None and left > 0 and not (self._run and last.run == self._run):
            of = f' of the job "{last.run}"' if last.run else ""
            take_over = f'pass run="{last.run}" to take over from an earlier process of that job, ' if last.run else ""
            raise OSError(
                f"Checkpoint folder {self._folder} is in use by {last.process}{of}; close() that Checkpoint, "
                f"{take_over}wait for {left:.0f} s if it has ended, or choose another folder"
            )
        host, number = socket.gethostname(), 1 if last is None else last.number + 1
        process = f"process {os.getpid()} on {host}"
        own = Holder(number, uuid4().hex, self._run, process, host, time.time(), flock, [*known])
        try:
            self._put(own, create=True)
        except FileExistsError:
            raise OSError(
                f"Checkpoint folder {self._folder} is in use by a writer that has locked it at the same time; choose "
                f"another folder"
            ) from None
        self._own, self._tried = own, own.renewed
        for name in filter(_NAME.fullmatch, names):
            remove(self._folder / name)
        return own.token

    def join(self, token: str) -> bool:
        """Write as a rank of the writer with this token, if that has locked the folder; return whether it has."""
        holder = self.holder()
        self._joined = holder.number if holder is not None and holder.token == token else None
        return self._joined is not None

    def release(self) -> None:
        """Let other writers lock the folder, at once if it can be reached."""
        own, forked = self._own, self._pid != os.getpid()
        with suppress(Exception):  # of a store any; and another writer may have locked it
            if own is not None and not forked:
                self.check()
                self._put(own._replace(renewed=0.0))
        self._own = self._joined = None

    def renew(self) -> None:
        """Give a sign of life, once a minute; a folder that cannot be reached is tried again.

        Raises:
            LostLockError: if another writer has locked the folder.
        """
        now = time.time()
        if self._own is None or now - self._tried <= _RENEWAL:
            return
        self._tried = now
        try:
            self.check()
            self._put(self._own._replace(renewed=now))
        except LostLockError:
            raise
        except Exception:  # which class it has depends on the store
            return

    def check(self) -> int:
        """Return the number of this writer, if it has the lock.

        Raises:
            LostLockError: if another writer has locked the folder.
            RuntimeError: if this one has not.
        """
        number = self._joined if self._own is None else self._own.number
        if number is None or self._pid != os.getpid():
            raise RuntimeError(
                f"Checkpoint folder {self._folder} is not locked by this Checkpoint, which was closed or is in a "
                f"forked process; create another Checkpoint"
            )
        names = self._names()
        if _locks(names)[:1] != [_name(number)]:
            other = self.holder(names)
            raise LostLockError(
                f"Checkpoint folder {self._folder} was taken over by {other.process if other else 'another writer'}, "
                f"so that this process writes no checkpoint; end it"
            )
        return number

    def holder(self, names: Iterable[str] | None = None) -> Holder | None:
        """Return who has locked the folder last, or None."""
        while locks := _locks(self._names() if names is None else names):
            if self._own is not None and locks[0] == _name(self._own.number):
                return self._own
            path = self._folder / locks[0]
            try:
                return Holder(**json.loads(read_text(path)))
            except FileNotFoundError:  # a later writer has deleted it
                names = None
            except ValueError:  # on a disk: half written, perhaps by a process that has ended
                number, renewed = int(locks[0][len(".lock-") :]), path.stat().st_mtime
                return Holder(number, "", "", "another writer", "", renewed, flock=True, known=[])
        return None

    def _names(self) -> list[str]:
        folder: Any = self._folder
        if is_on_disk(folder):
            return os.listdir(folder)  # noqa: PTH208
        with suppress(FileNotFoundError):  # a store has no empty folders
            return [name.rpartition("/")[2] for name in folder.fs.ls(folder.path, detail=False)]
        return []

    def _put(self, own: Holder, *, create: bool = False) -> None:
        put(self._folder / _name(own.number), json.dumps(own._asdict()), create=create)


def _locks(names: Iterable[str]) -> list[str]:
    """Return the names of locks, the newest first."""
    return sorted(filter(_NAME.fullmatch, names), reverse=True)


def _name(number: int) -> str:
    return f".lock-{number:08d}"


def put(path: Any, text: str, *, create: bool = False) -> None:
    """Write a small file at once; with `create` raise FileExistsError if there is one."""
    if is_on_disk(path):
        with path.open("x" if create else "w") as file:
            file.write(text)
    else:
        path.fs.pipe_file(path.path, text.encode(), mode="create" if create else "overwrite")


def remove(path: Any) -> None:
    """Delete a file, if it is there; `unlink` of a URL would take brackets in its name for a pattern."""
    with suppress(FileNotFoundError):
        path.unlink() if is_on_disk(path) else path.fs.rm_file(path.path)
