"""How long updates take, and by how much each moves the training on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import final

from variable_batch_size._validation import check_number, value_error
from variable_batch_size.adaptive.throughput import Throughput
from variable_batch_size.rules.base import Noise, Rule, RuleInput
from variable_batch_size.simulation.course import Course
from variable_batch_size.simulation.noise_curve import NoiseCurve
from variable_batch_size.simulation.position import Position


@final
@dataclass(frozen=True)
class Model:
    """How long an update takes on a number of devices, and the progress that it makes.

    Args:
        throughput: the seconds of an update.
        devices_per_node: devices of a node.
        minibatch_size: maximum number of rows of a microbatch; None: a device computes its share at once.
        dataset_size: samples of an epoch; None: there are no epochs.
        rule: gives the progress.
        ref_batchsize: batch size at which progress is counted; None if the rule needs none.
        noise: the gradient noise by progress; None if it is not known.
        spread: whether each device gets a share of a batch of few microbatches, see `Throughput.seconds`.
        fixed_shape: whether every microbatch has exactly `minibatch_size` rows.
    """

    throughput: Throughput
    devices_per_node: int
    minibatch_size: int | None
    dataset_size: int | None
    rule: Rule
    ref_batchsize: int | None
    noise: NoiseCurve | None
    spread: bool = True
    fixed_shape: bool = False
    _seconds: dict[tuple[int, int], float] = field(default_factory=dict)  # of (samples, devices)

    def devices(self, nodes: int) -> int:
        """Return the number of devices of so many nodes."""
        return nodes * self.devices_per_node

    def course(self, size: int, devices: int, before: Position) -> Course:
        """Return the next updates of one batch size.

        Raises:
            ValueError: if the batch size is larger than the dataset.
        """
        if self.dataset_size is not None and size > self.dataset_size:
            requirement = f"a batch must have at most the {self.dataset_size} samples of the dataset"
            raise value_error(requirement, f"{size} on {devices} devices", "limit it with bounds=, or use fewer nodes")

        def gain(batch_size: int) -> float:
            noise = self.noise_of(before.progress, before.updates, batch_size)
            reference = self.ref_batchsize or batch_size
            scaling = self.rule(RuleInput(batch_size, reference, before.updates, before.samples, noise))
            return check_number(scaling.progress, f"the progress of {self.rule}", "let the rule return a number >= 0")

        return Course(size, self.dataset_size, before.used, lambda batch_size: self.seconds(batch_size, devices), gain)

    def seconds(self, batch_size: int, devices: int) -> float:
        """Return the seconds of an update."""
        key = batch_size, devices
        if key not in self._seconds:
            cut = {"spread": self.spread, "fixed_shape": self.fixed_shape}
            self._seconds[key] = self.throughput.seconds(batch_size, devices, self.minibatch_size, **cut)
        return self._seconds[key]

    def noise_of(self, progress: float, updates: int, batch_size: int | None) -> Noise | None:
        """Return the noise at a progress, with the gain of an update of this batch size; None if it is not known."""
        if self.noise is None:
            return None
        if batch_size is None or self.ref_batchsize is None:
            return self.noise.at(progress, updates)
        return self.noise.at(progress, updates, self.noise.gain(progress, batch_size, self.ref_batchsize))

    def noise_until(self, progress: float) -> float:
        """Return the first progress after this one at which the noise changes; infinity if there is none."""
        return math.inf if self.noise is None else self.noise.next_change(progress)
