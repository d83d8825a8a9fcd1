"""Files that compute the SHA-256 of their contents while something else writes or reads them, each byte once."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import IO, Any, final

_BLOCK = 1 << 18  # bytes


@final
class HashingWriter:
    """A file that is written sequentially, with the SHA-256 of what is written.

    It keeps its first OSError instead of raising it, because `torch.save` would replace it with an error of its own.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest, self.bytes = hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, block: Any) -> int:
        """Write and hash the bytes, and return their number."""
        self.digest.update(block)
        self.bytes += len(block)
        try:
            if self.error is None:
                self._file.write(block)
        except OSError as error:
            self.error = error
        return len(block)

    def flush(self) -> None:
        """Do nothing: the file is flushed once, at the end."""


@final
class HashingReader(io.RawIOBase):
    """A file that is read mostly in the order of its bytes, with the SHA-256 of all of them.

    `torch.load` reads the directory at the end of its archive first and then one tensor after another, in the order in
    which they were saved. What it reads in order, and the small gaps between, is hashed as it passes; what it reads far
    ahead is read again when its turn comes.

    Raises:
        OSError: if the file cannot be opened or read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = io.FileIO(path)
        self._position, self._hashed, self._digest = 0, 0, hashlib.sha256()
        self.bytes_read = 0

    def readinto(self, buffer: Any, /) -> int:
        """Read at the position until the buffer is full or the file ends, and return the number of bytes."""
        if self._position - self._hashed <= _BLOCK:
            self._hash_up_to(self._position)
        return self._read(memoryview(buffer).cast("B"))

    def checksum(self) -> tuple[int, str]:
        """Read what is left, and return the size of the file in bytes and its SHA-256."""
        size = os.fstat(self._file.fileno()).st_size
        self._hash_up_to(size)
        return size, self._digest.hexdigest()

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to a position, and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence, os.fstat(self._file.fileno()).st_size)
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def _hash_up_to(self, end: int) -> None:
        position, block = self._position, memoryview(bytearray(min(_BLOCK, max(0, end - self._hashed))))
        while self._hashed < end:
            self._position = self._hashed
            if not self._read(block[: end - self._hashed]):
                break
        self._position = position

    def _read(self, buffer: memoryview) -> int:
        self._file.seek(self._position)
        count = 0
        while block := self._file.readinto(buffer[count : count + _BLOCK]):  # small enough to be in a cache when hashed
            if self._position == self._hashed:
                self._digest.update(buffer[count : count + block])
                self._hashed += block
            self._position += block
            self.bytes_read += block
            count += block
        return count
