"""Which rule for a small GPT with AdamW, while clouds give and take machines, and on a ramp?

    python benchmarks/evaluation_gpt.py --capacity-traces FOLDER --folder runs/gpt --jobs 2

As evaluation_large.py, under pieces of the same two traces and on a ramp, with batches of half to eight times those of
the reference. The GPT, that of the task `char-gpt`, reads the modules of Python's standard library, so that another
version trains on other texts. The learning rate is the best power of 2 at the reference's batch size.
evaluation_gpt.jsonl.gz beside this file has its trainings.
"""

from __future__ import annotations

import argparse
from typing import Any

from evaluation_large import LOGS, arguments, options, train, under
from variable_batch_size.lab.evaluation import Cell, Experiment
from variable_batch_size.trace.schedule import first_steps

TASK, ARGUMENTS = "char-gpt", {"width": 32, "layers": 2}
REF_BATCHSIZE, MINIBATCH_SIZE, LR, SAMPLES = 16, 8, 2**-6, 2**13
SIZES = (8, 16, 32, 64, 128)  # of the ramp, a fifth of the samples each
RULES = ("constant", "root", "adamscale", "invariant-adam", "sqrt-sde", "root-half-life", "surge", "linear")


def ramp() -> str:
    """Return the trace of the ramp."""
    thresholds = [(number * SAMPLES // len(SIZES), size) for number, size in enumerate(SIZES)]
    return " ".join(f"{step}:{size}" for step, size in first_steps(thresholds))


def cells(flags: argparse.Namespace) -> list[Cell]:
    """Return the trainings."""
    traces: dict[str, Any] = dict(under(log, flags.capacity_traces, REF_BATCHSIZE // 2, SAMPLES) for log in LOGS)
    traces[f"ramp from {SIZES[0]} to {SIZES[-1]}"] = ramp()
    own: dict[str, Any] = {"lr": LR, "ref_batchsize": REF_BATCHSIZE, "minibatch_size": MINIBATCH_SIZE}
    facts = options(flags, SAMPLES) | {"lr_factors": (1.0,)}
    return Experiment({TASK: ARGUMENTS}, traces, RULES, **facts, **own).cells()


if __name__ == "__main__":
    given = arguments(__doc__, __file__, "runs/gpt")
    train(cells(given), given, "adamscale")
