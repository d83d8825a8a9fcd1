"""Controllers choose the batch size of the next updates; a throughput model predicts their time. No torch."""

from variable_batch_size.adaptive.adaptive_trace import AdaptiveTrace
from variable_batch_size.adaptive.after import After
from variable_batch_size.adaptive.base import ControlInput, Controller
from variable_batch_size.adaptive.bounded import Bounded
from variable_batch_size.adaptive.constant import ConstantBatch
from variable_batch_size.adaptive.goodput import Goodput
from variable_batch_size.adaptive.monotone import Monotone
from variable_batch_size.adaptive.multiple_of import MultipleOf
from variable_batch_size.adaptive.noise_scale import NoiseScale
from variable_batch_size.adaptive.norm_test import NormTest
from variable_batch_size.adaptive.per_device import PerDevice
from variable_batch_size.adaptive.seesaw import Seesaw
from variable_batch_size.adaptive.smoothed import Smoothed
from variable_batch_size.adaptive.throughput import Throughput

__all__ = [
    "AdaptiveTrace",
    "After",
    "Bounded",
    "ConstantBatch",
    "ControlInput",
    "Controller",
    "Goodput",
    "Monotone",
    "MultipleOf",
    "NoiseScale",
    "NormTest",
    "PerDevice",
    "Seesaw",
    "Smoothed",
    "Throughput",
]
