"""The strategies: Lightning's DDPStrategy and ModelParallelStrategy, in which a batch is one update.

Lightning's optimizer calls `optimizer_step` (or, with manual optimization, its loop calls `training_step`), which goes
through the microbatches of an update; the wrapper weighs, clips, scales and steps at the last one. So Lightning counts,
schedules, logs and saves updates. The optimizers are wrapped when the training's loader is there, after a restore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler

from variable_batch_size._validation import in_documentation, type_error, value_error
from variable_batch_size.checkpoint.rng_states import get_rng_states, set_rng_states
from variable_batch_size.data.sampler import CustomSampler, TraceLike
from variable_batch_size.data.tokens.token_batches import TokenBatches
from variable_batch_size.integrations.facts import optimizer_facts
from variable_batch_size.integrations.lightning.loader import StrategyLoader, training_sampler
from variable_batch_size.integrations.lightning.loss import MEAN_LOSS, OF_TOKENS, REMEDY, Output
from variable_batch_size.integrations.lightning.supported import SETTINGS
from variable_batch_size.integrations.loading import with_sampler
from variable_batch_size.integrations.loss_check import LossCheck
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.integrations.supported import check_settings
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.rules import Rule
from variable_batch_size.testing.schedules import check_schedule

_VERSION = 1  # of the entry "vbs" in a checkpoint


class VariableBatch(ParallelStrategy):
    """What a strategy of Lightning needs for batches that follow a trace; see `VariableBatchStrategy`."""

    def __init__(
        self,
        trace: TraceLike,
        rule: Rule | str | Sequence[Rule | str] = "constant",
        ref_batchsize: int | None = None,
        sampler_options: Mapping[str, Any] | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
        check_loss: bool = True,
        **options: Any,
    ) -> None:
        """Take the settings of this library, and pass the other options to the strategy of Lightning."""
        if isinstance(self, DDPStrategy):  # which takes any name, for a DistributedDataParallel that may never be made
            known_names = {*signature(DDPStrategy).parameters, *signature(DistributedDataParallel).parameters}
            if unknown := ", ".join(sorted({*options} - known_names)):
                names = "trace, rule, ref_batchsize, sampler_options, optimizer_options and check_loss"
                raise TypeError(f"{type(self).__name__} has no {unknown}; beside arguments of DDPStrategy pass {names}")
        super().__init__(**options)
        self.settings = Settings(trace, rule, ref_batchsize, sampler_options or {}, optimizer_options or {}, check_loss)
        self._reset()

    def _reset(self) -> None:
        """Forget an earlier training, at the beginning of a `fit`."""
        self.optimizers: list[Optimizer] = []
        self._wrapped: list[CustomOptimizer] = []  # the wrappers of the optimizers, in their order
        self._saved: dict[str, Any] = {}  # the entry "vbs" of the checkpoint from which `fit` continues
        self._sampled = True  # Lightning's `use_distributed_sampler`, while it is off for the training's loader
        # How many epochs more than the optimizer Lightning has counted: one that max_steps has ended counts as whole.
        self._ahead = 0
        self._lengthened: tuple[Any, Any] | None = None  # the loop that got that many epochs more, and its end
        self._update: list[Any] = []  # the microbatches of the present update, as they were read
        self._microbatch: Microbatch | None = None  # the present microbatch, and its rows on the device
        self._rows: Any = None
        self._count: Any = None  # the "count" that `training_step` has returned for it
        self._loss_check = LossCheck(self.settings.check_loss)

    @property
    def samples(self) -> int:
        """The number of samples that were trained on so far, over all ranks, for a schedule that goes by samples."""
        return self._wrapped[0].samples if self._wrapped else 0

    @property
    def _module(self) -> LightningModule:
        """The module that is trained, which Lightning has connected."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _interrupted(self) -> bool:
        """Whether an exception has ended the training."""
        return self.lightning_module is not None and self._module.trainer.state.status == TrainerStatus.INTERRUPTED

    def connect(self, model: LightningModule) -> None:
        """Take the module; if it is to be trained, check the settings of the Trainer."""
        super().connect(model)
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            loop = self._module.trainer.fit_loop
            if self._lengthened is not None and self._lengthened == (loop, loop.max_epochs):  # by an earlier `fit`
                loop.max_epochs = self._lengthened[1] - self._ahead
            self._reset()
            check_settings(SETTINGS, self._module.trainer, "Lightning")

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Call `configure_optimizers`; the gradients of several optimizers are summed without the model's wrapper."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:  # a DistributedDataParallel expects all gradients of a forward in one backward()
            self.model = self._module

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the training's loader as updates; one of an evaluation draws no random numbers of the training's."""
        if self._module.trainer.training:
            self._module.trainer._accelerator_connector.use_distributed_sampler = self._sampled
            return self._training_loader(dataloader)
        for drawing in (dataloader, getattr(dataloader, "sampler", None)):
            if isinstance(drawing, DataLoader | RandomSampler) and drawing.generator is None:
                drawing.generator = torch.Generator()
        return dataloader

    def _training_loader(self, loader: Any) -> StrategyLoader:
        """Return the loader of updates for a training, and put the wrapped optimizers in the place of the module's own.

        They begin at their position in the checkpoint, or at the first update.

        Args:
            loader: the DataLoader of the module.
        """
        trainer = self._module.trainer
        if not self.optimizers:
            raise RuntimeError(
                f"the number of updates must come from the plan, but trainer.estimated_stepping_batches was read, "
                f"which is not known; pass sampler.plan.epoch(epochs - 1).end_step, {in_documentation('Lightning')}"
            )
        if not self._wrapped:
            if trainer.global_step and not self._saved:
                raise RuntimeError(
                    f"a second fit() must continue with ckpt_path, but the Trainer has made {trainer.global_step} "
                    f"updates; pass a checkpoint, or create a new Trainer and strategy"
                )
            self._wrap_optimizers(loader, trainer)
        first = self._wrapped[0]
        sampler: Any = first.sampler
        microbatch_loader = with_sampler(loader, sampler)
        if self.optimizers[0] is not first:  # in a new training, and after Lightning's learning rate finder
            self.optimizers = [*self._wrapped]
            for optimizer, position in zip(self._wrapped, self._saved.get("optimizers") or self._start, strict=True):
                optimizer.load_state_dict({**optimizer.inner.state_dict(), "vbs": position})
            self._ahead = max(0, trainer.current_epoch - first.epoch)
            if trainer.fit_loop.max_epochs not in (None, -1):
                trainer.fit_loop.max_epochs += self._ahead
                self._lengthened = trainer.fit_loop, trainer.fit_loop.max_epochs
        return StrategyLoader(microbatch_loader, self._wrapped, trainer, self._ahead)

    def _wrap_optimizers(self, loader: Any, trainer: Trainer) -> None:
        """Wrap the optimizers around one sampler, keep their first positions, and check schedules by updates."""
        sampler = training_sampler(loader, self.settings, trainer, self.distributed_sampler_kwargs)
        self._wrapped = [self._wrap_optimizer(inner, sampler) for inner in self.optimizers]
        self._start = [optimizer.state_dict()["vbs"] for optimizer in self._wrapped]
        batches = -(-len(loader.dataset) // loader.batch_sampler.batch_size)
        for config in self.lr_scheduler_configs:
            if config.interval == "step":
                check_schedule(config.scheduler, sampler, batches, trainer.max_steps)

    def _wrap_optimizer(self, inner: Optimizer, sampler: CustomSampler) -> CustomOptimizer:
        """Return a `CustomOptimizer` around an optimizer of the module, which clips as the Trainer says.

        Args:
            inner: the optimizer of torch.
            sampler: the sampler of the training.
        """
        clip = self._module.trainer.gradient_clip_val
        clipping = {"max_grad_norm": float(clip)} if clip else {}
        optimizer = self.settings.wrap_optimizer(inner, sampler, model=_gradient_reducer(self.model), **clipping)
        optimizer.optimizer = inner  # type: ignore[attr-defined]  # LearningRateMonitor takes the name from there
        optimizer.register_step_pre_hook(partial(self._call_step_hooks, optimizer))
        return optimizer

    def on_train_start(self) -> None:
        """Check that Lightning reads updates; set the random numbers as they were saved."""
        if not isinstance(loaders := self._module.trainer.train_dataloader, StrategyLoader):
            raise type_error("the training's loader must be one DataLoader", loaders, "put all data into one dataset")
        states = self._saved.get("host_rng_states", [])
        if len(states) == self.world_size:
            set_rng_states(states[self.global_rank])

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Return a batch on the device; an update stays on the host, and its microbatches are moved one by one."""
        return batch if self._module.trainer.training else super().batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keep the microbatches of an update, which `optimizer_step` or a manual `training_step` goes through."""
        self._update = batch

    def _microbatches(self, optimizer: CustomOptimizer) -> Iterator[Microbatch]:
        """Yield the microbatches of an update; while the caller has one, `training_step` gets its rows.

        After the last one it logs the update, and lets the Trainer stop if the training has ended.
        """
        for rows in self._update:
            self._microbatch = microbatch = optimizer.microbatch
            self._rows = self._on_device(rows)
            yield microbatch
        self._microbatch = self._rows = None
        self._log_update(optimizer, microbatch.batch_size)
        if optimizer.done:
            self._module.trainer.should_stop = True

    def _log_update(self, optimizer: CustomOptimizer, size: int) -> None:
        """Log the means of an update and, as often as the Trainer says, learning rate, batch size and further facts.

        Args:
            optimizer: the first optimizer.
            size: samples of the update, over all ranks.
        """
        module, trainer = self._module, self._module.trainer
        means = {name: mean for wrapped in self._wrapped for name, mean in wrapped.logged.items()}
        module.log_dict(means, on_step=True, on_epoch=True, batch_size=size, sync_dist=self.world_size > 1)
        if trainer.loggers and trainer.log_every_n_steps and optimizer.updates % trainer.log_every_n_steps == 0:
            rates = {"lr_effective": optimizer.current_lr(), "lr_factor": optimizer.lr_factor()}
            facts = {f"vbs/{name}": float(fact) for name, fact in {**rates, **optimizer_facts(optimizer)}.items()}
            module.log_dict({"vbs/global_batch_size": size, **facts}, on_step=True, rank_zero_only=True)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's `training_step` with the present microbatch; with manual optimization, with all in turn."""
        if not self._module.automatic_optimization:
            return self._manual_training_step(*args, **kwargs)
        if self._microbatch is None:
            raise RuntimeError(
                "an optimizer_step hook must call optimizer.step(closure=optimizer_closure) in every update, but it "
                "called the closure itself; pass it to step()"
            )
        optimizer = self._wrapped[0]
        if self._loss_check.takes(optimizer):
            self._check_loss(optimizer, args[1:], kwargs)
        returned = super().training_step(self._rows, *args[1:], **kwargs)
        output = Output.of(returned, self._microbatch.rows if optimizer.reduction == "sum" else None)
        self._count = output.count
        optimizer.log(**output.logged)
        return returned

    def _check_loss(self, optimizer: CustomOptimizer, others: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Warn if the loss of a batch is not the mean, or the sum, of the losses of parts of it; all ranks call it.

        Args:
            optimizer: the optimizer.
            others: the arguments of `training_step` after the batch.
            options: its keyword arguments.
        """

        def loss_of(module: LightningModule, batch: Any, _: float) -> Tensor:
            """Return the loss of a batch, without the log entries of the module."""
            vars(module)["log"] = lambda *_, **__: None  # the check restores attributes of the module
            with self.precision_plugin.train_step_context():
                return Output.of(module.training_step(self._on_device(batch), *others, **options)).loss

        remedy = OF_TOKENS if isinstance(optimizer.sampler.batches, TokenBatches) else REMEDY
        loader: Any = self._module.trainer.train_dataloader
        self._loss_check(optimizer, loader.rows, self._module, loss_of, reduction=optimizer.reduction, remedy=remedy)

    def _on_device(self, rows: Any) -> Any:
        """Return the rows of a microbatch on the device."""
        return super().batch_to_device(rows)

    def _manual_training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call `training_step`, which steps by itself, with each microbatch of an update; return the last output."""
        output = None
        self._loss_check.leave(self._wrapped[0], "training_step steps by itself (manual optimization)")
        for _ in self._microbatches(self._wrapped[0]):
            output = super().training_step(self._rows, *args[1:], **kwargs)
        lightning_optimizers = self._module.optimizers()
        for optimizer in lightning_optimizers if isinstance(lightning_optimizers, list) else [lightning_optimizers]:
            optimizer.step()  # only so that Lightning counts an update: `optimizer_step` does nothing here
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run a backward by the optimizer, which weighs the loss where that is needed."""
        if any(wrapped.microbatch != self._microbatch for wrapped in self._wrapped):  # one has counted this microbatch
            raise RuntimeError(
                "all backward passes of a training_step must run before its first step(), which changes weights only "
                "at the end of an update, but one ran after a step(); call manual_backward() for every loss first"
            )
        if len(self._wrapped) > 1 or is_overridden("backward", self._module):
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.pre_backward(closure_loss)
        Precision.pre_backward(self.precision_plugin, closure_loss, self._module)  # the hooks, and not the scale
        self._wrapped[0].backward(closure_loss, *args, scaler=getattr(self.precision_plugin, "scaler", None), **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self._module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> bool:
        """Go through the microbatches of an update; return whether weights changed."""
        assert isinstance(optimizer, CustomOptimizer)
        if not self._module.automatic_optimization:
            if self._microbatch is not None:
                raise RuntimeError(
                    "manual optimization must step by self.optimizers(use_pl_optimizer=False), but the step() of one "
                    "that Lightning counts was called for a microbatch; pass use_pl_optimizer=False"
                )
            return True  # made by the module: this one is counted
        scaler = getattr(self.precision_plugin, "scaler", None)
        updated = None
        for _ in self._microbatches(optimizer):
            loss = closure()
            if isinstance(closure, Closure):  # Private: it would call the hooks of zero_grad() for each microbatch
                closure._zero_grad_fn = None
            if scaler is None:
                updated = optimizer.step(count=self._count, **kwargs)
            else:
                updated = scaler.step(optimizer, count=self._count, **kwargs)
                scaler.update()
        loss.detach().copy_(optimizer.logged[MEAN_LOSS])  # which is the "loss" of `outputs`
        return bool(updated)

    def _call_step_hooks(self, optimizer: CustomOptimizer, *_: object) -> None:
        """Call Lightning's hooks before a step, once an update: gradients are complete, reduced and clipped."""
        module = self._module
        for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
            callback.on_before_optimizer_step(module.trainer, module, optimizer)
        module.on_before_optimizer_step(optimizer)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes, unless an exception has ended the training, when others may be elsewhere.

        It is also what Lightning calls before it prepares the training's loader, which it would shuffle.
        """
        if not self._interrupted:
            super().barrier(name)
        if name == "train_dataloader()":
            connector = self._module.trainer._accelerator_connector
            self._sampled, connector.use_distributed_sampler = connector.use_distributed_sampler, False

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the optimizer of torch; `save_checkpoint` adds the position in the training."""
        return super().optimizer_state(optimizer.inner if isinstance(optimizer, CustomOptimizer) else optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint with the position in the training; warn if an exception has left none."""
        try:
            if "optimizer_states" in checkpoint:
                checkpoint["vbs"] = self._positions()
        except RuntimeError as error:
            if not self._interrupted:
                raise
            rank_zero_warn(f"no checkpoint is written of the update that an exception has interrupted: {error}")
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def _positions(self) -> dict[str, Any]:
        """Return the entry "vbs" of a checkpoint: positions of the optimizers, if training began, and RNG states."""
        states: list[str] = []
        for optimizer in self._wrapped:
            if self._interrupted and optimizer.inside_step:
                optimizer.discard_step()
        if self._wrapped and (self.world_size == 1 or not self._interrupted):
            states = self._wrapped[0].agreement.gather("a checkpoint of Lightning", get_rng_states())
        positions = [optimizer.state_dict()["vbs"] for optimizer in self._wrapped]
        return {"version": _VERSION, "optimizers": positions, "host_rng_states": states}

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint; if a training continues, take its position, on any number of processes."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self._saved = checkpoint.get("vbs", {})
            if (version := self._saved.get("version")) != _VERSION:
                requirement = f"ckpt_path must be a checkpoint of this strategy, with a position of version {_VERSION}"
                remedy = "to begin with the weights of another one, load them into the module, and leave out ckpt_path"
                raise value_error(requirement, f"version {version}", remedy)
        return checkpoint


@final
class VariableBatchStrategy(VariableBatch, DDPStrategy):
    """Trains a LightningModule with a global batch size that follows a trace, on one process or, by DDP, on several.

    The `batch_size` of the training's DataLoader becomes the maximum number of rows of a microbatch, and
    `training_step` gets one microbatch. Everything that Lightning counts is in updates. Samples are shuffled if the
    loader shuffles, on any number of devices; `shuffle` in `sampler_options` wins.

    Args:
        trace: the trace of the global batch size, in samples, see `CustomSampler`.
        rule: the learning-rate rule, see `CustomOptimizer`.
        ref_batchsize: batch size, in samples, at which the hyperparameters were tuned.
        sampler_options: further arguments of the `CustomSampler`.
        optimizer_options: further arguments of the `CustomOptimizer`.
        check_loss: whether updates 0, 1, 10, 100 and 1,000 warn of a loss that is no mean over rows.
        **options: arguments of Lightning's DDPStrategy, such as `find_unused_parameters` or `start_method`.

    Raises:
        TypeError: if the options are not dicts; in `fit`, if the training's loader is not a DataLoader, or its dataset
            has no index.
        ValueError: in `fit`, if a setting of the Trainer or a hook of the module is not supported.
    """

    @property
    def launcher(self) -> Any:
        """What starts the processes; one is not started: it may be that of a notebook."""
        return super().launcher if self.world_size > 1 else None

    def setup_distributed(self) -> None:
        """Connect the processes, if there are several."""
        if self.world_size > 1:
            super().setup_distributed()

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model, if there are several processes, and create the optimizers."""
        if self.world_size > 1:
            super().setup(trainer)
            return
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()


@final
class VariableBatchModelParallelStrategy(VariableBatch, ModelParallelStrategy):
    """The same for a model that `configure_model` shards by `fully_shard`; with arguments of ModelParallelStrategy."""


def _gradient_reducer(model: Module | None) -> Module | None:
    """Return the module that sums gradients over ranks: a DistributedDataParallel, or the root of what FSDP2 shards."""
    sharded = [part for part in model.modules() if isinstance(part, FSDPModule)] if model is not None else []
    return sharded[0] if sharded and {*sharded} <= {*sharded[0].modules()} else model
