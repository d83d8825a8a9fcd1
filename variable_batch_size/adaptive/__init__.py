"""Controllers choose the batch size of the next updates; a throughput model predicts their time. No torch."""

from variable_batch_size.adaptive.base import ControlInput, Controller
from variable_batch_size.adaptive.constant import ConstantBatch
from variable_batch_size.adaptive.per_device import PerDevice
from variable_batch_size.adaptive.throughput import Throughput

__all__ = ["ConstantBatch", "ControlInput", "Controller", "PerDevice", "Throughput"]
