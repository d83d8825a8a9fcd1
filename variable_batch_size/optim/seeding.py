"""The random numbers of a microbatch: of its update and number alone, if updates are reproducible."""

from __future__ import annotations

import importlib
from typing import final

from torch import Tensor

from variable_batch_size.data.seeded import HostStates, seed_host, seed_of
from variable_batch_size.microbatching import Microbatch


@final
class Seeding:
    """Seeds the generators before the forward of each microbatch; after the block they have the user's states again.

    Args:
        seed: that of the sampler.
        like: a parameter, on whose device the forward runs.
        threads: whether ranks are threads, which share the generators of the host: these stay as they are.
    """

    def __init__(self, seed: int, like: Tensor, *, threads: bool) -> None:
        self._seed, self._on_xla, self._threads = seed, like.device.type == "xla", threads

    def __enter__(self) -> Seeding:
        self._states = HostStates()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._threads:
            self._states.restore()

    def seed(self, microbatch: Microbatch) -> None:
        """Seed for the forward of a microbatch that is handed out."""
        seed = seed_of(self._seed, microbatch.step, microbatch.number)
        if not self._threads:
            seed_host(seed)
        if self._on_xla:
            importlib.import_module("torch_xla.core.xla_model").set_rng_state(seed)
