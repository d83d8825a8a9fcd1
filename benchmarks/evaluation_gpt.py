"""Which rule for a small GPT with AdamW, while clouds give and take machines, and on a ramp?

    python benchmarks/evaluation_gpt.py --capacity-traces FOLDER --folder runs/gpt --jobs 2

As evaluation_large.py, under pieces of the same two traces and on a ramp, with batches of half to eight times those of
the reference. The GPT, that of the task `char-gpt`, reads the modules of Python's standard library, so that another
version trains on other texts. Its learning rate is the best of 2^-8 to 2^-4 at the reference's batch size, in five
seeds each, from 2000 on: mean losses 2.282, 2.221, 2.227, 2.296 and 2.450.

What is asked was written down before the trainings: `root`, `power:0.6`, `sqrt-sde`, `adamscale` and `linear` against
`constant` by the loss, in 18 seeds from 3000 on that nobody had looked at. An earlier evaluation, of 5 seeds at twice
this learning rate, had `sqrt-sde` ahead of `root` by 0.17 under one trace, which nine seeds see in 80 of 100 cases.
evaluation_gpt.jsonl.gz beside this file has the trainings.
"""

from __future__ import annotations

import argparse
from typing import Any

from evaluation_large import LOGS, arguments, options, train, under
from variable_batch_size.lab.evaluation import Cell, Experiment
from variable_batch_size.trace.schedule import first_steps

TASK, ARGUMENTS = "char-gpt", {"width": 32, "layers": 2}
REF_BATCHSIZE, MINIBATCH_SIZE, LR, SAMPLES = 16, 8, 2**-7, 2**13
SIZES = (8, 16, 32, 64, 128)  # of the ramp, a fifth of the samples each
RULES = ("constant", "root", "power:0.6", "sqrt-sde", "adamscale", "linear")
SEEDS = 18


def ramp() -> str:
    """Return the trace of the ramp."""
    thresholds = [(number * SAMPLES // len(SIZES), size) for number, size in enumerate(SIZES)]
    return " ".join(f"{step}:{size}" for step, size in first_steps(thresholds))


def cells(flags: argparse.Namespace) -> list[Cell]:
    """Return the trainings."""
    traces: dict[str, Any] = dict(under(log, flags.capacity_traces, REF_BATCHSIZE // 2, SAMPLES) for log in LOGS)
    traces[f"ramp from {SIZES[0]} to {SIZES[-1]}"] = ramp()
    facts = options(flags, SAMPLES) | {"lr": LR, "ref_batchsize": REF_BATCHSIZE, "minibatch_size": MINIBATCH_SIZE}
    return Experiment({TASK: ARGUMENTS}, traces, RULES, **facts).cells()


if __name__ == "__main__":
    given = arguments(__doc__, __file__, "runs/gpt", seeds=SEEDS)
    train(cells(given), given, "adamscale")
