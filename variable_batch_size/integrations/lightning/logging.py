"""What a module logs by `self.log` in `training_step`, as means over exactly the samples of an update or an epoch.

Lightning keeps each value by its name: the last one, for the loggers and the progress bar, and the sum of the values,
weighed by batch sizes, for the end of the epoch. Here a microbatch is weighed by its samples, and after the last one of
an update the last value becomes that of the update: the mean, or what `reduce_fx` says, or what a torchmetrics object
computes. Processes have different numbers of microbatches, so what `sync_dist=True` reduces is reduced after the last
one, and a process without samples of an update replays one, which must not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, final

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from variable_batch_size.integrations.lightning.metric_objects import MetricObjects
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.optimizer import CustomOptimizer


@final
class UpdateLog:
    """Combines the values that the microbatches of an update log.

    `trainer._results` holds the values, and `trainer._logger_connector` tells it of batches; both are private, and so
    is `_forward_cache`, the last value of each.

    Args:
        strategy: the strategy that reduces over the processes.
    """

    def __init__(self, strategy: ParallelStrategy) -> None:
        self._strategy = strategy
        self._within = False  # whether a microbatch is under way
        self._batch_size = 0  # of the update, in samples
        self._seen: dict[str, Any] = {}  # the last value of each name before the microbatch
        self._logged: dict[str, list[tuple[int, Tensor]]] = {}  # by name: (samples, value) of each microbatch
        self._deferred: list[Tensor] = []  # what was not reduced in the microbatch
        self._totals: dict[str, dict[str, Tensor]] = {}  # by name: the states of a sum or a mean of the epoch
        self._objects = MetricObjects()

    @property
    def _trainer(self) -> Any:
        module = self._strategy.lightning_module
        assert module is not None
        return module.trainer

    def check_collective(self, name: str) -> None:
        """Check that all processes are about to communicate.

        Raises:
            RuntimeError: within a microbatch, of which other processes may have more or fewer.
        """
        if self._within and self._strategy.world_size > 1:
            raise _communicates(name)

    def defer(self, value: Tensor) -> bool:
        """Return whether the reduction of a value waits for the end of the update."""
        if not self._within or self._strategy.world_size == 1:
            return False
        self._deferred.append(value)
        return True

    def check_deferred(self) -> None:
        """Check that what was not reduced in the microbatch is the last value of some name, which will be.

        Raises:
            RuntimeError: if `reduce()` was called for anything else.
        """
        if not {id(value) for value in self._deferred} <= {id(value) for value in self._values().values()}:
            raise _communicates("reduce()")

    @contextmanager
    def microbatch(self, microbatch: Microbatch, *, first: bool) -> Iterator[None]:
        """Collect what is logged within a block, for a microbatch."""
        trainer = self._trainer
        if first:
            self._logged, self._batch_size = {}, microbatch.batch_size
            self._objects.begin_update(trainer.lightning_module)
        else:
            trainer._logger_connector.on_batch_start(None)  # else a hook's first value would clear those of another one
        trainer._results.batch_size = microbatch.samples
        self._seen, self._deferred, self._within = self._values(), [], True
        replay, self._totals = microbatch.samples == 0, {name: _states(metric) for name, metric in self._totalled()}
        try:
            with self._objects.microbatch(replay=replay, several=self._strategy.world_size > 1):
                yield
        finally:
            self._within = False
        self._collect(microbatch.samples)
        for name, metric in self._totalled() if replay else ():  # a mean by a batch_size of the user's, too
            zeros = {state: torch.zeros_like(value) for state, value in _states(metric).items()}
            vars(metric).update(self._totals.get(name, zeros))

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Log within a block as for the whole update: in a hook that runs once an update."""
        results, before, within = self._trainer._results, self._values(), self._within
        totals = {name: metric.value for name, metric in self._totalled()}
        samples, results.batch_size, self._within = results.batch_size, self._batch_size, False
        try:
            yield
        finally:
            results.batch_size, self._within = samples, within
        self._seen |= {name: value for name, value in self._values().items() if value is not before.get(name)}
        changed = (pair for pair in self._totalled() if pair[1].value is not totals.get(pair[0]))
        self._totals |= {name: _states(metric) for name, metric in changed}

    def finish_update(self, optimizer: CustomOptimizer) -> None:
        """Set the value of each name to that of the update, and log what is known of the update."""
        for name, logged in self._logged.items():
            metric = self._trainer._results[name]
            metric._forward_cache = self._combined(metric.meta, logged)
        for name, value in self._objects.values().items():
            self._trainer._results[name]._forward_cache = value
        self._logged, self._trainer._results.batch_size = {}, self._batch_size
        if self._trainer.loggers and self._trainer._logger_connector.should_update_logs:
            module = self._strategy.lightning_module
            assert module is not None
            for tag, number in _facts(optimizer, self._batch_size).items():
                module.log(tag, number, on_step=True, on_epoch=False, rank_zero_only=True)

    def _values(self) -> dict[str, Any]:
        return {name: metric._forward_cache for name, metric in self._trainer._results.items() if metric.is_tensor}

    def _totalled(self) -> list[tuple[str, Any]]:
        results = ((name, metric) for name, metric in self._trainer._results.items() if metric.is_tensor)
        return [pair for pair in results if pair[1].meta.is_sum_reduction or pair[1].meta.is_mean_reduction]

    def _collect(self, samples: int) -> None:
        self.check_deferred()
        for name, value in self._values().items():
            if value is not self._seen.get(name):
                self._logged.setdefault(name, []).append((samples, value))
        for name, metric in self._trainer._results.items():
            if not metric.is_tensor and metric.meta.on_step:
                self._objects.add(name, metric.value)

    def _combined(self, meta: Any, logged: list[tuple[int, Tensor]]) -> Tensor:
        values = torch.stack([value for _, value in logged])
        synced = meta.sync.should and not meta.sync.rank_zero_only and self._strategy.world_size > 1
        if not meta.is_mean_reduction:
            own = torch.stack([value if samples else torch.zeros_like(value) for samples, value in logged])
            result: Tensor = own.sum() if meta.is_sum_reduction else meta.reduce_fx(values)
            return self._strategy.reduce(result, meta.sync.group, meta.sync.op) if synced else result
        counts = torch.tensor([samples for samples, _ in logged], dtype=values.dtype, device=values.device)
        sums = torch.stack([(values * counts).sum(), counts.sum()])
        if synced:
            sums = self._strategy.reduce(sums, meta.sync.group, "sum")
        return sums[0] / sums[1] if sums[1] else values[-1]


def _states(metric: Any) -> dict[str, Tensor]:
    """Return what Lightning keeps of a sum, or of a mean, which also has the samples that it counts."""
    return {name: getattr(metric, name) for name in ("value", "cumulated_batch_size") if hasattr(metric, name)}


def _communicates(name: str) -> RuntimeError:
    return RuntimeError(
        f"processes must not communicate in training_step, because they have different numbers of microbatches, but "
        f"it called {name} of the strategy; use self.log(..., sync_dist=True), or a hook that runs once an update, "
        f"such as on_train_batch_end"
    )


def _facts(optimizer: CustomOptimizer, batch_size: int) -> dict[str, float]:
    """Return what is known of the last update, by the tags of a `Tracker`."""
    facts = {
        "vbs/global_batch_size": float(batch_size),
        "vbs/samples": float(optimizer.samples),
        "vbs/lr_effective": optimizer.current_lr(),
        "vbs/lr_factor": optimizer.lr_factor(),
    }
    if optimizer.grad_norm is not None:
        facts["vbs/grad_norm"] = float(optimizer.grad_norm)
    with suppress(RuntimeError):  # it is not measured
        facts["vbs/noise_scale"] = float(optimizer.noise().noise_scale)
    return facts
