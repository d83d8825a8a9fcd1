"""What is said of wrong arguments of capacity traces, and of files that are none."""

import json
import math
from functools import partial
from pathlib import Path

import pytest

from helpers.capacity_files import TEXTS, parcae_line
from helpers.mistakes import Mistake, check
from variable_batch_size.lab import cluster
from variable_batch_size.lab.cluster import CapacityTrace, LogError, read, synthetic

TRACE = CapacityTrace([5], [3], end=20)
HOUR = 3600.0
machines = partial(synthetic, nodes=4, mean_up=HOUR, mean_down=HOUR, duration=1000, seed=0, bulk_every=HOUR)
SECONDS = "pass a positive number of seconds"
ARGUMENTS = [
    Mistake(lambda: CapacityTrace([], []), ValueError, "^a capacity trace must have at least one row, got no rows; pa"),
    Mistake(lambda: CapacityTrace([0, 2, 1], [1, 1, 1]), ValueError, r"^seconds must .* order, and .*2\] >= 2.0, got "),
    Mistake(lambda: CapacityTrace([0, math.nan], [1, 1], 5), ValueError, r"^seconds\[1\] must be in \[0, 2\*\*53\], g"),
    Mistake(lambda: CapacityTrace([-1], [1], 5), ValueError, r"^seconds\[0\] must be in \[0, 2\*\*53\], got -1.0; cor"),
    Mistake(lambda: CapacityTrace([0], [-1], 5), ValueError, r"^nodes\[0\] must be an integer in \[0, 2\*\*53\], got "),
    Mistake(lambda: CapacityTrace([0, 1], [1], 5), ValueError, r"^nodes must have the shape \(2,\) of seconds, got "),
    Mistake(
        lambda: CapacityTrace([0, 1.7e9], [1, 2]), ValueError, "^times must all be seconds since the beginning, or a"
    ),
    Mistake(lambda: CapacityTrace([0], [1]), ValueError, "^end must be > 0 and >= 0.0, the time of the last row, got "),
    Mistake(lambda: CapacityTrace([0], [1], 5, [-2]), ValueError, r"^prices\[0\] must be in \[0, 2\*\*53\], got -2.0;"),
    Mistake(lambda: CapacityTrace([[0]], [[1]], 5), ValueError, r"^seconds must have one dimension, got the shape \(1"),
    Mistake(lambda: CapacityTrace(["a"], [1], 5), TypeError, "^seconds.* must be .*, got .*; "),
    Mistake(lambda: CapacityTrace([0], [1.5], 5), TypeError, "^nodes.* must be .*, got .*; "),
    Mistake(lambda: CapacityTrace([0], [True], 5), TypeError, "^nodes.* must be .*, got .*; "),
    Mistake(lambda: CapacityTrace([0], [1], "5"), TypeError, "^end must be .*, got .*; "),
    Mistake(lambda: TRACE.at(20.5), ValueError, r"^seconds must be in \[0, 20.0\], got 20.5; pass times within the tr"),
    Mistake(lambda: TRACE.at([0, -1]), ValueError, r"^seconds must be in \[0, 20.0\], got -1.0; pass"),
    Mistake(lambda: TRACE.slice(20), ValueError, "^start must be < stop, within the 20.0 seconds of the trace, got st"),
    Mistake(lambda: TRACE.clip(5, 4), ValueError, "least number of nodes must be <= the largest, got 5 and 4"),
    Mistake(lambda: TRACE.machines(0), ValueError, "^devices must be an integer >= 1, got 0"),
    Mistake(lambda: TRACE.devices(0), ValueError, "^per_node must be an integer >= 1, got 0"),
    Mistake(lambda: TRACE.resampled(0), ValueError, "^every must be > 0, got 0; pass seconds$"),
    Mistake(lambda: TRACE.scaled(-1), ValueError, "^factor must be a finite number >= 0, got -1; pass a positive numb"),
    Mistake(lambda: cluster.fetch("no"), ValueError, "^name must be one of skypilot/.*, parcae/bert-hl, got 'no'; "),
    Mistake(lambda: cluster.fetch(3), TypeError, "^name must be one of "),
    Mistake(lambda: machines(nodes=0), ValueError, "^nodes must be an integer >= 1, got 0; pass an int in this range$"),
    Mistake(lambda: machines(mean_up=0), ValueError, f"^mean_up must be > 0, got 0; {SECONDS}$"),
    Mistake(lambda: machines(mean_down=-1), ValueError, f"^mean_down must be a finite number >= 0, got -1; {SECONDS}$"),
    Mistake(lambda: machines(seed=-1), ValueError, "^seed must be an integer >= 0, got -1; pass an int in this range$"),
    Mistake(lambda: machines(bulk_every=0), ValueError, f"^bulk_every must be > 0, got 0; {SECONDS}$"),
    Mistake(lambda: machines(bulk_fraction=1.5), ValueError, r"^bulk_fraction must be in \[0, 1\], got 1.5; pass a pr"),
    Mistake(lambda: machines(bulk_every=None, bulk_fraction=0.5), ValueError, "^bulk_fraction needs bulk_every, got b"),
    Mistake(lambda: machines(mean_up=1e-9, mean_down=1e-9), ValueError, r"at most 100,000,000 changes, got 4e\+12, ex"),
    *(
        Mistake(partial(machines, **{name: "4"}), TypeError, f"^{name} must be ")
        for name in ("nodes", "mean_up", "mean_down", "duration", "seed", "bulk_every", "bulk_fraction")
    ),
    Mistake(lambda: read(3), TypeError, r"^the path of a capacity trace must be a string or a path, got 3 \(int\); pa"),
    Mistake(lambda: log(TEXTS["csv"], 3), TypeError, r"^format must be .*, got 3 \(int\); choose one of these"),
    Mistake(lambda: log(TEXTS["csv"], "CSV"), ValueError, '^format must be "csv", .*, "eth" or "sacct", got \'CSV\';'),
    Mistake(lambda: log("", inverted="yes"), TypeError, r"^inverted must be an integer >= 1, got 'yes' \(str\); pass "),
    Mistake(lambda: log("", inverted=0), ValueError, "^inverted must be an integer >= 1, got 0; pass True for a clust"),
    Mistake(lambda: log("", max_gap="1"), TypeError, r"^max_gap must be a finite number >= 0, got '1' \(str\); pass s"),
    Mistake(lambda: log("", max_gap=0), ValueError, "^max_gap must be > 0, got 0; pass seconds > 0, or None for gaps "),
]


def log(text, *arguments, **options):
    Path("log").write_text(text, encoding="utf-8")
    return read("log", *arguments, **options)


PATHS = [
    Mistake(partial(reading, path), kind, f'^capacity trace \\({path}\\) must be a file that can be read, got "{found}')
    for reading in (read, CapacityTrace.from_csv)
    for path, kind, found in (
        ("absent", FileNotFoundError, "No such file or directory"),
        ("/", IsADirectoryError, "Is a directory"),
        ("a\0b", ValueError, "embedded null byte"),
    )
]
LAST = "a trace must end after a finite time > 0, got 0.0; correct the times, or add a row at its end"
RECIPE = 'pass time_column= .* and nodes_column= .*, see "Any other log" in the documentation$'
UNKNOWN_FORMAT = rf"a file must begin like seconds,nodes \(csv\) or .* \(skypilot\) or .* \(sacct\), got .*; {RECIPE}"
POLARITY = (
    r":1\): data\[2\] must be <= 1, the nodes of the cluster, with inverted=1, got 4; pass the number of nodes of "
)
TIME = "must be seconds, or in each row a time of ISO 8601 such as 2026-11-24T10:00:00Z"
PRETTY = json.dumps([0, "add", {"nodes": ["a"], "duration": 1}], indent=1) + "\n"
SHAPE = "the file must hold gap_seconds and at least one tick, as {.*} does, got .*; "
INTEGER = r"must be an integer in \[0, 2\*\*53\], got"
PRICES = "prices must be a list of 2 numbers, one for each tick, got"
REMOVED = "a node that is removed must be in the cluster, got '{}'; add it before, or correct its name$"
ADDED = "a node that is added must not be in the cluster yet, got '{}'; remove it before, or correct its name$"
EVENT = "the event must be one of add, remove, migration, no-op, got"
DATE = "a row must begin with a date and a time of day, such as 2021-12-10, 13:07:45, got '{}'; correct the row$"
COLUMNS = "the header must be ,Time,GPUs or ,Time,TPU_cores, got ',Time,GPUs,TPU_cores'; keep one of the columns$"


def ticks(data):
    return '{"metadata": {"gap_seconds": 300},\n"data": ' + data + "}"


def table(**columns):
    return log("a,seconds\n0,4\n", **columns)


def bamboo(*rows):
    return "\n".join(["0,add,a", *rows])


def parcae(*row, duration=60000):
    return parcae_line(0, "add", ["a"]) + "\n" + (row[0] if len(row) == 1 else parcae_line(*row, duration))


LOGS = [  # text, and what follows "capacity trace (log:"
    ("seconds,nodes\n0,4\n", rf"2\): {LAST}"),
    ("0,add,a\n", rf"1\): {LAST}"),
    (parcae_line(0, "add", ["a"], 0), rf"1\): {LAST}"),
    ('{"metadata": {"gap_seconds": 0}, "data": [1]}', rf"1\): {LAST}"),
    ('{"metadata": {"gap_seconds": 1e308}, "data": [1, 2, 3]}', r"1\): a trace must .* finite time > 0, got inf; corr"),
    ('{"SpotPriceHistory": []}', rf"1\): {UNKNOWN_FORMAT}"),
    ('{"apiVersion": "v1", "items": [{"kind": "Event"}], "kind": "List"}', rf"1\): {UNKNOWN_FORMAT}"),
    ("seconds,nodes\n", r"1\): there must be at least one row, got 'seconds,nodes'; add rows"),
    ("seconds,nodes\n0,4\n\n60\n", r"4\): a row must have the cells of seconds,nodes, got '60'; correct the row"),
    ("seconds,nodes,nodes\n0,4,5\n", r"1\): the header must have one column nodes, got 'seconds,nodes,nodes'; ren"),
    ("seconds,nodes\n0,4\n60,-2\n", rf"3\): nodes {INTEGER} '-2'; correct it"),
    ("seconds,nodes,price\n0,4,nan\n", r"2\): price must be a finite number >= 0, got 'nan'; correct it"),
    ("seconds,nodes\n60,4\n30,2\n", r"3\): seconds must be >= 60, the time of the row before, got 30.0; sort the r"),
    ("seconds,nodes\n0,4\u2028\n60,x\u000c\n", r"3\): nodes must be"),
    ("seconds,nodes\n0," + "x" * 10_000, r"2\): nodes must be .*, got 'x{59}; correct it"),
    ("time;nodes\n2024-05-01T08:00Z;2\n20240501T0900;4\n", rf"3\): time {TIME}, got '20240501T0900'; add the date"),
    ("time;nodes\n2024-05-01T08:00Z;2\n2024-02-30T08:00Z;4\n", rf"3\): time {TIME}, got '2024-02-30T08:00Z'; add"),
    ("seconds,nodes\n0,4\n2024-05-01T08Z,2\n", r"3\): seconds must be a finite number >= 0, got '2024-05-01T08Z'; "),
    ("time;nodes\n2024-05-01T08:00Z;2\n2024-05-01T07:00Z;2\n", r"3\): time must be >= 0, the time of the row be"),
    ("time,nodes\n08:00,2\n09:00,3\n", rf"2\): time {TIME}, got '08:00'; add the date, or correct it"),
    ("time,nodes\n20260101,4\n20260102,2\n", rf"2\): time {TIME}, got '20260101'; add the date, or correct it"),
    ("JobID|Start|End|NNodes\n1|08:00|Unknown|2\n", r"2\): Start must be a time such as 2026-11-24T10:00:00, got '08:"),
    ("JobID|Start|End|NNodes\n1|None|Unknown|2\n", r"2\): there must be a job that has started, got 'JobID"),
    ("JobID|Start|End|NNodes\n1|2026-01-01T08:00|2026-01-01T07:00|2\n", r"2\): End must not be before Start, 2026-01"),
    (ticks("[0, 3")[:-1], r"2\): the text must be JSON \(expecting ',' delimiter, column 14\), got 'the end'; "),
    (ticks("[0,\n3,\n-1]"), rf"1\): data\[2\] {INTEGER} -1; correct it"),
    (ticks('["3"]'), rf"1\): data\[0\] {INTEGER} '3'; correct it"),
    (ticks("[0,\n" + "9" * 5000 + "]"), rf"1\): data\[1\] {INTEGER} inf"),
    (ticks("[]"), rf"1\): {SHAPE}"),
    ('{"data": [1], "metadata": {}}', rf"1\): {SHAPE}"),
    ('{"data": [1], "metadata": {"gap_seconds": -3}}', r"1\): gap_seconds must be a finite number >= 0, got -3; "),
    (ticks('[0, 1],\n"prices": [1]'), rf"1\): {PRICES} '1 prices'; "),
    (ticks('[0, 1],\n"prices": 0'), rf"1\): {PRICES} 0; "),
    (ticks('[0, 1],\n"prices": [1,\nnull]'), r"1\): prices\[1\] must be a finite number >= 0, got None; correct it"),
    (bamboo("5,add,a"), rf"2\): {ADDED.format('a')}"),
    (bamboo("5,remove,b"), rf"2\): {REMOVED.format('b')}"),
    (bamboo("5,ad,b"), r"2\): the event must be add or remove, got 'ad'; correct the row"),
    (bamboo("5,add"), r"2\): a row must have the cells of 480000,add,node1, got '5,add'; correct the row"),
    (bamboo("5,add,"), r"2\): a row must name a node, got '5,add,'; correct the row"),
    ("-5,add,a\n", r"1\): milliseconds must be a finite number >= 0, got '-5'; correct it"),
    (parcae(5, "add", ["b", "b"]), rf"3\): {ADDED.format('b')}"),
    (parcae(5, "migration", ["a", "b"]), r"3\): a node that is named must be in the cluster, got 'b'; add it before"),
    (parcae(5, "lost", []), rf"3\): {EVENT} 'lost'; "),
    (parcae(5, "no-op", "a"), r"3\): nodes must be a list of names, got 'a'; "),
    (parcae('[5, "no-op", {"nodes": []}]'), r"3\): duration must be a finite number >= 0, got None; correct it"),
    (parcae('[5, "no-op", []]'), r"3\): a row must have the form \[0, .add., {.*}\], got "),
    (parcae('[5, "no-op", {"nodes": ['), r"3\): the text must be JSON \(expecting value, column 25\), got 'the end'; "),
    (parcae(f'[{"9" * 400}, "no-op", {{}}]'), r"3\): nodes must be a list of names, got None; "),
    (PRETTY + PRETTY, rf"11\): {ADDED.format('a')}"),
    (PRETTY + PRETTY[:-3], r"19\): the text must be JSON \(expecting ',' delimiter, col"),
    ("2021-12-10, 13:07:45, 80\n2021-02-29, 13:07:45, 8\n", rf"2\): {DATE.format('2021-02-29, 13:07:45')}"),
    ("2021-12-10, 13:07:45, 80\n2021-12-10, 13:07:45Z, 8\n", rf"2\): {DATE.format('2021-12-10, 13:07:45Z')}"),
    (",Time,GPUs,TPU_cores\n0,5,8,8\n", rf"1\): {COLUMNS}"),
    (",Time,GPUs\n0,5,8\n1,6,\n", rf"3\): GPUs {INTEGER} ''; correct it"),
    (",Time,GPUs\n0,5,8\n1,4,8\n", r"3\): Time must be >= 5, the time of the row before, got 4.0; sort the rows by"),
]
FORMATS = [
    Mistake(lambda: log("# 1\n# 2\n", "parcae"), LogError, r":2\): there must be at least one row, got '# 2'; add row"),
    Mistake(lambda: log(ticks("[0,\n1,\n4]"), inverted=True), LogError, POLARITY),
    Mistake(
        lambda: table(time_column="a", nodes_column="A"), LogError, "two columns, got 'a'; pass another time_column="
    ),
    Mistake(
        lambda: table(nodes_column="seconds"), LogError, "times and nodes must be two columns, got 'seconds'; pass"
    ),
    Mistake(lambda: table(time_column="time"), LogError, "the header must have one column time, got 'a,seconds'; "),
    Mistake(lambda: log("JobID|Start|End\n", "sacct"), LogError, "print them with sacct -P -o JobID,Start,End,NNodes$"),
    *(Mistake(partial(log, text), LogError, rf"^capacity trace \(log:{pattern}") for text, pattern in LOGS),
]


@pytest.mark.parametrize("mistake", [*ARGUMENTS, *PATHS, *FORMATS])
def test_a_mistake_is_named(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(mistake)
