"""Damaged files: each is read as the slow second reader reads it, or the error is one sentence that names the file."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.capacity_files import COLLECTION, EXAMPLES, assert_same
from helpers.reference import examples
from helpers.slow_readers import SLOW, Slow
from variable_batch_size.cluster import CapacityTrace, read
from variable_batch_size.cluster.readers.table import READERS

ALL = sorted(READERS)


BYTES = st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789.-,:e_ \n"'))  # any, and those that formats use


@st.composite
def mutated(draw: st.DrawFn, content: bytes) -> bytes:
    """Change, remove or insert bytes, and cut, swap or repeat lines, up to three times."""
    for _ in range(draw(st.integers(1, 3))):
        lines = content.splitlines(keepends=True) or [b""]
        line, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        byte = draw(st.integers(0, max(0, len(content) - 1)))
        kind = draw(st.sampled_from(["change", "remove", "insert", "end", "cut", "swap", "repeat"]))
        if kind in ("change", "remove", "insert"):
            new = b"" if kind == "remove" else bytes([draw(BYTES)])
            content = content[:byte] + new + content[byte + (kind != "insert") :]
            continue
        if kind == "end":
            lines = [content[:byte]]
        elif kind == "cut":
            lines[line] = lines[line][: draw(st.integers(0, len(lines[line])))]
        elif kind == "swap":
            lines[line], lines[other] = lines[other], lines[line]
        else:
            lines.insert(line, lines[other])
        content = b"".join(lines)
    return content


def outcome(path: Path, name: str | None) -> CapacityTrace | None:
    """Return the trace; None after an error, which has to be one sentence in three parts."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return read(path, name)
    except ValueError as error:
        message = str(error)
        assert re.fullmatch(rf"capacity trace \({re.escape(str(path))}(:\d+)?\):? .+, got .+; .+", message), message
        assert len(message) < 800 + len(str(path))
        return None


def slow_outcome(path: Path, name: str) -> Slow | None:
    try:
        return SLOW[name](path)
    except ValueError:
        return None


def check(path: Path, name: str) -> bool:
    """Hold the reader of a format, and the one that is recognized, against the slow ones; return whether it reads."""
    trace, slow = outcome(path, name), slow_outcome(path, name)
    assert (trace is None) == (slow is None), path.read_bytes()
    if trace is not None and slow is not None:
        assert_same(trace, slow)
    found = outcome(path, None)
    if found is not None:
        accepted = [other for other in ALL if outcome(path, other) == found and slow_outcome(path, other)]
        assert accepted
    return trace is not None


def test_a_damaged_file_is_an_error_or_what_the_slow_reader_says(tmp_path: Path) -> None:
    read_in: dict[str, int] = dict.fromkeys(ALL, 0)
    drawn = dict.fromkeys(ALL, 0)

    @examples(1000)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(ALL))
        path = tmp_path / "trace"
        path.write_bytes(data.draw(mutated(EXAMPLES[name].text.encode())))
        drawn[name] += 1
        read_in[name] += check(path, name)

    run()
    assert sum(drawn.values()) >= 1000
    assert all(0 < read_in[name] < drawn[name] for name in ALL)  # neither all is an error, nor nothing


@pytest.mark.parametrize("name", ALL)
def test_a_truncated_file_is_an_error_or_what_the_slow_reader_says(name: str, tmp_path: Path) -> None:
    content = EXAMPLES[name].text.encode()
    path = tmp_path / "trace"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        check(path, name)


@pytest.mark.skipif(not COLLECTION.is_dir(), reason="the collection of real traces is not here")
def test_a_damaged_real_file_is_an_error_or_what_the_slow_reader_says(tmp_path: Path) -> None:
    beginnings = [_beginning(source) for source in sorted(COLLECTION.iterdir()) if source.suffix != ".md"]
    path = tmp_path / "trace"

    @examples(200)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        name, content = data.draw(st.sampled_from(beginnings))
        path.write_bytes(data.draw(mutated(content)))
        check(path, name)

    run()


def _beginning(path: Path) -> tuple[str, bytes]:
    """Return the format of a file, and a part of it in this format."""
    text = path.read_text()
    beginning = (
        text[: text.rindex(",", 0, 600)] + "]}" if path.suffix == ".json" else text[: text.rindex("\n", 0, 3000)]
    )
    return next(name for name in ALL if slow_outcome(path, name)), beginning.encode()
