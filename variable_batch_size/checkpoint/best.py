"""Which checkpoint is the best one.

A checkpoint that `report` has saved or marked holds the reported values in its manifest, with the criterion. There is
no other record of the best one: a process that is killed leaves every value with its checkpoint, and a training that
resumes from an earlier one compares with what is in the folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from variable_batch_size._validation import type_error, value_error

_CRITERION, _METRICS = "best", "metrics"  # keys of the manifest
_REMEDY = 'pass for example best="min:val_loss"'


@final
class Criterion(NamedTuple):
    """What makes a checkpoint better than another: the lowest or the highest value of a metric.

    Attributes:
        mode: "min" or "max".
        name: name of the metric.
    """

    mode: str
    name: str

    @staticmethod
    def parse(text: object) -> Criterion:
        """Return the criterion of a text such as "min:val_loss".

        Raises:
            TypeError: if `text` is not a string.
            ValueError: if it does not begin with "min:" or "max:", or names no metric.
        """
        requirement = 'best must be "min:" or "max:" and the name of a metric'
        if not isinstance(text, str):
            raise type_error(requirement, text, f"{_REMEDY}, and a part of the checkpoint under another name")
        mode, _, name = text.partition(":")
        if mode not in ("min", "max") or not name:
            raise value_error(requirement, repr(text), _REMEDY)
        return Criterion(mode, name)

    @staticmethod
    def of_manifest(manifest: Mapping[str, Any]) -> Criterion | None:
        """Return the criterion by which the checkpoint was the best one when it was saved, or None."""
        try:
            return Criterion.parse(manifest[_CRITERION])
        except (LookupError, TypeError, ValueError):
            return None

    def __str__(self) -> str:
        return f"{self.mode}:{self.name}"

    def check_metrics(self, metrics: Mapping[str, object], decides: bool) -> None:
        """Check the values that a rank reports.

        Args:
            metrics: values by name.
            decides: whether the values of this rank count; those of another rank may be None.

        Raises:
            TypeError: if a value is not a real number.
            ValueError: if the metric of the criterion is missing.
        """
        if self.name not in metrics:
            reported = " and ".join(metrics) or "no metric"
            raise value_error(f'report() must get {self.name}, by which best="{self}"', reported, f"pass {self.name}=")
        for name, value in metrics.items():
            if not _is_real(value) and (decides or value is not None):
                raise type_error(f"{name} must be a number or a tensor with one", value, "pass its value")

    def manifest_entries(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the manifest of a checkpoint says of reported values: the criterion, and the values by name.

        A value that is not finite becomes None, because JSON has no NaN or infinity.
        """
        values = {name: float(value.item() if isinstance(value, Tensor) else value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        return {_CRITERION: str(self), _METRICS: finite}

    def score(self, manifest: Mapping[str, Any]) -> float:
        """Return a number that is lower for a better checkpoint, and infinite for one without a finite value."""
        metrics = manifest.get(_METRICS)
        value = metrics.get(self.name) if isinstance(metrics, dict) else None
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return math.inf
        return value if self.mode == "min" else -value


def _is_real(value: object) -> bool:
    """Return whether a value is a real number, or a tensor with one; a bool is none."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype != torch.bool and not value.is_complex()
    return isinstance(value, (int, float, np.number)) and not isinstance(value, (bool, np.complexfloating))
