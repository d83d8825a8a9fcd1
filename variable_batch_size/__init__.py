"""PyTorch training whose global batch size changes from one update to the next."""

import lazy_loader

__version__ = "0.1.0"

_getattr, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # the index is __init__.pyi


def __getattr__(name: str) -> object:
    if name in ("cluster", "evaluation", "simulation"):
        raise AttributeError(f"{__name__} is for trainings, and has no {name}; use {__name__}.lab.{name}", name=name)
    return _getattr(name)
