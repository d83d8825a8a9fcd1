import pickle
import re
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from variable_batch_size.trace import csv_file
from variable_batch_size.trace.batch_trace import BatchTrace, TraceEndError

TRACES = Path(__file__).parents[2] / "traces"
LARGEST = 2**53

size = st.one_of(st.integers(1, 6), st.integers(1, 2000), st.integers(1, LARGEST))
sizes = st.lists(size, min_size=1, max_size=40)
runs = st.lists(st.tuples(size, st.integers(1, 9)), min_size=1, max_size=8)
stepped = st.one_of(sizes, runs.map(lambda pairs: [size for size, count in pairs for _ in range(count)]))
beyond = st.sampled_from(["hold", "cycle"])


def for_all(*arguments, **named):
    """`given`, on a machine that may be busy."""
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    return lambda test: patient(given(*arguments, **named)(test))


class Twin:
    """A trace as a plain list that is written out as far as it is asked for."""

    def __init__(self, sizes, on_end, horizon):
        more = [sizes[-1]] * horizon if on_end == "hold" else sizes * horizon
        self.sizes = (sizes + more)[:horizon]
        self.offsets = [0, *accumulate(self.sizes)]

    def step_at(self, sample):
        return bisect_right(self.offsets, sample) - 1


@pytest.fixture(autouse=True, scope="module")
def all_at_once():
    """Read short files as long ones are read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_file, "_SMALL", 0)
        yield


def write(folder, text, name="a.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def lines(sizes, row="{},{}", end="\n"):
    return "step,batchsize" + end + "".join(row.format(step, size) + end for step, size in enumerate(sizes))


# Queries


@for_all(stepped, st.data())
def test_queries_within_the_trace_agree_with_a_plain_list(sizes, data):
    trace, offsets = BatchTrace.from_sizes(sizes), [0, *accumulate(sizes)]
    assert len(trace) == trace.steps == len(sizes)
    assert trace.total_samples == offsets[-1]
    assert trace.max_batch_size == max(sizes)
    assert [trace.batch_size(step) for step in range(len(sizes))] == sizes
    assert [trace.offset(step) for step in range(len(sizes) + 1)] == offsets
    for step, size in enumerate(sizes):
        assert trace.step_at(offsets[step]) == trace.step_at(offsets[step] + size - 1) == step
    sample = data.draw(st.integers(0, offsets[-1] - 1))
    step = trace.step_at(sample)
    assert trace.offset(step) <= sample < trace.offset(step + 1)


@for_all(stepped, beyond)
def test_queries_beyond_the_end_agree_with_a_plain_list(sizes, on_end):
    horizon = 3 * len(sizes) + 5
    trace, twin = BatchTrace.from_sizes(sizes, on_end=on_end), Twin(sizes, on_end, horizon)
    assert [trace.batch_size(step) for step in range(horizon)] == twin.sizes
    assert [trace.offset(step) for step in range(horizon + 1)] == twin.offsets
    for before, after in zip(twin.offsets, twin.offsets[1:], strict=False):
        for sample in (before, (before + after) // 2, after - 1):
            assert trace.step_at(sample) == twin.step_at(sample)


@for_all(stepped, beyond, st.integers(0, 2**80))
def test_queries_far_beyond_the_end_stay_exact(sizes, on_end, step):
    trace, total, count = BatchTrace.from_sizes(sizes, on_end=on_end), sum(sizes), len(sizes)
    if on_end == "cycle":
        expected = step // count * total + sum(sizes[: step % count])
    else:
        expected = sum(sizes[:step]) + max(0, step - count) * sizes[-1]
    assert trace.offset(step) == expected
    assert trace.offset(step + 1) - expected == trace.batch_size(step)
    assert trace.step_at(expected) == trace.step_at(expected + trace.batch_size(step) - 1) == step


@for_all(stepped, beyond, st.lists(st.integers(0, 2**62), max_size=20))
def test_batch_sizes_are_batch_size_of_each_step(sizes, on_end, far):
    trace = BatchTrace.from_sizes(sizes, on_end=on_end)
    steps = np.array([*far, *range(2 * len(sizes))], np.int64)
    result = trace.batch_sizes(steps)
    assert result.dtype == np.int64
    assert result.tolist() == [trace.batch_size(step) for step in steps]
    assert trace.batch_sizes(steps.reshape(1, -1, 1)).tolist() == result.reshape(1, -1, 1).tolist()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64, object])
def test_batch_sizes_takes_every_dtype_of_ints(dtype):
    trace = BatchTrace.from_sizes(range(1, 1001), on_end="cycle")
    assert trace.batch_sizes(np.array([0, 99, 100], dtype)).tolist() == [1, 100, 101]
    assert trace.batch_sizes([]).tolist() == []
    assert trace.batch_sizes([2**70]).tolist() == [2**70 % 1000 + 1]


@for_all(sizes, st.sampled_from(["error", "hold", "cycle"]), st.integers(0, 2**70))
def test_a_trace_without_end_holds_its_last_size_whatever_on_end_is(sizes, on_end, step):
    schedule = " ".join(f"{step}:{size}" for step, size in enumerate(sizes))
    endless, held = BatchTrace.parse(schedule, on_end=on_end), BatchTrace.from_sizes(sizes, on_end="hold")
    assert endless.batch_size(step) == held.batch_size(step)
    assert endless.offset(step) == held.offset(step)
    assert endless.step_at(step) == held.step_at(step)
    assert endless.steps is None
    assert endless.on_end == on_end
    assert endless.max_batch_size == max(sizes)


@for_all(stepped, st.integers(0, 2**70))
def test_on_end_error_refuses_what_is_beyond_the_end(sizes, beyond):
    trace = BatchTrace.from_sizes(sizes)
    end, total = len(sizes), sum(sizes)
    queries = [
        (trace.batch_size, end + beyond, end),
        (trace.batch_sizes, [0, end + beyond], end),
        (trace.offset, end + 1 + beyond, end),
        (trace.step_at, total + beyond, total),
    ]
    for query, asked, limit in queries:
        with pytest.raises(TraceEndError) as caught:
            query(asked)
        found = asked[-1] if isinstance(asked, list) else asked
        for part in (f"< {limit}", f"got {found}", f"{end} steps", 'on_end="hold"', "longer trace"):
            assert part in str(caught.value)
        assert isinstance(caught.value, (IndexError, ValueError))


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True, np.float64(1), np.bool_(True)])
@pytest.mark.parametrize("query", ["batch_size", "offset", "step_at", "batch_sizes"])
def test_queries_refuse_what_is_no_step(query, step):
    argument = np.array([step]) if query == "batch_sizes" else step
    with pytest.raises(ValueError, match=r"must be an integer >= 0, got .*; pass such an int"):
        getattr(BatchTrace.from_sizes([1, 2], on_end="hold"), query)(argument)


@pytest.mark.parametrize("query", [len, lambda trace: trace.total_samples, lambda trace: trace.to_csv("never.csv")])
def test_a_trace_without_end_has_no_length(query):
    with pytest.raises((TypeError, ValueError), match=r"needs a trace that has an end, got .*; give .* by steps="):
        query(BatchTrace.constant(8))
    assert BatchTrace.constant(8)


# The same trace, written in several ways


@for_all(stepped, st.sampled_from(["error", "hold", "cycle"]))
def test_equal_traces_have_equal_hashes_and_fingerprints_however_they_were_made(sizes, on_end):
    trace = BatchTrace.from_sizes(sizes, on_end=on_end)
    spelled = ", ".join(f"{step}:{size}" for step, size in enumerate(sizes))
    others = [
        BatchTrace.from_sizes(np.array(sizes, np.uint64), on_end=on_end),
        BatchTrace.from_sizes(iter(sizes), on_end="cycle").with_on_end(on_end),
        BatchTrace.parse(spelled, steps=len(sizes), on_end=on_end),
        BatchTrace.of(sizes, on_end=on_end),
        pickle.loads(pickle.dumps(trace)),
    ]
    for other in others:
        assert other == trace
        assert hash(other) == hash(trace)
        assert other.fingerprint == trace.fingerprint
        assert other.on_end == on_end
        assert other.batch_sizes(range(len(sizes))).tolist() == sizes


@for_all(stepped, st.sampled_from(["error", "hold", "cycle"]))
def test_traces_that_mean_something_else_differ(sizes, on_end):
    trace = BatchTrace.from_sizes(sizes, on_end=on_end)
    others = [BatchTrace.from_sizes(sizes, on_end=end) for end in ("error", "hold", "cycle") if end != on_end]
    others += [
        BatchTrace.from_sizes(more, on_end=on_end) for more in ([*sizes, sizes[-1]], [*sizes[:-1], sizes[-1] % 7 + 1])
    ]
    others += [BatchTrace.parse(" ".join(f"{step}:{size}" for step, size in enumerate(sizes)), on_end=on_end)]
    same = sizes[-1] % 7 + 1 == sizes[-1]
    assert sum(other == trace for other in others) == same
    assert len({other.fingerprint for other in [trace, *others]}) == len(others) + 1 - same
    assert trace != sizes


def test_the_fingerprint_of_a_trace_never_changes():
    assert BatchTrace.parse("0:128 2000:256", steps=3000).fingerprint == FINGERPRINT
    assert BatchTrace.constant(8) == BatchTrace.constant(8, on_end="cycle") != BatchTrace.constant(8, steps=10**9)


FINGERPRINT = "5c7e8a25961a4eca06f84e03a20f158f5f0fe60e9ad49524e4c1ab1678f3fadf"


def test_a_trace_is_frozen_and_its_repr_short():
    trace = BatchTrace.from_sizes(range(1, 10**4))
    with pytest.raises(AttributeError):
        trace.steps = 3
    assert repr(trace).startswith("BatchTrace(steps=9999, on_end='error'")
    assert len(repr(trace)) < 150


@pytest.mark.parametrize(
    ("schedule", "equal"),
    [
        ("0:128 2000:256 10K:1024", [(128, 2000), (256, 8000), (1024, 2000)]),
        ("0:128,2k:256,\n 10k:1K", [(128, 2000), (256, 8000), (1000, 2000)]),
        ("  0:1M, 1:2m", [(10**6, 1), (2 * 10**6, 11999)]),
        ("0:128 5:128 7:128", [(128, 12000)]),
        ("0k:008", [(8, 12000)]),
    ],
)
def test_a_schedule_is_the_list_that_it_describes(schedule, equal):
    listed = BatchTrace.from_sizes(size for size, count in equal for _ in range(count))
    assert BatchTrace.parse(schedule, steps=12000) == listed
    assert BatchTrace.of(schedule, on_end="hold").batch_size(10**30) == equal[-1][0]


def test_of_takes_what_a_sampler_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = BatchTrace.from_sizes([3, 1, 2])
    trace.to_csv("a.csv")
    trace.to_csv(tmp_path / "0.csv")
    assert BatchTrace.of(trace) is trace
    assert BatchTrace.of(trace.with_on_end("hold")).on_end == "hold"
    assert BatchTrace.of(trace, on_end="cycle").batch_size(4) == 1
    for source in ("a.csv", "0.csv", tmp_path / "a.csv", [3, 1, 2], (3, 1, 2), np.array([3, 1, 2], np.int16)):
        assert BatchTrace.of(source) == trace
        assert BatchTrace.of(source, on_end="hold") == trace.with_on_end("hold")
    assert BatchTrace.of(range(1, 4)) == BatchTrace.from_sizes([1, 2, 3])
    assert BatchTrace.of(5) == BatchTrace.of(np.int64(5)) == BatchTrace.of("0:5") == BatchTrace.constant(5)


@pytest.mark.parametrize("source", [None, True, np.bool_(True), 1.5, b"a.csv", {1: 2}, iter([1]), object()])
def test_of_refuses_anything_else(source):
    with pytest.raises(TypeError, match=r"trace must be a path, .*, got .* \(\w+\); pass one of these$"):
        BatchTrace.of(source)


# Rounding


@for_all(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 400))
def test_rounded_sizes_are_multiples_that_keep_the_cumulative_samples(pairs, multiple):
    sizes = [multiple + more for more, count in pairs for _ in range(count)]
    trace = BatchTrace.from_sizes(sizes, on_end="cycle")
    rounded = trace.round_to(multiple)
    assert (rounded.steps, rounded.on_end) == (trace.steps, trace.on_end)
    for step in range(len(sizes)):
        assert rounded.batch_size(step) % multiple == 0
        assert rounded.batch_size(step) >= multiple
    for step in range(len(sizes) + 1):
        nearest = (2 * trace.offset(step) + multiple) // (2 * multiple) * multiple
        assert rounded.offset(step) == nearest
        assert 2 * abs(rounded.offset(step) - trace.offset(step)) <= multiple
    assert rounded.round_to(multiple) == rounded
    assert trace.round_to(1) == trace


@for_all(sizes=st.lists(st.integers(8, 99), max_size=9), last=st.integers(1, 20), step=st.integers(0, 2**70))
def test_a_trace_without_end_is_rounded_if_its_last_size_is_a_multiple(sizes, last, step):
    schedule = " ".join(f"{step}:{size}" for step, size in enumerate([*sizes, 8 * last]))
    trace = BatchTrace.parse(schedule)
    rounded = trace.round_to(8)
    assert rounded.steps is None
    assert rounded.batch_size(step) % 8 == 0
    assert abs(rounded.offset(step) - trace.offset(step)) <= 4


def test_rounding_keeps_runs_of_multiples_as_runs():
    assert BatchTrace.constant(64, steps=10**15).round_to(32) == BatchTrace.constant(64, steps=10**15)


@pytest.mark.parametrize(
    ("trace", "multiple", "parts"),
    [
        (BatchTrace.from_sizes([64, 64, 31, 64]), 32, ["step 2", ">= 32", "got 31", "smaller multiple"]),
        (BatchTrace.parse("0:64 5:100"), 32, ["without end", "multiple of 32", "got 100", "steps="]),
        (BatchTrace.constant(64), 0, ["multiple must be an integer >= 1", "got 0"]),
        (BatchTrace.constant(64), 2.0, ["multiple must be an integer >= 1", "got 2.0"]),
    ],
)
def test_rounding_refuses_what_it_cannot_keep(trace, multiple, parts):
    with pytest.raises(ValueError, match="; ") as caught:
        trace.round_to(multiple)
    assert all(part in str(caught.value) for part in parts)


# CSV files


@for_all(stepped, beyond)
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
@for_all(sizes=sizes, between=st.sampled_from(BETWEEN), last=st.sampled_from(LAST), bom=st.booleans())
def test_spaces_quotes_line_ends_blank_lines_and_a_byte_order_mark_mean_nothing(
    tmp_path_factory, row, sizes, between, last, bom
):
    rows = [row.format("step", "batchsize").replace("+", "").replace(",0", ",")]
    rows += [row.format(step, size) for step, size in enumerate(sizes)]
    text = (between.join(rows) + last).encode("utf-8-sig" if bom else "utf-8")
    path = write(tmp_path_factory.getbasetemp(), text)
    for small in (0, LARGEST):  # all at once, line by line
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(csv_file, "_SMALL", small)
            assert BatchTrace.from_csv(path) == BatchTrace.from_sizes(sizes)


@pytest.mark.parametrize("quote", ["", '"'])
def test_other_columns_are_ignored_wherever_they_stand(tmp_path, quote):
    rows = ["note,batchsize,,step,cost", f"{quote}größer{quote},7,,0,1.5", ",9,,1,"]
    assert BatchTrace.from_csv(write(tmp_path, "\n".join(rows))) == BatchTrace.from_sizes([7, 9])


@pytest.mark.parametrize("column", ["0,5\n7,6\n7,8\n", "x,5\n,6\n1.5,8\n", '"x",5\n,6\n1.5,8\n'])
def test_renumber_ignores_the_step_column(tmp_path, column):
    path = write(tmp_path, "step,batchsize\n" + column)
    assert BatchTrace.from_csv(path, renumber=True) == BatchTrace.from_sizes([5, 6, 8])
    with pytest.raises(ValueError, match="step must count"):
        BatchTrace.from_csv(path)


HEAD = "step,batchsize\n"
BAD_ROW = "fix the row, or drop it and renumber"
BAD_STEP = "renumber=True"
WHOLE = "batchsize must be an integer >= 1"
REFUSED = {
    "zero": (HEAD + "0,5\n1,0\n", "row 2 (a.csv:3)", WHOLE, "got 0;", BAD_ROW),
    "negative": (HEAD + "0,5\n1,-32\n", "row 2 (a.csv:3)", WHOLE, "got -32;", BAD_ROW),
    "fraction": (HEAD + "0,1.5\n1,5\n", "row 1 (a.csv:2)", WHOLE, "got '1.5'", BAD_ROW),
    "decimal point": (HEAD + "0,5\n1,128.0\n", "row 2 (a.csv:3)", WHOLE, "got '128.0'", BAD_ROW),
    "exponent": (HEAD + "0,1e3\n", "row 1 (a.csv:2)", WHOLE, "got '1e3'", BAD_ROW),
    "empty cell": (HEAD + "0,5\n1,\n2,5\n", "row 2 (a.csv:3)", WHOLE, "got ''", BAD_ROW),
    "nan": (HEAD + "0,nan\n", "row 1 (a.csv:2)", WHOLE, "got 'nan'", BAD_ROW),
    "infinity": (HEAD + "0,inf\n", "row 1 (a.csv:2)", WHOLE, "got 'inf'", BAD_ROW),
    "text": (HEAD + "0,many\n", "row 1 (a.csv:2)", WHOLE, "got 'many'", BAD_ROW),
    "bool": (HEAD + "0,True\n1,True\n", "row 1 (a.csv:2)", WHOLE, "got 'True'", BAD_ROW),
    "underscore": (HEAD + "0,1_0\n", "row 1 (a.csv:2)", WHOLE, "got '1_0'", BAD_ROW),
    "other digits": (HEAD + "0,٣\n", "row 1 (a.csv:2)", WHOLE, "got '٣'", BAD_ROW),
    "zero byte": (HEAD + "0,1\x002\n", "a.csv", "must be", "got", "fix the "),
    "2**53 + 1": (HEAD + f"0,{2**53 + 1}\n", "row 1 (a.csv:2)", "<= 2**53", f"got {2**53 + 1}", BAD_ROW),
    "2**64": (HEAD + f"0,{2**64}\n", "row 1 (a.csv:2)", "<= 2**53", f"got {2**64}", BAD_ROW),
    "10**99": (HEAD + "0,1" + "0" * 99 + "\n", "row 1 (a.csv:2)", WHOLE, "got '1000", BAD_ROW),
    "steps from 1": (HEAD + "1,5\n2,5\n", "row 1 (a.csv:2)", "and be 0", "got 1", BAD_STEP),
    "step left out": (HEAD + "0,5\n2,5\n", "row 2 (a.csv:3)", "and be 1", "got 2", BAD_STEP),
    "step twice": (HEAD + "0,5\n0,5\n", "row 2 (a.csv:3)", "and be 1", "got 0", BAD_STEP),
    "step of text": (HEAD + "0,5\nx,5\n", "row 2 (a.csv:3)", "and be 1", "got 'x'", BAD_STEP),
    "step with point": (HEAD + "0.0,5\n1.0,5\n", "row 1 (a.csv:2)", "and be 0", "got '0.0'", BAD_STEP),
    "no step": (HEAD + "0,5\n,5\n", "row 2 (a.csv:3)", "and be 1", "got ''", BAD_STEP),
    "after blank lines": ("\n" + HEAD + "0,5\n\n \n1,0\n", "row 2 (a.csv:6)", WHOLE, "got 0;", BAD_ROW),
    "after CRLF": (lines([5, 5, 0], end="\r\n"), "row 3 (a.csv:4)", WHOLE, "got 0;", BAD_ROW),
    "after a quoted line end": ('step,batchsize,note\n0,5,"a\nb"\n1,0,\n', "row 2 (a.csv:4)", WHOLE, "got 0;", BAD_ROW),
    "no such column": ("step,size\n0,5\n", "(a.csv:1)", "column batchsize", "got 'step,size'", "rename"),
    "no step column": ("batchsize\n5\n", "(a.csv:1)", "column step", "got 'batchsize'", "rename"),
    "no header": ("0,5\n1,5\n", "(a.csv:1)", "column step", "got '0,5'", "rename"),
    "semicolons": ("step;batchsize\n0;5\n", "(a.csv:1)", "column step", "got 'step;batchsize'", "rename"),
    "column twice": ("step,batchsize,step\n0,5,0\n", "(a.csv:1)", "one column step", "got 'step,", "rename"),
    "empty": ("", "(a.csv:1)", "column step", "got an empty file", "add"),
    "blank": (" \n\n", "(a.csv:1)", "column step", "got an empty file", "add"),
    "only a header": (HEAD, "(a.csv:1)", "at least one step", "got only the header", "add rows"),
    "cell too many": (HEAD + "0,5\n1,5,5\n", "row 2 (a.csv:3)", "2 cells", "got 3", "fix the row"),
    "cell too many in all": (HEAD + "0,5,5\n1,5,5\n", "row 1 (a.csv:2)", "2 cells", "got 3", "fix the row"),
    "comma at the end": (HEAD + "0,5,\n", "row 1 (a.csv:2)", "2 cells", "got 3", "fix the row"),
    "cell too few": (HEAD + "0,5\n1\n", "row 2 (a.csv:3)", "2 cells", "got 1", "fix the row"),
    "one too many, one too few": (
        "a,step,batchsize,b\n0,0,5,0\n0,1,5,0,0\n0,2,5\n",
        "row 2 (a.csv:3)",
        "4 cells",
        "got 5",
        "fix the row",
    ),
    "latin 1": ("step,batchsize,ä\n".encode("latin-1"), "(a.csv:1)", "UTF-8", "got byte 0xe4", "save"),
    "binary": (HEAD.encode() + bytes(range(256)), "(a.csv:3)", "UTF-8", "got byte 0x80", "save"),
    "UTF-16": (HEAD.encode("utf-16"), "(a.csv:1)", "UTF-8", "got byte 0xff", "save"),
    "endless quote": (
        'step,batchsize\n0,"5\n' + "1,5\n" * 40000,
        "(a.csv:",
        "must be CSV",
        "got field",
        "fix the line",
    ),
    "too many samples": (lines([2**53] * 1025), "a.csv", "<= 2**63 - 1", "run from step 0", "shorten"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_is_refused_by_place_value_and_remedy(tmp_path, monkeypatch, case):
    text, *parts = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"must .*, got .*; ") as caught:
        BatchTrace.from_csv(write(tmp_path, text).name)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, str(caught.value)
    assert "\n" not in str(caught.value)


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


@for_all(sizes=sizes, data=st.data(), blank=st.lists(st.integers(0, 40), max_size=5))
def test_the_line_of_a_fault_counts_every_line_of_the_file(tmp_path_factory, sizes, data, blank):
    bad = data.draw(st.integers(0, len(sizes) - 1))
    rows = ["step,batchsize", *(f"{step},{0 if step == bad else size}" for step, size in enumerate(sizes))]
    for place in blank:
        rows.insert(place, data.draw(st.sampled_from(["", "  "])))
    path = write(tmp_path_factory.getbasetemp(), "\n".join(rows))
    with pytest.raises(ValueError, match="got 0;") as caught:
        BatchTrace.from_csv(path)
    assert f"trace row {bad + 1} ({path}:{rows.index(f'{bad},0') + 1})" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "part"), [("6\r7,1,", "3 cells"), ("6,1,,", "3 cells"), ("6", "3 cells"), ("1\0007,1,", "")]
)
def test_renumber_refuses_rows_that_pandas_would_mend(tmp_path, row, part):
    path = write(tmp_path, f"batchsize,step,note\n5,0,\n{row}\n7,2,\n")
    with pytest.raises(ValueError, match=rf"a.csv:3\).* must .*{part}.*, got .*; fix the"):
        BatchTrace.from_csv(path, renumber=True)


@pytest.mark.parametrize(("name", "error"), [("none.csv", FileNotFoundError), (".", IsADirectoryError)])
def test_a_path_without_a_file_is_refused(tmp_path, monkeypatch, name, error):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=rf"^trace must be a CSV file, got '{name}' \(.*\); correct the path, or"):
        BatchTrace.of(name)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    BatchTrace.from_sizes([1]).to_csv(path)

    def no_replace(source, target):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", no_replace)
    with pytest.raises(OSError, match="disk full"):
        BatchTrace.from_sizes([2]).to_csv(path)
    assert path.read_text() == "step,batchsize\n0,1\n"
    assert list(tmp_path.iterdir()) == [path]


# Sizes, schedules and the rest


@pytest.mark.parametrize("bad", [0, -1, 1.5, 128.0, float("nan"), float("inf"), "8", None, True, LARGEST + 1, 2**70])
def test_a_bad_size_is_refused_wherever_it_is_given(bad):
    match = r"batchsize must be an integer >= 1.*, got .*; pass such an int$"
    with pytest.raises(ValueError, match=r"^trace step 2 \(sizes\[2\]\): " + match):
        BatchTrace.from_sizes([1, 2, bad, 0])
    with pytest.raises(ValueError, match="^" + match):
        BatchTrace.constant(bad)


@pytest.mark.parametrize("array", [[1, 0], [1, -1], [1.0, 2.0], [True, True], [[1], [2]], [1, 2**63], [1.0, np.nan]])
def test_a_bad_array_is_refused(array):
    with pytest.raises(ValueError, match=r"^trace step [01] \(sizes\[[01]\]\): batchsize must be .*, got .*; "):
        BatchTrace.from_sizes(np.array(array))


@pytest.mark.parametrize("empty", [[], (), np.array([], np.int64), np.array([])])
def test_a_trace_has_a_step(empty):
    with pytest.raises(ValueError, match="must have at least one step, got no sizes; give at least one"):
        BatchTrace.from_sizes(empty)


@pytest.mark.parametrize(
    ("schedule", "parts"),
    [
        ("", ["must have an entry", "got ''", "0:128"]),
        (" , ", ["must have an entry", "0:128"]),
        ("0:128 2000", ["entry 2", "first step:size", "got '2000'", "0:128"]),
        ("0:128 2000:x", ["entry 2", "first step:size", "got '2000:x'"]),
        ("0:1.5", ["entry 1", "first step:size", "got '0:1.5'"]),
        ("0:-5", ["entry 1", "first step:size", "got '0:-5'"]),
        ("0:128 2G:256", ["entry 2", "first step:size", "got '2G:256'"]),
        ("0 : 128", ["entry 1", "first step:size", "got '0'"]),
        ("10:128", ["entry 1 ('10:128')", "start at step 0", "got 10", "0:size"]),
        ("10K:128", ["entry 1 ('10K:128')", "start at step 0", "got 10000"]),
        ("0:128 5:1 5:2", ["entry 3 ('5:2')", ">= 6", "got 5", "order"]),
        ("0:128 7:1 5:2", ["entry 3 ('5:2')", ">= 8", "got 5", "order"]),
        ("0:0", ["entry 1 ('0:0')", "batchsize must be an integer >= 1", "got 0", "fix"]),
        (f"0:{2**53 + 1}", ["entry 1", "batchsize", "<= 2**53", f"got {2**53 + 1}"]),
        (f"0:1 {2**60}:2", ["entry 2", "first step", "<= 2**53", f"got {2**60}"]),
        (f"0:{2**53} {2**53}:2", ["<= 2**63 - 1", "run from step 0", "shorten"]),
    ],
)
def test_a_bad_schedule_is_refused(schedule, parts):
    with pytest.raises(ValueError, match=r" must .*, got .*; ") as caught:
        BatchTrace.parse(schedule)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, str(caught.value)


@pytest.mark.parametrize("steps", [0, -1, 2000, 2.5, True, LARGEST + 1])
def test_steps_must_reach_the_last_entry(steps):
    with pytest.raises(ValueError, match=r"^steps must be .*, got .*; "):
        BatchTrace.parse("0:128 2000:256", steps=steps)
    assert len(BatchTrace.parse("0:128 2000:256", steps=2001)) == 2001


@pytest.mark.parametrize("make", [lambda on_end: BatchTrace.of(8, on_end=on_end), BatchTrace.constant(8).with_on_end])
def test_an_unknown_on_end_is_refused(make):
    with pytest.raises(ValueError, match=r"on_end must be .*, got 'stop'; choose one"):
        make("stop")


def test_samples_are_counted_up_to_the_last_int64():
    assert BatchTrace.constant(2**53, steps=1023).total_samples == 1023 * 2**53
    assert BatchTrace.from_sizes([2**53] * 1023 + [2**53 - 1]).total_samples == 2**63 - 1
    for make in (lambda: BatchTrace.constant(2**53, steps=1024), lambda: BatchTrace.from_sizes([2**53, 2**52] * 700)):
        with pytest.raises(ValueError, match=r"all samples together must be <= 2\*\*63 - 1, got more .*; shorten"):
            make()


# Files of real size


@pytest.mark.parametrize("row", ["{},{}", " {} , {} "])
def test_a_million_steps_load_and_answer(tmp_path, row):
    sizes = np.random.default_rng(0).integers(32, 1025, 10**6)
    ends = np.cumsum(sizes)
    path = write(tmp_path, lines(sizes, row))
    trace = BatchTrace.from_csv(path)
    assert trace == BatchTrace.from_sizes(sizes)
    assert (len(trace), trace.total_samples, trace.max_batch_size) == (10**6, ends[-1], 1024)
    assert np.array_equal(trace.batch_sizes(np.arange(10**6)), sizes)
    for step in (0, 1, 499_999, 999_999):
        assert trace.batch_size(step) == sizes[step]
        assert trace.offset(step + 1) == ends[step]
        assert trace.step_at(ends[step] - 1) == step
    rounded = trace.round_to(32)
    steps = np.arange(10**6)
    assert np.abs(np.cumsum(rounded.batch_sizes(steps)) - ends).max() <= 16
    assert not (rounded.batch_sizes(steps) % 32).any()


def test_the_test_trace_covers_five_epochs_of_mnist_and_the_hard_sizes():
    trace = BatchTrace.from_csv(TRACES / "test_trace.csv")
    step = 0
    for _ in range(5):
        step = trace.step_at(trace.offset(step) + 60_000 - 1) + 1
    assert step <= len(trace) <= 2000
    sizes = trace.batch_sizes(np.arange(len(trace)))
    assert (sizes.min(), sizes.max()) == (3, 1024)
    assert ((sizes >= 64) & (sizes <= 512)).mean() > 0.9
    assert all((sizes[sizes >= 64] % divisor != 0).sum() > 500 for divisor in (4, 32))


def test_every_trace_has_its_line_in_the_readme():
    text = (TRACES / "README.md").read_text()
    assert all(f"- `{path.name}`: " in text for path in TRACES.glob("*.csv"))
