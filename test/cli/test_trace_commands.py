"""`vbs trace`: what it writes and shows is the trace."""

from __future__ import annotations

import pytest

import variable_batch_size as vbs
from helpers.commands import run
from helpers.console import run_json, run_main

SCHEDULE = "0:8 4:12 10:6"


@pytest.mark.parametrize("more", [[], ["--round-to", 4], ["--unit", "samples"]])
def test_a_schedule_becomes_a_file(more, tmp_path):
    path = tmp_path / "trace.csv"
    status, out, err = run_main("trace", "make", SCHEDULE, "--steps", 20, "--out", path, *more)
    expected = vbs.BatchTrace.parse(SCHEDULE, 20, unit="samples" if "samples" in more else "steps")
    expected = expected.round_to(4) if "--round-to" in more else expected
    assert (status, err) == (0, "")
    assert out.startswith(f"{path}: 20 updates, {expected.total_samples:,} samples, batch size at most")
    assert vbs.BatchTrace.from_csv(path) == expected


def test_the_facts_are_those_of_the_trace(tmp_path):
    path = tmp_path / "trace.csv"
    trace = vbs.BatchTrace.parse(SCHEDULE, 20)
    trace.to_csv(path)
    facts = {"steps": 20, "samples": trace.total_samples, "min": 6, "max": 12, "changes": 2}
    assert run_json("trace", "show", path) == {**facts, "fingerprint": trace.fingerprint}
    assert "batch size   6 to 12, mean 8.200" in run_main("trace", "show", path)[1]


@pytest.mark.parametrize("source", [SCHEDULE, "64"])
def test_infinite_traces_are_shown(source, tmp_path):
    facts = run_json("trace", "show", source)
    assert (facts["steps"], facts["samples"]) == (None, None)
    status, out, _ = run_main("trace", "show", source, "--png", tmp_path / "trace.png")
    assert status == 0
    assert "steps        infinite" in out
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_the_folder_of_a_file_is_created(tmp_path):
    path = tmp_path / "some" / "where" / "trace.csv"
    assert run_main("trace", "make", SCHEDULE, "--steps", 30, "-o", path)[0] == 0
    assert len(vbs.BatchTrace.from_csv(path)) == 30


def test_a_link_is_followed_and_a_pipe_is_written_to(tmp_path):
    vbs.BatchTrace.constant(8, 3).to_csv(tmp_path / "trace.csv")
    (tmp_path / "link.csv").symlink_to(tmp_path / "trace.csv")
    assert run_main("trace", "make", SCHEDULE, "--steps", 30, "-o", tmp_path / "link.csv")[0] == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert len(vbs.BatchTrace.from_csv(tmp_path / "trace.csv")) == 30
    done = run("bash", "-c", f"vbs trace make '{SCHEDULE}' --steps 12 --out - | tail -n 1", cwd=tmp_path)
    assert done.stdout == "11,6\n"
    assert done.stderr.startswith("/dev/stdout: 12 updates, ")


@pytest.mark.parametrize("schedule", ["0:768 250B:1536", "0:128 100000000:256"])
def test_long_schedules_are_shown_at_once(schedule, tmp_path):
    assert run_json("trace", "show", schedule)["changes"] == 1
    assert run_main("trace", "show", schedule, "--png", tmp_path / "trace.png")[0] == 0
    tokens = run_json("trace", "show", schedule, "--unit", "tokens", "--sequence-length", 4096)
    assert tokens["max"] == run_json("trace", "show", schedule)["max"]


def test_pictures_are_png_or_svg(tmp_path):
    for suffix, beginning in (("png", b"\x89PNG"), ("PNG", b"\x89PNG"), ("svg", b"<?xml")):
        picture = tmp_path / f"trace.{suffix}"
        assert run_main("trace", "show", "64", "--png", picture)[0] == 0
        assert picture.read_bytes().startswith(beginning)
