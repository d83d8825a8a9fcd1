"""Capacity traces: how many nodes a cluster had at each time, from logs, formulas and public collections."""

from typing import TYPE_CHECKING

from variable_batch_size._lazy import lazy_index

if TYPE_CHECKING:
    from variable_batch_size.cluster.capacity_trace import CapacityTrace as CapacityTrace
    from variable_batch_size.cluster.public import PUBLIC as PUBLIC
    from variable_batch_size.cluster.public import fetch as fetch
    from variable_batch_size.cluster.reading import read as read
    from variable_batch_size.cluster.synthesis import synthetic as synthetic
else:
    __getattr__, __dir__, __all__ = lazy_index(__name__, __file__)
