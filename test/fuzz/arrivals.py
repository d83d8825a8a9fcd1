"""`python -m fuzz.arrivals`: random batches that arrive, at one to four ranks, against the plain loop over all rows."""

from __future__ import annotations

import argparse
import random
import sys

import numpy as np
import torch
from tqdm import tqdm

from helpers.arrivals import Arriving
from helpers.reference import network
from variable_batch_size.testing import run_ranks

TOLERANCE = 1e-12  # relative to the largest weight


def difference(case: Arriving) -> str:
    """Return how a training differs from the plain loop, or nothing."""
    models = [network() for _ in range(case.world)]
    weights, samples, updates = case.expected()
    try:
        optimizers = run_ranks(lambda backend: case.train(backend, models[backend.world.rank]), case.world)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    largest = max(float(np.abs(array).max()) for array in weights)
    for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        if (optimizer.samples, optimizer.updates) != (samples, updates):
            return f"rank {rank} counts {optimizer.samples} in {optimizer.updates}, not {samples} in {updates}"
        pairs = zip(model.parameters(), weights, strict=True)
        worst = max(float(np.abs(one.detach().numpy() - other).max()) for one, other in pairs)
        if not worst <= TOLERANCE * largest:
            return f"rank {rank} differs by {worst:.1e}"
    return ""


def main() -> int:
    """Run cases; return 1 if one differs."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.arrivals", description=__doc__)
    parser.add_argument("--number", type=int, default=1000, help="how many random trainings to run")
    parser.add_argument("--seed", type=int, help="the seed of the search (default: another one each time)")
    parser.add_argument("--case", type=int, help="run this training only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seed = random.randrange(2**31) if arguments.seed is None else arguments.seed
    rng = random.Random(seed)
    cases = [rng.randrange(2**40) for _ in range(arguments.number)] if arguments.case is None else [arguments.case]
    print(f"search seed {seed}")
    found = 0
    for number in tqdm(cases):
        if message := difference(Arriving.drawn(number, 1 + number % 4)):
            found += 1
            print(f"python -m fuzz.arrivals --case {number}  # {message}")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
