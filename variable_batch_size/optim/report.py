"""The scalars that an optimizer logs after an update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from variable_batch_size.data.plan import Step

if TYPE_CHECKING:
    from variable_batch_size.optim.optimizer import CustomOptimizer

_TAGS = ("global_batch_size", "num_microbatches", "world_size", "lr_effective", "lr_factor", "samples")
_NOISE_TAGS = ("gain", "progress", "noise_scale", "sigma2", "mu2")


def tags(*, noise: bool) -> list[str]:
    """Return the tags of `scalars`.

    Args:
        noise: whether the gradient noise is measured.
    """
    return [f"vbs/{tag}" for tag in (*_TAGS, *(_NOISE_TAGS if noise else ()))]


def scalars(optimizer: CustomOptimizer, step: Step, *, noise: bool) -> dict[str, float]:
    """Return the scalars after the update of a step; with the noise, reads it from a device."""
    values: list[float] = [
        step.batch_size,
        step.num_microbatches,
        optimizer.backend.world.size,
        optimizer.current_lr(),
        optimizer.lr_factor(),
        optimizer.samples,
    ]
    if noise:
        found = optimizer.noise()
        values += [found.gain, optimizer.progress, found.noise_scale, found.sigma2, found.mu2]
    return dict(zip(tags(noise=noise), values, strict=True))
