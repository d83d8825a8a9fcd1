"""What trainers log of an update besides their own numbers."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from variable_batch_size.optim.optimizer import CustomOptimizer


def optimizer_facts(optimizer: CustomOptimizer) -> dict[str, Any]:
    """Return "samples" so far; if they are measured also "noise_scale", in samples, and "grad_norm" before clipping."""
    facts: dict[str, Any] = {"samples": optimizer.samples, "grad_norm": optimizer.grad_norm}
    with suppress(RuntimeError):  # it is not measured
        facts["noise_scale"] = float(optimizer.noise().noise_scale)
    return {name: fact for name, fact in facts.items() if fact is not None}
