"""PyTorch training whose global batch size changes from one update to the next."""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # the index is __init__.pyi
