"""The sampler of a training: what the loader and the Trainer say of the order of samples, and of the end."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from variable_batch_size._validation import value_error
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.lightning.checks import seed_of_training, shuffles
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.world import World


def training_sampler(loader: DataLoader[Any], settings: Settings, trainer: Trainer, world: World) -> CustomSampler:
    """Return the sampler of the training.

    A trace that ends, and of which nothing says what follows, has to last until `max_epochs` or `max_steps`. An epoch
    that it does not cover ends with `max_steps`.

    Args:
        loader: the training's loader.
        settings: the trace, and further arguments of the sampler, which go before what the loader says.
        trainer: the trainer.
        world: the rank, and the number of ranks.

    Raises:
        ValueError: if the trace ends before the training does.
    """
    options: dict[str, Any] = {"shuffle": shuffles(loader), "seed": seed_of_training()}
    options = {name: value for name, value in options.items() if name not in settings.sampler_options}
    options |= {"num_replicas": world.size, "rank": world.rank, "drop_last": loader.drop_last}
    options |= {} if loader.batch_size is None else {"minibatch_size": loader.batch_size}
    create = partial(settings.sampler, loader.dataset, **options)
    sampler = create()
    most, steps = trainer.max_epochs, trainer.max_steps
    known = most is not None and most > 0 and "epochs" not in settings.sampler_options
    ends = {"epochs": most} if known else {}
    if not _ends_unexpectedly(sampler):
        return create(**ends) if ends and steps == -1 else sampler
    length = len(sampler.plan.trace)
    if most == -1 and steps == -1:
        raise value_error(
            "a trace must last until the training ends",
            f"one of {length} steps and max_epochs=-1 without max_steps",
            f'pass max_steps={length} to the Trainer, or sampler_options={{"on_end": "stop"}} to the strategy',
        )
    try:
        return create(**ends, **({"max_updates": steps} if steps > 0 else {}))
    except ValueError as error:  # of the end: all else was checked before
        raise ValueError(
            f"{error}. With Lightning: max_steps={length} of the Trainer shortens the training, and so does "
            f'sampler_options={{"max_updates": {length}}} of the strategy; sampler_options={{"on_end": "hold"}} says '
            f"what follows the trace"
        ) from error


def _ends_unexpectedly(sampler: CustomSampler) -> bool:
    """Return whether the trace has an end, and neither it nor another argument says what happens there."""
    plan = sampler.plan
    return (
        sampler._feed.plans.decided is None
        and plan.trace.steps is not None
        and plan.trace.on_end == "error"
        and not plan.ends
    )
