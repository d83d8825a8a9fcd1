"""Traces as CSV files: both readers, the errors that locate a wrong cell, the writer, and the traces of the project."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.traces import any_sizes, any_sizes_or_runs, hold_or_cycle
from variable_batch_size.trace import BatchTrace, csv_file

TRACES = Path(__file__).parents[2] / "traces"
READERS = ("columns", "rows")

columns = st.sampled_from(["batchsize", "batch_size"])


def read(path, reader, renumber=False):
    with pytest.MonkeyPatch.context() as patch:
        if reader == "rows":
            patch.setattr(csv_file, "_read_columns", lambda *_: None)
        return BatchTrace.from_csv(path, renumber=renumber)


def outcome(path, reader, renumber):
    """Return the trace, or the message of the error."""
    try:
        return read(path, reader, renumber)
    except ValueError as error:
        return str(error)


def write(folder, text, name="a.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def lines(sizes, row="{},{}", end="\n"):
    return "step,batchsize" + end + "".join(row.format(step, size) + end for step, size in enumerate(sizes))


# Valid files


@given(any_sizes_or_runs, hold_or_cycle)
def test_to_csv_is_the_inverse_of_from_csv(tmp_path_factory, sizes, on_end):
    folder = tmp_path_factory.mktemp("trace")
    trace = BatchTrace.from_sizes(sizes, on_end=on_end)
    trace.to_csv(folder / "a.csv")
    assert (folder / "a.csv").read_text() == lines(sizes)
    assert BatchTrace.from_csv(folder / "a.csv", on_end=on_end) == trace
    assert [path.name for path in folder.iterdir()] == ["a.csv"]


ROWS = ["{},{}", " {} , {} ", "{},\t{}", '"{}","{}"', '{}, "{}"', "+{},0{}"]
BETWEEN = ["\n", "\r\n", "\r", "\n\n", "\n  \n"]
LAST = ["", "\n", "\r\n\r\n", "\n   \n\n"]


@pytest.mark.parametrize("row", ROWS)
@given(column=columns, sizes=any_sizes, between=st.sampled_from(BETWEEN), last=st.sampled_from(LAST), bom=st.booleans())
def test_ignores_spaces_quotes_line_ends_blank_lines_and_a_byte_order_mark(
    tmp_path_factory, row, column, sizes, between, last, bom
):
    rows = [row.format("step", column).replace("+", "").replace(",0", ",")]
    rows += [row.format(step, size) for step, size in enumerate(sizes)]
    text = (between.join(rows) + last).encode("utf-8-sig" if bom else "utf-8")
    path = write(tmp_path_factory.getbasetemp(), text)
    for reader in READERS:
        assert read(path, reader) == BatchTrace.from_sizes(sizes)


CELLS = ["", " ", "0", "1", "2", " 1", "+1", "01", "-1", "1.0", "1e3", "nan", "x", "True", '"2"', '"', str(2**53 + 1)]
EXTRA, MISSING = "extra cell", "missing cell"


@pytest.mark.parametrize("renumber", [False, True])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("header", ["step,batchsize", "batch_size,step", "step,note,batch_size", "batchsize,step,note"])
def test_both_readers_return_the_same_trace_or_error(tmp_path, header, place, renumber):
    names = header.split(",")
    for fault in [EXTRA, MISSING, *itertools.product(range(len(names)), CELLS)]:
        rows = [[{"step": str(step), "note": "x"}.get(name, "5") for name in names] for step in range(2)]
        if fault == EXTRA:
            rows[place].append("1")
        elif fault == MISSING:
            rows[place].pop()
        else:
            column, cell = fault
            rows[place][column] = cell
        path = write(tmp_path, "\n".join([header, *map(",".join, rows)]))
        assert outcome(path, "columns", renumber) == outcome(path, "rows", renumber), fault


@pytest.mark.parametrize("quote", ["", '"'])
def test_ignores_other_columns_at_any_position(tmp_path, quote):
    rows = ["note,batchsize,,step,cost", f"{quote}größer{quote},7,,0,1.5", ",9,,1,"]
    assert BatchTrace.from_csv(write(tmp_path, "\n".join(rows))) == BatchTrace.from_sizes([7, 9])


@pytest.mark.parametrize("column", ["0,5\n7,6\n7,8\n", "x,5\n,6\n1.5,8\n", '"x",5\n,6\n1.5,8\n'])
def test_renumber_ignores_the_step_column(tmp_path, column):
    path = write(tmp_path, "step,batchsize\n" + column)
    assert BatchTrace.from_csv(path, renumber=True) == BatchTrace.from_sizes([5, 6, 8])
    with pytest.raises(ValueError, match="they are numbered 0, 1, 2"):
        BatchTrace.from_csv(path)


@pytest.mark.parametrize("row", ["{},{}", " {} , {} "])
def test_reads_and_queries_many_steps(tmp_path, row):
    sizes = np.random.default_rng(0).integers(32, 1025, 10**5)  # (steps,)
    ends = np.cumsum(sizes)  # (steps,)
    path = write(tmp_path, lines(sizes, row))
    trace = BatchTrace.from_csv(path)
    assert trace == BatchTrace.from_sizes(sizes)
    assert (len(trace), trace.total_samples, trace.max_batch_size) == (10**5, ends[-1], 1024)
    assert np.array_equal(trace.batch_sizes(np.arange(10**5)), sizes)
    for step in (0, 1, 49_999, 99_999):
        assert trace.batch_size(step) == sizes[step]
        assert trace.offset(step + 1) == ends[step]
        assert trace.step_at(ends[step] - 1) == step
    rounded = trace.round_to(32)
    steps = np.arange(10**5)  # (steps,)
    assert np.abs(np.cumsum(rounded.batch_sizes(steps)) - ends).max() <= 16
    assert not (rounded.batch_sizes(steps) % 32).any()


# Invalid files


@given(column=columns, sizes=any_sizes, data=st.data(), blank=st.lists(st.integers(0, 40), max_size=5))
def test_the_line_of_an_error_counts_every_line_of_the_file(tmp_path_factory, column, sizes, data, blank):
    bad = data.draw(st.integers(0, len(sizes) - 1))
    rows = [f"step,{column}", *(f"{step},{0 if step == bad else size}" for step, size in enumerate(sizes))]
    for place in blank:
        rows.insert(place, data.draw(st.sampled_from(["", "  "])))
    path = write(tmp_path_factory.getbasetemp(), "\n".join(rows))
    with pytest.raises(ValueError, match=f"{column} must .* got 0;") as caught:
        BatchTrace.from_csv(path)
    assert f"trace row {bad + 1} ({path}:{rows.index(f'{bad},0') + 1})" in str(caught.value)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    BatchTrace.from_sizes([1]).to_csv(path)

    def no_replace(source, target):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", no_replace)
    with pytest.raises(OSError, match="disk full"):
        BatchTrace.from_sizes([2]).to_csv(path)
    assert path.read_text() == "step,batchsize\n0,1\n"
    assert list(tmp_path.iterdir()) == [path]


# The traces of the project


def test_the_test_trace_covers_five_epochs_of_mnist_and_difficult_sizes():
    trace = BatchTrace.from_csv(TRACES / "test_trace.csv")
    step = 0
    for _ in range(5):
        step = trace.step_at(trace.offset(step) + 60_000 - 1) + 1
    assert step <= len(trace) <= 2000
    sizes = trace.batch_sizes(np.arange(len(trace)))  # (steps,)
    assert (sizes.min(), sizes.max()) == (3, 1024)
    assert ((sizes >= 64) & (sizes <= 512)).mean() > 0.9
    assert all((sizes[sizes >= 64] % divisor != 0).sum() > 500 for divisor in (4, 32))


def test_the_readme_describes_every_trace():
    text = (TRACES / "README.md").read_text()
    assert all(f"- `{path.name}`: " in text for path in TRACES.glob("*.csv"))


@pytest.mark.parametrize("reader", READERS)
@given(epochs=st.lists(st.integers(2, 6), min_size=2, max_size=4))
def test_steps_that_are_numbered_from_0_in_each_epoch_are_read_on(tmp_path_factory, reader, epochs):
    """The example trace of the evaluation module of ETH has such a column."""
    rows = [f"{step},{7 + step}" for length in epochs for step in range(length)]
    path = write(tmp_path_factory.getbasetemp(), "\n".join(["step,batchsize", *rows]))
    told = (
        rf"^The column step begins again at 0 in row {epochs[0] + 1} \(.*:{epochs[0] + 2}\), .* as with renumber=True$"
    )
    with pytest.warns(UserWarning, match=told) as warned:
        found = read(path, reader)
    assert len(warned) == 1
    assert found == BatchTrace.from_sizes([7 + step for length in epochs for step in range(length)])
    path.write_text(path.read_text() + "\n9,9")
    with (
        pytest.raises(ValueError, match=r"step must be \d, because .*, got 9; fix the column, or ignore it with renum"),
        pytest.warns(UserWarning, match="begins again"),
    ):
        read(path, reader)
