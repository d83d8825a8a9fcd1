"""What a simulation returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, final

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import value_error
from variable_batch_size.cluster.capacity_trace import CapacityTrace
from variable_batch_size.simulation.interval import Interval
from variable_batch_size.trace.batch_trace import BatchTrace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_COLORS = {"redone": "tab:red", "restarting": "tab:orange", "saving": "tab:purple", "idle": "tab:gray"}


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
            used or not, over the elapsed time; `on_demand_cost`, if that price is given, of the nodes that the
            productive seconds have used.
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
        """Draw nodes, batch size and progress over the hours, and return the figure.

        Colored spans are the times in which the training makes no update that is kept. That progress depends on the
        batch size and on a given noise alone is a model.

        Raises:
            ModuleNotFoundError: if matplotlib is not installed.
        """
        plt = import_extra("matplotlib.pyplot", "plot")
        figure, (nodes, batch, progress) = plt.subplots(3, sharex=True, figsize=(9, 7), layout="constrained")
        rows, end = self._intervals, self.summary["elapsed"] / 3600
        edges = [*(row.begin / 3600 for row in rows), end]  # (rows + 1,)
        made = [row.progress if row.state == "productive" else 0.0 for row in rows]
        self.capacity.plot(nodes).patches[0].set_label("there")
        nodes.stairs([row.nodes for row in rows], edges, color="black", baseline=None, label="used")
        sizes: list[int] = []  # (rows,), held where there is no update
        for row in rows:
            sizes.append(row.batch_size or (sizes[-1] if sizes else 0))
        batch.stairs(sizes, edges, baseline=None)
        progress.plot(edges, [0.0, *accumulate(made)])
        for axes in (nodes, batch, progress):
            for state, color in _COLORS.items():
                spans = [(row.begin / 3600, (row.end - row.begin) / 3600) for row in rows if row.state == state]
                if spans:
                    height = axes.get_xaxis_transform()
                    axes.broken_barh(spans, (0, 1), transform=height, color=color, alpha=0.25, lw=0, label=state)
        nodes.set(xlabel="", xlim=(0, end))
        batch.set(ylabel="batch size (samples)")
        progress.set(ylabel="modelled progress\n(updates at the reference)", xlabel="time (hours)")
        batch.set_ylim(bottom=0)
        progress.set_ylim(bottom=0)
        figure.legend(*nodes.get_legend_handles_labels(), loc="outside upper center", ncols=6)
        result: Figure = figure
        return result
