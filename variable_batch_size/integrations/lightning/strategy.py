"""The strategies: Lightning's DDPStrategy and ModelParallelStrategy, in which a batch is one update.

Lightning reads a batch, which stands for this rank's microbatches. Its optimizer calls `optimizer_step` (or, with
manual optimization, its loop calls `training_step`), which goes through them; the wrapper weighs, clips, scales and
steps at the last one. So Lightning counts, schedules, logs and saves updates. What it has put around the model sums
the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler

from variable_batch_size._validation import value_error
from variable_batch_size.checkpoint.rng_states import get_rng_states, set_rng_states
from variable_batch_size.data.sampler import TraceLike
from variable_batch_size.integrations.lightning.loader import LightningUpdates, training_sampler
from variable_batch_size.integrations.lightning.logging import UpdateLog
from variable_batch_size.integrations.lightning.private import OneOrSeveral, count_updates, replace_loader
from variable_batch_size.integrations.lightning.supported import SETTINGS
from variable_batch_size.integrations.schedules import warn_of_batches
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.integrations.supported import check
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.rules import Rule

_VERSION = 1  # of what a checkpoint has under "vbs"


class VariableBatch(ParallelStrategy):
    """What a strategy of Lightning needs for batches that follow a trace; see `VariableBatchStrategy`."""

    _updates: LightningUpdates  # the training's loader
    _log: UpdateLog

    def __init__(
        self,
        trace: TraceLike,
        rule: Rule | str | Sequence[Rule | str] = "constant",
        ref_batchsize: int | None = None,
        sampler_options: Mapping[str, Any] | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.settings = Settings(trace, rule, ref_batchsize, sampler_options or {}, optimizer_options or {})
        self.options = options
        self._microbatch: Any = None  # the one that training_step gets, on the device
        self._stepped = ""  # with manual optimization, the kind of an optimizer that has stepped in the microbatch
        self._rng_states: list[str] = []  # of the ranks' hosts, if they are to be restored

    @property
    def samples(self) -> int:
        """The number of samples that were trained on so far, over all ranks, for a schedule that goes by samples."""
        return self._wrapped[0].samples if self._wrapped else 0

    @property
    def _wrapped(self) -> list[CustomOptimizer]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, CustomOptimizer)]

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    @property
    def _interrupted(self) -> bool:
        """Whether an exception has ended the training, of which other ranks may not know."""
        return self.lightning_module is not None and self._trainer.state.status == TrainerStatus.INTERRUPTED

    @property
    def _scaler(self) -> GradScaler | None:
        return getattr(self.precision_plugin, "scaler", None)

    # Before the training. ---------------------------------------------------------------------------------------------

    def connect(self, model: LightningModule) -> None:
        """Take the module; if it is to be trained, check the settings of the Trainer."""
        super().connect(model)
        trainer = self._trainer
        if trainer.state.fn == TrainerFn.FITTING:
            self.__dict__.pop("_updates", None)
            self.optimizers: list[Optimizer] = []
            check(SETTINGS, trainer, "lightning")
            count_updates(trainer, lambda: self._updates.plan if hasattr(self, "_updates") else None)
            replace_loader(trainer, self._read)

    def _read(self, loader: DataLoader[Any]) -> LightningUpdates:
        """Return the training's loader as updates."""
        if hasattr(self, "_updates"):  # the learning rate finder asks again
            self._updates.reload(loader)
        else:
            sampler = training_sampler(loader, self.settings, self._trainer, self.distributed_sampler_kwargs)
            self._updates = LightningUpdates(loader, sampler, self._trainer, lambda: self._wrapped)
        return self._updates

    def process_dataloader(self, dataloader: object) -> object:
        """Give a loader of an evaluation a generator of its own: a run that resumes after it draws the same dropout."""
        for drawing in (dataloader, getattr(dataloader, "sampler", None)):
            if isinstance(drawing, DataLoader | RandomSampler) and drawing.generator is None:
                drawing.generator = torch.Generator()
        return dataloader

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Read the training's loader, call `configure_optimizers`, and wrap the optimizers."""
        trainer.fit_loop.setup_data()  # as `estimated_stepping_batches` does it in configure_optimizers
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:  # a DistributedDataParallel expects all gradients of a forward in one backward()
            self.model = self._module
        self.optimizers = [self._wrap(optimizer, _summing(self.model)) for optimizer in self.optimizers]
        self._log = UpdateLog(self._module, self._updates.own_sampler.world.size)

    def _wrap(self, inner: Optimizer, model: Module | None) -> CustomOptimizer:
        clip = self._trainer.gradient_clip_val
        clipping = {"max_grad_norm": float(clip)} if clip else {}
        optimizer = self.settings.optimizer(inner, self._updates.own_sampler, model=model, **clipping)
        optimizer.optimizer = inner  # type: ignore[attr-defined]  # LearningRateMonitor takes the name from there
        optimizer.register_step_pre_hook(partial(self._before_step, optimizer))
        return optimizer

    def on_train_start(self) -> None:
        """Set the random numbers as they were saved; warn of schedules that count batches."""
        if len(self._rng_states) == self.world_size:
            set_rng_states(self._rng_states[self.global_rank])
        self._rng_states = []
        manual = not self._module.automatic_optimization
        stepped = (each.scheduler for each in self.lr_scheduler_configs if manual or each.interval == "step")
        total = self._trainer.estimated_stepping_batches
        warn_of_batches(stepped, self._updates.plan, self._updates.batches, total)

    # An update. -------------------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Return a batch on the device; an update stays on the host, and its microbatches are moved one by one."""
        return batch if self._trainer.training else super().batch_to_device(batch, device, dataloader_idx)

    def _each(self, optimizer: CustomOptimizer) -> Iterator[Microbatch]:
        """Yield the microbatches of an update, which `training_step` gets, and log and end it after the last one."""
        for rows in self._updates.microbatches:
            microbatch, self._stepped = optimizer.microbatch, ""
            self._microbatch = super().batch_to_device(self.precision_plugin.convert_input(rows))
            yield microbatch
            self._microbatch = None
        self._log.finish_update(optimizer, microbatch.batch_size)
        if optimizer.done:
            self._trainer.should_stop = True

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call `training_step` with the microbatch under way; with manual optimization, with each one."""
        if self._module.automatic_optimization:
            if self._microbatch is None:
                raise RuntimeError(
                    "an optimizer_step hook must call optimizer.step(closure=optimizer_closure) in every update, but "
                    "it called the closure itself; pass it to step()"
                )
            return super().training_step(self._microbatch, *args[1:], **kwargs)
        output, first = None, self._wrapped[0]
        for microbatch in self._each(first):
            with self._log.microbatch(microbatch), self._counting(last=microbatch.ends_step):
                output = super().training_step(self._microbatch, *args[1:], **kwargs)
        return output

    @contextmanager
    def _counting(self, *, last: bool) -> Iterator[None]:
        """Let schedulers step, and Lightning count steps, in a block for the `last` microbatch of an update only."""
        steps = self._trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        before, schedulers = steps.state_dict(), [vars(each.scheduler) for each in self.lr_scheduler_configs]
        for attributes in schedulers * (not last):
            attributes["step"] = lambda *args, **kwargs: None
        try:
            yield
        finally:
            for attributes in schedulers * (not last):
                del attributes["step"]
        if not last:
            steps.load_state_dict(before)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run a backward by the optimizer, which weighs the loss where that is needed."""
        if self._stepped:
            raise RuntimeError(
                f"all backwards of a training_step must run before its first step(), which changes the weights only in "
                f"the last microbatch of an update, but one ran after step() of the optimizer {self._stepped}; call "
                f"manual_backward() for every loss first, and step() of all optimizers after that"
            )
        if len(self._wrapped) > 1 or is_overridden("backward", self._module):
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.pre_backward(closure_loss)
        Precision.pre_backward(self.precision_plugin, closure_loss, self._module)  # the hooks, and not the scale
        self._wrapped[0].backward(closure_loss, *args, scaler=self._scaler, **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self._module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> bool:
        """Go through the microbatches of an update, or step at that of a manual one; return whether weights changed."""
        assert isinstance(optimizer, CustomOptimizer)
        if not self._module.automatic_optimization:
            closure()
            self._stepped = type(optimizer.inner).__name__
            return self._step(optimizer, kwargs)
        updated, samples = False, 0
        total: Any = 0.0
        for microbatch in self._each(optimizer):
            with self._log.microbatch(microbatch):
                loss = closure()  # which becomes the "loss" of `outputs`
            samples += microbatch.samples
            total = total + loss.detach() * microbatch.samples if isinstance(loss, Tensor) else total
            updated = self._step(optimizer, kwargs)
        if isinstance(total, Tensor) and samples:
            loss.detach().copy_(total / samples)  # that of the update, on this rank
        return updated

    def _step(self, optimizer: CustomOptimizer, arguments: Mapping[str, Any]) -> bool:
        if self._scaler is None:
            return optimizer.step(**arguments)
        updated = self._scaler.step(optimizer, **arguments)
        self._scaler.update()
        return bool(updated)

    def _before_step(self, optimizer: CustomOptimizer, *_: object) -> None:
        """Call the hooks before an optimizer's step, once an update: gradients are complete, reduced and clipped."""
        with self._log.outside():
            for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
                callback.on_before_optimizer_step(self._trainer, self._module, optimizer)
            self._module.on_before_optimizer_step(optimizer)

    # State. -----------------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes, unless an exception has ended the training, when others may be elsewhere."""
        if not self._interrupted:
            super().barrier(name)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the optimizer of torch; `save_checkpoint` adds the position in the training."""
        return super().optimizer_state(optimizer.inner if isinstance(optimizer, CustomOptimizer) else optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint with the position in the training; warn if an exception has left none."""
        try:
            if self._wrapped and "optimizer_states" in checkpoint:
                checkpoint["vbs"] = self._position()
        except RuntimeError as error:
            if not self._interrupted:
                raise
            rank_zero_warn(f"no checkpoint is written of the update that an exception has interrupted: {error}")
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def _position(self) -> dict[str, Any]:
        states: list[str] = []
        for optimizer in self._wrapped:
            if self._interrupted and optimizer.inside_step:
                optimizer.discard_step()
        if self.world_size == 1 or not self._interrupted:
            states = self._wrapped[0].agreement.gather("a checkpoint of Lightning", get_rng_states())
        positions = [optimizer.state_dict()["vbs"] for optimizer in self._wrapped]
        return {"version": _VERSION, "optimizers": positions, "host_rng_states": states}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers, and with them the position in the training, on any number of processes.

        Raises:
            ValueError: if the checkpoint has no position in a trace, or one of another version or training.
        """
        inner, own = checkpoint["optimizer_states"], checkpoint.get("vbs", {})
        if all("vbs" in state for state in inner) and inner:  # as they were saved before there was a version
            own = {"version": _VERSION, "optimizers": [state["vbs"] for state in inner]}
            own["host_rng_states"] = inner[0].pop("host_rng_states", [])
        if own.get("version") != _VERSION:
            requirement = (
                f"ckpt_path must be a checkpoint of VariableBatchStrategy, with a position of version {_VERSION}"
            )
            remedy = "to begin with the weights of another one, load them into the module, and leave out ckpt_path"
            raise value_error(requirement, f"version {own.get('version')}", remedy)
        inner = inner or [optimizer.inner.state_dict() for optimizer in self._wrapped]  # already loaded
        states = [{**state, "vbs": position} for state, position in zip(inner, own["optimizers"], strict=True)]
        Strategy.load_optimizer_state_dict(self, {"optimizer_states": states})
        self._rng_states = own["host_rng_states"]
        self._updates.after_restore()


@final
class VariableBatchStrategy(VariableBatch, OneOrSeveral):
    """Trains a LightningModule with a global batch size that follows a trace, on one process or, by DDP, on several.

    The `batch_size` of the training's DataLoader becomes the maximum number of rows of a microbatch, and
    `training_step` gets one microbatch. Everything that Lightning counts is in updates, and values of `self.log` are
    means over the samples of an update or an epoch.

    Args:
        trace: the trace of the global batch size, in samples, see `CustomSampler`.
        rule: the learning-rate rule, see `CustomOptimizer`.
        ref_batchsize: batch size, in samples, at which the hyperparameters were tuned.
        sampler_options: further arguments of the `CustomSampler`.
        optimizer_options: further arguments of the `CustomOptimizer`.
        **options: arguments of Lightning's DDPStrategy, such as `find_unused_parameters` or `start_method`.

    Raises:
        TypeError: if the options are not dicts; in `fit`, if the training's loader is not a DataLoader, or its dataset
            has no index.
        ValueError: in `fit`, if a setting of the Trainer or a hook of the module is not supported.
    """

    strategy_name = "variable_batch"


@final
class VariableBatchModelParallelStrategy(VariableBatch, ModelParallelStrategy):
    """The same for a model that `configure_model` shards with `fully_shard`, by Lightning's ModelParallelStrategy.

    The further arguments are those of ModelParallelStrategy, such as `data_parallel_size`.
    """

    strategy_name = "variable_batch_model_parallel"
    lightning_restore_optimizer = True  # by load_optimizer_state_dict, which restores the position

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the model and the optimizers of torch; return the rest."""
        wrapped = self.optimizers
        self.optimizers = [optimizer.inner for optimizer in self._wrapped]
        try:
            checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        finally:
            self.optimizers = wrapped
        return {**checkpoint, "optimizer_states": []}


def _summing(model: Module | None) -> Module | None:
    """Return what sums gradients: a DistributedDataParallel, or the root of what a module has sharded."""
    sharded = [part for part in model.modules() if isinstance(part, FSDPModule)] if model is not None else []
    inner = {id(part) for root in sharded for part in root.modules() if part is not root}
    roots = [part for part in sharded if id(part) not in inner]
    return roots[0] if len(roots) == 1 else model
