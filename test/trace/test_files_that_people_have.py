"""Files as spreadsheets, loggers and schedulers write them: read right, or one sentence that says what to do."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import variable_batch_size as vbs
from helpers.mistakes import check_shape
from variable_batch_size.lab import cluster

BATCHES = {
    "a spreadsheet": ("Step;BatchSize\r\n0;32\r\n1;64\r\n", {}),
    "tabs": ("step\tbatch_size\tlr\n0\t32\t0.1\n1\t64\t0.2\n", {}),
    "numbers of pandas": ("step,batchsize\n0.0,32.0\n1.0,64.0\n", {}),
    "capitals": ("STEP,BATCHSIZE\n0,32\n1,64\n", {}),
    "a title with a space, and a row of separators": ("Step;Batch Size\n0;32\n1;64\n;\n", {}),
    "an index": (",Step,Batch_Size\n0,0,32\n1,1,64\n", {}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_trace(name, tmp_path):
    text, options = BATCHES[name]
    (tmp_path / "trace.csv").write_text(text, newline="")
    assert vbs.BatchTrace.from_csv(tmp_path / "trace.csv", **options) == vbs.BatchTrace.from_sizes([32, 64])


def test_rows_where_the_size_changes(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("step;batchsize\n0;32\n100;64.0\n10000;128\n")
    assert vbs.BatchTrace.from_csv(path, every="change") == vbs.BatchTrace.parse("0:32 100:64 10000:128")
    found = r'got 100; fix the column, .*; if .* pass every="change" instead, or the schedule "0:32 100:64 \.\.\."'
    with pytest.raises(ValueError, match=found) as caught:
        vbs.BatchTrace.from_csv(path)
    check_shape(str(caught.value))
    for wrong in ("step,batchsize\n5,32\n", "step,batchsize\n0,32\n9,64\n9,65\n"):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="let the first row be step 0, and sort the others") as caught:
            vbs.BatchTrace.from_csv(path, every="change")
        check_shape(str(caught.value))


@pytest.mark.parametrize(
    "sizes",
    [
        pd.Series([32, 64]),
        pd.Series([32.0, 64.0], index=["a", "b"]),
        torch.tensor([32, 64]),
        torch.tensor([32.0, 64.0]),
        torch.tensor([32.0, 64.0], requires_grad=True),
        torch.tensor([32.0, 64.0], dtype=torch.bfloat16),
        np.ma.array([32, 64], mask=[False, False]),
        np.array([32, 64], np.uint8),
    ],
    ids=lambda sizes: f"{type(sizes).__name__} of {sizes.dtype}",
)
def test_what_holds_a_size_for_each_step(sizes):
    assert vbs.BatchTrace.of(sizes) == vbs.BatchTrace.from_sizes(sizes) == vbs.BatchTrace.from_sizes([32, 64])


MASKED = np.ma.array([32, 64], mask=[False, True])


@pytest.mark.parametrize("sizes", [pd.Series([32, 3.5]), torch.tensor([32.0, float("nan")]), pd.Series(["32"]), MASKED])
def test_what_holds_something_else(sizes):
    with pytest.raises(TypeError, match=r"^trace step \d \(sizes\[\d\]\): batch_size must be an integer >= 1, got "):
        vbs.BatchTrace.of(sizes)


def test_masked_capacity_is_not_read():
    with pytest.raises(TypeError, match=r"^nodes\[1\] must be an integer >= 0, got masked"):
        cluster.CapacityTrace([0, 1], MASKED)
    with pytest.raises(ValueError, match=r"^seconds\[1\] must be in \[0, 2\*\*53\], got nan; correct it"):
        cluster.CapacityTrace(MASKED, [4, 2])


@pytest.mark.parametrize("size", ["1.000", "1,000", "1 000", "32.00"])
def test_a_point_may_separate_thousands(size, tmp_path):
    (tmp_path / "trace.csv").write_text(f"step;batchsize\n0;{size}\n")
    why = "" if size == "32.00" else ", which may be thousands"
    with pytest.raises(
        ValueError, match=rf"batchsize must be an integer >= 1, got '{size}'{why}; fix the row"
    ) as caught:
        vbs.BatchTrace.from_csv(tmp_path / "trace.csv")
    check_shape(str(caught.value))


def test_steps_that_begin_at_1_are_numbered_anew(tmp_path):
    (tmp_path / "trace.csv").write_text("step,batchsize\n1,32\n2,64\n")
    with pytest.raises(ValueError, match=r"got 1; fix the column, or ignore it with renumber=True in .*from_csv$"):
        vbs.BatchTrace.from_csv(tmp_path / "trace.csv")
    assert vbs.BatchTrace.from_csv(tmp_path / "trace.csv", renumber=True) == vbs.BatchTrace.from_sizes([32, 64])


def test_steps_of_changes_are_not_ignored(tmp_path):
    (tmp_path / "trace.csv").write_text("step,batchsize\n0,32\n100,64\n")
    with pytest.raises(
        ValueError, match=r'^every="change" needs the column step, got renumber=True, .*; leave out one'
    ):
        vbs.BatchTrace.from_csv(tmp_path / "trace.csv", every="change", renumber=True)


LOGS = {
    "Unix times": ("Time,Nodes\n1764230400,4\n1764232200,2\n1764234000,2\n", {}),
    "ISO 8601": ("time;nodes\n2026-11-27T08:00:00Z;4\n2026-11-27T08:30:00Z;2\n2026-11-27T09:00:00Z;2\n", {}),
    "timestamps": ("timestamp;nodes\n1764230400.5;4\n1764232200.5;2\n1764234000.5;2\n", {}),
    "other names": (
        "Timestamp,zone,Running Nodes\n0,a,4.0\n1800,a,2.0\n3600,a,2.0\n",
        {"time_column": "timestamp", "nodes_column": "Running Nodes"},
    ),
    "quoted cells": ('"Time","Nodes"\n"0","4"\n"1800","2"\n3600,2\n', {}),
    "sacct": (
        "JobID|Start|End|NNodes\n7|2026-11-27T08:00:00|2026-11-27T09:00:00|2\n7.0|2026-11-27T08:00:00||2\n"
        "8|2026-11-27T08:00:00|2026-11-27T08:30:00|2\n9|2026-11-27T08:30:00|2026-11-27T08:30:00|5\n",
        {},
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_capacity_trace(name, tmp_path):
    text, options = LOGS[name]
    (tmp_path / "log").write_text(text)
    trace = cluster.read(tmp_path / "log", **options)
    assert (trace.at(np.array([0, 1799, 1800, 3599])).tolist(), trace.end) == ([4, 4, 2, 2], 3600)
