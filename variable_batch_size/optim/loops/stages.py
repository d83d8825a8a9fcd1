"""Continues a training with another sampler: a second stage, with other samples, lengths, or another trace."""

from __future__ import annotations

import copy

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.steps import Phase
from variable_batch_size.data.training import Training, check_can_attach
from variable_batch_size.optim.properties import ObservedOptimizer
from variable_batch_size.optim.wrapper import check_world


def continue_with(training: Training, sampler: object) -> None:
    """Let the optimizers of a training continue with another sampler; see `CustomOptimizer.continue_with`."""
    training.check_phase("continue_with()", Phase.BETWEEN_STEPS)
    training.finish_update()
    optimizers: list[ObservedOptimizer] = list(training.members)
    if any(optimizer._updater.sum.has_uncounted for optimizer in optimizers):
        raise RuntimeError(
            "continue_with() must be called between steps, but a backward() has come that no step() has counted; "
            "call it after step()"
        )
    old_sampler = optimizers[0].sampler
    # A "stage" is the part of the training with one sampler. A script that resumes in a later stage calls this function
    # for each stage again, and `later` is the restored state, which waits for the sampler of its stage.
    later = training.later
    if later is not None and later["stage"] > training.earlier.stage + 1:
        later = None  # it is the state of a sampler after the new one
    if not isinstance(sampler, CustomSampler) or not isinstance(old_sampler, CustomSampler):
        raise type_error("continue_with() needs a CustomSampler after a CustomSampler", sampler, "create one")
    # All checks come before the first change, so that an error leaves the training as it was.
    _check_fresh(sampler.training)
    for optimizer in optimizers:
        _check_suits(sampler, optimizer)
    if later is not None:
        sampler.check_samples(later)
    for optimizer in optimizers:
        sampler.attach(None, **optimizer._cut)
    resumed = None if later is None else sampler.resume(later)  # raises if there is no such position
    old_sampler.training = copy.copy(training)  # the sampler that is left keeps a copy, which does not move any more
    old_sampler.training.left = True
    training.continue_with(sampler.training)
    sampler.training = training
    if later is not None and resumed is not None:
        sampler.adopt_state(later, resumed, owned=True)
    for optimizer in optimizers:
        optimizer._sampler = sampler
        optimizer._updater.agreed = False  # the ranks compare their settings again at the next update


def check_not_begun(wrapper: object, sampler: object) -> None:
    """Raise RuntimeError if an inner optimizer, whose wrapper this is, has made updates with another sampler.

    Schedules, averages and a tracker follow that other wrapper, and would not see the updates of a new one.
    """
    if getattr(wrapper, "updates", 0) and getattr(wrapper, "sampler", sampler) is not sampler:
        raise RuntimeError(
            f"an inner optimizer has one wrapper, but another one has made {wrapper.updates} updates with another "  # type: ignore[attr-defined]
            "sampler; call optimizer.continue_with(sampler) of that one, or delete it to begin a different run"
        )


def _check_fresh(training: Training) -> None:
    """Raise ValueError if the new sampler, whose training this is, was used before or has an optimizer."""
    if training.members or training.owned or training.left or training.updates:
        found = "one that another optimizer reads" if training.members else "one that was used"
        raise value_error("continue_with() needs a sampler of its own", found, "create another CustomSampler")


def _check_suits(sampler: CustomSampler, optimizer: ObservedOptimizer) -> None:
    """Raise ValueError unless an optimizer, as it was created for its first sampler, can continue with this one."""
    backend = optimizer.backend
    check_world(sampler, backend)
    check_can_attach(sampler.batches, compiles_shapes=backend.static_graph, elastic=backend.elastic)
    optimizer._abilities.check_continues(sampler)
