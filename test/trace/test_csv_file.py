"""Traces as CSV files: both readers, the errors that locate a wrong cell, the writer, and the traces of the project."""

import itertools
import re
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

HEAD = "step,batchsize\n"
BAD_ROW = "fix the row, or drop it and renumber"
BAD_STEP = "renumber=True"
SIZE = "batchsize must be an integer >= 1"
INVALID = {
    "zero": (HEAD + "0,5\n1,0\n", "row 2 (a.csv:3)", SIZE, "got 0;", BAD_ROW),
    "zero in batch_size": ("step,batch_size\n0,5\n1,0\n", "(a.csv:3): batch_size must be", ">= 1", "got 0;", BAD_ROW),
    "text in batch_size": ("batch_size,step\nx,0\n", "(a.csv:2): batch_size must be", ">= 1", "got 'x';", BAD_ROW),
    "negative": (HEAD + "0,5\n1,-32\n", "row 2 (a.csv:3)", SIZE, "got -32;", BAD_ROW),
    "fraction": (HEAD + "0,1.5\n1,5\n", "row 1 (a.csv:2)", SIZE, "got '1.5';", BAD_ROW),
    "decimal point": (HEAD + "0,5\n1,128.0\n", "row 2 (a.csv:3)", SIZE, "got '128.0';", BAD_ROW),
    "exponent": (HEAD + "0,1e3\n", "row 1 (a.csv:2)", SIZE, "got '1e3';", BAD_ROW),
    "empty cell": (HEAD + "0,5\n1,\n2,5\n", "row 2 (a.csv:3)", SIZE, "got '';", BAD_ROW),
    "nan": (HEAD + "0,nan\n", "row 1 (a.csv:2)", SIZE, "got 'nan';", BAD_ROW),
    "infinity": (HEAD + "0,inf\n", "row 1 (a.csv:2)", SIZE, "got 'inf';", BAD_ROW),
    "text": (HEAD + "0,many\n", "row 1 (a.csv:2)", SIZE, "got 'many';", BAD_ROW),
    "bool": (HEAD + "0,True\n1,True\n", "row 1 (a.csv:2)", SIZE, "got 'True';", BAD_ROW),
    "underscore": (HEAD + "0,1_0\n", "row 1 (a.csv:2)", SIZE, "got '1_0';", BAD_ROW),
    "other digits": (HEAD + "0,٣\n", "row 1 (a.csv:2)", SIZE, "got '٣';", BAD_ROW),
    "zero byte": (HEAD + "0,1\x002\n", "a.csv", "must be", "got", "fix the "),
    "2**53 + 1": (HEAD + f"0,{2**53 + 1}\n", "row 1 (a.csv:2)", f"<= {2**53}", f"got {2**53 + 1}", BAD_ROW),
    "2**64": (HEAD + f"0,{2**64}\n", "row 1 (a.csv:2)", f"<= {2**53}", f"got {2**64}", BAD_ROW),
    "10**99": (HEAD + "0,1" + "0" * 99 + "\n", "row 1 (a.csv:2)", SIZE, "got '1000", BAD_ROW),
    "steps from 1": (HEAD + "1,5\n2,5\n", "row 1 (a.csv:2)", "step must be 0", "got 1;", BAD_STEP),
    "step missing": (HEAD + "0,5\n2,5\n", "row 2 (a.csv:3)", "step must be 1", "got 2;", BAD_STEP),
    "step twice": (HEAD + "0,5\n0,5\n", "row 2 (a.csv:3)", "step must be 1", "got 0;", BAD_STEP),
    "text as a step": (HEAD + "0,5\nx,5\n", "row 2 (a.csv:3)", "step must be 1", "got 'x';", BAD_STEP),
    "decimal point in a step": (HEAD + "0.0,5\n1.0,5\n", "row 1 (a.csv:2)", "step must be 0", "got '0.0';", BAD_STEP),
    "empty step": (HEAD + "0,5\n,5\n", "row 2 (a.csv:3)", "step must be 1", "got '';", BAD_STEP),
    "after blank lines": ("\n" + HEAD + "0,5\n\n \n1,0\n", "row 2 (a.csv:6)", SIZE, "got 0;", BAD_ROW),
    "after CRLF": (lines([5, 5, 0], end="\r\n"), "row 3 (a.csv:4)", SIZE, "got 0;", BAD_ROW),
    "after a quoted line end": ('step,batchsize,note\n0,5,"a\nb"\n1,0,\n', "row 2 (a.csv:4)", SIZE, "got 0;", BAD_ROW),
    "no size column": ("step,size\n0,5\n", "(a.csv:1)", "column batchsize or batch_size", "got 'step,size'", "rename"),
    "no step column": ("batchsize\n5\n", "(a.csv:1)", "column step", "got 'batchsize'", "rename"),
    "no header": ("0,5\n1,5\n", "(a.csv:1)", "column step", "got '0,5'", "rename"),
    "semicolons": ("step;batchsize\n0;5\n", "(a.csv:1)", "column step", "got 'step;batchsize'", "rename"),
    "step column twice": ("step,batchsize,step\n0,5,0\n", "(a.csv:1)", "one column step", "got 'step,", "rename"),
    "batch_size column twice": (
        "step,batch_size,batch_size\n0,5,5\n",
        "(a.csv:1)",
        "one column batch_size",
        "got 'step,",
        "drop or rename",
    ),
    "both size columns": (
        "step,batch_size,batchsize\n0,5,5\n",
        "header (a.csv:1)",
        "only one of the columns batchsize and batch_size",
        "got both",
        "drop the column batch_size",
    ),
    "empty": ("", "(a.csv:1)", "column step", "got an empty file", "add"),
    "blank": (" \n\n", "(a.csv:1)", "column step", "got an empty file", "add"),
    "only a header": (HEAD, "(a.csv:1)", "at least one step", "got only the header", "add rows"),
    "extra cell in one row": (HEAD + "0,5\n1,5,5\n", "row 2 (a.csv:3)", "2 cells", "got 3", "fix the row"),
    "extra cell in every row": (HEAD + "0,5,5\n1,5,5\n", "row 1 (a.csv:2)", "2 cells", "got 3", "fix the row"),
    "comma at the end": (HEAD + "0,5,\n", "row 1 (a.csv:2)", "2 cells", "got 3", "fix the row"),
    "missing cell": (HEAD + "0,5\n1\n", "row 2 (a.csv:3)", "2 cells", "got 1", "fix the row"),
    "extra cell, then missing cell": (
        "a,step,batchsize,b\n0,0,5,0\n0,1,5,0,0\n0,2,5\n",
        "row 2 (a.csv:3)",
        "4 cells",
        "got 5",
        "fix the row",
    ),
    "Latin-1": ("step,batchsize,ä\n".encode("latin-1"), "(a.csv:1)", "UTF-8", "got byte 0xe4", "save"),
    "binary": (HEAD.encode() + bytes(range(256)), "(a.csv:3)", "UTF-8", "got byte 0x80", "save"),
    "UTF-16": (HEAD.encode("utf-16"), "(a.csv:1)", "UTF-8", "got byte 0xff", "save"),
    "unclosed quote": (
        'step,batchsize\n0,"5\n' + "1,5\n" * 40000,
        "(a.csv:",
        "must be valid CSV",
        "got field",
        "fix the line",
    ),
    "a wrong row before an unclosed quote": (HEAD + '5,5\n1,"5\n', "row 1 (a.csv:2)", "must be 0", "got 5", "fix"),
}


@pytest.mark.parametrize(
    ("rows", "beginning"),
    [("0,16\n12,48\n22,32\n", "0:16 12:48"), ("0,16\n1,8\n22,32\n", "0:16 1:8 22:32"), ("0,9\n1,9\n2,9\n9,5\n", None)],
)
def test_names_the_schedule_if_the_rows_may_be_those_where_the_batch_size_changes(tmp_path, rows, beginning):
    text = HEAD + rows
    with pytest.raises(ValueError, match="because each update has a row") as caught:
        BatchTrace.from_csv(write(tmp_path, text))
    assert (f'pass the schedule "{beginning} ..." instead' in str(caught.value)) == (beginning is not None)
    assert ("pass the schedule" in str(caught.value)) == (beginning is not None)


@pytest.mark.parametrize("case", INVALID)
def test_rejects_an_invalid_file_with_place_value_and_remedy(tmp_path, monkeypatch, case):
    text, *parts = INVALID[case]
    monkeypatch.chdir(tmp_path)
    name = write(tmp_path, text).name
    with pytest.raises(ValueError, match=r"must .*, got .*; ") as caught:
        BatchTrace.from_csv(name)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=f"^{re.escape(str(caught.value))}$"):
        read(name, "rows")


def test_the_message_names_row_and_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    sizes = [128] * 16 + [-32, 128]
    write(tmp_path, lines(sizes), "traces/a.csv")
    expected = (
        "trace row 17 (traces/a.csv:18): batchsize must be an integer >= 1, got -32; "
        "fix the row, or drop it and renumber"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        BatchTrace.from_csv("traces/a.csv")


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


@pytest.mark.parametrize(
    ("row", "part"), [("6\r7,1,", "3 cells"), ("6,1,,", "3 cells"), ("6", "3 cells"), ("1\0007,1,", "")]
)
def test_renumber_rejects_rows_with_other_cells(tmp_path, row, part):
    path = write(tmp_path, f"batchsize,step,note\n5,0,\n{row}\n7,2,\n")
    with pytest.raises(ValueError, match=rf"a.csv:3\).* must .*{part}.*, got .*; fix the"):
        BatchTrace.from_csv(path, renumber=True)


@pytest.mark.parametrize(("name", "error"), [("none.csv", FileNotFoundError), (".", IsADirectoryError)])
def test_rejects_a_path_that_is_not_a_file(tmp_path, monkeypatch, name, error):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=rf"^trace must be a CSV file, got '{name}' \(.*\); correct the path, pass"):
        BatchTrace.of(name)


@pytest.mark.parametrize("path", [None, 1.5, True])
def test_rejects_a_path_of_another_type(path):
    with pytest.raises(TypeError, match="PathLike"):
        BatchTrace.from_csv(path)


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


def test_an_unclosed_quote_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"trace line \(.*a\.csv:3\) must be valid CSV, got unexpected end of data; fix"
    ):
        BatchTrace.from_csv(write(tmp_path, 'step,batchsize\n0,64\n1,"32'))
