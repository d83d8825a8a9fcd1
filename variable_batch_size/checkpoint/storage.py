"""Files in a folder of a disk or of an object store, by fsspec: each small one is there whole, or not at all.

JSON has its own checksum, so that a file that is not as it was written is found.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, Final, final
from urllib.parse import urlsplit
from uuid import uuid4

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from variable_batch_size._validation import value_error

# What reading a damaged file can raise: any of these, as another program can have written it with a valid checksum.
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError)
_SEAL: Final = ', "seal": "'


def seal_json(facts: Mapping[str, Any]) -> str:
    """Return a JSON object, which must not be empty, whose last entry is the SHA-256 of the object without it."""
    text = json.dumps(facts, allow_nan=False)
    return f'{text[:-1]}{_SEAL}{hashlib.sha256(text.encode()).hexdigest()}"}}\n'


def unseal_json(text: str) -> dict[str, Any]:
    """Return the contents of a text that `seal_json` returned, with the seal.

    Raises:
        ValueError: if it is not intact.
    """
    body, _, seal = text.rpartition(_SEAL)
    if seal != hashlib.sha256(f"{body}}}".encode()).hexdigest() + '"}\n':
        raise ValueError("its checksum is another one")
    facts: dict[str, Any] = json.loads(text)
    return facts


@final
class Storage:
    """A folder.

    Args:
        location: a path, or a URL of fsspec.

    Attributes:
        location: the absolute path, or the URL.
        on_disk: whether it is on a file system.

    Raises:
        ModuleNotFoundError: if it is a URL, and the library of its store is not installed.
        ValueError: if it is empty.
    """

    def __init__(self, location: str | os.PathLike[str]) -> None:
        """Find the file system of a path, or the object store of a URL."""
        text = str(location)
        if not text:
            raise value_error("the folder of checkpoints must be a path or a URL", "''", 'pass for example "runs/a"')
        try:
            if "://" in text:
                self._fs, self._path = url_to_fs(text, use_listings_cache=False)  # others write there, too
            else:
                self._fs, self._path = LocalFileSystem(), os.path.abspath(os.fspath(location))  # noqa: PTH100
        except ImportError as error:
            raise ModuleNotFoundError(
                f"{text} needs the library of its store ({error}); run: pip install 'variable_batch_size[cloud]', and "
                f"that library, such as s3fs"
            ) from None
        self._path = self._path.rstrip("/")
        self.on_disk = isinstance(self._fs, LocalFileSystem)
        # The path of the store may lack what the URL says, such as the account of an Azure container. A password stays
        # out of messages.
        whole = self._fs.unstrip_protocol(self._path) if urlsplit(text).password else text
        self.location = self._path if self.on_disk else whole.rstrip("/")

    def at(self, *names: str) -> str:
        """Return the path or URL of something in the folder."""
        return "/".join([self.location, *names])

    def make(self, *folder: str) -> None:
        """Create the folder, or one within it, on a disk; a store needs none, because it has no empty folders."""
        if self.on_disk:
            os.makedirs(self._path_of(folder), exist_ok=True)  # noqa: PTH103

    def names(self, *folder: str) -> list[str]:
        """Return the names in the folder, or in a folder within it."""
        with suppress(FileNotFoundError, NotADirectoryError):
            if self.on_disk:
                return os.listdir(self._path_of(folder))  # noqa: PTH208
            return [path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._path_of(folder), detail=False)]
        return []

    def listed(self, prefix: str = "") -> dict[str, set[str]]:
        """Return the names in the folder, each with the names of the files within it; one request to a store.

        On a disk only folders whose names begin with `prefix` are looked into: others may be unreadable.
        """
        if self.on_disk:  # fsspec's `find` looks at every file, and raises if one is deleted meanwhile
            return {name: {*self.names(name)} if name.startswith(prefix) else set() for name in self.names()}
        by_name: dict[str, set[str]] = {}
        for path in self._fs.find(self._path):
            name, _, file = path.removeprefix(self._path + "/").partition("/")
            by_name.setdefault(name, set()).add(file)
        return by_name

    def read(self, *names: str) -> bytes:
        """Return the contents of a small file."""
        contents: bytes = self._fs.cat_file(self._path_of(names))
        return contents

    def put(self, text: str, *names: str, create: bool = False) -> None:
        """Write a small file, so that a reader finds all of it or nothing.

        Args:
            text: its contents.
            names: folders and name of the file.
            create: whether to raise FileExistsError if it exists.
        """
        if not self.on_disk:
            self._fs.pipe_file(self._path_of(names), text.encode(), mode="create" if create else "overwrite")
        elif create:
            with open(self._path_of(names), "x", encoding="utf-8") as file:  # noqa: PTH123
                file.write(text)
        else:
            *folder, name = names
            with self.create(*folder, f"{name}.new", replaces=True) as stream:
                stream.write(text.encode())
            os.replace(self._path_of([*folder, f"{name}.new"]), self._path_of(names))  # noqa: PTH105
            for path in {self._path_of(folder), self._path}:  # else a new name may be lost when the machine fails
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    @contextmanager
    def create(self, *names: str, replaces: bool = False) -> Iterator[IO[bytes]]:
        """Open a file to be written, and flush it to the disk, or publish it in the store, at the end of the block.

        Args:
            names: folder and name of the file.
            replaces: whether the file may exist on a disk; an object of a store is replaced in any case.

        Raises:
            FileExistsError: if it exists on a disk, unless `replaces`.
        """
        path = self._path_of(names)
        if self.on_disk:
            with open(path, "wb" if replaces else "xb") as file:  # noqa: PTH123
                yield file
                file.flush()
                os.fsync(file.fileno())
            return
        stream = self._fs.open(path, "wb")
        try:
            yield stream
        except BaseException:
            with suppress(Exception):
                stream.discard()
            raise
        stream.close()  # which publishes the object

    @contextmanager
    def open(self, *names: str) -> Iterator[IO[bytes]]:
        """Read a file; on a disk without a buffer, because what is read is large."""
        path = self._path_of(names)
        with open(path, "rb", buffering=0) if self.on_disk else self._fs.open(path, "rb") as file:  # noqa: PTH123
            yield file

    def size(self, *names: str) -> int:
        """Return the number of bytes of a file."""
        return int(self._fs.size(self._path_of(names)))

    def remove(self, *names: str) -> None:
        """Delete a file, or an empty folder of a disk, if it is there."""
        with suppress(FileNotFoundError, NotADirectoryError):
            if self.on_disk and os.path.isdir(self._path_of(names)):  # noqa: PTH112
                os.rmdir(self._path_of(names))  # noqa: PTH106
            else:
                self._fs.rm_file(self._path_of(names))

    def age(self, name: str) -> float:
        """Return the seconds since a file was written, by the clock of the disk or the store.

        Clocks of hosts may differ, so it compares with the time of a file that it writes and deletes.
        """
        probe = f".probe-{uuid4().hex}"  # a new file, whose time of writing is now by that clock
        self.put("", probe, create=True)
        try:
            time_now, time_written = (self._fs.modified(self._path_of([file])) for file in (probe, name))
            return float((time_now - time_written).total_seconds())
        finally:
            self.remove(probe)

    def is_damage(self, error: BaseException) -> bool:
        """Return whether an error of `DAMAGE` means that files are damaged, and not that a store cannot be reached.

        A disk is always reached; a store that cannot be reached raises an OSError other than FileNotFoundError.
        """
        return self.on_disk or not isinstance(error, OSError) or isinstance(error, FileNotFoundError)

    def _path_of(self, names: Any) -> str:
        return "/".join([self._path, *names])
