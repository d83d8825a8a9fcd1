"""Does a training that is killed at any instant resume exactly, and how many updates does it repeat?

Several trainings run in parallel, each in processes of torchrun and gloo, whose gradients are summed plainly, by DDP or
by FSDP2. They are killed, all processes or one worker, at random instants between start and save, and resume in worlds
of 1 to 4 ranks, summed in another way. At the end every sample has been used exactly once in every epoch, every update
has been made once, and the parameters equal those of one uninterrupted process: test/helpers/kills.py asserts it. With
`--signal` the trainings are asked to stop, and may lose no update; with `--s3` they save to a server of S3.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from pathlib import Path

import pytest

from helpers.killed_training import KilledTraining
from helpers.kills import ENDINGS, Campaign, Kill
from helpers.object_stores import s3
from records import Measured
from results import KILLS, REPEATED, SAVED, SAVED_TO_S3, record

# The result of AdaScale depends on the microbatch, so it is fixed; the other training draws one at every start.
TRAININGS: list[tuple[str, str, tuple[int, ...]]] = [
    ("RootRuleOptimizer", "Adam", (1, 2, 3, 4, 5, 8)),
    ("AdaScaleOptimizer", "SGD", (4,)),
]

_printing = threading.Lock()


def kill(
    number: int, kills: int, seed: int, folder: Path, url: str, endings: list[str], failed: threading.Event
) -> list[Kill]:
    """Kill training `number` this many times and let it finish, unless another training has failed."""
    rng = random.Random(seed)
    kind, inner, minibatch_sizes = TRAININGS[number % len(TRAININGS)]
    sizes = tuple(rng.randint(1, 40) for _ in range(50))
    run = KilledTraining(
        kind,
        inner,
        sizes,
        dataset_size=rng.randint(50, 300),
        seed=rng.getrandbits(32),
        every=3,
        numbers=1_000_000,
        location=f"{url}/{number}" if url else "",
    )
    sums = ("plain", "ddp", "fsdp")
    campaign = Campaign(run, folder, rng.getrandbits(64), minibatch_sizes=minibatch_sizes, sums=sums)
    for index in range(kills):
        if failed.is_set():
            return []
        (world,) = rng.choices((1, 2, 3, 4), (4, 3, 2, 1))
        (phase,) = rng.choices(("start", "restore", "training"), (1, 1, 8))
        done = campaign.kill(world, rng.choice(endings), phase)
        with _printing:
            print(f"training {number}, kill {index + 1}: {done}", flush=True)
    campaign.finish(rng.randint(1, 4))
    return campaign.kills


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, help="number of kills; by default 200, with --signal 50")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signal", action="store_true", help="send SIGTERM or SIGUSR1 instead of SIGKILL")
    parser.add_argument("--s3", action="store_true", help="save to a server of S3 on this machine, not to the disk")
    parser.add_argument("--trainings", type=int, default=2, help="number of parallel trainings")
    flags = parser.parse_args()
    print(f"seed {flags.seed}")
    number_of_kills = flags.kills or (50 if flags.signal else 200)
    endings = [name for name, ending in ENDINGS["torchrun"].items() if ending.graceful == flags.signal]
    failed = threading.Event()
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        s3(patch) if flags.s3 else nullcontext("") as url,
        ThreadPoolExecutor(flags.trainings) as pool,
    ):
        jobs = []
        for number in range(flags.trainings):
            own = Path(folder) / str(number)
            own.mkdir()
            share = len(range(number, number_of_kills, flags.trainings))
            jobs.append(pool.submit(kill, number, share, flags.seed * 1000 + number, own, url, endings, failed))
        try:
            kills = [done for job in as_completed(jobs) for done in job.result()]
        finally:
            failed.set()
    repeated = [done.update - done.resumes_from for done in kills if done.update]
    seconds = sorted(done.saved_after for done in kills if done.saved_after is not None)
    signals = "SIGTERM and SIGUSR1" if flags.signal else "SIGKILL"
    own = {"what": "trainings under torchrun", "on": signals + SAVED_TO_S3 * flags.s3}

    def answer(question: str, unit: str, values: dict[str, float], n: int | None = None, note: str = "") -> None:
        for case, value in values.items():
            record(question, measured=Measured(value, n=n), unit=unit, case=case, note=note, **own)
            note = ""  # only in the first row

    answer(REPEATED, "updates", {"mean": statistics.mean(repeated), "most": max(repeated)}, len(repeated))
    done = {"all": len(kills), "after the first update": len(repeated)}
    if not flags.s3:  # there a save leaves no folder by which it is seen
        done["during a save"] = sum(kill.saving for kill in kills)
    answer(KILLS, "kills", done, note="every sample used once an epoch, parameters as in one process")
    if seconds:
        answer(SAVED, "s", {"median": statistics.median(seconds), "most": seconds[-1]}, len(seconds))
