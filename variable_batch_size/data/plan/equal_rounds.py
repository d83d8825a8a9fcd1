"""Equal rounds: in every step all ranks compute the same number of microbatches, and none of them is a replay."""

from __future__ import annotations

import numpy as np

from variable_batch_size._validation import MAX_INT
from variable_batch_size.data.plan.deal import Dealing, Step
from variable_batch_size.data.plan.plan import Epoch, Plan
from variable_batch_size.microbatching import count_microbatches
from variable_batch_size.world import World


def next_equal(
    batch_size: int, minibatch_size: int, world_size: int, *, fixed_shape: bool, multiple_of: int = 1
) -> int:
    """Return the smallest batch size >= `batch_size` for which all ranks compute equally many microbatches.

    None of these is a replay, which repeats another one with weight 0. The error about a step without such equal rounds
    advises this batch size.

    >>> next_equal(33, 32, 4, fixed_shape=False), next_equal(3, 32, 4, fixed_shape=False, multiple_of=4)
    (97, 4)

    Args:
        batch_size: samples of a step.
        minibatch_size: maximum number of rows of a microbatch.
        world_size: number of ranks.
        fixed_shape: whether every microbatch has exactly `minibatch_size` rows.
        multiple_of: `world_size` if steps are cut into a multiple of so many microbatches, otherwise 1.
    """
    if fixed_shape:
        full, remainder = divmod(batch_size, minibatch_size)
        # Number of partial microbatches that a remainder of 0, 1, ... samples takes.
        partial = count_microbatches(np.arange(minibatch_size), minibatch_size, fixed_shape=True)  # (remainders,)
        while True:  # at most until the full microbatches alone are a multiple of the ranks
            equal = np.flatnonzero((full + partial[remainder:]) % world_size == 0)
            if len(equal):
                return full * minibatch_size + remainder + int(equal[0])
            full = full + 1
            remainder = 0
    necessary = -(-batch_size // minibatch_size)  # rounded up
    microbatches = -(-necessary // world_size) * world_size  # rounded up to a multiple of the ranks
    # With `multiple_of` a step gets this number if it has a sample for each; without, only if fewer do not hold it.
    fewest_samples = microbatches if multiple_of > 1 else (microbatches - 1) * minibatch_size + 1
    return max(batch_size, fewest_samples)


def check_equal_rounds(
    plan: Plan, epoch: Epoch, first_step: int, world: World, dealing: Dealing, end_step: int = MAX_INT
) -> None:
    """Check that in all steps of an epoch every rank computes equally many microbatches, and none with weight 0.

    Layers that communicate in forward need that: a rank with fewer microbatches would leave the others waiting.

    Args:
        plan: which samples make up which step.
        epoch: the epoch.
        first_step: the first step that is checked.
        world: this rank, and the number of ranks.
        dealing: how steps are split into microbatches, and these are dealt to ranks.
        end_step: the step before which the check ends, if that is earlier than the end of the epoch.

    Raises:
        ValueError: if a step has not; the message names the first such step.
    """
    # Rounds are equal if no rank has to repeat a microbatch, a replay, to fill them up. If any rank has to, the one
    # with the smallest share has, so that it is enough to look at that rank.
    padded = dealing._replace(padded=True)
    least_rank = world.size - 1 if dealing.unequal is None else dealing.unequal.slowest
    for deal in plan.deals(epoch, first_step, World(least_rank, world.size), padded, end_step):
        steps_with_replay = np.flatnonzero(deal.replays)  # as indices into the deal
        if len(steps_with_replay):
            raise _unequal_rounds_of_step(plan, epoch, deal.first_step + int(steps_with_replay[0]), world, dealing)


def check_constant(plan: Plan, world: World, dealing: Dealing) -> None:
    """Check that all ranks compute equally many microbatches in every step, if the batch size never changes.

    All epochs of a constant trace are alike, so that the first one tells of all, and the user learns of a mistake
    before the first update. Epochs of any other trace are checked when they are read.

    Raises:
        ValueError: if a rank would have to repeat a microbatch; the message names the step.
    """
    if plan.trace.constant_until(0) is None and not plan.ends:
        epoch = plan.epoch(plan.first_epoch)
        check_equal_rounds(plan, epoch, epoch.first_step, world, dealing)


def _unequal_rounds_of_step(plan: Plan, epoch: Epoch, number: int, world: World, dealing: Dealing) -> ValueError:
    """Return the error about step `number`, in which some rank would have fewer microbatches than the others."""
    step = plan.step(epoch, number, dealing)
    count = f"{step.num_microbatches} {'microbatches' if step.num_microbatches > 1 else 'microbatch'}"
    size, rows, remedy = step.batch_size, plan.minibatch_size, _remedy_for_step(plan, epoch, step, world, dealing)
    return ValueError(
        f"equal_rounds=True needs as many microbatches on every rank, and no replay, but step {number} has a batch "
        f"size of {size}, cut into {count}, on {world.size} ranks with minibatch_size={rows}; {remedy}"
    )


def _remedy_for_step(plan: Plan, epoch: Epoch, step: Step, world: World, dealing: Dealing) -> str:
    """Return the last part of an error, which tells the user how all ranks get equally many microbatches in a step.

    Args:
        plan: which samples make up which step.
        epoch: the epoch of the step.
        step: the step in which some rank has fewer.
        world: this rank, and the number of ranks.
        dealing: how steps are split into microbatches, and these are dealt to ranks.
    """
    if step.batch_size < plan.trace.batch_size(step.number):  # it was shortened: the trace's batch size is not used
        if step.start + step.batch_size == plan.dataset_size:
            return f"pass drop_last=True, because the step is the rest of epoch {epoch.number}"
        return f"change max_samples={plan.max_samples}, which shortens the step"
    if dealing.unequal is not None:
        return "choose a larger batch size or minibatch_size, or speeds that differ less"
    # An optimizer that measures the gradient noise attaches later, perhaps; then steps must not be split further than
    # memory needs, as with multiple_of=1, and the batch size has to be larger.
    enough, enough_with_noise = (
        next_equal(step.batch_size, plan.minibatch_size, world.size, fixed_shape=plan.fixed_shape, multiple_of=multiple)
        for multiple in (dealing.multiple_of, 1)
    )
    if enough > plan.dataset_size:
        return f"pass a smaller minibatch_size, because {enough}, the next one without replays, exceeds the dataset"
    noise = ""
    if enough < enough_with_noise <= plan.dataset_size:
        noise = f" ({enough_with_noise} if the noise is measured)"
    return f"choose a batch size of {enough}, the next one without replays{noise}"
