"""How long a test may take: what is quick is in `make test`, and everything else is marked `slow`.

A test that is not marked and takes more of the processors than two `import torch`, alone and with the processes that it
waits for, is named by a line at the end; one that takes twice as much fails where the variable CI is set: a slow moment
of the machine fails nothing. Fixtures and first imports do not count, because they are there for other tests, too, nor
waiting, nor a forked process that is killed.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

# Whole paths that `make test` runs although they take longer: one for each thing that processes or compilers do.
WHOLE_PATHS = (
    "test/backend/test_xla.py::test_sums_are_exact_in_every_dtype_on_all_ranks",
    "test/checkpoint/test_checkpoint.py::test_processes_save_and_restore",
    "test/checkpoint/test_folder.py::test_a_killed_writer_leaves_an_intact_checkpoint",
    "test/cli/test_evaluate_command.py::test_trains_each_cell_once",
    "test/cli/test_report_command.py::test_a_report_of_the_whole_folder",
    "test/optim/test_compile.py::test_a_compiled_inner_step_equals_the_eager_one",
    "test/optim/test_elastic_world.py::test_the_updates_are_those_of_one_process",
    "test/optim/test_laws.py::",
    "test/test_layout.py::test_importing_",
    "test/test_preemption.py::test_all_ranks_stop_after_the_same_update_when_one_gets_a_signal",
    "test/test_readme.py::test_the_tour_trains",
)
ALLOWED = {"slow", "nightly", "cuda"}  # marks
FREE = (*WHOLE_PATHS, "test/integrations/")  # make test runs no trainers

_imported = 0.0  # seconds of this process in imports
_importing = False
_find_and_load = importlib._bootstrap._find_and_load  # type: ignore[attr-defined]


def _timed(name: str, import_: Any) -> Any:
    """Import a module that is not there yet; add the time to that of all imports."""
    global _imported, _importing
    if _importing:
        return _find_and_load(name, import_)
    began, _importing = time.thread_time(), True
    try:
        return _find_and_load(name, import_)
    finally:
        _imported, _importing = _imported + time.thread_time() - began, False


importlib._bootstrap._find_and_load = _timed  # type: ignore[attr-defined]


def _seconds() -> float:
    """Return what this process and the ones that it has waited for have used of the processors, without imports."""
    processes = sys.modules.get("helpers.processes")
    return sum(os.times()[:4]) + (processes.seconds_of_forked() if processes else 0.0) - _imported


@cache
def limit() -> float:
    """Return the seconds of two `import torch`."""
    before = os.times()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    after = os.times()
    return 2 * (after.children_user + after.children_system - before.children_user - before.children_system)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    began = _seconds()
    result = yield
    used = _seconds() - began
    free = item.nodeid.startswith(FREE) or ALLOWED & {mark.name for mark in item.iter_markers()}
    if used > 2 and not free and used > limit():  # no import takes less than a second
        most = f"{limit():.1f} s at most: make it quicker, or mark it slow, or nightly if others resemble it"
        line = f"{item.nodeid} takes {used:.1f} s of the processors, {most}"
        if os.environ.get("CI") and used > 2 * limit():
            pytest.fail(line, pytrace=False)
        item.user_properties.append(("takes long", line))
    return result  # type: ignore[return-value]
