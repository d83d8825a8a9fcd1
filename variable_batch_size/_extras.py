"""Libraries that an extra of the package installs, imported where they are needed."""

from __future__ import annotations

import importlib
from types import ModuleType


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a module of an optional library, which `pip install variable_batch_size[extra]` installs.

    Raises:
        ModuleNotFoundError: if it is not installed; the message has the command that installs it.
    """
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != library:  # the library is there, and lacks a module itself
            raise
        raise ModuleNotFoundError(
            f"this needs {library}, which is not installed; run: pip install 'variable_batch_size[{extra}]'",
            name=library,
        ) from None
