"""transformers' Trainer with a batch size that changes: `VariableBatchTrainer`, and a mixin for its subclasses.

Trainer sees one batch an update, the list of this rank's microbatches, so that what it counts, schedules, logs and
saves by steps is right. `training_step` makes the whole update. Trainer wraps and saves model and optimizer as ever;
the position in the training is a file beside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from sys import maxsize
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.integrations.facts import optimizer_facts
from variable_batch_size.integrations.loss_check import WITH_CLASS_WEIGHTS, LossCheck
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.integrations.supported import check_settings
from variable_batch_size.integrations.transformers.labels import label_counter
from variable_batch_size.integrations.transformers.loader import TrainerLoader
from variable_batch_size.integrations.transformers.supported import SETTINGS
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.tensors.arithmetic import WITHOUT_FLOAT64
from variable_batch_size.testing.schedules import check_schedule

POSITION = "variable_batch.pt"  # file in a checkpoint of Trainer
REMEDY = (
    "return a mean over labels or rows, which is multiplied by their number before this comparison, with class weights "
    f"{WITH_CLASS_WEIGHTS}; or pass check_loss=False"
)

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object


class VariableBatchMixin(Base):
    """Makes a subclass of Trainer train with a batch size that changes: `class Mine(VariableBatchMixin, SFTTrainer)`.

    `per_device_train_batch_size` is the microbatch, and the trace gives the global batch size of each update. The seed,
    the order of samples, clipping, precision, and how ranks share the model (DistributedDataParallel or FSDP2) are
    those of the training arguments. Labels are averaged over all tokens of an update, on all ranks, if Trainer counts
    them (see `Trainer.get_batch_samples`), otherwise losses over samples.

    Args:
        args, kwargs: arguments of the class that it is mixed into.
        trace: the trace of the global batch size, in samples, see `CustomSampler`; with `sampler_options`, a dict.
        rule, ref_batchsize: see `CustomOptimizer`; with `optimizer_options`, a dict.
        check_loss: whether updates 0, 1, 10, 100 and 1,000 warn of a loss that is no mean over rows or labels.

    Attributes:
        variable_optimizer: the optimizer that counts samples and updates, from the beginning of `train()` on.

    Raises:
        TypeError: if an argument has the wrong type, or there are several datasets, or a sampler that chooses samples.
        ValueError: if a training argument is not supported, batches are chosen, the trace is too short, or a checkpoint
            has no position or that of another training.
    """

    variable_optimizer: CustomOptimizer

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError unless the mixin comes before the Trainer, whose methods it overrides."""
        super().__init_subclass__(**options)
        bases = [base for base in cls.__mro__ if base in (VariableBatchMixin, Trainer)]
        if bases[0] is Trainer:
            raise TypeError(f"VariableBatchMixin must come first; write class {cls.__name__}(VariableBatchMixin, ...)")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the settings of this library out of the arguments, pass the others on, and check them early."""
        self.settings = Settings.taken_from(kwargs)
        self._batch_size = 0
        super().__init__(*args, **kwargs)
        check_settings(SETTINGS, self, "transformers")
        self.callback_handler.callbacks.insert(0, Follower(self))  # before all that read the state
        if self.train_dataset is not None:
            TrainerLoader(self, DataLoader(self.train_dataset, self.args.per_device_train_batch_size))  # raises early

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train`; a second call is a new training of the present weights, as it is there."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True  # for which Trainer raises
        self._checkpoint, self._batch_size = resume_from_checkpoint, 0
        with patch_attributes(self.args, ignore_data_skip=True):  # the loader goes on by itself
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return the loader of the training, whose batches are updates: lists of this rank's microbatches."""
        return TrainerLoader(self, super().get_train_dataloader())

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return the numbers of epochs and updates of the training, of which Trainer asks for seven.

        Trainer multiplies epochs by updates of an epoch, but epochs have unequal numbers of updates here.
        """
        if not isinstance(dataloader, TrainerLoader):
            remedy = "override it in a class below: class Mine(VariableBatchMixin, TrainerWithALoader)"
            raise type_error("the loader must come from VariableBatchMixin", dataloader, remedy)
        sum_in_float32(self.accelerator)
        self._loader, sampler, epochs, updates = dataloader, dataloader.sampler, maxsize, args.max_steps
        self._epochs = epochs
        if not sampler.batches.arriving and sampler.batches.decided is None:  # otherwise the epochs are not known
            # From the epoch `last` on, the last `alike` epochs have equally many updates.
            *_, (last, alike) = sampler.plan.epoch_runs(None)
            self._epochs, updates = last.number + alike, last.first_step + alike * last.updates
            epochs = updates  # the loader ends the training; a callback may have ended some epochs before
        # Epochs, updates of an epoch, samples of the dataset, samples of the training, batch size, batches of an epoch,
        # and updates. An epoch has at most all updates: the loader ends it. log() counts the samples.
        return epochs, updates, sampler.batches.dataset_size, 0, sampler.max_batch_size, updates, updates

    def _create_optimizer(self) -> None:
        """Create the variable optimizer around what Trainer has prepared and restored, and load the position."""
        inner, sampler = self.optimizer.optimizer, self._loader.sampler  # in Accelerate's optimizer
        options = {"model": self.model_wrapped, "max_grad_norm": self.args.max_grad_norm or None, "grad_norm": True}
        self.__dict__.pop("variable_optimizer", None)  # that of an earlier train()
        self.variable_optimizer = optimizer = self.settings.wrap_optimizer(inner, sampler, **options)
        if self._checkpoint:
            optimizer.load_state_dict({**inner.state_dict(), "vbs": saved_position(self._checkpoint)})
        if not sampler.batches.arriving:
            batches = math.ceil(sampler.batches.dataset_size / self.args.per_device_train_batch_size)
            check_schedule(self.lr_scheduler, sampler, batches, self.state.max_steps)
        self._loss_check = LossCheck(self.settings.check_loss)
        self._samples_before, self._count_labels = optimizer.samples, label_counter(self)

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save as `Trainer.save_model`; in a checkpoint also the position, before Trainer writes its own state."""
        super().save_model(output_dir, *args, **kwargs)
        if output_dir is None or not kwargs.get("_internal_call") or self.args.save_only_model:
            return
        position = self.variable_optimizer.state_dict()["vbs"]  # on every rank
        if self.args.should_save:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            torch.save(position, Path(output_dir, POSITION))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Make one whole update, where Trainer expects one backward pass.

        Args:
            model: the model, as Trainer has wrapped it.
            inputs: a list of the microbatches of this rank in the update.
            num_items_in_batch: ignored, because Trainer does not count what a whole update has.

        Returns:
            The loss of the update, 0-D. Trainer logs its mean over the ranks.
        """
        optimizer = self.variable_optimizer
        descriptions, self._batch_size = optimizer.batch.microbatches, optimizer.batch.batch_size
        self._check_loss_if_due()
        own_tokens = {"average_tokens_across_devices": False}  # Trainer would multiply the loss by the number of ranks
        counts, total, model_counts = self._label_counts(inputs, descriptions)
        update_loss = torch.zeros((), device=self.args.device)
        for microbatch, sizes, count, model_count in zip(inputs, descriptions, counts, model_counts, strict=True):
            # The optimizer weighs a microbatch by its share of the rows; this turns it into its share of the labels.
            factor = count * sizes.batch_size / (total * sizes.rows)
            backward = {"backward": lambda loss, factor=factor, **_: optimizer.backward(scale_loss(loss, factor))}
            with patch_attributes(self.accelerator, **backward), patch_attributes(self.args, **own_tokens):
                loss = super().training_step(model, microbatch, model_count)
            optimizer.step()
            if sizes.samples == 0:  # a repeated microbatch, which only lets all ranks communicate equally often
                loss = torch.zeros_like(loss)  # even if it is not finite
            update_loss = update_loss + scale_loss(loss, factor * sizes.samples / sizes.batch_size)
        self.accelerator.sync_gradients = False  # so that Trainer's own optimizer.step(), which follows, does nothing
        return update_loss * self.args.world_size  # Trainer divides it by the number of ranks, each of which has a part

    def _check_loss_if_due(self) -> None:
        """Check in the first updates whether the loss is a mean over rows or labels, and warn if it is not."""
        optimizer = self.variable_optimizer
        if optimizer.sampler.batches.arriving:
            self._loss_check.leave(optimizer, "rows of a stream, or of group_by_length, have no index")
        elif self._loss_check.takes(optimizer):
            self._check_loss()

    def _label_counts(self, update: list[Any], parts: Sequence[Microbatch]) -> tuple[list[Any], Any, list[Any]]:
        """Return the numbers of labels by which the microbatches of an update are weighed: each label counts once.

        Args:
            update: the microbatches.
            parts: their descriptions.

        Returns:
            For each microbatch the number of labels, or of rows, over which its loss is a mean; the total of these over
            all ranks; and for each microbatch the number of labels that the model gets, None for a mean over rows.
        """
        counts: list[Any] = [self._count_labels(microbatch) for microbatch in update]
        if any(count is None for count in counts):
            return [part.rows for part in parts], self._batch_size, [None] * len(parts)
        dtype = torch.float32 if self.args.device.type in WITHOUT_FLOAT64 else torch.float64
        counts = [count.to(self.args.device, dtype) for count in counts]
        # Without the labels of rows that are there more than once, or that another microbatch of this rank has.
        distinct = [count * part.distinct for count, part in zip(counts, parts, strict=True)]
        total = self.accelerator.reduce(torch.stack(distinct).sum(), "sum").clamp(min=1)
        return counts, total, [count.clamp(min=1) for count in counts]

    def _check_loss(self) -> None:
        """Warn if the loss of rows, times their number of labels or rows, is not the sum of this over parts of them.

        If it is not, its gradient depends on how an update is cut into microbatches.
        """

        def summed_loss(model: Any, batch: Any, row_weight: float) -> Any:
            """Return the loss of a batch times the number of its labels, or of its rows."""
            self.__dict__["log"] = lambda *_, **__: None  # restored after the check, as an attribute of `owner`
            batch = send_to_device(batch, self.args.device)
            labels = self._count_labels(batch)
            loss = self.compute_loss(model, batch, num_items_in_batch=labels)
            return loss * (row_weight if labels is None else labels)

        options: Any = {"reduction": "sum", "remedy": REMEDY, "owner": self}
        with patch_attributes(self.args, average_tokens_across_devices=False):
            self._loss_check(self.variable_optimizer, self._loader.loader, self.model, summed_loss, **options)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of an update on this rank, or of a batch of an evaluation."""
        return sum(map(super().floating_point_ops, inputs if isinstance(inputs, list) else [inputs]))

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log also the batch size of the update, the samples so far, and the learning rate as the rule scaled it."""
        if "learning_rate" in logs and self._batch_size:
            optimizer = self.variable_optimizer
            logs |= {"learning_rate": optimizer.current_lr(), "batch_size": self._batch_size}
            logs |= optimizer_facts(optimizer)
            logs["grad_norm"] = float(logs["grad_norm"])
            if not math.isfinite(logs.get("noise_scale", 0.0)):  # JSON, in which Trainer saves its logs, has no nan
                del logs["noise_scale"]
        if "train_samples_per_second" in logs:
            samples = self.variable_optimizer.samples - self._samples_before
            logs["train_samples_per_second"] = round(samples / logs["train_runtime"], 3)
        super().log(logs, *args, **kwargs)


class VariableBatchTrainer(VariableBatchMixin, Trainer):
    """transformers' Trainer with a batch size that changes; see `VariableBatchMixin` for its arguments and errors."""


class Follower(TrainerCallback):
    """The callback of a trainer, which comes first, so that other callbacks read the right `state.epoch`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Create the optimizer, now that Trainer has wrapped the model and loaded a checkpoint."""
        self._trainer._create_optimizer()
        state.num_train_epochs = self._trainer._epochs
        self.on_step_end(args, state, control)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let optimizers of Accelerate step again."""
        self._trainer.accelerator.sync_gradients = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Correct the epoch, by the samples that were used, and the end: Trainer takes epochs to be equally long."""
        sampler = self._trainer.variable_optimizer.sampler
        if sampler.batches.arriving:  # a stream has no epochs
            state.epoch = state.global_step / args.max_steps
        else:
            epoch = sampler.batches.epoch(sampler.position)
            step = sampler.position.step
            state.epoch = sampler.plan.epochs_before(epoch, step)
        if state.global_step and self._trainer.variable_optimizer.done:  # other callbacks then save and evaluate
            state.max_steps = state.global_step


def saved_position(checkpoint: Any) -> Any:
    """Return the position in the training that a checkpoint of Trainer has; raise ValueError if it has none."""
    path = Path(str(checkpoint), POSITION)
    if not path.is_file():
        remedy = "load its model, and begin a new training"
        raise value_error("a checkpoint must have the position in the training", f"one without {path}", remedy)
    return torch.load(path, map_location="cpu", weights_only=True)


def sum_in_float32(accelerator: Any) -> None:
    """Let FSDP2 reduce gradients in float32, if an accelerator's mixed precision would do it in 16 bits.

    Sums of several microbatches need it: in bfloat16 small ones vanish in large ones.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy: Any = getattr(plugin, "mixed_precision_policy", None)
    if getattr(policy, "reduce_dtype", None) in (torch.bfloat16, torch.float16):
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32)


def scale_loss(loss: Tensor, factor: Tensor | float) -> Tensor:
    """Return a loss times a factor; 0 for a factor of 0, although the loss may be nan, as the mean over no labels is.

    Args:
        loss: the loss, 0-D.
        factor: a number > 0, or a tensor, 0-D.
    """
    return torch.where(factor > 0, loss * factor, 0) if isinstance(factor, Tensor) else loss * factor


@contextmanager
def patch_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object within a block, and restore or delete them afterwards."""
    values_before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values.keys() - values_before.keys():
            del vars(owner)[name]
        vars(owner).update(values_before)
