"""A strategy of lightning.pytorch in which a batch is one update: `Trainer(strategy=VariableBatchStrategy(...))`.

The life of an update here: Lightning reads a batch, which is the list of this rank's microbatches; its optimizer calls
`optimizer_step` (or, with manual optimization, its loop calls `training_step`), which goes through them; the wrapper
reduces, clips, scales and steps at the last one. What Lightning counts, schedules, logs and saves is then updates.
Processes are started and connected as by `DDPStrategy`, but no module is wrapped in DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from variable_batch_size._validation import type_error
from variable_batch_size.checkpoint.rng_states import get_rng_states, set_rng_states
from variable_batch_size.data.sampler import TraceLike
from variable_batch_size.integrations.loading import with_sampler
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.integrations.versions import require_version
from variable_batch_size.optim.consistency import broadcast_parameters, broadcast_tensors
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.rules import Rule
from variable_batch_size.world import World

require_version("lightning", "2.5", "lightning")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy  # noqa: E402
from lightning.pytorch.trainer import call  # noqa: E402  # private; the way in which all strategies call hooks
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus  # noqa: E402

from variable_batch_size.integrations.lightning.checks import (  # noqa: E402
    check_loss,
    check_optimizers,
    check_steps,
    check_training,
    check_training_loader,
    explaining_mismatch,
    refuse_clipping,
    several_loaders,
)
from variable_batch_size.integrations.lightning.counts import count_updates  # noqa: E402
from variable_batch_size.integrations.lightning.loader import LightningUpdates, Update, own_random_numbers  # noqa: E402
from variable_batch_size.integrations.lightning.logging import UpdateLog  # noqa: E402
from variable_batch_size.integrations.lightning.manual import BackwardsFirst, OncePerUpdate, counting_one_step  # noqa: E402
from variable_batch_size.integrations.lightning.training_sampler import training_sampler  # noqa: E402

T = TypeVar("T")
_STATES = "host_rng_states"  # key in the state of the first optimizer, beside "vbs"


@final
class VariableBatchStrategy(ParallelStrategy):
    """Trains a LightningModule with a global batch size that follows a trace, on one process or several.

    `Trainer(strategy=VariableBatchStrategy(...))` is the one line that changes. The `batch_size` of the training's
    DataLoader becomes the maximum number of rows of a microbatch, and `training_step` gets one microbatch. Everything
    that Lightning counts is in updates: `global_step`, `max_steps`, `batch_idx`, `val_check_interval`,
    `log_every_n_steps`, schedulers with `interval="step"`, `estimated_stepping_batches`. Values of `self.log` are means
    over exactly the samples of an update or an epoch.

    Args:
        trace: the trace of the global batch size, in samples, see `CustomSampler`.
        rule: the learning-rate rule, see `CustomOptimizer`.
        ref_batchsize: batch size, in samples, at which the hyperparameters were tuned.
        sampler_options: further arguments of the `CustomSampler`.
        optimizer_options: further arguments of the `CustomOptimizer`.
        process_group_backend: backend of torch.distributed, as in `DDPStrategy`.
        timeout: timeout of collectives, as in `DDPStrategy`.
        start_method: how processes are started, as in `DDPStrategy`.

    Attributes:
        settings: the arguments.

    Raises:
        TypeError: if the options are not dicts; in `fit`, if the training's loader is not a DataLoader, or its dataset
            has no index.
        ValueError: in `fit`, if a setting of the Trainer or a hook of the module contradicts the trace.
    """

    strategy_name = "variable_batch"

    def __init__(
        self,
        trace: TraceLike,
        rule: Rule | str | Sequence[Rule | str] = "constant",
        ref_batchsize: int | None = None,
        sampler_options: Mapping[str, Any] | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__()
        self.settings = Settings(trace, rule, ref_batchsize, sampler_options or {}, optimizer_options or {})
        given = {} if timeout is None else {"timeout": timeout}
        self._processes = DDPStrategy(process_group_backend=process_group_backend, start_method=start_method, **given)
        self.num_nodes = 1  # set by the Trainer, as are the devices
        self._updates: LightningUpdates | None = None  # the training's loader
        self._update: Update | None = None  # the one under way
        self._microbatch: Any = None  # the one of it that training_step gets
        self._log, self._backwards = UpdateLog(self), BackwardsFirst()
        self._saved_states: list[str] = []  # of the ranks' host RNGs, if they are to be restored

    # Processes: as DDPStrategy does it. -------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning gives loaders a DistributedSampler, and reduces logged values: not the training's loader.

        Lightning would replace the sampler of that loader, which says whether samples are shuffled.
        """
        return self.world_size > 1 and not (self._fits and self._updates is None)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of processes and the rank of this one, for the loaders of evaluations."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _fits(self) -> bool:
        return self.lightning_module is not None and self._trainer.state.fn == TrainerFn.FITTING

    @property
    def _optimizers_of_sampler(self) -> list[CustomOptimizer]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, CustomOptimizer)]

    @property
    def _interrupted(self) -> bool:
        """Whether an exception has ended the training, of which other ranks may not know."""
        return self.lightning_module is not None and self._trainer.state.status == TrainerStatus.INTERRUPTED

    def set_world_ranks(self) -> None:
        """Tell the environment the rank of this process; the Trainer calls it when it has set the devices."""
        processes = self._processes
        processes.accelerator, processes.parallel_devices = self.accelerator, self.parallel_devices
        processes.cluster_environment, processes.num_nodes = self.cluster_environment, self.num_nodes
        processes.set_world_ranks()

    def _configure_launcher(self) -> None:  # the name by which Lightning calls it
        if self.world_size > 1:
            self._processes._configure_launcher()
            self._launcher = self._processes.launcher

    def setup_environment(self) -> None:
        """Connect the processes."""
        super().setup_environment()
        if self.world_size > 1:
            self._processes.setup_distributed()

    def model_to_device(self) -> None:
        """Move the module to its device, and copy the parameters and buffers of rank 0 to every rank."""
        assert self.model is not None
        self.model.to(self.root_device)
        if self.world_size > 1:
            broadcast_parameters(self.model)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        self._log.check_collective("barrier()")
        if not self._interrupted:  # else other ranks may be elsewhere
            self._processes.barrier(name)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank `src`."""
        self._log.check_collective("broadcast()")
        return self._processes.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, stacked."""
        self._log.check_collective("all_gather()")
        return super().all_gather(tensor, group, sync_grads)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, or another reduction, of a tensor over the ranks; what is logged waits for the update."""
        if not isinstance(tensor, Tensor) or self._log.defer(tensor):
            return tensor
        if reduce_op in ("mean", "avg") and not tensor.is_floating_point():
            tensor = tensor.double()  # Lightning would cut off the fraction, of the number of samples for example
        return self._processes.reduce(tensor, group, reduce_op)

    @property
    def samples(self) -> int:
        """The number of samples that were trained on so far, over all ranks, for a schedule that goes by samples."""
        return self._optimizers_of_sampler[0].samples if self._optimizers_of_sampler else 0

    # Before the training. ---------------------------------------------------------------------------------------------

    def connect(self, model: LightningModule) -> None:
        """Take the module; if it is to be trained, check the settings of the Trainer."""
        super().connect(model)
        if self._fits:
            self._updates, self._update, self._saved_states = None, None, []
            self._reset_optimizers_and_schedulers()
            check_training(self._trainer, self.precision_plugin, sync_batchnorm=self._layer_sync is not None)
            count_updates(self._trainer, lambda: self._updates)

    def process_dataloader(self, dataloader: object) -> object:
        """Return the training's loader as updates; others as they are."""
        if not self._fits or self._trainer.state.stage != RunningStage.TRAINING:
            return own_random_numbers(dataloader) if self._fits else dataloader
        loader = check_training_loader(dataloader)
        if self._updates is not None:
            if loader.dataset is self._updates.loader.dataset:  # the learning rate finder asks again
                return self._updates
            raise several_loaders("a second one")
        sampler = training_sampler(loader, self.settings, self._trainer, World(self.global_rank, self.world_size))
        dealt = with_sampler(loader, sampler)
        self._updates = LightningUpdates(dealt, self._trainer, lambda: self._optimizers_of_sampler)
        return self._updates

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Read the training's loader, call `configure_optimizers`, and wrap the optimizers."""
        trainer.fit_loop.setup_data()  # as `estimated_stepping_batches` does it in configure_optimizers
        if self._updates is None or trainer.train_dataloader is not self._updates:
            raise several_loaders(f"a {type(trainer.train_dataloader).__name__}")
        super().setup_optimizers(trainer)
        plugin: Any = self.precision_plugin
        plugin.clip_gradients = refuse_clipping  # which LightningModule.clip_gradients calls
        found: list[Optimizer] = trainer.optimizers
        check_optimizers(trainer, found)
        self.optimizers = [self._wrapped(optimizer, self._updates) for optimizer in found]
        if not trainer.lightning_module.automatic_optimization:
            for config in self.lr_scheduler_configs:
                config.scheduler = OncePerUpdate(config.scheduler, self._optimizers_of_sampler)
        if trainer.ckpt_path is None:
            self._updates.check_position()  # also if max_epochs or max_steps was reached, so that nothing is trained

    def _wrapped(self, inner: Optimizer, updates: LightningUpdates) -> CustomOptimizer:
        clip = self._trainer.gradient_clip_val
        clipping = {"max_grad_norm": float(clip)} if clip else {}
        optimizer = self.settings.optimizer(inner, updates.loader.batch_sampler, **clipping)  # type: ignore[arg-type]
        optimizer.optimizer = inner  # type: ignore[attr-defined]  # LearningRateMonitor takes the name from there
        optimizer.register_step_pre_hook(partial(self._call_before_step, optimizer))
        return optimizer

    def on_train_start(self) -> None:
        """Check that Lightning and the optimizer are at the same update; set the RNGs as they were saved."""
        assert self._updates is not None
        self._updates.check_position()
        if len(self._saved_states) == self.world_size:
            set_rng_states(self._saved_states[self.global_rank])
        self._saved_states = []

    # An update. -------------------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Return a batch on the device; an update as it is: its microbatches are moved one by one."""
        return batch if isinstance(batch, Update) else super().batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Take the update that begins, and the buffers of rank 0."""
        self._update = batch
        self._broadcast_buffers()

    def on_validation_start(self) -> None:
        """Evaluate the same model on every rank: that of rank 0, which is the one that is saved."""
        self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        """Copy the buffers of rank 0, such as those of a batch normalization, as DistributedDataParallel does it."""
        if self.world_size > 1 and self._optimizers_of_sampler:
            assert self.model is not None
            broadcast_tensors([*self.model.buffers()], self._optimizers_of_sampler[0].backend)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `training_step` with the microbatch under way; with manual optimization, with each one."""
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            if self._microbatch is None:
                raise RuntimeError(
                    "an optimizer_step hook must call optimizer.step(closure=optimizer_closure) in every update, but "
                    "it called the closure itself; pass it to step(), and let the trace have larger batch sizes"
                )
            return super().training_step(self._microbatch, *args, **kwargs)
        output, optimizer = None, self._optimizers_of_sampler[0]
        before = [own.updates for own in self._optimizers_of_sampler]
        for index, microbatch in enumerate(batch):
            last = index == len(batch) - 1
            with (
                self._log.microbatch(optimizer.microbatch, first=index == 0),
                counting_one_step(self, last=last),
                self._backwards.microbatch(),
            ):
                output = super().training_step(super().batch_to_device(microbatch), *args, **kwargs)
        check_steps([own.updates - made for own, made in zip(self._optimizers_of_sampler, before, strict=True)])
        self._finish_update(optimizer)
        return output

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a backward; with manual optimization only before the first step of a microbatch."""
        self._backwards.check_backward()
        return super().backward(closure_loss, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> bool:
        """Go through the microbatches of an update; with manual optimization, step at the one under way.

        Returns:
            Whether the weights changed.
        """
        assert self.lightning_module is not None
        if not isinstance(optimizer, CustomOptimizer):
            raise type_error("the optimizer must be one of configure_optimizers", optimizer, "return it there")
        if not self.lightning_module.automatic_optimization:
            closure()
            self._log.check_deferred()  # before the processes meet
            self._backwards.check_gradients(optimizer)
            updated = self._step(optimizer, kwargs)
            self._backwards.note_step(optimizer, self._optimizers_of_sampler)
            return updated
        assert self._update is not None
        updated = False
        try:
            for index, microbatch in enumerate(self._update):
                with self._log.microbatch(optimizer.microbatch, first=index == 0):
                    self._microbatch = super().batch_to_device(microbatch)
                    check_loss(closure())
                updated = self._step(optimizer, kwargs)
        finally:
            self._microbatch = None
        self._finish_update(optimizer)
        return updated

    def _step(self, optimizer: CustomOptimizer, arguments: Mapping[str, Any]) -> bool:
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is None:
            return optimizer.step(**arguments)
        updated = scaler.step(optimizer, **arguments)
        scaler.update()
        return bool(updated)

    def _call_before_step(self, optimizer: CustomOptimizer, *_: object) -> None:
        """Call the hooks before an optimizer's step, once an update: gradients are complete, reduced and clipped."""
        with self._log.outside():
            for caller in call._call_callback_hooks, call._call_lightning_module_hook:
                caller(self._trainer, "on_before_optimizer_step", optimizer)

    def _finish_update(self, optimizer: CustomOptimizer) -> None:
        self._log.finish_update(optimizer)
        if optimizer.done:
            self._trainer.should_stop = True

    # State. -----------------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, with the position in the training and the host RNGs of all ranks."""
        assert isinstance(optimizer, CustomOptimizer)
        if optimizer.inside_step and self._interrupted:
            optimizer.discard_step()  # after an exception, for an OnExceptionCheckpoint
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if optimizer is self.optimizers[0] and (self.world_size == 1 or not self._interrupted):
            state[_STATES] = optimizer.agreement.gather("a checkpoint of Lightning", get_rng_states())
        return state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers, and with them the position in the training, on any number of processes.

        Raises:
            ValueError: if the checkpoint is not one of this strategy.
        """
        states = checkpoint["optimizer_states"]
        if not all("vbs" in state for state in states):
            raise ValueError(
                "ckpt_path must be a checkpoint of a training with VariableBatchStrategy, but this one has no position "
                "in a trace; to begin with its weights, load them into the module, and leave out ckpt_path"
            )
        with explaining_mismatch():
            super().load_optimizer_state_dict(checkpoint)
        self._saved_states = states[0].get(_STATES, [])
        assert self._updates is not None
        self._updates.after_restore()
