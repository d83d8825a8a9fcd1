"""The command itself: what it imports, how it ends, and what it writes where."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer import BadParameter

import variable_batch_size as vbs
from helpers.commands import run
from helpers.console import error_of, run_main
from helpers.pages import ROOT
from variable_batch_size.cli import main as module
from variable_batch_size.cli.options import check_count, parse_duration

COMMANDS = [
    *("", "capacity", "trace", "checkpoint", "goodput", "plan", "simulate", "evaluate", "report", "trace show"),
    *("capacity show", "capacity convert", "capacity fetch", "capacity synthetic", "trace make"),
    *(
        "checkpoint show",
        "checkpoint verify",
        "checkpoint to-torch",
        "checkpoint from-torch",
        "checkpoint to-safetensors",
    ),
]
HEAVY = ["torch", "pandas", "matplotlib", "scipy"]


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["trace", "show", "0:8 9:16"],
        [
            *("simulate", str(ROOT / "traces" / "spot_example.json"), "--policy", "constant:64", "--notice", "9"),
            *("--samples-per-second", "9", "--ref-batchsize", "64"),
        ],
        ["plan", "0:8", "--dataset-size", "50", "--microbatch", "4", "--epochs", "2"],
    ],
    ids=lambda command: command[0],
)
def test_a_command_imports_no_more_than_it_needs(command):
    script = f"""
import sys
from variable_batch_size.cli.main import main
try:
    main({command})
finally:
    heavy = [name for name in {HEAVY} if name in sys.modules]
    assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow("starts processes")
def test_it_runs_as_a_program_and_as_a_module():
    modules = "variable_batch_size", "variable_batch_size.cli.main"
    for program in (["vbs"], *([sys.executable, "-m", name] for name in modules)):
        done = run(*program, "--version")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{vbs.__version__}\n", "")


def test_the_reader_of_a_pipe_may_stop():
    done = run("bash", "-c", "vbs plan 0:8 --dataset-size 50 --microbatch 4 --epochs 2 --world 1-4096 | head -n 1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "epochs       2\n", "") or done.stdout.startswith(
        "epochs"
    )
    assert done.stderr == ""


@pytest.mark.parametrize(("args", "status"), [([], 2), (["--help"], 0), (["trace"], 2), (["plan", "-h"], 0)])
def test_help_is_printed(args, status):
    found, out, err = run_main(*args)
    assert (found, err) == (status, "")
    assert "Usage: vbs" in out


@given(st.floats(0, 1e9), st.sampled_from([("", 1), ("s", 1), ("m", 60), ("h", 3600), ("d", 86400)]))
def test_a_duration_may_have_a_unit(number, unit):
    suffix, seconds = unit
    assert parse_duration(f"{number}{suffix}") == parse_duration(f" {number} {suffix}") == number * seconds
    assert parse_duration(number) == number
    assert {parse_duration(text) for text in ("1.5h", ".0625d", "90m", "1h30m", "1h 29m 60s")} == {5400}
    for wrong in ("2w", "-3", "inf", "nan", "1_0", "", "1e999", "1.5 h 3", "h", "30m1h", "1h1h"):
        with pytest.raises(
            BadParameter, match=r"a duration must be a time >= 0 with the largest .*, got .*; pass 90, 90s, 10m, 1h30m"
        ):
            parse_duration(wrong)


@pytest.mark.parametrize(("text", "number"), [("60k", 60_000), ("60K", 60_000), ("1.5M", 1_500_000), ("7", 7)])
def test_a_count_may_have_a_unit(text, number):
    assert check_count(text) == number
    for wrong in (f"-{text}", f"{text}x", "0.5", ""):
        with pytest.raises(BadParameter, match=r"it must be an integer >= 1, got .*; pass one such as 512 or 60k"):
            check_count(wrong)


def test_commas_and_repetition_are_the_same():
    plan = ("plan", "64", "--dataset-size", "60k", "--microbatch", 32, "--max-updates", 3, "--json")
    joined, apart = (run_main(*plan, *more)[1] for more in (["--world", "8,1-2"], ["--world", "1-2", "--world", "8"]))
    assert joined == apart
    assert [world["ranks"] for world in json.loads(joined)["worlds"]] == [1, 2, 8]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_has_no_types_of_python(command):
    out = run_main(*command.split(), "--help")[1]
    assert "Usage: vbs" in out
    assert not re.findall(r"<\w+|TEXT|BOOLEAN|INTEGER", out)


def test_a_command_of_a_group_is_pointed_to():
    assert error_of("convert", "a.json") == (
        2,
        "the command must be one of vbs --help, got convert; use vbs capacity convert",
    )


DURATIONS = {
    "simulate": [
        *("--restart", "--save", "--save-every", "--notice", "--grow-every", "--start", "--stop", "--max-gap"),
        *("--mean-up", "--mean-down", "--duration", "--bulk-every", "--communication-seconds"),
    ],
    "capacity convert": ["--start", "--stop", "--max-gap", "--resample", "--communication-seconds"],
    "capacity show": ["--start", "--stop", "--max-gap"],
    "capacity synthetic": ["--mean-up", "--mean-down", "--duration", "--bulk-every"],
    "plan": ["--communication-seconds"],
    "evaluate": ["--restart", "--save", "--save-every", "--notice", "--grow-every", "--communication-seconds"],
}


@pytest.mark.parametrize("command", DURATIONS)
def test_every_option_in_seconds_is_a_duration(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    options = [line.split() for line in run_main(*command.split(), "--help")[1].splitlines()]
    found = {line[line.index(name) - 1] for line in options for name in ("DURATION", "DURATIONS") if name in line}
    assert found == set(DURATIONS[command])
    for option in DURATIONS[command]:
        for wrong in ("2w", "-3"):
            status, message = error_of(*command.split(), option, wrong)
            assert (status, message) == (
                2,
                f"Invalid value for '{option}': a duration must be a time >= 0 with the largest unit first, "
                f"got {wrong!r}; pass 90, 90s, 10m, 1h30m or 2d; see vbs {command} --help",
            )


def test_a_missing_extra_is_named(monkeypatch):
    def missing(library, extra):
        raise ModuleNotFoundError(f"this needs {library}, ...[{extra}]")

    monkeypatch.setattr(module, "import_extra", missing)
    assert error_of("--help") == (1, "this needs typer, ...[cli]")


def test_warnings_are_one_line(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("step,batchsize\n0,4\n1,4\n0,4\n1,4\n")
    done = run("vbs", "trace", "show", str(path))
    assert done.returncode == 0
    assert done.stderr.startswith("vbs: warning: The column step begins again at 0 in row 3")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow("starts processes")
def test_completion_scripts_are_printed():
    done = run("bash", "-c", "_VBS_COMPLETE=complete_bash COMP_WORDS='vbs tr' COMP_CWORD=1 vbs")
    assert (done.returncode, done.stdout.split()) == (0, ["trace"])
    words = "vbs capacity show --format b"
    done = run("bash", "-c", f"_VBS_COMPLETE=complete_bash COMP_WORDS='{words}' COMP_CWORD=4 vbs")
    assert done.stdout.split() == ["bamboo-events", "bamboo-counts"]


@pytest.mark.parametrize("error", [MemoryError("8 TiB"), OverflowError("inf"), AttributeError("x"), UserWarning("odd")])
def test_no_error_has_a_traceback(error, monkeypatch):
    def fail(*args):
        raise error

    monkeypatch.setattr(module, "import_extra", fail)
    status, message = error_of("--help")
    assert status == 1
    assert str(error) in message
    monkeypatch.setenv("VBS_TRACEBACK", "1")
    if not isinstance(error, MemoryError):
        with pytest.raises(type(error)):
            module.main(["--help"])


def test_a_file_that_is_overwritten_is_named(tmp_path):
    path, picture = tmp_path / "trace.csv", tmp_path / "trace.png"
    make = ("trace", "make", "0:8 9:16", "--steps", 20, "--out", path)
    show = ("trace", "show", path, "--png", picture)
    for command, file in ((make, path), (show, picture)):
        assert [run_main(*command)[2] for _ in range(2)] == ["", f"{file}: overwritten\n"]


@pytest.mark.parametrize("redirection", [">&-", "2>&-"])
def test_closed_streams_are_no_error(redirection):
    done = run("bash", "-c", f"vbs trace show 0:8 {redirection}")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_a_picture_in_another_encoding_is_no_error():
    done = run("vbs", "trace", "show", "0:8", PYTHONIOENCODING="cp1252")
    assert (done.returncode, done.stderr) == (0, "")
