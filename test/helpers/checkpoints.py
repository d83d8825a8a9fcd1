"""What the tests of checkpoints share."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import variable_batch_size as vbs
from helpers.reference import Training, training
from variable_batch_size.checkpoint import writer
from variable_batch_size.checkpoint.folder import Folder, update_of

STATE = "tensors-0.safetensors"


def checkpoint(folder: Path | str, run: Training, /, **options: Any) -> vbs.Checkpoint:
    return vbs.Checkpoint(folder, model=run.model, optimizer=run.optimizer, sampler=run.sampler, **options)


def save_checkpoint(folder: Path | str, run: Training, /, **options: Any) -> None:
    """Save one, and close it."""
    with checkpoint(folder, run, **options) as saves:
        saves.save()


def restore_checkpoint(folder: Path | str, run: Training, /, **options: Any) -> None:
    """Restore one, which has to be there."""
    with checkpoint(folder, run, **options) as saves:
        assert saves.restore()


class Held:
    """A part of a user, whose state is what it holds."""

    def __init__(self, held: Any = None) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        self.held = state


def updates(folder: Path | str) -> list[int]:
    """Return the updates of the checkpoints that are there, the oldest first; all of them have to be intact."""
    place = Folder(folder)
    assert all(map(place.is_intact, place.names()))
    return [update_of(name) for name in reversed(place.names())]


def path_of(folder: Path, update: int) -> Path:
    """Return the newest checkpoint of an update."""
    place = Folder(folder)
    return folder / next(name for name in place.names() if update_of(name) == update)


def intact(path: Path | str) -> bool:
    """Return whether a checkpoint is intact."""
    parent, _, name = str(path).rpartition("/")
    return Folder(parent).is_intact(name)


def names(folder: Path) -> list[str]:
    """Return the names in the folder except those of its writer and of the events."""
    own = (".lock", ".writer-*", "events.jsonl")
    return sorted(path.name for path in folder.iterdir() if not any(map(path.match, own)))


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What an operator has been told since the last call."""
    found = [message for name, _, message in caplog.record_tuples if name == "variable_batch_size"]
    caplog.clear()
    return found


def messages(text: str) -> list[str]:
    """The lines of standard error, without the time, rank and update with which each message of the library begins."""
    return [re.sub(r"^\S+ \S+,\d+ (rank \d+(, update \d+)?: )?", "", line) for line in text.splitlines()]


def two_saved(folder: Path) -> Path:
    """Save the checkpoints of updates 1 and 2 in `folder`, and return `folder`."""
    run = training()
    with checkpoint(folder, run) as saves:
        for _ in range(2):
            run.run(1)
            saves.save()
    return folder


def truncate_state(folder: Path) -> None:
    """Damage a checkpoint whose path this is."""
    os.truncate(folder / STATE, (folder / STATE).stat().st_size // 2)


HEAD = """
import resource, signal, sys
from pathlib import Path
import torch
import variable_batch_size as vbs
from helpers.reference import training
from helpers.checkpoints import checkpoint, names, updates
from variable_batch_size.testing import run_ranks
folder = Path(sys.argv[1])
"""


def start(script: str, *arguments: object, new_session: bool = False) -> subprocess.Popen[str]:
    """Start a process that runs HEAD and `script`; the first argument is the folder."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(vbs.__file__).parent.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", HEAD + script, *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=new_session, **pipes)


def as_another_process() -> None:
    """Let this process be another one than that of the writers so far."""
    writer._open.clear()
    writer._own.clear()


def resealed(text: str, version: int | str) -> str:
    """Return the JSON of a rank with another version, as a later release would write it."""
    body = text.rpartition(', "seal"')[0].replace('"version": 2', f'"version": {version}')
    return f'{body}, "seal": "{hashlib.sha256(f"{body}}}".encode()).hexdigest()}"}}\n'
