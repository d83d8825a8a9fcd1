"""One training of an experiment, and the name that what determines it gives it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, final

from variable_batch_size.lab.evaluation.end import SAMPLES
from variable_batch_size.lab.evaluation.start import Start
from variable_batch_size.lab.evaluation.timed_trace import TimedTrace


@final
@dataclass(frozen=True)
class Cell:
    """One training run of an experiment: all settings that determine it, as plain values, and its batch sizes.

    Attributes:
        task: name of the task, see `load_task`; with its `task_arguments` and its `version`.
        trace: name of the trace, or its text, and what is equal if it is not the samples.
        trace_fingerprint: of the batch sizes, or of the controller, and of the simulated time.
        rule: name of the rule, with its number if it takes one, see `rule_named`.
        lr: learning rate at `ref_batchsize`, in samples, at which it was tuned (None: not known): `lr_factor` times
            the lr of the task or the start.
        seed: seed of the model and of the order of the samples.
        samples: number to train on; with another end, the number that it is compared with.
        minibatch_size: maximum number of rows of a microbatch.
        between: samples between two evaluations.
        max_grad_norm: norm to which gradients are clipped; None: they are not.
        warmup: samples over which the learning rate rises to its scheduled value.
        end: when the training ends, see `End`.
        start: the checkpoint from which it continues; None: it starts with the untrained model.
        timed: batch sizes and simulated time, for which the fingerprint stands.
        data_dir: folder of the files of the task, which are the same anywhere.
    """

    task: str
    task_arguments: Mapping[str, Any]
    task_version: str
    trace: str
    trace_fingerprint: str
    rule: str
    lr: float
    lr_factor: float
    seed: int
    samples: int
    ref_batchsize: int | None
    minibatch_size: int
    between: int
    max_grad_norm: float | None
    timed: TimedTrace = field(compare=False, repr=False)
    data_dir: str | None = field(default=None, compare=False, repr=False)
    end: str = str(SAMPLES)
    start: Start | None = None
    warmup: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the settings that determine the training run, as values of JSON.

        Two settings are left out at their defaults, so that runs of earlier versions, which lack them, keep their keys.
        """
        values = {column.name: getattr(self, column.name) for column in fields(self) if column.compare}
        del values["start"]
        for name, default in (("end", str(SAMPLES)), ("warmup", 0)):
            if values[name] == default:
                del values[name]
        return values if self.start is None else values | self.start.as_json()

    @property
    def key(self) -> str:
        """The name of the cell: the first 16 hexadecimal digits of the SHA-256 of its canonical JSON."""
        return _hash_json(self.as_json())

    @property
    def training(self) -> str:
        """The name of the training run without the name of its trace: cells with equal ones are trained once."""
        return _hash_json(self.as_json() | {"trace": ""})

    def __str__(self) -> str:
        """Return the settings in which the cells of an experiment differ, for messages."""
        return f"{self.task}, trace {self.trace}, rule {self.rule}, lr {self.lr:g}, seed {self.seed}"


def _hash_json(values: Mapping[str, Any]) -> str:
    """Return a hash of values: the first 16 hexadecimal digits of the SHA-256 of their JSON with sorted keys."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
