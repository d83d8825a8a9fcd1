"""Capacity traces: how many nodes a cluster had at each time, from logs, formulas and public collections."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
