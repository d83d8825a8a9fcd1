"""The slow twin of `cluster.synthetic`: event by event, node by node, from the definition; and the formulas."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """Nodes that go up and down, and bulk preemptions; the formulas are those of the docstring of `synthetic`."""

    nodes: int
    mean_up: float
    mean_down: float
    bulk_every: float | None = None
    bulk_fraction: float = 1.0

    @property
    def bulk_rate(self) -> float:
        return 0.0 if self.bulk_every is None else 1 / self.bulk_every

    @property
    def decay(self) -> float:
        """Rate at which the autocovariance decays, in 1/s."""
        return 1 / self.mean_up + self.bulk_fraction * self.bulk_rate + 1 / self.mean_down

    @property
    def up(self) -> float:
        return 1 / self.mean_down / self.decay

    @property
    def mean(self) -> float:
        return self.nodes * self.up

    @property
    def variance(self) -> float:
        shared = self.bulk_rate * self.bulk_fraction**2
        between = self.up**2 * shared / (2 * self.decay - shared)
        return self.nodes * self.up * (1 - self.up) + self.nodes * (self.nodes - 1) * between

    def covariance(self, lag: float) -> float:
        return self.variance * math.exp(-lag * self.decay)

    def arguments(self) -> dict[str, float | None]:
        """Return the arguments of `synthetic` but `duration` and `seed`."""
        fraction = None if self.bulk_every is None else self.bulk_fraction
        return {**vars(self), "bulk_fraction": fraction}

    def simulate(self, duration: float, seed: int) -> list[tuple[float, int]]:
        """Return (second, nodes) at 0 and at each change; all are down 20 decay times before 0."""
        rng = random.Random(seed)
        up = [False] * self.nodes
        time, rows = -20 / self.decay, [(0.0, 0)]
        toggle = [time + rng.expovariate(1 / self.mean_down) for _ in up]  # when each node changes next, by itself
        bulk = time + rng.expovariate(self.bulk_rate) if self.bulk_rate else math.inf
        while (time := min(bulk, *toggle)) < duration:
            if time == bulk:
                for node in range(self.nodes):
                    if up[node] and rng.random() < self.bulk_fraction:
                        up[node], toggle[node] = False, time + rng.expovariate(1 / self.mean_down)
                bulk = time + rng.expovariate(self.bulk_rate)
            else:
                node = toggle.index(time)
                up[node] = not up[node]
                toggle[node] = time + rng.expovariate(1 / (self.mean_up if up[node] else self.mean_down))
            if time <= 0:
                rows = [(0.0, sum(up))]
            elif sum(up) != rows[-1][1]:
                rows.append((time, sum(up)))
        return rows
