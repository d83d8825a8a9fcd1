"""Records of an evaluation that nobody ran: the effect of each rule, trace and seed is known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from variable_batch_size.lab.evaluation import Record

EFFECTS = {"constant": 0.0, "adascale": -0.05, "root": -0.04, "linear": 0.06}  # on the final loss
TRACES = {"64": [64], "0:64 40:256": [64, 256], "spot": [32, 512, 128, 256]}  # name -> batch sizes, in equal parts
BEST_LR = {"64": 1.0, "0:64 40:256": 2.0, "spot": 2.0}  # where the constant rule has its least loss
CURVATURE = 0.03  # loss for each squared doubling of the learning rate away from it
START, END = 2.3, 0.5  # losses of the untrained model, and of the constant rule at the best learning rate
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
    """Return the trainings of an evaluation, as `evaluation.records.read` does.

    Args:
        losses: final losses by seed of each kind of trainings; nan of those that diverged, None of those killed.
        columns: other columns, the same of all trainings.
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
        "end": "samples",
        "rule": rule,
        "lr": 0.1 * factor,
        "lr_factor": factor,
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


def records(
    rules: Mapping[str, float] = EFFECTS,
    traces: Sequence[str] = tuple(TRACES),
    lrs: Sequence[float] = (1.0,),
    seeds: int = 3,
    *,
    task: str = "simulated",
    grid: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0),
    noise: float = 0.01,
    common: float = 0.02,
    divergence: Mapping[str, float] | None = None,
    seed: int = 0,
    **cell: Any,
) -> list[Record]:
    """Return a record for each rule at `lrs`, the constant one at `grid` too, for each trace and seed.

    Args:
        rules: rule -> effect on the final loss.
        traces: of TRACES.
        lrs: learning rates of all rules.
        seeds: trainings of each kind.
        task: name of the task.
        grid: learning rates of the constant rule.
        noise: standard deviation of the final loss.
        common: that of what all rules with the same seed and trace have in common.
        divergence: rule -> probability of diverging.
        seed: of the generator.
        cell: further fields of the cells.
    """
    rng = np.random.default_rng(seed)
    return list(_draw(rng, rules, traces, lrs, seeds, task, grid, noise, common, divergence or {}, cell))


def final_loss(rule: str, trace: str, lr: float, rules: Mapping[str, float] = EFFECTS) -> float:
    """Return the mean of the final loss."""
    return END + rules[rule] + CURVATURE * float(np.log2(lr / BEST_LR[trace])) ** 2


def _draw(
    rng: np.random.Generator,
    rules: Mapping[str, float],
    traces: Sequence[str],
    lrs: Sequence[float],
    seeds: int,
    task: str,
    grid: Sequence[float],
    noise: float,
    common: float,
    divergence: Mapping[str, float],
    more: Mapping[str, Any],
) -> Iterator[Record]:
    for trace, seed in product(traces, range(seeds)):
        shared = common * rng.normal()
        for rule, lr in product(rules, sorted({*lrs, *grid})):
            if lr not in lrs and rule != "constant":
                continue
            end = final_loss(rule, trace, lr, rules) + shared + noise * rng.normal()
            rows = int(rng.integers(3, ROWS)) if rng.random() < divergence.get(rule, 0.0) else ROWS
            cell = {"task": task, "task_arguments": {}, "trace": trace, "rule": rule, "seed": seed}
            cell |= {
                "lr": 0.1 * lr,
                "lr_factor": lr,
                "samples": SAMPLES,
                "ref_batchsize": 64,
                "minibatch_size": 16,
                **more,
            }
            yield _record(cell, end, rows)


def _record(cell: dict[str, Any], end: float, rows: int) -> Record:
    """Return the record of a loss that falls exponentially from START to `end`; one of fewer rows diverged."""
    share = np.arange(ROWS) / (ROWS - 1)  # of the samples
    loss = end + (START - end) * (np.exp(-5 * share) - np.exp(-5) * share)
    sizes = np.array(TRACES[cell["trace"]])
    size = sizes[np.maximum(np.ceil(share * len(sizes)).astype(int) - 1, 0)]  # of the updates before each row
    samples = np.round(share * SAMPLES).astype(int)
    updates = np.concatenate([[0], np.cumsum(np.diff(samples) / size[1:])]).astype(int)
    factor = {"linear": size / 64, "root": np.sqrt(size / 64), "adascale": np.sqrt(size / 64)}
    curve: dict[str, Any] = {
        "updates": updates, "samples": samples, "progress": updates * 1.5, "seconds": updates * 0.2 + samples * 1e-3,
        "cost": None, "batch_size": size, "lr": cell["lr"] * factor.get(cell["rule"], np.ones(ROWS)),
        "train_loss": loss * 0.9, "loss": loss, "accuracy": 1 - loss / 2.6,
    }  # fmt: skip
    curve = {name: values if values is None else values[:rows].tolist() for name, values in curve.items()}
    curve["batch_size"][0] = curve["lr"][0] = curve["train_loss"][0] = None
    if rows < ROWS:
        curve["train_loss"][-1] = curve["loss"][-1] = None
    key = hashlib.sha256(json.dumps(cell, sort_keys=True).encode()).hexdigest()[:16]
    return Record(key, cell, "finished" if rows == ROWS else "diverged", curve, 1.5, ENVIRONMENT)
