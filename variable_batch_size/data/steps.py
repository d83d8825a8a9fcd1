"""What is known of the step under way: its phase, the reads that feed it, and the update that it is part of."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, final

from variable_batch_size.data.batches import Batch, Position


@final
class Phase(Enum):
    """Where in a step a training is."""

    BETWEEN_STEPS = auto()
    INSIDE_STEP = auto()  # some microbatches are accumulated, others are to come
    OUTSIDE = auto()  # between two steps, in a block whose forwards and backwards do not belong to the training
    PARTLY_MADE = auto()  # some of several optimizers have made the update, others are to make it
    INTERRUPTED = auto()  # an exception has left step(): what is accumulated is unknown, the weights have not changed
    HALF_UPDATED = auto()  # an exception has come after an inner optimizer's step had begun: the weights are unknown


_WAY_OUT = {
    Phase.INSIDE_STEP: "call it when optimizer.step() has returned True, or call discard_step() first",
    Phase.OUTSIDE: "call it after the block",
    Phase.PARTLY_MADE: "call step() of each optimizer of the sampler first, and delete those that are not used",
    Phase.INTERRUPTED: "call optimizer.discard_step() and iterate the loader again, or load a state",
    Phase.HALF_UPDATED: "restore the states of model and optimizer, as of the last checkpoint, or create both again",
}
_IN_WORDS = {
    Phase.INSIDE_STEP: "has accumulated only some of its microbatches",
    Phase.OUTSIDE: "waits while optimizer.outside() is entered",
    Phase.PARTLY_MADE: "was made by some of the sampler's optimizers only",
    Phase.INTERRUPTED: "was interrupted by an exception",
    Phase.HALF_UPDATED: "was interrupted by an exception in the inner optimizer's step, or in a hook of it, so that "
    "the weights may be half updated",
}


def wrong_phase(call: str, phase: Phase, step: int, *, running: bool, inside: bool) -> RuntimeError:
    """Return the error of a method that was called at a point of a step where it is not allowed.

    Args:
        call: the name of the method, for the message.
        phase: where in a step the training is.
        step: number of the update.
        running: whether `optimizer.step()` has not returned yet.
        inside: whether the method may be called within a step, as long as no exception has interrupted it.
    """
    if running:
        return RuntimeError(
            f"{call} must be called when optimizer.step() has returned, but it was called within it, as by a hook "
            f"of the inner optimizer; call it after step()"
        )
    when = "in an intact step" if inside else "between steps"
    return RuntimeError(f"{call} must be called {when}, but step {step} {_IN_WORDS[phase]}; {_WAY_OUT[phase]}")


@dataclass
class Reads:
    """The counts of one iteration over the microbatches of a sampler.

    Attributes:
        start: the position of its first microbatch.
        restarts: `Training.restarts` when the iteration began; if that has grown, the iteration is outdated.
        thread: the thread that reads.
        number: number of microbatches that were read.
        stepped: number of microbatches that have reached `step()`.
        exhausted: whether a read has met the end.
        serial: whether each microbatch is read when its turn comes, because nothing prefetches; None before the first.
    """

    start: Position
    restarts: int
    thread: int
    number: int = 0
    stepped: int = 0
    exhausted: bool = False
    serial: bool | None = None

    def find_serial(self) -> bool:
        """Return whether each microbatch is read when the loop needs it, instead of ahead by a loader that prefetches.

        The first call decides: only one microbatch was read by then, in the thread of the loop.
        """
        if self.serial is None:
            self.serial = self.number == 1 and self.thread == threading.get_ident()
        return self.serial

    def count_lost(self, received: int) -> int:
        """Return how many microbatches the loader has read from the sampler, but has not given to the loop.

        It is called when the loop receives a microbatch. The result is negative if a microbatch came twice. With a
        loader that reads ahead, lost microbatches cannot be told from those that are still to come, and it is 0.

        Args:
            received: number of microbatches that the loop has received before this one.
        """
        if not self.find_serial():
            return 0
        received_with_this_one = received + 1
        return self.number - received_with_this_one


def too_many_steps(read: int, number: int) -> RuntimeError:
    """Return the error of call `number` of `optimizer.step()` if the sampler has yielded only `read` microbatches."""
    return RuntimeError(
        f"this is step() {number}, but the optimizer's sampler has yielded {read} microbatches; pass it as "
        "batch_sampler= to the loader that the loop reads (in Ignite: VariableBatchEngine)"
    )


@final
class Due(NamedTuple):
    """The update that an optimizer is to make.

    Attributes:
        batch: the samples of the update, and its microbatches.
        updates: number of updates before it.
        samples: number of samples of the updates before it.
        epoch: the epoch of the update.
    """

    batch: Batch
    updates: int
    samples: int
    epoch: int


@final
class Earlier(NamedTuple):
    """What a training has done with earlier samplers, before `optimizer.continue_with(sampler)`.

    Attributes:
        stage: number of earlier samplers.
        updates: number of updates that were made with them.
        samples: number of samples of these updates.
    """

    stage: int = 0
    updates: int = 0
    samples: int = 0

    def state_dict(self) -> dict[str, int]:
        """Return the three numbers as entries of the state of a sampler."""
        return {"stage": self.stage, "earlier_updates": self.updates, "earlier_samples": self.samples}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Earlier:
        """Return the three numbers that `state_dict` has put into the state of a sampler."""
        return cls(*(int(state[name]) for name in ("stage", "earlier_updates", "earlier_samples")))
