"""Who computes what: the steps of each epoch, and the sampler that deals their microbatches to the ranks.

`plan/` and `batches.py` are pure: what is where. `training.py` holds the place of the training, and `dealer.py` is its
face; `iteration.py` is what a loader reads, and `decided.py` lets it wait for a controller. `streams/`: what arrives.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
