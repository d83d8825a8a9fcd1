"""The sampler that reads a dataset as an ordinary DataLoader would, but for the batch sizes."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.settings import Settings, check_indexed


def sampler_for(loader: DataLoader[Any], settings: Settings, **world: int) -> CustomSampler:
    """Return a sampler whose microbatches have at most the rows of a batch of `loader`.

    It shuffles and drops the last batch if `loader` does, or as `sampler_options` of the settings say.

    Args:
        loader: the loader, created with `batch_size` and perhaps `shuffle=True`.
        settings: the trace, and further arguments of the sampler.
        **world: `num_replicas` and `rank`, if the framework determines them.

    Raises:
        TypeError: if `loader` is not a DataLoader, its dataset has no index, or it has a sampler of its own.
        ValueError: if it has no `batch_size`.
    """
    if not isinstance(loader, DataLoader):
        raise type_error("the training's loader must be a DataLoader", loader, "pass the loader of the training data")
    check_indexed(loader.dataset)
    order = order_of(loader)
    minibatch_size = order.pop("batch_size")
    order = {name: value for name, value in order.items() if name not in settings.sampler_options}
    return settings.sampler(loader.dataset, minibatch_size=minibatch_size, **order, **world)


def check_samples(loader: DataLoader[Any], sampler: CustomSampler) -> None:
    """Check that `loader` has as many samples as the one that `sampler` was made for.

    Raises:
        TypeError: if its dataset has no index.
        ValueError: if its length is another one.
    """
    check_indexed(loader.dataset)
    size: Any = sampler.plan.dataset_size
    if (samples := len(loader.dataset)) != size:  # type: ignore[arg-type]
        remedy = "pass the loader of the training, or begin another one"
        raise value_error(f"a training continues with its {size} samples", samples, remedy)


def order_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return `batch_size`, `shuffle` and `drop_last` of a loader, also of one that Accelerate has prepared.

    Raises:
        TypeError: if it has a sampler of its own.
        ValueError: if its batches are not the next samples of the sampler.
    """
    batches: Any = loader.batch_sampler
    batches = getattr(batches, "batch_sampler", batches)  # below Accelerate's, which deals batches to the ranks
    iterates = next((kind.__name__ for kind in type(batches).__mro__ if "__iter__" in vars(kind)), None)
    if not isinstance(batches, BatchSampler) or iterates != "BatchSampler":  # torch's or torchdata's, or one below it
        found = f"one with batch_sampler={type(batches).__name__}"
        remedy = (
            "create it as DataLoader(dataset, batch_size=32, shuffle=True), for example; what chooses batches, such as "
            "NO_DUPLICATES and multi-dataset samplers of Sentence Transformers, cannot be used"
        )
        raise value_error("the loader must have a batch_size, the rows of a microbatch", found, remedy)
    return {"batch_size": batches.batch_size, "shuffle": shuffles(batches.sampler), "drop_last": batches.drop_last}


def shuffles(sampler: Any) -> bool:
    """Return whether a loader's sampler shuffles.

    Raises:
        TypeError: if it does not deal each sample once an epoch, in order or shuffled.
    """
    if type(sampler) is DistributedSampler:  # each rank gets its share of each batch anyway
        return sampler.shuffle
    if type(sampler) is SequentialSampler:
        return False
    # A RandomSampler, of torch or of torchdata, whose StatefulDataLoader has its own.
    if getattr(sampler, "replacement", True) or len(sampler) != len(getattr(sampler, "data_source", ())):
        raise type_error(
            "the loader must read each sample once an epoch, in order or with shuffle=True, because the trace "
            "determines which samples make up an update",
            sampler,
            "leave out sampler=, and put a choice of samples into the dataset, as torch.utils.data.Subset does",
        )
    return True
