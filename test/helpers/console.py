"""The command `vbs`, called in this process."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any
from unittest import mock

from variable_batch_size.cli.main import main


def run_main(*args: object) -> tuple[int, str, str]:
    """Return the exit status of a command line, and what it printed to standard output and standard error."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("warnings.showwarning"):
        try:
            main(list(map(str, args)))
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), err.getvalue()


def run_json(*args: object) -> Any:
    """Return what a command line prints with --json, which has to succeed."""
    status, out, err = run_main(*args, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def error_of(*args: object, silent: bool = True) -> tuple[int, str]:
    """Return the exit status of a command line and its error, which has to be one line, and all if `silent`."""
    status, out, err = run_main(*args)
    assert err.count("\n") == 1
    assert not (out and silent)
    assert err.startswith("vbs: error: ")
    return status, err.removeprefix("vbs: error: ").strip()
