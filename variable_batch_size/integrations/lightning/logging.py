"""What a module logs by `self.log` in `training_step`: once an update, as the mean over its samples.

Within a microbatch the values are collected. After the last one `LightningModule.log` gets that of the update, so that
`on_step`, `on_epoch`, loggers, progress bar and callbacks need nothing else. `CustomOptimizer.log` does not do here: it
needs values before `step()`, of all ranks, and from the first update on, while modules log after the step of a manual
optimization, now and then, or on rank 0 only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Number
from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from lightning_utilities import apply_to_collection
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from variable_batch_size.integrations.facts import facts_of
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.optimizer import CustomOptimizer

_SIGNATURE = inspect.signature(LightningModule.log)


@final
class UpdateLog:
    """Collects what the microbatches of an update log on this rank; `ranks` share a batch."""

    def __init__(self, module: LightningModule, ranks: int) -> None:
        self._module, self._ranks = module, ranks
        self._samples = 0  # of the update, on this rank
        self._logged: dict[str, list[tuple[int, Any]]] = {}  # by name: (samples, value) of each microbatch
        self._options: dict[str, dict[str, Any]] = {}  # by name: the other arguments of `log`

    @contextmanager
    def microbatch(self, microbatch: Microbatch) -> Iterator[None]:
        """Collect what is logged in a block; what a replay adds to torchmetrics objects is undone."""
        module, log = self._module, self._module.log
        self._samples += microbatch.samples

        def collect(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if not isinstance(value, Number | Metric) and not (isinstance(value, Tensor) and value.numel() == 1):
                log(name, value, *args, **kwargs)  # which raises
            options = _SIGNATURE.bind(module, name, value, *args, **kwargs).arguments
            self._options[name] = {key: options[key] for key in options if key not in ("self", "name", "value")}
            self._logged.setdefault(name, []).append((microbatch.samples, value))

        restore = _keep_metrics(module) if microbatch.samples == 0 else None
        vars(module)["log"] = collect  # of this object, and not of its class
        try:
            yield
        finally:
            vars(module).pop("log", None)  # an exception in `outside` leaves none
            if restore is not None:
                restore()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Log in a block as Lightning does, in a hook that runs once an update."""
        collect = vars(self._module).pop("log", None)
        yield
        if collect is not None:
            vars(self._module)["log"] = collect

    def finish_update(self, optimizer: CustomOptimizer, batch_size: int) -> None:
        """Log the values of the update, and what is known of it."""
        log, trainer = self._module.log, self._module.trainer
        for name, logged in self._logged.items():
            value, options = logged[-1][1], self._options[name]
            if not isinstance(value, Metric):
                value, options["batch_size"] = self._combine(name, batch_size)
            log(name, value, **options)
        if trainer.loggers and trainer.log_every_n_steps and optimizer.updates % trainer.log_every_n_steps == 0:
            rates = {"lr_effective": optimizer.current_lr(), "lr_factor": optimizer.lr_factor()}
            for name, number in {"global_batch_size": batch_size, **rates, **facts_of(optimizer)}.items():
                log(f"vbs/{name}", number, on_step=True, on_epoch=False, rank_zero_only=True)
        self._samples, self._logged, self._options = 0, {}, {}

    @torch.no_grad()
    def _combine(self, name: str, batch_size: int) -> tuple[Tensor, int]:
        """Return the value of an update by the values of its microbatches, and the samples that it stands for."""
        values = []
        for samples, found in self._logged[name]:
            value = torch.as_tensor(found, device=self._module.device).reshape(())
            values.append((samples, value.to(torch.promote_types(value.dtype, torch.float32))))
        reduction = self._options[name].get("reduce_fx", "mean")
        reduction = getattr(reduction, "__name__", reduction).lower()
        if reduction in ("min", "max"):  # to which the microbatch of another rank, in a replay, adds nothing
            return getattr(torch, reduction)(torch.stack([value for _, value in values])), batch_size
        zero = torch.zeros_like(values[-1][1])
        if reduction == "sum":
            return sum((value for samples, value in values if samples), zero), batch_size
        samples = sum(samples for samples, _ in values)
        total = sum((samples * value for samples, value in values if samples), zero)
        options = self._options[name]
        if self._ranks == 1 or not options.get("sync_dist") or options.get("rank_zero_only"):
            return (total / samples if samples else values[-1][1]), samples
        if samples != self._samples:
            raise RuntimeError(
                f"log() with sync_dist=True must be called once in each microbatch, but {name!r} was logged for "
                f"{samples} of the {self._samples} samples that this rank has of the update; leave out sync_dist"
            )
        return total * (self._ranks / batch_size), batch_size  # of which Lightning takes the mean over the ranks


def _keep_metrics(module: LightningModule) -> Callable[[], None]:
    """Return a function that sets the torchmetrics objects of a module back."""
    parts = [part for part in module.modules() if isinstance(part, Metric | MetricCollection)]
    before = [apply_to_collection({**vars(part)}, Tensor, lambda value: value.detach().clone()) for part in parts]

    def restore() -> None:
        for part, attributes in zip(parts, before, strict=True):
            vars(part).clear()
            vars(part).update(attributes)

    return restore
