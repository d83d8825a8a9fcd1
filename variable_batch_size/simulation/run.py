"""What a simulation returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from variable_batch_size._validation import value_error
from variable_batch_size.cluster.capacity_trace import CapacityTrace
from variable_batch_size.simulation.interval import Interval
from variable_batch_size.simulation.picture import plot_runs
from variable_batch_size.trace.batch_trace import BatchTrace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@final
@dataclass(frozen=True)
class Run:
    """A training that was simulated.

    Attributes:
        summary: `elapsed`, in seconds, and its parts `productive` (updates that are kept), `redone` (updates that were
            lost, whole or in part), `restarting`, `saving` (the training waits) and `idle` (too few nodes, or the rest
            after the last update that ends within the trace); `updates`, `samples` and `progress` that are kept;
            `goodput`, the progress a second; `efficiency`, the progress a sample relative to that at `ref_batchsize`,
            if there is one and an update was made; `preemptions`, how often nodes left that the training used, or was
            restarting with; `restarts`, how often it has begun to restart; `cost`, if prices are known, of all nodes,
            used or not, over the elapsed time, and `cost_per_progress`, if progress was made; `on_demand_cost`, if that
            price is given, of the nodes that the productive seconds have used.
        capacity: the capacity trace, with the prices.
    """

    summary: Mapping[str, float]
    capacity: CapacityTrace
    _intervals: tuple[Interval, ...] = field(repr=False)
    _runs: tuple[tuple[int, int], ...] = field(repr=False)  # batch size, updates
    _devices_per_node: int = field(repr=False)

    @property
    def trace(self) -> BatchTrace:
        """The batch sizes of the updates that are kept.

        With a dataset, the last update of each epoch has the size before it was shortened; the sampler shortens it.

        Raises:
            ValueError: if no update is kept.
        """
        if not self._runs:
            requirement = "an update must end within the capacity trace"
            raise value_error(requirement, f"none in {self.capacity!r}", "check the nodes and the throughput")
        return BatchTrace.from_runs(*zip(*self._runs, strict=True))

    @property
    def timeline(self) -> pd.DataFrame:
        """One row for each interval of one state, in ascending order and without gaps.

        The columns are `begin` and `end`, in seconds; `state`: productive, redone, restarting, saving or idle; `nodes`
        and `devices`: those that the training uses; `batch_size`; and the `updates`, `samples` and `progress` that end
        in the interval, which are kept if it is productive and lost if it is redone.
        """
        import pandas as pd

        table = pd.DataFrame(self._intervals, columns=list(Interval._fields))
        table.insert(Interval._fields.index("nodes") + 1, "devices", table["nodes"] * self._devices_per_node)
        return table

    def plot(self) -> Figure:
        """Draw nodes, batch size, progress and lost time over the hours, and return the figure, as `plot_runs` does.

        Raises:
            ModuleNotFoundError: if matplotlib is not installed.
        """
        return plot_runs({"": self})
