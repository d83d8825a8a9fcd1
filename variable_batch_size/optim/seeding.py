"""The random numbers of a microbatch: of its update and number alone, if updates are reproducible."""

from __future__ import annotations

from typing import final

from variable_batch_size.backend import Backend
from variable_batch_size.data.seeded import HostStates, seed_host, seed_of
from variable_batch_size.microbatching import Microbatch


@final
class Seeding:
    """Seeds the generators before the forward of each microbatch; after the block they have the user's states again.

    Args:
        seed: that of the sampler.
        backend: that of the optimizer. Ranks that are threads share the generators of the host: these stay as they are.
    """

    def __init__(self, seed: int, backend: Backend) -> None:
        self._seed, self._backend = seed, backend

    def __enter__(self) -> Seeding:
        self._states = HostStates()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._backend.threads:
            self._states.restore()

    def seed(self, microbatch: Microbatch) -> None:
        """Seed for the forward of a microbatch that is handed out."""
        seed = seed_of(self._seed, microbatch.step, microbatch.number)
        if not self._backend.threads:
            seed_host(seed)
        self._backend.seed(seed)
