"""The random numbers of a microbatch: of its update and number alone, if updates are reproducible."""

from __future__ import annotations

from typing import final

from variable_batch_size.backend import Backend
from variable_batch_size.backend.generators import HostStates, seed_host
from variable_batch_size.data.seeded import seed_of
from variable_batch_size.microbatching import Microbatch


@final
class Seeding:
    """Seeds the generators for a microbatch that is handed out; `end` lets them go on as they were before.

    Ranks that are threads share the generators of the host: these stay as they are.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._states: HostStates | None = None  # of the user, while a microbatch is out
        self._begun = 0

    def begin(self, seed: int, microbatch: Microbatch) -> int:
        """Seed by the seed of the sampler and a microbatch, after it was read; return a number for `end`."""
        self.end()
        of_microbatch = seed_of("microbatch", seed, microbatch.step, microbatch.number)
        if not self._backend.threads:
            self._states = HostStates.now()
            seed_host(of_microbatch)
        self._backend.seed(of_microbatch)
        self._begun += 1
        return self._begun

    def end(self, number: int | None = None) -> None:
        """Give the generators back, unless another microbatch than that of `number` is out."""
        if self._states is not None and number in (None, self._begun):
            states, self._states = self._states, None
            states.restore()
