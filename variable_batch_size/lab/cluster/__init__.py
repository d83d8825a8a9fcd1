"""Capacity traces: how many nodes a cluster had at each time.

`CapacityTrace` is the value, `read` makes it from a file of any format in `readers`, `synthetic` from a formula, and
`fetch` from a public collection.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
