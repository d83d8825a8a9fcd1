"""Damaged files: each is a trace that keeps what holds for all of them, or an error of one sentence that names it."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.capacity_files import TEXTS
from helpers.properties import examples
from variable_batch_size.lab.cluster import read
from variable_batch_size.lab.cluster.readers.base import Text
from variable_batch_size.lab.cluster.reading import READERS

ALL = sorted(READERS)


BYTES = st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789.-,:e_ \n"'))  # any, and those that formats use


@st.composite
def mutated(draw, content):
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


def outcome(path, name):
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


def check(path, name):
    """Hold a file against what every one keeps; return whether it is read as one of a format."""
    trace, recognized = outcome(path, name), outcome(path, None)
    if recognized is not None:
        (own,) = [other for other in ALL if READERS[other].recognizes(Text.load(path))]
        assert recognized == outcome(path, own)
    if trace is not None:
        trace.to_csv(copy := path.with_name("copy"))
        assert read(copy) == trace
    return trace is not None


def rows_of(trace):
    columns = [trace.seconds, trace.nodes, *([] if trace.prices is None else [trace.prices])]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_damaged_file_is_a_trace_or_an_error(tmp_path):
    outcomes = []

    @examples(1000)
    @given(st.data())
    def run(data):
        name = data.draw(st.sampled_from(ALL))
        path = tmp_path / "trace"
        path.write_bytes(data.draw(mutated(TEXTS[name].encode())))
        outcomes.append(check(path, name))

    run()
    assert {*outcomes} == {True, False}  # neither all is an error, nor nothing


@pytest.mark.parametrize("name", ALL)
def test_a_truncated_file_is_the_beginning_of_the_trace_or_an_error(name, tmp_path):
    content = TEXTS[name].encode()
    path = tmp_path / "trace"
    path.write_bytes(content)
    whole = rows_of(read(path))
    for length in range(len(content)):
        path.write_bytes(content[:length])
        check(path, name)
        beginning = outcome(path, name)
        if beginning is not None and content[length - 1 : length] == b"\n":
            rows = rows_of(beginning)
            assert rows[:-1] == whole[: len(rows) - 1]  # a line that follows may be at the time of the last one
