"""Policy gradients on a maze (examples/rollouts.py): all groups with a learning-rate rule, trimmed, or padded?

Every way is given the same number of rollouts. Its learning rate at 16 groups is the one of RATES that is best on three
seeds, and it is judged on ten others: by the share of rollouts that succeed in the last ten of 60 updates.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import numpy as np
import torch
from joblib import Parallel, delayed

from records import spread
from results import record

EXAMPLE = Path(__file__).parents[1] / "examples" / "rollouts.py"
RATES = (0.01, 0.02, 0.04, 0.08, 0.16)
WAYS = {
    "all groups, constant": ("constant", "none"),
    "all groups, root": ("root", "none"),
    "all groups, linear": ("linear", "none"),
    "all groups, AdamScale": ("adamscale", "none"),
    "trimmed to microbatches of 8": ("constant", "trim"),
    "padded to 48 groups": ("constant", "pad"),
}
TUNING, JUDGING = range(3), range(10, 20)


def score(way: str, lr: float, seed: int, updates: int) -> float:
    """Return the share of rollouts that succeed in the last ten updates."""
    torch.set_num_threads(1)
    rule, cut = WAYS[way]
    shares, _ = runpy.run_path(str(EXAMPLE))["train"](rule, lr, seed, updates=updates, cut=cut)
    return float(np.mean(shares[-10:]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    flags = parser.parse_args()
    pool = Parallel(n_jobs=flags.jobs)
    for way in WAYS:
        tried = [(lr, seed) for lr in RATES for seed in TUNING]
        found = pool(delayed(score)(way, lr, seed, flags.updates) for lr, seed in tried)
        best = RATES[int(np.argmax(np.reshape(found, (len(RATES), -1)).mean(axis=1)))]
        judged = pool(delayed(score)(way, best, seed, flags.updates) for seed in JUDGING)
        record("rollouts of a maze that succeed", way, spread(judged), "share", on=f"lr {best:g} at 16 groups")
