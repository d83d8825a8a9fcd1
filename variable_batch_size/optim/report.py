"""The scalars that an optimizer logs after an update, by tag."""

from __future__ import annotations

from collections.abc import Iterable

from variable_batch_size.data.plan import Step
from variable_batch_size.rules import Noise

_TAGS = ("global_batch_size", "num_microbatches", "world_size", "lr_effective", "lr_factor", "samples")
_NOISE_TAGS = ("gain", "progress", "noise_scale", "sigma2", "mu2")


def tags(*, noise: bool) -> list[str]:
    """Return all tags of a training.

    Args:
        noise: whether the gradient noise is measured.
    """
    return [*_tagged(_TAGS), *(_tagged(_NOISE_TAGS) if noise else ())]


def scalars(step: Step, world_size: int, lr: float, lr_factor: float, samples: int) -> dict[str, float]:
    """Return the scalars of every training: of the step that was made, and the samples so far."""
    values = step.batch_size, step.num_microbatches, world_size, lr, lr_factor, samples
    return dict(zip(_tagged(_TAGS), values, strict=True))


def noise_scalars(noise: Noise, progress: float) -> dict[str, float]:
    """Return the scalars of a training that measures the noise; progress is in updates at `ref_batchsize`."""
    values = noise.gain, progress, noise.noise_scale, noise.sigma2, noise.mu2
    return dict(zip(_tagged(_NOISE_TAGS), values, strict=True))


def _tagged(names: Iterable[str]) -> list[str]:
    return [f"vbs/{name}" for name in names]
