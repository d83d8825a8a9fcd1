"""What a Trainer of Lightning, its module and its loader must be like if a trace defines the batches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.integrations.settings import check_indexed


def check_training(trainer: Trainer, precision: Precision, *, sync_batchnorm: bool) -> None:
    """Check the settings of a Trainer, and the hooks of its module.

    Raises:
        ValueError: if one contradicts the trace, or needs each batch to be an update of the same size.
    """
    for applies, requirement, found, remedy in _contradictions(trainer, precision, sync_batchnorm=sync_batchnorm):
        if applies:
            raise value_error(requirement, found, remedy)


def _contradictions(
    trainer: Trainer, precision: Precision, *, sync_batchnorm: bool
) -> list[tuple[bool, str, str, str]]:
    accumulation, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_algorithm
    limit, overfit = trainer.limit_train_batches, trainer.overfit_batches
    callbacks: list[object] = list(trainer.callbacks)  # type: ignore[attr-defined]
    stepping = type(precision).optimizer_step
    module, datamodule = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    return [
        (
            accumulation != 1,
            "accumulate_grad_batches must be 1, because the trace defines the batch size of an update",
            str(accumulation),
            "leave it out, and let the trace have the larger batch sizes",
        ),
        (
            any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks),
            "the trace defines the batch size of an update",
            "a GradientAccumulationScheduler",
            "leave it out, and let the trace have the larger batch sizes",
        ),
        (
            any(isinstance(callback, BatchSizeFinder) for callback in callbacks),
            "the trace defines the batch size of an update",
            "a BatchSizeFinder",
            "leave it out, and pass the rows that fit into memory as batch_size of the DataLoader",
        ),
        (
            any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks)
            and any(isinstance(part, BatchNorm1d | BatchNorm2d | BatchNorm3d) for part in module.modules()),
            "an epoch must have updates, but StochasticWeightAveraging adds one without for batch normalization",
            "a module with batch normalization",
            "use an EMAWeightAveraging or WeightAveraging",
        ),
        (
            bool(trainer.gradient_clip_val) and clip == GradClipAlgorithmType.VALUE,
            "gradients must be clipped by their norm",
            'gradient_clip_algorithm="value"',
            'pass gradient_clip_algorithm="norm"',
        ),
        (
            overfit > 0,
            "an epoch must have all samples of the dataset",
            f"overfit_batches={overfit}",
            "leave it out, and pass a torch.utils.data.Subset as the dataset",
        ),
        (
            limit != 1.0 and not trainer.fast_dev_run,  # type: ignore[attr-defined]
            "an epoch must have all samples of the dataset",
            f"limit_train_batches={limit}",
            "leave it out, and pass max_steps, or a torch.utils.data.Subset as the dataset",
        ),
        (
            trainer.reload_dataloaders_every_n_epochs != 0,
            "the training's loader must stay the same, because it has the position in the trace",
            f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}",
            "leave it out",
        ),
        (
            sync_batchnorm,
            "processes must not communicate within a microbatch, because they have different numbers of them",
            "sync_batchnorm=True",
            "leave it out",
        ),
        (
            stepping not in (Precision.optimizer_step, MixedPrecision.optimizer_step),
            "the optimizer must be stepped once for each microbatch",
            f"{type(precision).__name__}, which steps it itself",
            'pass precision="bf16-mixed" or "16-mixed" to the Trainer, for example',
        ),
        (
            is_overridden("configure_gradient_clipping", module),
            "gradients must be clipped when all microbatches of an update are summed",
            f"{type(module).__name__}.configure_gradient_clipping",
            "remove it, and pass gradient_clip_val to the Trainer",
        ),
        *(
            (
                is_overridden("on_before_batch_transfer", owner),
                "microbatches must reach the device as the loader yields them",
                f"{type(owner).__name__}.on_before_batch_transfer, which would get all microbatches of an update",
                "do its work in collate_fn or in on_after_batch_transfer",
            )
            for owner in (module, datamodule)
            if owner is not None
        ),
        (
            is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True),
            "training_step must get a microbatch",
            "training_step(dataloader_iter)",
            "define training_step(self, batch, batch_idx)",
        ),
    ]


def check_training_loader(loader: object) -> DataLoader[Any]:
    """Return a loader whose samples may be dealt by another sampler.

    Raises:
        TypeError: if it is not a DataLoader, or its dataset has no index.
        ValueError: if it has a sampler of its own.
    """
    if not isinstance(loader, DataLoader):
        raise type_error("the training's loader must be a DataLoader of torch", loader, "pass one with a batch_size")
    check_indexed(loader.dataset)
    assert isinstance(loader.dataset, Sized)
    sampler: Any = loader.sampler
    drawn = _is(sampler, "RandomSampler") and not sampler.replacement and sampler.num_samples == len(loader.dataset)
    if not (drawn or _is(sampler, "SequentialSampler") or isinstance(sampler, DistributedSampler)):
        raise value_error(
            "the training's DataLoader must have no sampler of its own, because the trace defines what is dealt",
            type(sampler).__name__,
            "pass shuffle=True or False instead, and a dataset that has the samples to be dealt",
        )
    if loader.batch_sampler is not None and not _is(loader.batch_sampler, "BatchSampler"):
        raise value_error(
            "the training's DataLoader must have no batch_sampler of its own, because the trace defines the batches",
            type(loader.batch_sampler).__name__,
            "pass batch_size, the maximum number of rows of a microbatch, instead",
        )
    return loader


def several_loaders(found: str) -> TypeError:
    """Return the error for training loaders in a collection."""
    return TypeError(f"there must be one training DataLoader, got {found}; pass it itself, not in a list or dict")


def shuffles(loader: DataLoader[Any]) -> bool:
    """Return whether a loader shuffles its samples."""
    sampler = loader.sampler
    return sampler.shuffle if isinstance(sampler, DistributedSampler) else _is(sampler, "RandomSampler")


def _is(sampler: object, name: str) -> bool:
    """Return whether a DataLoader has created a sampler; those of torchdata's StatefulDataLoader are its own."""
    return type(sampler).__name__ == name and type(sampler).__module__.partition(".")[0] in ("torch", "torchdata")


def check_optimizers(trainer: Trainer, optimizers: Sequence[Optimizer]) -> None:
    """Check that there is something to wrap.

    Raises:
        ValueError: if `configure_optimizers` has returned None.
    """
    if not all(optimizer.param_groups for optimizer in optimizers):
        name = f"{type(trainer.lightning_module).__name__}.configure_optimizers"
        raise value_error(f"{name} must return an optimizer", "None", "return one")


def check_loss(loss: object) -> None:
    """Check that `training_step` has returned a loss.

    Raises:
        RuntimeError: if it has returned None, which in Lightning means to skip a batch.
    """
    if loss is None:
        raise RuntimeError(
            "training_step must return a loss for every microbatch, because all samples of an update count, but it "
            "returned None; return a loss of 0 that depends on the parameters, such as 0.0 * loss"
        )


def check_steps(updates: Sequence[int]) -> None:
    """Check that with manual optimization each optimizer has made one update.

    Raises:
        RuntimeError: if one has not.
    """
    if any(made != 1 for made in updates):
        raise RuntimeError(
            f"training_step must call step() of each optimizer once for each microbatch, but the optimizers have made "
            f"{', '.join(map(str, updates))} updates in one; call step() in every training_step, and let the trace "
            f"have larger batch sizes instead of accumulating"
        )


def refuse_clipping(*args: Any, **kwargs: Any) -> None:
    """Raise RuntimeError in the place of a plugin's `clip_gradients`, which would clip parts of a gradient."""
    raise RuntimeError(
        "gradients must be clipped when all microbatches of an update are summed, but clip_gradients() was called "
        'before; remove it, and pass optimizer_options={"max_grad_norm": 1.0} to the strategy, for example'
    )


@contextmanager
def explaining_mismatch() -> Iterator[None]:
    """Add to the error of a checkpoint that does not match what to do with Lightning."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{error}. With Lightning there is no `strict`: the seed is that of seed_everything (0 without), shuffle "
            f"and drop_last are those of the DataLoader; to begin another training with the weights, load them into "
            f"the module, and leave out ckpt_path"
        ) from error


def seed_of_training() -> int:
    """Return the seed of Lightning's `seed_everything`, which its samplers use too; 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
