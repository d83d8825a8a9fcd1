"""`python -m fuzz`: search, or run one case again."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
import sys
import time
from collections import Counter

from tqdm import tqdm

from fuzz.case import FEATURES
from fuzz.drawing import draw_case
from fuzz.processes import prepare, run_all
from fuzz.search import Outcome, run_case, train

SHOWN = 5  # findings of a kind


def main() -> int:
    """Run cases; return 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--number", type=int, default=1000, help="how many random trainings to run")
    parser.add_argument("--seed", type=int, help="the seed of the search (default: another one each time)")
    parser.add_argument("--case", type=int, help="run this training only, and show what it is and where it fails")
    parser.add_argument("--without", nargs="*", default=[], choices=sorted(FEATURES), help="features to leave out")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    arguments = parser.parse_args()
    without = frozenset(arguments.without)
    if arguments.case is not None:
        return show(arguments.case, without)
    seed = random.randrange(2**31) if arguments.seed is None else arguments.seed
    rng = random.Random(seed)
    cases = [rng.randrange(2**40) for _ in range(arguments.number)]
    print(f"search seed {seed}")
    began = time.monotonic()
    outcomes = list(tqdm(run_all(cases, without, arguments.processes), total=len(cases), smoothing=0.05))
    return report(outcomes, without, time.monotonic() - began)


def report(outcomes: list[Outcome], without: frozenset[str], seconds: float) -> int:
    """Print the counts by feature and each finding's reproducer."""
    kinds = Counter(outcome.kind for outcome in outcomes)
    print(f"{dict(kinds)}, {seconds / max(1, len(outcomes)) * 1000:.0f} ms a case")
    findings = [outcome for outcome in outcomes if outcome.kind == "finding"]
    cases = Counter(feature for outcome in outcomes for feature in outcome.features)
    failed = Counter(feature for outcome in findings for feature in outcome.features)
    for feature in FEATURES:
        print(f"  {feature:18}{cases[feature]:7} cases{failed[feature]:7} findings")
    flags = f" --without {' '.join(sorted(without))}" if without else ""
    alike: dict[str, list[Outcome]] = {}
    for outcome in findings:
        alike.setdefault(re.sub(r"[0-9.e-]+", "#", outcome.message)[:60], []).append(outcome)
    for group in sorted(alike.values(), key=len):
        print(f"{len(group)} findings like")
        for outcome in group[:SHOWN]:
            print(f"  python -m fuzz --case {outcome.seed}{flags}  # {outcome.message}")
    return int(bool(findings))


def show(seed: int, without: frozenset[str]) -> int:
    """Print a case and its outcome, with the traceback of an exception."""
    prepare()
    case = draw_case(seed, without)
    for name, value in vars(case).items():
        print(f"{name}: {value}")
    outcome = run_case(seed, without)
    print(f"{outcome.kind}: {outcome.message}")
    if outcome.kind == "finding":
        train(case)  # raises what it raised
    return int(outcome.kind == "finding")


if __name__ == "__main__":
    sys.exit(main())
