"""The version of a trainer, checked when its integration is imported."""

from __future__ import annotations

from importlib import metadata

from torch.torch_version import TorchVersion


def require_version(library: str, at_least: str, extra: str) -> None:
    """Check that a library which `extra` installs is there, and not older than a version.

    Raises:
        ModuleNotFoundError: if it is not installed.
        ImportError: if it is older. Both messages have the command that installs it.
    """
    command = f"run: pip install --upgrade 'variable_batch_size[{extra}]'"
    try:
        found = metadata.version(library)
    except metadata.PackageNotFoundError:
        message = f"this needs {library} {at_least} or newer, which is not installed; {command}"
        raise ModuleNotFoundError(message, name=library) from None
    if TorchVersion(found) < at_least:
        raise ImportError(f"this needs {library} {at_least} or newer, but {found} is installed; {command}")
