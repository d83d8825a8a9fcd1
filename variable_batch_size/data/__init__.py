"""Who computes what: the steps of each epoch, and the sampler that deals their microbatches to the ranks.

`plan.py`, `deal.py` and `clock.py` are pure. `feed.py` is what a sampler shares with its optimizers, `planning.py` how
a plan grows with a controller, and `iteration.py` what a loader reads.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
