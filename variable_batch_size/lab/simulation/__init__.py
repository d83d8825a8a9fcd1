"""Trainings under a capacity trace, simulated without torch: time, cost and progress.

`simulate` goes through the events of an `engine`, with the `nodes` of the trace, the `batch_sizes` of a controller, the
seconds and progress of a `model` with a `noise_curve`. It returns the `result`; `sweep` makes many.
"""

from variable_batch_size.lab.simulation.engine import Overheads
from variable_batch_size.lab.simulation.noise_curve import NoiseCurve
from variable_batch_size.lab.simulation.result import Run, plot_runs
from variable_batch_size.lab.simulation.simulate import simulate, to_batch_trace
from variable_batch_size.lab.simulation.sweep import compare, means, sweep

__all__ = ["NoiseCurve", "Overheads", "Run", "compare", "means", "plot_runs", "simulate", "sweep", "to_batch_trace"]
