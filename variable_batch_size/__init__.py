"""PyTorch training whose global batch size changes from one update to the next."""

import lazy_loader

__version__ = "0.1.0rc1"

_getattr, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # the index is __init__.pyi


def __getattr__(name: str) -> object:
    try:
        return _getattr(name)
    except AttributeError as error:
        from variable_batch_size._validation import did_you_mean

        if name.startswith("__") or not (hint := did_you_mean(name, __all__)):
            raise
        raise AttributeError(f"{error}{hint}", name=name) from None
