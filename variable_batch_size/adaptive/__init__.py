"""Controllers choose the batch size of the next updates; a throughput model predicts their time. No torch.

`adaptive_trace.py` says when one is asked, `decisions.py` what follows, in a simulation and in a training, and
`decided_trace.py` what a training keeps of it. A string can name those in `table.py`.
"""

from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace
from variable_batch_size.adaptive.base import ControlInput, Controller
from variable_batch_size.adaptive.goodput import Goodput
from variable_batch_size.adaptive.noise_scale import NoiseScale, NormTest
from variable_batch_size.adaptive.seesaw import Seesaw
from variable_batch_size.adaptive.static import ConstantBatch, PerDevice
from variable_batch_size.adaptive.throughput import Throughput

__all__ = [
    "AdaptiveTrace",
    "ConstantBatch",
    "ControlInput",
    "Controller",
    "Goodput",
    "NoiseScale",
    "NormTest",
    "PerDevice",
    "Seesaw",
    "Throughput",
]
