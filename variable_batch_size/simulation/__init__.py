"""Trainings under a capacity trace, without running them: their time, cost and progress. No torch."""

from variable_batch_size.simulation.conversion import to_batch_trace
from variable_batch_size.simulation.noise_curve import NoiseCurve
from variable_batch_size.simulation.overheads import Overheads
from variable_batch_size.simulation.picture import plot_runs
from variable_batch_size.simulation.run import Run
from variable_batch_size.simulation.simulate import simulate
from variable_batch_size.simulation.sweep import compare, means, sweep
from variable_batch_size.simulation.sweep_picture import plot_sweep

__all__ = [
    "NoiseCurve",
    "Overheads",
    "Run",
    "compare",
    "means",
    "plot_runs",
    "plot_sweep",
    "simulate",
    "sweep",
    "to_batch_trace",
]
