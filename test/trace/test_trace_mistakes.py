"""What is said of wrong sizes, schedules, ramps and files, and of queries that a trace cannot answer."""

from pathlib import Path

import numpy as np
import pytest

from helpers.mistakes import Mistake, check
from variable_batch_size.trace import BatchTrace

of, parse, ramp, constant = BatchTrace.of, BatchTrace.parse, BatchTrace.ramp, BatchTrace.constant
from_sizes, from_runs = BatchTrace.from_sizes, BatchTrace.from_runs
TRACE, INFINITE = BatchTrace.from_sizes([1, 2], on_end="hold"), BatchTrace.constant(8)
LARGE = 2**53 + 1
HEAD = "step,batchsize\n"
ROW_1 = r"^trace row 1 \(a.csv:2\): batchsize must be an integer >= 1"
STEP_2 = r"^trace step 2 \(sizes\[2\]\): batch_size must be an integer >= 1.*, got .*; pass an int in this range$"
STEP_0_OR_1 = r"^trace step [01] \(sizes\[[01]\]\): batch_size must be .*, got .*; "
RAMP = {"start": 8, "end": 16, "increment": 8, "samples": 9}
FIX = "; fix the row, or drop it and renumber$"


def csv(text, **options):
    Path("a.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return BatchTrace.from_csv("a.csv", **options)


def samples(schedule):
    return parse(schedule, unit="samples")


def tokens(schedule, sequence_length=4096):
    return parse(schedule, unit="tokens", sequence_length=sequence_length)


QUERIES = [
    Mistake(lambda: TRACE.batch_size(-1), ValueError, "^step must be an integer >= 0, got -1; pass an int in this ra"),
    Mistake(lambda: TRACE.offset(1.0), TypeError, r"^step must be an integer >= 0, got 1.0 \(float\); pass an int in"),
    Mistake(lambda: TRACE.step_at(-1), ValueError, "^sample must be an integer >= 0, got -1; pass an int in this rang"),
    Mistake(lambda: TRACE.batch_sizes(np.array([-1])), ValueError, "^step must be an integer >= 0, got -1; pass an "),
    Mistake(lambda: TRACE.batch_sizes(np.array([True])), TypeError, "^step must be an integer >= 0, got .*; pass an "),
    Mistake(lambda: len(INFINITE), TypeError, "^len requires a finite trace, got BatchTrace.*; limit it with steps="),
    Mistake(lambda: INFINITE.total_samples, ValueError, "^total_samples requires a finite trace, got .*; limit it wit"),
    Mistake(lambda: INFINITE.to_csv("a.csv"), ValueError, "^to_csv requires a finite trace, got .*; limit it with st"),
    Mistake(lambda: INFINITE.round_to(0), ValueError, "^multiple must be an integer >= 1, got 0; "),
    Mistake(lambda: INFINITE.round_to(2.0), TypeError, "^multiple must be an integer >= 1, got 2.0 "),
    Mistake(lambda: of([64, 31]).round_to(32), ValueError, "step 1: .* >= 32 .*, got 31; .* smaller multiple"),
    Mistake(lambda: of("0:64 5:100").round_to(32), ValueError, "infinite trace .* multiple of 32, got 100; .*ps="),
]
SIZES = [
    Mistake(lambda: from_sizes([1, 2, 0, 0]), ValueError, STEP_2),
    Mistake(lambda: from_sizes([1, 2, 128.0]), TypeError, STEP_2),
    Mistake(lambda: from_sizes([1, 2, True]), TypeError, STEP_2),
    Mistake(lambda: from_sizes(np.array([1, 0])), ValueError, STEP_0_OR_1),
    Mistake(lambda: from_sizes(np.array([1, 2**63], np.uint64)), ValueError, STEP_0_OR_1),
    Mistake(lambda: from_sizes(np.array([1.0, np.nan])), TypeError, STEP_0_OR_1),
    Mistake(lambda: from_sizes(np.array([True, True])), TypeError, STEP_0_OR_1),
    Mistake(lambda: from_sizes(np.array([[1], [2]])), TypeError, STEP_0_OR_1),
    Mistake(lambda: constant(0), ValueError, "^batch_size must be an integer >= 1, got 0; pass an int in t"),
    Mistake(lambda: constant("8"), TypeError, "^batch_size must be an integer >= 1, got '8' .*; pass an in"),
    Mistake(lambda: of([]), ValueError, "^a trace must have at least one step, got no sizes; pass at least"),
    Mistake(lambda: constant(8, on_end="halt"), ValueError, "^on_end must be .*, got 'halt'; choose one"),
    Mistake(lambda: INFINITE.with_on_end(None), TypeError, "^on_end must be .*, got None .*; choose one"),
    *(
        Mistake(lambda source=source: BatchTrace.of(source), TypeError, r"^trace must be a path, .*, got .*; pass one ")
        for source in (None, True, 1.5, b"a.csv", {1: 2}, iter([1]))
    ),
    Mistake(lambda: from_runs([], []), ValueError, "^a trace must .*, and at least one, got 0 and 0; pass as"),
    Mistake(lambda: from_runs([1], [1, 2]), ValueError, "a length for each size, .* got 1 and 2; pass as m"),
    Mistake(lambda: from_runs([0], [1]), ValueError, r"^sizes\[0\] must be an integer >= 1, got 0; "),
    Mistake(lambda: from_runs([1, 1], [1, 0]), ValueError, r"^lengths\[1\] must be an integer >= 1, got 0"),
]
SCHEDULES = [
    Mistake(lambda: parse(""), ValueError, "^a schedule must have at least one entry, got ''; .*0:128"),
    Mistake(lambda: parse("0:128 2000"), ValueError, "entry 2 must be step:batch_size .*got '2000'; .*0:128"),
    Mistake(lambda: parse("0:1.5"), ValueError, "entry 1 must be step:batch_size .*got '0:1.5'; "),
    Mistake(lambda: parse("0:1 2G:256"), ValueError, "entry 2 must be step:batch_size .*got '2G:256'; "),
    Mistake(lambda: parse("0:1 1.2345K:1"), ValueError, r"in integers .*T = 10\^12\), got '1.2345K:1'; "),
    Mistake(lambda: parse("0:1 9e99T:1"), ValueError, f"step must be an integer >= 1 and <= {2**53}, got 9000"),
    Mistake(lambda: parse("10:1"), ValueError, r"entry 1 \('10:1'\) must start at step 0, got 10; .* 0:batch"),
    Mistake(lambda: parse("0:1 5:1 5:2"), ValueError, r"entry 3 \('5:2'\): step .* >= 6, got 5; order the"),
    Mistake(lambda: parse("0:0"), ValueError, r"entry 1 \('0:0'\): batch_size must be .* >= 1, got 0; correct"),
    Mistake(lambda: parse(f"0:{LARGE}"), ValueError, f"entry 1 .*: batch_size .* <= {2**53}, got {LARGE}; "),
    Mistake(lambda: parse(f"0:1 {2**60}:2"), ValueError, rf"entry 2 .*\): step must .* <= {2**53}, got {2**60}"),
    Mistake(lambda: parse(None), TypeError, r'^a schedule must be a string, got None .*; write it like "0:12'),
    Mistake(lambda: parse("0:1 9:2", steps=0), ValueError, "^steps must be .* >= 1, got 0; "),
    Mistake(lambda: parse("0:1 9:2", steps=9), ValueError, "^steps must be > 9, the first .* got 9; raise it"),
    Mistake(lambda: parse("0:1 9:2", steps=2.5), TypeError, "^steps must be .*, got 2.5 .*; "),
    Mistake(lambda: parse("0:1", unit="token"), ValueError, '^unit must be .*"tokens" or "epochs", got \'toke'),
    Mistake(lambda: parse("0:1", unit=None), TypeError, r"^unit must be .*, got None \(NoneType\); "),
    Mistake(lambda: tokens("0:1", None), TypeError, 'h for unit="tokens" must be .*, got None .*; .*tokens in a sampl'),
    Mistake(lambda: tokens("0:1", 4096.0), TypeError, "^sequence_length .* must be an integer >= 1, got 4096.0 "),
    Mistake(lambda: tokens("0:1", 0), ValueError, "^sequence_length .* must be an integer >= 1, got 0; "),
    Mistake(lambda: parse("0:1", unit="samples", sequence_length=1), ValueError, '^seq.* None for unit="samples", got'),
    Mistake(lambda: samples("0:1 5"), ValueError, "^schedule entry 2 must be sample:batch_size .*, got '5'; "),
    Mistake(lambda: samples("5:1"), ValueError, r"entry 1 \('5:1'\) must start at sample 0, got 5; .* 0:batch_size"),
    Mistake(lambda: samples("0:1 9:2 5:3"), ValueError, r"entry 3 \('5:3'\): sample must .* >= 10, got 5; order the"),
    Mistake(lambda: tokens("0:1 5K:2 6K:3"), ValueError, "entry 3 .*: tokens // sequence_length must .* >= 2, got 1; "),
    Mistake(lambda: parse("0:9 1K:99", 8, unit="samples"), ValueError, "^steps must be > 112, .* of '0:9 1K:99', got "),
    Mistake(lambda: ramp(16, 20, 8, 9), ValueError, r"^end must be .*, here 16 \+ n \* 8, got 20; change one of"),
    Mistake(lambda: ramp(1, 10**6 + 2, 1, 9), ValueError, r"at most 10\^6 .*, got 1000001; .* larger incre"),
    Mistake(lambda: ramp(8, 16, 8, 100, 13), ValueError, r"^steps must .* ramp\(8, 16, 8, 100\), got 13; raise it"),
    *(
        Mistake(lambda change=change: ramp(**{**RAMP, **change}), error, pattern)
        for name in ("start", "end", "increment", "samples", "steps")
        for change, error in (({name: 0}, ValueError), ({name: LARGE}, ValueError), ({name: 8.0}, TypeError))
        for pattern in [f"^{name} must be an integer >= 1.*, got .*; pass an int in this range$"]
    ),
]
FILES = [
    Mistake(lambda: csv(HEAD + "0,5\n1,0\n"), ValueError, r"row 2 \(a.csv:3\): batchsize must .* >= 1, got 0" + FIX),
    Mistake(lambda: csv("step,batch_size\n0,5\n1,0\n"), ValueError, r"2 \(a.csv:3\): batch_size must .* got 0" + FIX),
    Mistake(lambda: csv("batch_size,step\nx,0\n"), ValueError, r"\(a.csv:2\): batch_size must be .* got 'x'" + FIX),
    *(
        Mistake(lambda cell=cell: csv(f"{HEAD}0,{cell}\n"), ValueError, f"{ROW_1}, got '{cell}'{FIX}")
        for cell in ("", "128.5", "many", "1_0", "٣")
    ),
    Mistake(lambda: csv(HEAD + "0,1\x002\n"), ValueError, r"a.csv.* must be .*, got .*; fix the "),
    Mistake(lambda: csv(f"{HEAD}0,{LARGE}\n"), ValueError, f"{ROW_1} and <= {2**53}, got {LARGE}{FIX}"),
    Mistake(lambda: csv(f"{HEAD}0,{10**99}\n"), ValueError, f"{ROW_1}, got '1000.*{FIX}"),
    Mistake(lambda: csv(HEAD + "1,5\n2,5\n"), ValueError, r"row 1 \(a.csv:2\): step must be 0, .*, got 1; .*renumber="),
    Mistake(lambda: csv(HEAD + "0,5\n2,5\n"), ValueError, r"row 2 \(a.csv:3\): step must be 1, .*, got 2; .*renumber="),
    Mistake(lambda: csv(HEAD + "0,5\nx,5\n"), ValueError, r"row 2 \(a.csv:3\): step must be 1, .*, got 'x'; .*renumbe"),
    Mistake(lambda: csv(HEAD + "0,16\n12,8\n22,2\n"), ValueError, 'each update has a row.*or the schedule "0:16 12:'),
    Mistake(lambda: csv(HEAD + "0,16\n1,8\n22,2\n"), ValueError, 'each update has a row.*schedule "0:16 1:8 22:2 ..."'),
    Mistake(lambda: csv(HEAD + "0,9\n1,9\n2,9\n9,5\n"), ValueError, r"row 4 .* each update has a row.*renumber=True i"),
    Mistake(lambda: csv("\n" + HEAD + "0,5\n\n \n1,0\n"), ValueError, r"row 2 \(a.csv:6\): batchsize .* got 0" + FIX),
    Mistake(lambda: csv("step,batchsize\r\n0,5\r\n1,0\r\n"), ValueError, r"row 2 \(a.csv:3\): .* got 0" + FIX),
    Mistake(lambda: csv('step,batchsize,note\n0,5,"a\nb"\n1,0,\n'), ValueError, r"row 2 \(a.csv:4\): .* got 0" + FIX),
    Mistake(lambda: csv("step,size\n"), ValueError, r"\(a.csv:1\) .* column batchsize or batch_size, got 'step,size';"),
    Mistake(lambda: csv("batchsize\n5\n"), ValueError, r"\(a.csv:1\) .* column step, got 'batchsize'; add or rename"),
    Mistake(lambda: csv("seconds,nodes\n0,4\n"), ValueError, "'seconds,nodes'; run vbs capacity convert --policy on"),
    Mistake(lambda: csv("step,batchsize,step\n"), ValueError, r"\(a.csv:1\) .* one column step, got 'step,.*; drop or"),
    Mistake(lambda: csv("step,batch_size,batchsize\n0,5,5\n"), ValueError, r"\(a.csv:1\) .* only one .*, got both; dr"),
    Mistake(lambda: csv(""), ValueError, r"\(a.csv:1\) must have one column step, got an empty file; add"),
    Mistake(lambda: csv(HEAD), ValueError, r"must have at least one step, got only the header \(a.csv:1\); add rows"),
    Mistake(lambda: csv(HEAD + "0,5\n1,5,5\n"), ValueError, r"row 2 \(a.csv:3\): .* 2 cells, .*, got 3; fix the row"),
    Mistake(lambda: csv(HEAD + "0,5\n1\n"), ValueError, r"row 2 \(a.csv:3\): .* 2 cells, .*, got 1; fix the row"),
    Mistake(lambda: csv("step,batchsize,ä\n".encode("latin-1")), ValueError, r"\(a.csv:1\) .* UTF-8 .* got byte 0xe4;"),
    Mistake(lambda: csv(HEAD.encode() + bytes(range(256))), ValueError, r"\(a.csv:3\) .* UTF-8 text, got byte 0x80; s"),
    Mistake(lambda: csv(HEAD + '0,"5\n' + "1,5\n" * 40000), ValueError, r"\(a.csv:\d+\) must be valid CSV, got field "),
    Mistake(lambda: csv(HEAD + '0,64\n1,"32'), ValueError, r"^trace line \(a.csv:3\) must be valid CSV, got unexpecte"),
    Mistake(lambda: csv(HEAD + '5,5\n1,"5\n'), ValueError, r"row 1 \(a.csv:2\): step must be 0, .* got 5; fix"),
    Mistake(lambda: csv(HEAD + "0,5\n1\r7,1\n", renumber=True), ValueError, r"a.csv:3\).* must have 2 cells, .*, got "),
    Mistake(lambda: csv("batchsize,step\n5,0\n1\0007,1\n", renumber=True), ValueError, r"a.csv:3\).* must .*, got .*;"),
    Mistake(lambda: of("none.csv"), FileNotFoundError, r"^trace must be a CSV file, got 'none.csv' \(No such .*\); co"),
    Mistake(lambda: of("."), IsADirectoryError, r"^trace must be a CSV file, got '.' \(Is a .*\); correct the path, p"),
    Mistake(lambda: BatchTrace.from_csv(None), TypeError, "PathLike", free=True),
]


@pytest.mark.parametrize("mistake", [*QUERIES, *SIZES, *SCHEDULES, *FILES])
def test_a_mistake_is_named(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(mistake)
