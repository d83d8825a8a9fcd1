"""Trainings of an evaluation that nobody ran: the loss of each rule, trace and seed is given."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

TRACES = {"64": [64], "0:64 40:256": [64, 256], "spot": [32, 512, 128, 256]}  # name -> batch sizes, in equal parts
START = 2.3  # loss of the untrained model
ROWS, SAMPLES = 21, 20_000
ENVIRONMENT = {
    "python": "3.11.7",
    "torch": "2.9.0",
    "variable_batch_size": "0.1.0",
    "commit": "0123abc",
    "cpu": "a CPU",
}


Kind = tuple[str, str] | tuple[str, str, float]  # trace, rule and factor on the learning rate


def trainings(losses: Mapping[Kind, Sequence[float | None]], **columns: Any) -> pd.DataFrame:
    """Return the trainings of an evaluation, as `evaluation.records.read` does, with other columns the same of all.

    `losses`: final losses by seed of each kind of trainings; nan of those that diverged, None of those killed.
    """
    rows = [
        _training(kind[0], kind[1], kind[2] if len(kind) > 2 else 1.0, seed, loss, columns)
        for kind, own in losses.items()
        for seed, loss in enumerate(own)
    ]
    return pd.DataFrame(rows)


def _training(
    trace: str, rule: str, factor: float, seed: int, loss: float | None, columns: Mapping[str, Any]
) -> dict[str, Any]:
    share = np.arange(ROWS) / (ROWS - 1)
    known = loss is not None and np.isfinite(loss)
    values = START + ((loss if known else START) - START) * (1 - np.exp(-5 * share)) / (1 - np.exp(-5))
    values[-1] = loss if known else np.nan
    sizes = np.array(TRACES.get(trace, [64]))
    size = sizes[np.maximum(np.ceil(share * len(sizes)).astype(int) - 1, 0)]
    scale = {"linear": size / 64, "root": np.sqrt(size / 64)}.get(rule, np.ones(ROWS))
    curve: dict[str, list[Any]] = {
        "samples": np.round(share * SAMPLES).astype(int).tolist(),
        "batch_size": [None, *size[1:].tolist()],
        "lr": [None, *(0.1 * factor * scale[1:]).tolist()],
        "loss": [None if np.isnan(value) else value for value in values.tolist()],
        "accuracy": [None if np.isnan(value) else value for value in (1 - values / 2.6).tolist()],
    }
    name = f"{trace} {rule} {factor} {seed}"
    return {
        "key": hashlib.sha256(name.encode()).hexdigest()[:16],
        "plan": 0,
        "task": "simulated",
        "task_version": "",
        "trace": trace,
        "trace_fingerprint": trace,
        "end": "samples",
        "rule": rule,
        "lr": 0.1 * factor,
        "lr_factor": factor,
        "warmup": 0,
        "seed": seed,
        "samples": SAMPLES,
        "ref_batchsize": 64,
        "start": "",
        "status": "killed" if loss is None else "finished" if known else "diverged",
        "wall_seconds": 1.5,
        "curve": curve,
        "untrained": START,
        "environment": ENVIRONMENT,
        **columns,
    }
