"""Many cases over several processes, each within a time limit."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from fuzz.search import Outcome, run_case

SECONDS = 120  # that a case may take
EXPECTED_WARNINGS: list[tuple[str, type[Warning]]] = [  # beginning of the message, category
    ("Skipped an update", RuntimeWarning),
    ("The gradient noise could not be estimated", UserWarning),
    ("The controller got the same gradient noise", UserWarning),
    ("Batch normalization gets microbatches", UserWarning),
    ("AdaScale's gain is meant for SGD", UserWarning),
    (".*fork.*", DeprecationWarning),
]


def run_all(cases: list[int], without: frozenset[str], processes: int) -> Iterator[Outcome]:
    """The outcomes of all cases, over several processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=prepare) as pool:
        yield from pool.map(partial(run_within_time, without=without), cases, chunksize=16)


def prepare() -> None:
    """Use one thread a process, and log no restores; any warning that is not expected is an error."""
    torch.set_num_threads(1)
    logging.getLogger("variable_batch_size").setLevel(logging.ERROR)
    warnings.simplefilter("error")
    for message, category in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)


def run_within_time(seed: int, without: frozenset[str]) -> Outcome:
    """Run a case; one that hangs is a finding too."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"the case takes more than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return run_case(seed, without)
    except Exception as error:  # of the search itself
        return Outcome(seed, "finding", frozenset(), f"the search failed: {type(error).__name__}: {error}"[:300])
    finally:
        signal.alarm(0)
