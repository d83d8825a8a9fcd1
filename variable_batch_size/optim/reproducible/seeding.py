"""The random numbers of a microbatch: of its update and number alone, if updates are reproducible."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final
from weakref import ref

from variable_batch_size.backend import Backend
from variable_batch_size.backend.generators import HostStates, seed_host
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.data.seeded import seed_of
from variable_batch_size.microbatching import Microbatch


class _Latest(threading.local):
    """The sampler of the last microbatch that was seeded, in the thread of a rank."""

    sampler: Callable[[], Dealer | None] = staticmethod(lambda: None)


_latest = _Latest()


@final
class Seeding:
    """Seeds the generators for a microbatch that is handed out; `end_microbatch` lets them go on as they were before.

    Ranks that are threads share the generators of the host: these stay as they are.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._states: HostStates | None = None  # of the user, while a microbatch is out
        self._begun = 0

    def begin_microbatch(self, sampler: Dealer, microbatch: Microbatch) -> int:
        """Seed by the seed of the sampler and a microbatch, after it was read; return a number for `end_microbatch`."""
        self.end_microbatch()
        of_microbatch = seed_of("microbatch", sampler.batches.seed, microbatch.step, microbatch.number)
        _latest.sampler = ref(sampler)
        if not self._backend.threads:
            self._states = HostStates.present()
            seed_host(of_microbatch)
        self._backend.seed(of_microbatch)
        self._begun += 1
        return self._begun

    def seeded_last_for(self, sampler: Dealer) -> bool:
        """Return whether the last microbatch that was seeded in this thread is one of a sampler."""
        return _latest.sampler() is sampler

    def end_microbatch(self, number: int | None = None) -> None:
        """Give the generators back, unless another microbatch than that of `number` is out."""
        if self._states is not None and number in (None, self._begun):
            states, self._states = self._states, None
            states.restore()
