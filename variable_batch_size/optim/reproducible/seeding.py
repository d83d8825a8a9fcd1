"""The random numbers of a microbatch: of its update and number alone, if updates are reproducible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, final
from weakref import ref

from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.backend.generators import HostStates, seed_host
from variable_batch_size.data.dataset.seeded import seed_of
from variable_batch_size.data.training import Training
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.stage import LoopStage


class _Latest(threading.local):
    """The training of the last microbatch that was seeded, in the thread of a rank."""

    training: Callable[[], Training | None] = staticmethod(lambda: None)


_latest = _Latest()


@final
class Seeding(LoopStage):
    """Seeds the generators for a microbatch that is handed out; `give_back` lets them go on as they were before.

    Ranks that are threads share the generators of the host: these stay as they are.
    """

    def __init__(self, training: Training, backend: Backend) -> None:
        self._training, self._backend = training, backend
        self._states: HostStates | None = None  # of the user, while a microbatch is out
        self._begun = 0

    def begin_backward(self, member: object, loss: Tensor, *, divided: bool) -> None:
        """Raise RuntimeError if another optimizer has made the update, and so changed weights for this microbatch."""
        self._check_weights(member)

    def _check_weights(self, member: object) -> None:
        """Raise RuntimeError if another optimizer of the sampler has made the update of this microbatch already.

        Otherwise its gradient would depend on whether a rank computes it before that. Updates of a single microbatch
        are allowed, because there the order is always the same.
        """
        training = self._training
        plan = training.batches.plan
        if training.batches.max_batch_size <= plan.minibatch_size and not plan.fixed_shape:
            return
        if training.is_made_without(member):
            made = training.batch_of(member).step
            raise RuntimeError(
                "reproducible=True needs microbatches that meet the same weights, but another optimizer has made "
                f"update {made}; call optimizer.backward() of each before any step(), or give each a sampler and loader"
            )

    def begin_microbatch(self, member: object, *, has_backward: bool) -> None:
        """Raise RuntimeError unless the microbatch of a `step()` was seeded last, for this sampler."""
        if not has_backward:
            self._check_weights(member)
        if not (self._training.is_handed_out_last(member) and _latest.training() is self._training):
            raise RuntimeError(
                "reproducible=True seeds before each forward pass, but step() was called outside of vbs.updates, or "
                "after another microbatch was read, as by list(update); call step() after each"
            )

    def end_microbatch(self, *, ends_update: bool) -> None:
        """After the last microbatch of an update, restore the user's random generators, which were seeded for it."""
        if ends_update:
            self.give_back()

    def discard(self) -> None:
        """Give the generators back, which a step that starts over seeds again."""
        self.give_back()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the generators back."""
        self.discard()

    def seed(self, microbatch: Microbatch) -> int:
        """Seed the random generators by the number of a microbatch, before its forward pass (`reproducible=True`).

        Return a number by which `give_back` knows whether a later microbatch was seeded since.
        """
        self.give_back()
        training = self._training
        update = training.earlier.updates + microbatch.step
        seed = seed_of("microbatch", training.batches.seed, update, microbatch.number)
        _latest.training = ref(training)
        if not self._backend.threads:
            self._states = HostStates.present()
            seed_host(seed)
        self._backend.seed(seed)
        self._begun += 1
        return self._begun

    def give_back(self, number: int | None = None) -> None:
        """Restore the user's random generators as `seed` has found them; nothing if they were restored already.

        `number`: what `seed` has returned: nothing is restored if a later microbatch was seeded since. None: restore.
        """
        if self._states is not None and number in (None, self._begun):
            states, self._states = self._states, None
            states.restore()
