"""JSON of which every key counts: the errors name the line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from variable_batch_size.cluster.readers.base import Text


class _RepeatedKeyError(ValueError):
    """A key that an object has twice, which Python's JSON would silently take from the second place."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise _RepeatedKeyError(key)
        found[key] = value
    return found


_BLANKS = re.compile(r"\s*")
_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def values(text: Text, content: str) -> Iterator[tuple[int, object]]:
    """Yield each JSON value of a text, compact or on several lines, with the number of its first line.

    NaN and Infinity are read, as Python does: `Text.number` raises for them where a number is used.

    Raises:
        ValueError: if it is not JSON, an object has a key twice, or it is too long or too deep for Python.
    """
    line, start = 1, 0
    while (begin := _BLANKS.match(content, start).end()) < len(content):  # type: ignore[union-attr]
        line += content.count("\n", start, begin)
        value, start = _decode(text, content, begin, line)
        yield line, value
        line += content.count("\n", begin, start)


def _decode(text: Text, content: str, begin: int, line: int) -> tuple[object, int]:
    """Return the value that begins at a position, which is on this line, and where it ends."""
    try:
        return _DECODER.raw_decode(content, begin)
    except json.JSONDecodeError as error:
        found = content[error.pos : error.pos + 40].split("\n")[0] or "the end"
        requirement = f"the text must be JSON ({error.msg.lower()}, column {error.colno})"
        raise text.error(error.lineno, requirement, found, "download or write it again") from None
    except _RepeatedKeyError as error:
        key = str(error)
        quoted = json.dumps(key, ensure_ascii=False)
        at = line_of(content, content.find(quoted, content.find(quoted, begin) + 1))
        raise text.error(at, "an object must have each key once", key, "leave one of them out") from None
    except RecursionError:
        found = content[begin : begin + 40]
        raise text.error(line, "the JSON must not be nested so deeply", found, "pass another file") from None
    except ValueError:  # of int(), for a number of more than 4300 digits
        number = re.compile(r"[0-9]{4300,}").search(content, begin)
        at = line_of(content, number.start()) if number else line
        raise text.error(at, "an integer must be <= 2**53", number and number[0], "correct it") from None


def line_of(content: str, position: int) -> int:
    """Return the number, from 1, of the line at a position of a text."""
    return 1 + content.count("\n", 0, max(position, 0))


def line_of_key(content: str, key: str) -> int:
    """Return the number of the line on which a key stands."""
    return line_of(content, content.find(f'"{key}"'))


def line_of_element(content: str, key: str, index: int) -> int:
    """Return the number of the line of the element `index` of the list `key`, before which are only numbers."""
    start = re.search(rf'"{key}"\s*:\s*\[', content)
    position = start.end() if start else 0
    for _ in range(index):
        position = content.find(",", position) + 1
    return line_of(content, position + len(content[position:]) - len(content[position:].lstrip()))
