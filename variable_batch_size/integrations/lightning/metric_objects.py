"""What the torchmetrics objects of a module say of an update, while each of their calls is about a microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, final

from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric

from variable_batch_size._validation import value_error


@final
class MetricObjects:
    """Repeats the calls of an update on a copy of each Metric that is logged with `on_step`.

    What a Metric accumulates belongs to the epoch, and most of them (a F1 score, for example) are no mean of those of
    microbatches. The replay of a rank without samples does not count: `_update_count` and `_computed`, which are set
    back with a Metric's states, are private.
    """

    def __init__(self) -> None:
        self._metrics: list[Metric] = []
        self._calls: list[tuple[Metric, Any, Any]] = []  # (metric, arguments, keyword arguments) of the microbatch
        self._copies: dict[str, tuple[Metric, Metric]] = {}  # by the name of a logged value: a Metric and its copy
        self._used: set[str] = set()  # names of those that were called in the update

    def begin_update(self, module: nn.Module) -> None:
        """Forget the last update."""
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self._used = set()

    @contextmanager
    def microbatch(self, *, replay: bool, several: bool) -> Iterator[None]:
        """Keep the calls within a block; undo them if it is a replay.

        Args:
            replay: whether the samples do not count.
            several: whether there are several processes.

        Raises:
            ValueError: if a Metric would communicate in the block.
        """

        def keep(metric: Any, args: Any, kwargs: Any) -> None:
            if several and metric.dist_sync_on_step:
                raise value_error(
                    "a Metric must not communicate in training_step, because processes have different numbers of "
                    "microbatches",
                    f"{type(metric).__name__}(dist_sync_on_step=True)",
                    "leave it out",
                )
            if not replay:
                self._calls.append(
                    (metric, *apply_to_collection((args, kwargs), Tensor, Tensor.detach, allow_frozen=True))
                )

        self._calls = []
        before = [(metric, _kept(metric.metric_state), metric._update_count) for metric in self._metrics * replay]
        hooks = [metric.register_forward_pre_hook(keep, with_kwargs=True) for metric in self._metrics]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for metric, states, count in before:
                for name, state in states.items():
                    setattr(metric, name, state)
                metric._update_count, metric._computed = count, None

    def add(self, name: str, metric: Metric) -> None:
        """Add the calls of the microbatch to the value of a name, under which a Metric was logged."""
        calls = [(args, kwargs) for called, args, kwargs in self._calls if called is metric]
        if not calls:
            return
        if name not in self._copies or self._copies[name][0] is not metric:
            self._copies[name] = metric, _alone(metric)
        copy = self._copies[name][1]
        if name not in self._used:
            copy.reset()
        self._used.add(name)
        for args, kwargs in calls:
            copy.update(*args, **kwargs)

    def values(self) -> dict[str, Any]:
        """Return, by the names, the values over the samples of the update, on this process."""
        self._calls = []
        return {name: self._copies[name][1].compute() for name in self._used}


def _kept(states: dict[str, Any]) -> dict[str, Any]:
    """Return a Metric's states as they are, while it may change tensors in place and append to lists."""
    return {name: state.detach().clone() if isinstance(state, Tensor) else [*state] for name, state in states.items()}


def _alone(metric: Metric) -> Metric:
    """Return a copy that does not communicate, without the graph of a loss that was measured."""
    known: dict[int, Any] = {}  # what deepcopy takes for copied

    def detach(tensor: Tensor) -> Tensor:
        if not tensor.is_leaf:
            known[id(tensor)] = tensor.detach().clone()
        return tensor

    for part in metric.modules():
        for value in vars(part).values():
            apply_to_collection(value, Tensor, detach, allow_frozen=True)
    copy = deepcopy(metric, known)
    for part in copy.modules():
        if isinstance(part, Metric):
            part.distributed_available_fn = lambda: False
    return copy
