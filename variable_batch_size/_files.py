"""Writing files that are complete at any instant."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def written(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Open a text file whose contents replace those of `path` at the end of the block; a failure leaves the old ones.

    A link is followed. What exists and is not a regular file, such as a pipe or /dev/stdout, is written to directly.

    Raises:
        OSError: if the file cannot be written.
    """
    with _named_errors(path):
        target = Path(path)
        if target.is_relative_to("/dev") or (target.exists() and not target.is_file()):
            with target.open("a", encoding="utf-8", newline="") as file:  # a shell's >> keeps what the file has
                yield file
            return
        with replacing_file(target) as temporary, temporary.open("x", encoding="utf-8", newline="") as file:
            yield file


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace the contents of a file at once; a failure leaves the old ones.

    Raises:
        OSError: if the file cannot be written.
    """
    with _named_errors(path), replacing_file(Path(path)) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yield the path of a file beside `path`, which it replaces at the end of the block; a link is followed."""
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        os.replace(temporary, target)  # noqa: PTH105 - same as Path.replace, but the name states that it overwrites
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Within a block that writes a file, let an OSError name this path and say what to do."""
    try:
        yield
    except OSError as error:
        if error.filename is None:  # it is not about the file, but about what was written into it
            raise
        raise type(error)(
            f"{os.fspath(path)!r} must be a file that can be written, got {error.strerror}; choose another path"
        ) from None
