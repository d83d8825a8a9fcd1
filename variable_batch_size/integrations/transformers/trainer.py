"""transformers' Trainer with a batch size that changes: `VariableBatchTrainer`, and a mixin for its subclasses.

Trainer sees one batch an update, the list of this rank's microbatches, so that what it counts, schedules, logs and
saves by steps is right. It makes the last step of an update itself, and `training_step` makes those before it. The
model is wrapped by Accelerate, in DistributedDataParallel or FSDP2, and the optimizer goes around what comes of that.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from variable_batch_size._validation import type_error
from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace
from variable_batch_size.data.arriving import ArrivingBatches
from variable_batch_size.data.sampler import CustomSampler, TraceLike
from variable_batch_size.integrations.facts import facts_of
from variable_batch_size.integrations.settings import Settings, check_indexed, check_names
from variable_batch_size.integrations.versions import require_version
from variable_batch_size.metrics import WITHOUT_FLOAT64
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.lr_scheduler import ProgressScheduler
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.rules import Rule

require_version("transformers", "5.19", "transformers")
require_version("accelerate", "1.13", "transformers")

from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils import recursively_apply  # noqa: E402
from transformers import Trainer  # noqa: E402  (after the check, which has the better message)

from variable_batch_size.integrations.accelerate import sum_in_float32  # noqa: E402
from variable_batch_size.integrations.transformers.internals import TrainerInternals, order_of  # noqa: E402
from variable_batch_size.integrations.transformers.labels import Share  # noqa: E402
from variable_batch_size.integrations.transformers.length import Position, is_adaptive, length  # noqa: E402
from variable_batch_size.integrations.transformers.loss_check import check_loss  # noqa: E402
from variable_batch_size.integrations.transformers.stream_loader import StreamLoader, check_length, is_stream  # noqa: E402
from variable_batch_size.integrations.transformers.supported import check_settings  # noqa: E402
from variable_batch_size.integrations.transformers.update_loader import Update, UpdateLoader  # noqa: E402


class VariableBatchMixin(TrainerInternals):
    """Makes a subclass of Trainer train with a batch size that changes: `class Mine(VariableBatchMixin, SFTTrainer)`.

    `per_device_train_batch_size` is the microbatch, and the trace gives the global batch size of each update. The seed,
    the order of samples, clipping, precision, and how ranks share the model (DistributedDataParallel or FSDP2) are
    those of the training arguments. Labels are averaged over all tokens of an update, on all ranks, if Trainer counts
    them (see `Trainer.get_batch_samples`), otherwise losses over samples.

    Args:
        args: arguments of the class that it is mixed into.
        trace: the trace of the global batch size, in samples, see `CustomSampler`.
        rule: the learning-rate rule, see `CustomOptimizer`.
        ref_batchsize: batch size, in samples, at which the hyperparameters were tuned.
        sampler_options: further arguments of the `CustomSampler`.
        optimizer_options: further arguments of the `CustomOptimizer`.
        check_loss: whether the first update checks, by three forwards, that the loss is a mean over rows or labels; a
            UserWarning tells if not.
        kwargs: keyword arguments of the class that it is mixed into.

    Raises:
        TypeError: if the dataset has no index, or an argument has the wrong type.
        ValueError: if a training argument contradicts the trace or is not supported, or the trace is too short.
    """

    update_loader: UpdateLoader | StreamLoader
    optimizer: Any  # these belong to Trainer
    lr_scheduler: Any
    control: Any

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
        check_loss: bool = True,
        **kwargs: Any,
    ) -> None:
        self._settings = Settings(trace, rule, ref_batchsize, sampler_options or {}, optimizer_options or {})
        self._variable: CustomOptimizer | None = None
        self._initial_samples = 0  # before the train() under way
        self._parts: Sequence[Microbatch] = ()  # of the last update
        self._share: Share | None = None  # of the microbatch under way
        self._epoch_is_read = False  # whether the loop must end, though no callback leaves the epoch
        self._check_loss = self._checks_loss = check_loss
        check_names(kwargs, Trainer.__init__)
        dataset = kwargs.get("train_dataset")
        if dataset is not None and not isinstance(dataset, IterableDataset):
            check_indexed(dataset)
        super().__init__(*args, **kwargs)
        check_settings(self)
        self.callback_handler.callbacks.insert(0, Position(weakref.proxy(self)))  # before all that read the state
        self._counts_anyway = self.count_labels_right()
        if self.train_dataset is not None:  # raises early
            if is_stream(self):
                check_length(self.args, self._new_source())
            else:
                length(self._new_sampler(), self.args)

    @property
    def variable_optimizer(self) -> CustomOptimizer:
        """The optimizer that counts samples and updates, around the one that `train()` has prepared.

        Raises:
            RuntimeError: before.
        """
        if self._variable is None:
            raise RuntimeError("the variable optimizer must be there, but none was created yet; call train()")
        return self._variable

    # The training's parts. ---------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train`; a second call is a new training of the present weights, as it is there."""
        check_settings(self)  # again, because arguments may have been changed
        if self._variable is not None and isinstance(self.optimizer, AcceleratedOptimizer):
            self.optimizer.optimizer = self._variable.inner
        self._checks_loss, self._variable = self._check_loss, None
        return super().train(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and set the methods of it that must do something else for parts of an update."""
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        me: Any = weakref.proxy(self)
        accelerator.prepare = partial(type(self)._prepare, me, accelerator.prepare)
        accelerator.backward = partial(type(self)._backward, me)
        accelerator.clip_grad_norm_ = lambda *_args, **_options: None  # the optimizer clips, when all is summed
        sum_in_float32(accelerator)

    def _prepare(self, prepare: Any, *objects: Any, **options: Any) -> Any:
        """Let Accelerate wrap model and optimizer, which exchanges parameters, and put ours around the latter."""
        prepared = prepare(*objects, **options)
        everything = prepared if isinstance(prepared, (tuple, list)) else (prepared,)
        if any(one is self.optimizer for one in objects):
            model = everything[0] if len(everything) > 1 else self.model_wrapped
            self._bind(model, everything[-1])
        return prepared

    def _bind(self, model: Any, prepared: Any) -> None:
        options = {"model": model, "max_grad_norm": self.args.max_grad_norm or None, "grad_norm": True}
        sampler = self.update_loader.sampler
        self._variable = prepared.optimizer = self._settings.optimizer(prepared.optimizer, sampler, **options)

    def _backward(self, loss: Tensor, **_: Any) -> None:
        self.variable_optimizer.backward(loss if self._share is None else self._share.scaled(loss))

    def get_train_dataloader(self) -> Any:
        """Return the loader of the training, whose batches are updates: lists of this rank's microbatches."""
        loader = super().get_train_dataloader()
        loader = getattr(loader, "base_dataloader", loader)  # below accelerate's, which deals batches to the ranks
        if not isinstance(loader, DataLoader):
            raise type_error("get_train_dataloader() must return a DataLoader", loader, "return one of torch there")
        optimizer = partial(getattr, weakref.proxy(self), "_variable")
        if is_stream(self):
            return StreamLoader(self.args, loader, self._new_source, optimizer)
        return UpdateLoader(loader, self._new_sampler(**order_of(loader)), optimizer)

    def _new_source(self, collate_fn: Any = None) -> ArrivingBatches:
        args, options = self.args, {"collate_fn": collate_fn, "shared": True}
        world = {"num_replicas": args.world_size, "rank": args.process_index}
        return self._settings.source(minibatch_size=self.rows_of_microbatch, **world, **options)

    def _new_sampler(self, **order: bool) -> CustomSampler:
        args, settings = self.args, self._settings
        fixed = args.max_steps <= 0 or isinstance(settings.trace, AdaptiveTrace)
        ends = {} if fixed or "max_updates" in settings.sampler_options else {"max_updates": args.max_steps}
        return settings.sampler(
            self.train_dataset,
            minibatch_size=self.rows_of_microbatch,
            seed=args.seed if args.data_seed is None else args.data_seed,
            num_replicas=args.world_size,
            rank=args.process_index,
            **ends,
            **order,
        )

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return the numbers of epochs, updates and samples of the training, of which no two epochs are alike.

        Raises:
            TypeError: if `get_train_dataloader` of another class was called.
        """
        if isinstance(dataloader, StreamLoader):
            self.update_loader, largest = dataloader, dataloader.sampler.trace.max_batch_size
            samples = args.max_steps * largest
            return 1, args.max_steps, samples, samples, largest, args.max_steps, args.max_steps
        if not isinstance(dataloader, UpdateLoader):
            remedy = "override it in a class below: class Mine(VariableBatchMixin, TrainerWithALoader)"
            raise type_error("the loader must be that of VariableBatchMixin", dataloader, remedy)
        self.update_loader, sampler = dataloader, dataloader.sampler
        found, examples = length(sampler, args), sampler.plan.dataset_size
        # An epoch has at most so many updates; get_batch_samples() ends it.
        return found.epochs, examples, examples, found.samples, sampler.max_batch_size, examples, found.updates

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the schedule of the training: it steps by updates; without a known number of them, by samples.

        With a trace that a controller writes and a number of epochs, it counts samples / `ref_batchsize`, the updates
        at the reference, and so do the steps of a warm-up.
        """
        variable = self.variable_optimizer
        self._initial_samples, self._parts = variable.samples, ()
        if self.lr_scheduler is not None or self.args.max_steps > 0 or not is_adaptive(variable.sampler):
            return super().create_scheduler(num_training_steps, optimizer)
        assert variable.ref_batchsize is not None  # check_settings
        total = math.ceil(length(variable.sampler, self.args).samples / variable.ref_batchsize)
        scheduler = super().create_scheduler(total, variable)
        if isinstance(scheduler, LambdaLR):
            self.lr_scheduler = ProgressScheduler(scheduler, variable, by="samples", total=total)
        return self.lr_scheduler

    # An update. --------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the next update, in a list, and the number of its labels over all ranks; an empty list at the end."""
        update = next(epoch_iterator, None)
        if update is None:
            self._epoch_is_read = self.control.should_epoch_stop = True  # this one is shorter than the longest
            return [], None
        self._parts = self.variable_optimizer.batch.microbatches
        counts = [self.labels_of(microbatch) for microbatch in update]
        if any(number is None for number in counts):
            return [update], None
        double = torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64
        update.counts = [torch.as_tensor(number).to(device, double) for number in counts]
        # Rows of a fixed shape are repeated, or all of them.
        pairs = zip(update.counts, self._parts, strict=True)
        own = torch.stack([number * (part.samples / part.rows) for number, part in pairs]).sum()
        update.total = self.accelerator.reduce(own, "sum").clamp(min=1)
        return [update], update.total

    def labels_of(self, microbatch: Any) -> Any:
        """Return the number of labels of a microbatch, as Trainer counts them; None if they do not count."""
        takes = self.model_accepts_loss_kwargs
        self.model_accepts_loss_kwargs = takes or self._counts_anyway
        try:
            with self._on_this_rank():
                return super().get_batch_samples(iter((microbatch,)), 1, self.args.device)[1]
        finally:
            self.model_accepts_loss_kwargs = takes

    def training_step(self, model: Any, inputs: Update, num_items_in_batch: Any = None) -> Tensor:
        """Run the microbatches of an update, and step after all but the last, which Trainer steps; return the loss."""
        if self._checks_loss:
            self._checks_loss = False
            with self._on_this_rank():
                check_loss(self, inputs[0], self._parts[0].rows)
        loss = torch.zeros((), device=self.args.device)
        for number, (microbatch, part) in enumerate(zip(inputs, self._parts, strict=True)):
            if number > 0:
                self.optimizer.step()
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
            self._share = share = Share.of(inputs, number, part)
            with self._on_this_rank(), self._gathering(counts=part.samples > 0):
                own = super().training_step(model, microbatch, share.items)
            loss = loss + torch.where(torch.as_tensor(share.weight > 0), own * share.weight, 0)
        return loss * self.args.world_size  # Trainer logs the mean over the ranks

    @contextlib.contextmanager
    def _gathering(self, *, counts: bool) -> Iterator[None]:
        """Let what a loss logs by `accelerator.gather` in a replay be 0, so that sums over the ranks are right."""
        accelerator: Any = self.accelerator
        gather = accelerator.gather
        if not counts:
            accelerator.gather = lambda values: gather(recursively_apply(torch.zeros_like, values))
        try:
            yield
        finally:
            vars(accelerator).pop("gather", None)  # the method of the class is there again

    @contextlib.contextmanager
    def _on_this_rank(self) -> Iterator[None]:
        """Keep Trainer from summing the labels over the ranks in each microbatch, and from multiplying the loss."""
        before = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = before

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of an update on this rank, or of a batch of an evaluation."""
        if isinstance(inputs, Update):
            return sum(self.floating_point_ops(microbatch) for microbatch in inputs)
        return super().floating_point_ops(inputs)

    # What it tells. ----------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log also what an update was made with: batch size, samples so far, the learning rate as it was scaled."""
        if "learning_rate" in logs and self._parts:
            optimizer, size = self.variable_optimizer, self._parts[0].batch_size
            logs |= {"learning_rate": optimizer.current_lr(), "batch_size": size, **facts_of(optimizer)}
            logs["grad_norm"] = float(logs["grad_norm"])  # always measured here
            if not math.isfinite(logs.get("noise_scale", 0.0)):  # which is no JSON
                del logs["noise_scale"]
        if "train_samples_per_second" in logs:
            samples = self.variable_optimizer.samples - self._initial_samples
            logs["train_samples_per_second"] = round(samples / logs["train_runtime"], 3)
        super().log(logs, *args, **kwargs)


class VariableBatchTrainer(VariableBatchMixin, Trainer):
    """transformers' Trainer with a batch size that changes; see `VariableBatchMixin` for its arguments and errors."""
