"""When an update of a training would end, and what it would cost until then, on the machines of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np

from variable_batch_size._validation import FloatArray, IntArray, check_int, check_number, type_error
from variable_batch_size.adaptive.throughput import Throughput
from variable_batch_size.lab.cluster.capacity_trace import CapacityTrace
from variable_batch_size.lab.simulation.result import Run, cost_until


@final
@dataclass(frozen=True)
class ModelTime:
    """The time of a run whose devices do not change.

    Args:
        throughput: seconds of an update.
        devices: number of devices, >= 1.
        price: price of a device-hour; by default, no cost is counted.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if a number is not in its range.
    """

    throughput: Throughput
    devices: int = 1
    price: float | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not isinstance(self.throughput, Throughput):
            raise type_error("throughput must be a Throughput", self.throughput, "pass Throughput.simple(500)")
        object.__setattr__(self, "devices", check_int(self.devices, "devices", 1))
        if self.price is not None:
            object.__setattr__(self, "price", check_number(self.price, "price", "pass the price of a device-hour"))

    def update_end(self, seconds: float, updates: int, batch_size: int, minibatch_size: int) -> float:
        """Return when an update ends, in simulated seconds.

        Args:
            seconds: when the update before it ended.
            updates: its number, from 1.
            batch_size: its samples.
            minibatch_size: maximum number of rows of a microbatch.
        """
        return seconds + self.throughput.seconds(batch_size, self.devices, minibatch_size)

    def cost(self, seconds: float) -> float | None:
        """Return the cost until then; None if no price is known."""
        return None if self.price is None else self.price * self.devices * seconds / 3600


@final
@dataclass(frozen=True, eq=False)
class RunTime:
    """The time of a training under a capacity trace, as `simulate` has found it.

    Attributes:
        begin: seconds at which each interval of kept updates begins, (intervals,).
        end: seconds at which it ends, (intervals,).
        updates: number of updates until then, (intervals,).
        capacity: the nodes and their prices.
    """

    begin: FloatArray
    end: FloatArray
    updates: IntArray
    capacity: CapacityTrace

    @classmethod
    def from_run(cls, run: Run) -> RunTime:
        """Return the time of a simulated training."""
        table = run.timeline
        productive = table[(table["state"] == "productive") & (table["updates"] > 0)]
        ends = productive["updates"].to_numpy(np.int64).cumsum()
        return cls(productive["begin"].to_numpy(np.float64), productive["end"].to_numpy(np.float64), ends, run.capacity)

    def update_end(self, seconds: float, updates: int, batch_size: int, minibatch_size: int) -> float:
        """Return when an update of the simulated training ends, in seconds.

        Args:
            seconds: not used; `ModelTime` adds to it.
            updates: number of the update, from 1.
            batch_size: not used.
            minibatch_size: not used.
        """
        row = min(int(self.updates.searchsorted(updates)), len(self.updates) - 1)  # the interval of this update
        updates_before = int(self.updates[row - 1]) if row else 0
        # The updates of an interval are equally long.
        share = (updates - updates_before) / (int(self.updates[row]) - updates_before)
        return float(self.begin[row] + share * (self.end[row] - self.begin[row]))

    def cost(self, seconds: float) -> float | None:
        """Return the cost until then; None if no price is known."""
        return cost_until(self.capacity, seconds)

    def __repr__(self) -> str:
        """Return text that tells different times apart, for the fingerprint of a cell."""
        rows = [self.begin.tolist(), self.end.tolist(), self.updates.tolist()]
        prices = None if self.capacity.prices is None else self.capacity.prices.tolist()
        nodes = [self.capacity.seconds.tolist(), self.capacity.nodes.tolist()]
        return f"RunTime({rows}, {nodes if prices else None}, {prices})"


SimulatedTime: TypeAlias = ModelTime | RunTime
