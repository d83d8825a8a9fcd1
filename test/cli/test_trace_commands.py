"""`vbs trace`: what it writes and shows is the trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import variable_batch_size as vbs
from helpers.commands import run
from helpers.console import error_of, run_json, run_main

SCHEDULE = "0:8 4:12 10:6"


@pytest.mark.parametrize("more", [[], ["--round-to", 4], ["--unit", "samples"]])
def test_a_schedule_becomes_a_file(more: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    status, out, err = run_main("trace", "make", SCHEDULE, "--steps", 20, "--out", path, *more)
    expected = vbs.BatchTrace.parse(SCHEDULE, 20, unit="samples" if "samples" in more else "steps")
    expected = expected.round_to(4) if "--round-to" in more else expected
    assert (status, err) == (0, "")
    assert out.startswith(f"{path}: 20 updates, {expected.total_samples:,} samples, batch size at most")
    assert vbs.BatchTrace.from_csv(path) == expected


def test_the_facts_are_those_of_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    trace = vbs.BatchTrace.parse(SCHEDULE, 20)
    trace.to_csv(path)
    facts = {"steps": 20, "samples": trace.total_samples, "min": 6, "max": 12, "changes": 2}
    assert run_json("trace", "show", path) == {**facts, "fingerprint": trace.fingerprint}
    out = run_main("trace", "show", path)[1]
    assert "batch size   6 to 12, mean 8.200" in out
    assert "█" in out
    assert "█" not in run_main("trace", "show", path, "--no-picture")[1]


@pytest.mark.parametrize("source", [SCHEDULE, "64"])
def test_infinite_traces_are_shown(source: str, tmp_path: Path) -> None:
    facts = run_json("trace", "show", source)
    assert (facts["steps"], facts["samples"]) == (None, None)
    status, out, _ = run_main("trace", "show", source, "--png", tmp_path / "trace.png")
    assert status == 0
    assert "steps        infinite" in out
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_errors_are_one_line(tmp_path: Path) -> None:
    assert error_of("trace", "make", "5:8", "--steps", 3, "-o", tmp_path / "a.csv")[0] == 1
    assert error_of("trace", "make", SCHEDULE, "--steps", 3, "-o", tmp_path / "a.csv")[1].startswith(
        "--steps must be > 10"
    )
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    status, message = error_of("trace", "make", SCHEDULE, "--steps", 30, "-o", tmp_path / "file" / "a.csv")
    assert (status, "Not a directory" in message or "File exists" in message) == (1, True)
    status, message = error_of("trace", "make", SCHEDULE, "--steps", 30, "-o", tmp_path)
    assert message.startswith(f"'{tmp_path}' must be a file that can be written, got Is a directory; choose another")


def test_the_folder_of_a_file_is_created(tmp_path: Path) -> None:
    path = tmp_path / "some" / "where" / "trace.csv"
    assert run_main("trace", "make", SCHEDULE, "--steps", 30, "-o", path)[0] == 0
    assert len(vbs.BatchTrace.from_csv(path)) == 30


def test_a_link_is_followed_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    vbs.BatchTrace.constant(8, 3).to_csv(tmp_path / "trace.csv")
    (tmp_path / "link.csv").symlink_to(tmp_path / "trace.csv")
    assert run_main("trace", "make", SCHEDULE, "--steps", 30, "-o", tmp_path / "link.csv")[0] == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert len(vbs.BatchTrace.from_csv(tmp_path / "trace.csv")) == 30
    done = run("bash", "-c", f"vbs trace make '{SCHEDULE}' --steps 12 --out - | tail -n 1", cwd=tmp_path)
    assert done.stdout == "11,6\n"
    assert done.stderr.startswith("/dev/stdout: 12 updates, ")


@pytest.mark.parametrize("schedule", ["0:768 250B:1536", "0:128 100000000:256"])
def test_long_schedules_are_shown_at_once(schedule: str, tmp_path: Path) -> None:
    assert run_json("trace", "show", schedule)["changes"] == 1
    status, out, _ = run_main("trace", "show", schedule, "--png", tmp_path / "trace.png")
    assert (status, "█" in out) == (0, True)
    tokens = run_json("trace", "show", schedule, "--unit", "tokens", "--sequence-length", 4096)
    assert tokens["max"] == run_json("trace", "show", schedule)["max"]


def test_pictures_are_png_or_svg(tmp_path: Path) -> None:
    for suffix, beginning in (("png", b"\x89PNG"), ("PNG", b"\x89PNG"), ("svg", b"<?xml")):
        picture = tmp_path / f"trace.{suffix}"
        assert run_main("trace", "show", "64", "--no-picture", "--png", picture)[0] == 0
        assert picture.read_bytes().startswith(beginning)


@pytest.mark.parametrize("command", [["trace", "show"], ["capacity", "show"], ["simulate"]], ids=" ".join)
def test_a_picture_that_cannot_be_written_is_an_error_at_once(command: list[str], tmp_path: Path) -> None:
    """Before a file is read, and before a line is printed."""
    for path, message in [
        (tmp_path / "a.jpg", f"a picture must be a file that ends in .png or .svg, got '{tmp_path}/a.jpg'; rename it"),
        (tmp_path / "no" / "a.png", f"the folder of a picture must be there, got '{tmp_path}/no'; create it"),
    ]:
        found = error_of(*command, tmp_path / "absent.csv", "--png", path)
        assert found == (2, f"Invalid value for '--png': {message}; see vbs {' '.join(command)} --help")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("column", ["batchsize", "batch_size"])
def test_a_file_of_the_other_kind_of_trace_names_its_command(column: str, tmp_path: Path) -> None:
    batches, capacity = tmp_path / "batches.csv", tmp_path / "capacity.csv"
    batches.write_text(f"step,{column}\n0,64\n")
    capacity.write_text("seconds,nodes\n0,4\n60,4\n")
    simulate = ["simulate", batches, "--policy", "constant:8", "--samples-per-second", 9, "--ref-batchsize", 8]
    for command in (["capacity", "show", batches], ["capacity", "convert", batches, "--out", "-"], simulate):
        assert error_of(*command)[1] == (
            f"capacity trace ({batches}:1): a capacity trace must have numbers of nodes, not the batch sizes of a "
            f"batch trace, got 'step,{column}'; pass a log, or show this file with vbs trace show"
        )
    message = error_of("trace", "show", capacity)[1]
    assert message.startswith("TRACE must be a batch trace, got what looks like a capacity trace of the format csv (")
    assert message.endswith("; use vbs capacity show for that")
    capacity.write_text("a,b\n")
    assert error_of("trace", "show", capacity)[1].startswith(f"trace header ({capacity}:1) must have one column")
