"""The lab: instruments that compare rules, prices and machines. No training needs them.

`cluster/` has capacity traces, `simulation/` trainings under them, without torch, and `evaluation/` trains tasks under
traces and reports which rule was best. They use the rest by its public names.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
