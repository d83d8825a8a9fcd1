"""Kill processes of an evaluation at random instants, and start it again when it ends, until all is trained.

    python -m helpers.killed_evaluation FOLDER '{"tasks": [...], "traces": [...], "rules": [...]}' --kills 20 --jobs 2

It prints how many processes were killed. The arguments are those of `Experiment`. Any moment of a training or of a
write may be hit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from joblib.externals.loky import get_reusable_executor

from variable_batch_size.lab.evaluation import Experiment, run

WORKERS = {"joblib": b"LokyProcess", "ray": b"ray::_line"}  # in the command line of a process that trains
EXPECTED = ("was killed", "is in use by")  # errors of an evaluation of which one process was killed


def kill(flags: argparse.Namespace) -> int:
    """Kill so many processes, and let the evaluation end; return how many it took: fewer if it ended before."""
    draw, killed = random.Random(flags.seed), 0
    saved = Path(flags.folder, "checkpoints")
    while True:
        child, kinds = start(flags), ["all"] if flags.jobs == 1 else ["all", "worker"]
        while (status := ended(child)) is None:
            time.sleep(draw.uniform(*flags.seconds) if killed < flags.kills else 0.1)
            late = killed % 2 == 0 or any(saved.glob("*/update-*"))  # so that something is restored, however slow it is
            if killed < flags.kills and late and kinds:
                kind = "worker" if flags.engine == "ray" else draw.choice(kinds)
                killed += send(child, kind, WORKERS[flags.engine], draw)
                if kind == "worker":
                    kinds = kinds[:1]  # a second death may be that of the same training, which is then killed
        if status == 0:
            return killed


def start(flags: argparse.Namespace) -> int:
    """Run the evaluation in a fork of this process, which has imported torch; return its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        experiment = Experiment(**flags.experiment)
        save_every: Any = flags.save_every
        run(experiment, flags.folder, jobs=flags.jobs, engine=flags.engine, save_every=save_every, progress=False)
        status = 0
    except BaseException as error:
        status = 1 if any(text in str(error) for text in EXPECTED) else 2
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        if flags.jobs > 1:  # else idle processes hold the pipes of who reads the output
            get_reusable_executor().shutdown(kill_workers=True)
        os._exit(status)


def ended(child: int) -> int | None:
    """Return the status of a process that has ended, None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 1, -signal.SIGKILL), "the evaluation failed, see above"
    return code


def send(child: int, kind: str, worker: bytes, draw: random.Random) -> int:
    """Kill all processes of an evaluation, or one that trains; return how many kills this is.

    Without its first process alone, joblib's others would train the next few cells.
    """
    family = descendants(child)
    if kind == "worker":
        family = [pid for pid in family if worker in command(pid)]
        family = [draw.choice(family)] if family else []
    else:
        family = [child, *family]
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return int(bool(family))


def descendants(pid: int) -> list[int]:
    """Return the processes that a process and its children have started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("experiment", type=json.loads)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--engine", choices=["joblib", "ray"], default="joblib")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=2, help="updates")
    parser.add_argument("--seconds", type=float, nargs=2, default=[0.01, 0.2], help="between two kills")
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)
    print(kill(parser.parse_args()))
