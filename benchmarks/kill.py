"""Does a training that is killed at any instant go on exactly, and how much does it do again?

Several trainings side by side, each of them in processes of torchrun and gloo that are killed, all at once or one
worker, at random instants from their start to their saves, and that go on in a world of 1 to 4. At the end every
sample has counted exactly once in every epoch, every update has been made once, and the parameters are those of one
unbroken process: see test/kills.py, which asserts it. With `--signal` they are asked to stop, which no update may be
lost by.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from helpers.killed_training import Run
from helpers.kills import ENDINGS, Campaign, Kill
from results import record

# The microbatch is a part of AdaScale's result, so it stays; what reads no noise takes another one at every start.
TRAININGS: list[tuple[str, str, tuple[int, ...]]] = [
    ("RootRuleOptimizer", "Adam", (1, 2, 3, 4, 5, 8)),
    ("AdaScaleOptimizer", "SGD", (4,)),
]

_printing = threading.Lock()


def kill(number: int, kills: int, seed: int, folder: Path, endings: list[str], failed: threading.Event) -> list[Kill]:
    """Kill training `number` so many times, and let it finish, unless another one has failed."""
    rng = random.Random(seed)
    kind, inner, minibatch_sizes = TRAININGS[number % len(TRAININGS)]
    sizes = tuple(rng.randint(1, 40) for _ in range(50))
    run = Run(kind, inner, sizes, rng.randint(50, 300), rng.getrandbits(32), every=3, numbers=1_000_000)
    campaign = Campaign(run, folder, rng.getrandbits(64), minibatch_sizes=minibatch_sizes)
    for turn in range(kills):
        if failed.is_set():
            return []
        (world,) = rng.choices((1, 2, 3, 4), (4, 3, 2, 1))
        (phase,) = rng.choices(("start", "restore", "training"), (1, 1, 8))
        done = campaign.kill(world, rng.choice(endings), phase)
        with _printing:
            print(f"training {number}, kill {turn + 1}: {done}", flush=True)
    campaign.finish(rng.randint(1, 4))
    return campaign.kills


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, help="how many, by default 200, with --signal 50")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signal", action="store_true", help="ask by SIGTERM or SIGUSR1, in the place of SIGKILL")
    parser.add_argument("--trainings", type=int, default=2, help="side by side")
    flags = parser.parse_args()
    print(f"seed {flags.seed}")
    number_of_kills = flags.kills or (50 if flags.signal else 200)
    endings = [name for name, ending in ENDINGS["torchrun"].items() if ending.asked == flags.signal]
    failed = threading.Event()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(flags.trainings) as pool:
        jobs = []
        for number in range(flags.trainings):
            own = Path(folder) / str(number)
            own.mkdir()
            share = len(range(number, number_of_kills, flags.trainings))
            jobs.append(pool.submit(kill, number, share, flags.seed * 1000 + number, own, endings, failed))
        try:
            kills = [done for job in as_completed(jobs) for done in job.result()]
        finally:
            failed.set()
    again = [done.at - done.goes_on for done in kills if done.at]
    seconds = sorted(done.notice for done in kills if done.notice is not None)
    notices = (
        f"; saved {statistics.median(seconds):.2f} s after the signal, {seconds[-1]:.2f} at most" if seconds else ""
    )
    record(
        "trainings in torchrun's processes, a checkpoint every 3 updates, ended by "
        f"{'SIGTERM and SIGUSR1' if flags.signal else 'SIGKILL'}",
        f"{len(kills)} times, {len(again)} in training, {sum(done.saving for done in kills)} during a save: every "
        f"sample once an epoch, the parameters of one process; {sum(again) / len(again):.2f} updates again in the "
        f"mean, {max(again)} at most{notices}",
    )
