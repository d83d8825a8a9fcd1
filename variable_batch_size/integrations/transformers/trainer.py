"""transformers' Trainer with a batch size that changes: `VariableBatchTrainer`, and a mixin for its subclasses.

Trainer sees one batch an update, the list of this rank's microbatches, so that what it counts, schedules, logs and
saves by steps is right. It makes the last step of an update itself, and `training_step` makes those before it.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from variable_batch_size._validation import type_error
from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace
from variable_batch_size.data.sampler import CustomSampler, TraceLike
from variable_batch_size.integrations.loading import with_sampler
from variable_batch_size.integrations.settings import Settings, check_indexed
from variable_batch_size.integrations.transformers.planned import (
    Length,
    epochs_passed,
    is_growing,
    length_of_epochs,
    length_of_updates,
    microbatches_of_update,
    most_microbatches,
)
from variable_batch_size.integrations.transformers.update_loader import UpdateLoader, counted
from variable_batch_size.integrations.versions import require_version
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.consistency import broadcast_parameters
from variable_batch_size.optim.lr_scheduler import ProgressScheduler
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.rules import Rule
from variable_batch_size.rules.base import check_reference
from variable_batch_size.rules.selection import rules_for_groups

require_version("transformers", "5.19", "transformers")
require_version("accelerate", "1.10", "transformers")

from transformers import Trainer  # noqa: E402  (after the check, which has the better message)

from variable_batch_size.integrations.transformers.arguments import check_arguments, check_order  # noqa: E402
from variable_batch_size.integrations.transformers.labels import Weights, predicts_next_label, refuses_count  # noqa: E402
from variable_batch_size.integrations.transformers.position import Position  # noqa: E402
from variable_batch_size.integrations.transformers.unequal_rounds import UnequalRounds  # noqa: E402

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object


class VariableBatchMixin(Base):
    """Makes a subclass of Trainer train with a batch size that changes: `class Mine(VariableBatchMixin, SFTTrainer)`.

    `per_device_train_batch_size` is the microbatch, and the trace gives the global batch size of each update. The seed,
    the order of samples, clipping and precision are those of the training arguments. Labels are averaged over all
    tokens of an update, on all ranks, if Trainer counts them (see `Trainer.get_batch_samples`), otherwise losses over
    samples.

    Args:
        args: arguments of the class that it is mixed into.
        trace: the trace of the global batch size, in samples, see `CustomSampler`.
        rule: the learning-rate rule, see `CustomOptimizer`.
        ref_batchsize: batch size, in samples, at which the hyperparameters were tuned.
        sampler_options: further arguments of the `CustomSampler`.
        optimizer_options: further arguments of the `CustomOptimizer`.
        kwargs: keyword arguments of the class that it is mixed into.

    Raises:
        TypeError: if the dataset has no index, or an argument has the wrong type.
        ValueError: if a training argument contradicts the trace or is not supported, or the trace is too short.
    """

    optimizer: Any  # these belong to Trainer
    lr_scheduler: Any
    control: Any
    model_accepts_loss_kwargs: bool
    _loss_shifts_labels: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Trainer in cls.__mro__ and cls.__mro__.index(VariableBatchMixin) > cls.__mro__.index(Trainer):
            raise TypeError(
                f"VariableBatchMixin must come before the Trainer that it changes, but {cls.__name__} has it after; "
                f"write class {cls.__name__}(VariableBatchMixin, ...)"
            )

    def __init__(
        self,
        *args: Any,
        trace: TraceLike,
        rule: Rule | str | Sequence[Rule | str] = "constant",
        ref_batchsize: int | None = None,
        sampler_options: Mapping[str, Any] | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._settings = Settings(trace, rule, ref_batchsize, sampler_options or {}, optimizer_options or {})
        self._sampler: CustomSampler | None = None
        self._variable: CustomOptimizer | None = None
        self._used = False  # whether the sampler and the optimizer are those of a train()
        self._initial_samples = 0  # before that train()
        self._parts: list[Microbatch] = []  # of the last update
        for each in rules_for_groups(rule, len(rule) if isinstance(rule, (list, tuple)) else 1):
            check_reference(each, ref_batchsize)
        if kwargs.get("train_dataset") is not None:
            check_indexed(kwargs["train_dataset"])
        super().__init__(*args, **kwargs)
        check_arguments(self)
        self.callback_handler.callbacks.insert(0, Position(self))  # before all that read what it corrects
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
        # A private attribute of Trainer: whether the loss leaves out the first label of a row, which does not count.
        self._loss_shifts_labels = self._loss_shifts_labels or predicts_next_label(model)
        self._counts_anyway = self._loss_shifts_labels and refuses_count(model)
        if self.train_dataset is not None:
            self._length(self._new_sampler())  # raises early

    @property
    def variable_optimizer(self) -> CustomOptimizer:
        """The optimizer that counts samples and updates; it is created by `train()` or `create_optimizer()`.

        Raises:
            RuntimeError: before.
        """
        if self._variable is None:
            found, remedy = "none was created yet", "call train() or create_optimizer()"
            if self._used and self.optimizer is not None:
                found = f"create_optimizer() of {type(self).__name__} has not called that of VariableBatchMixin"
                remedy = "override it in a class below, class Mine(VariableBatchMixin, Theirs), or pass optimizers="
            raise RuntimeError(f"the variable optimizer must be there, but {found}; {remedy}")
        return self._variable

    @property
    def begun(self) -> bool:
        """Whether there is a variable optimizer, or a training that needs one has begun."""
        return self._variable is not None or self._used

    # The training's parts. ---------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train`; a second call is a new training of the present weights, as it is there."""
        check_arguments(self)  # again, because arguments may have been changed
        if self._used:
            self._sampler = None
            if self._variable is not None:
                self.optimizer, self._variable = self._variable.inner, None
        self._used = True
        return super().train(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, which leaves the sum over the ranks and the clipping to the optimizer."""
        super().create_accelerator_and_postprocess()
        # In this mode it does all but wrap the model in DistributedDataParallel, which would reduce gradients, too.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.accelerator.clip_grad_norm_ = lambda *_args, **_options: None  # it would clip parts of the gradient

    def begin_training(self) -> None:
        """Note where the optimizer begins."""
        self._initial_samples, self._parts = self.variable_optimizer.samples, []

    def get_train_dataloader(self) -> Any:
        """Return the loader of the training, whose batches are updates: lists of this rank's microbatches."""
        loader = super().get_train_dataloader()
        loader = getattr(loader, "base_dataloader", loader)  # below accelerate's, which deals batches to the ranks
        if not isinstance(loader, DataLoader):
            raise type_error("get_train_dataloader() must return a DataLoader", loader, "return one of torch there")
        check_order(loader, self.present_sampler, self.args)
        return UpdateLoader(with_sampler(loader, self.present_sampler), self)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer as Trainer does, and the variable one around it."""
        if self.optimizer is None:
            self._variable = None
        if self._variable is None:
            broadcast_parameters(self.model)  # as DistributedDataParallel does when it is created
            self._variable = self._wrapped(super().create_optimizer(*args, **kwargs))
            self.optimizer = self._variable
        return self.optimizer

    def _wrapped(self, inner: Any) -> CustomOptimizer:
        args = self.args
        options = {"max_grad_norm": args.max_grad_norm or None, "grad_norm": True}
        if handler := self.accelerator.ddp_handler:  # with Trainer's default: True without activation checkpointing
            options["find_unused_parameters"] = handler.find_unused_parameters
        return self._settings.optimizer(inner, self.present_sampler, **options)

    @property
    def present_sampler(self) -> CustomSampler:
        """The sampler of the training under way, or of the next one."""
        if self._sampler is None:
            self._sampler = self._new_sampler()
        return self._sampler

    def _new_sampler(self) -> CustomSampler:
        args, settings = self.args, self._settings
        ends: dict[str, int] = {}
        if args.max_steps > 0 and not isinstance(settings.trace, AdaptiveTrace):
            ends = {} if "max_updates" in settings.sampler_options else {"max_updates": args.max_steps}
        return settings.sampler(
            self.train_dataset,
            minibatch_size=self._train_batch_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy != "sequential",
            drop_last=args.dataloader_drop_last,
            num_replicas=args.world_size,
            rank=args.process_index,
            **ends,
        )

    # How long it is. ---------------------------------------------------------------------------------------------

    def _length(self, sampler: CustomSampler) -> Length:
        args = self.args
        if args.max_steps > 0:
            return length_of_updates(sampler.plan, args.max_steps)
        return length_of_epochs(sampler.plan, args.num_train_epochs)

    def updates_in_all(self, estimate: int) -> int:
        """Return the number of updates of the training, as far as it is known by now; `estimate`: by Trainer."""
        optimizer, args = self.variable_optimizer, self.args
        if args.max_steps > 0 or not is_growing(optimizer.sampler):
            return estimate
        if epochs_passed(optimizer.sampler.clock) >= args.num_train_epochs:
            return optimizer.updates
        return max(optimizer.updates + 1, length_of_epochs(optimizer.sampler.plan, args.num_train_epochs).updates)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return the numbers of epochs, updates and samples of the training, of which no two epochs are alike.

        Raises:
            TypeError: if `get_train_dataloader` of another class was called.
        """
        if not isinstance(dataloader, UpdateLoader):
            remedy = "override it in a class below: class Mine(VariableBatchMixin, TrainerWithALoader)"
            raise type_error("the loader must be that of VariableBatchMixin", dataloader, remedy)
        sampler = self.present_sampler
        length, examples = self._length(sampler), sampler.plan.dataset_size
        epochs, longest = length.epochs, length.longest
        if is_growing(sampler):
            longest = examples  # at most
            epochs = sys.maxsize if args.max_steps > 0 else epochs
        largest = sampler.max_batch_size
        return epochs, longest, examples, length.samples, largest, longest, length.updates

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        # Private, but the only place that knows the epoch to resume in: Trainer takes all of them to be equally long.
        # Our loader begins after the last update by itself, so that no batches are to be skipped.
        super()._init_training_state(*args, **kwargs)
        return int(self.state.epoch), 0

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # Private, but only there is it known that a state which does not fit comes from a checkpoint.
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        except ValueError as error:
            reason = str(error).rpartition("; ")[0]
            remedy = f"resume from a checkpoint of this training, or begin a new one with the model of {checkpoint}"
            raise ValueError(f"{reason}; {remedy}") from error

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the schedule of the training: it steps by updates; without a known number of them, by samples.

        With a trace that a controller writes and a number of epochs, it counts samples / `ref_batchsize`, the updates
        at the reference, and so do the steps of a warm-up.
        """
        sampler = self.present_sampler
        if self.lr_scheduler is not None or self.args.max_steps > 0 or not is_growing(sampler):
            return super().create_scheduler(num_training_steps, optimizer)
        variable = self.variable_optimizer
        assert variable.ref_batchsize is not None  # check_arguments
        total = math.ceil(self._length(sampler).samples / variable.ref_batchsize)
        scheduler = super().create_scheduler(total, variable)
        if isinstance(scheduler, LambdaLR):
            self.lr_scheduler = ProgressScheduler(scheduler, variable, by="samples", total=total)
        return self.lr_scheduler

    # An update. --------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the next update, in a list, and the number of its labels over all ranks; an empty list at the end."""
        update = next(epoch_iterator, None)
        if update is None:
            self.control.should_epoch_stop = True  # this one is shorter than the longest
            return [], None
        count = super().get_batch_samples
        takes = self.model_accepts_loss_kwargs
        self.model_accepts_loss_kwargs = takes or self._counts_anyway
        try:
            with self._counting_on_this_rank():
                counts = [count(iter((microbatch,)), 1, device)[1] for microbatch in update]
        finally:
            self.model_accepts_loss_kwargs = takes
        if any(number is None for number in counts):
            return [update], None
        parts = microbatches_of_update(self.variable_optimizer)
        double = torch.float32 if device.type in ("mps", "xla") else torch.float64  # which they do not have
        update.counts = [torch.as_tensor(number).to(device, double) for number in counts]
        # Rows of a fixed shape are repeated, or all of them.
        shares = [number * (part.samples / part.rows) for number, part in zip(update.counts, parts, strict=True)]
        total = self.accelerator.reduce(torch.stack(shares).sum(), "sum")
        return [update], total.clamp(min=1)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run the microbatches of an update, and step after all but the last, which Trainer steps; return the loss."""
        parts, rounds = microbatches_of_update(self.variable_optimizer), UnequalRounds(self.accelerator)
        self._parts = parts
        missing = most_microbatches(self.variable_optimizer) - len(parts)
        weights = None if num_items_in_batch is None else Weights(inputs.counts, parts, num_items_in_batch)
        loss = torch.zeros((), device=self.args.device)
        for number, (microbatch, part) in enumerate(zip(inputs, parts, strict=True)):
            if number > 0:
                self.optimizer.step()
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._counting_on_this_rank())
                stack.enter_context(rounds.microbatch(counts=part.samples > 0))
                if weights is not None:
                    stack.enter_context(weights.scaled(self, number))
                own = super().training_step(model, microbatch, None if weights is None else weights.items(number))
            loss = loss + own * (part.samples / part.batch_size)
        rounds.catch_up(missing)
        return loss * self.args.world_size  # Trainer logs the mean over the ranks

    @contextlib.contextmanager
    def _counting_on_this_rank(self) -> Iterator[None]:
        """Keep Trainer from summing the labels over the ranks in each microbatch, and from multiplying the loss."""
        before = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = before

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of an update on this rank, or of a batch of an evaluation."""
        if isinstance(inputs, list):
            return sum(self.floating_point_ops(microbatch) for microbatch in inputs)
        return super().floating_point_ops(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        # Private, but it gathers over the ranks, which have unequal numbers of microbatches: once an update.
        names = {"attention_mask", getattr(self.model, "main_input_name", "input_ids")}
        joined = {
            name: torch.cat([counted(batch[name], part) for batch, part in zip(inputs, self._parts, strict=True)])
            for name in names
            if all(name in batch for batch in inputs)
        }
        super()._track_num_input_tokens(joined)

    # What it tells. ----------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log also what an update was made with: batch size, samples so far, the learning rate as it was scaled."""
        if "learning_rate" in logs and self._parts:
            logs.update(self._of_last_update())
        if "train_samples_per_second" in logs:
            samples = self.variable_optimizer.samples - self._initial_samples
            logs["train_samples_per_second"] = round(samples / logs["train_runtime"], 3)
        super().log(logs, *args, **kwargs)

    def _of_last_update(self) -> dict[str, float]:
        optimizer = self.variable_optimizer
        logs = {
            "learning_rate": optimizer.current_lr(),
            "batch_size": self._parts[0].batch_size,
            "samples": optimizer.samples,
        }
        if optimizer.grad_norm is not None:
            logs["grad_norm"] = optimizer.grad_norm.item()
        with contextlib.suppress(RuntimeError):  # the noise is not measured
            scale = float(optimizer.noise().noise_scale)
            logs |= {"noise_scale": scale} if math.isfinite(scale) else {}
        return logs


class VariableBatchTrainer(VariableBatchMixin, Trainer):
    """transformers' Trainer with a batch size that changes; see `VariableBatchMixin` for its arguments and errors."""
