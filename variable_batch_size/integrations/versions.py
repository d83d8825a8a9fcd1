"""The version of a trainer, checked when its integration is imported."""

from __future__ import annotations

from importlib import metadata

from torch.torch_version import TorchVersion


def require_version(library: str, at_least: str, extra: str, *, below: str | None = None) -> None:
    """Check that a library which `extra` installs is there, not older than a version, and older than another, if any.

    Raises:
        ModuleNotFoundError: if it is not installed.
        ImportError: if it has another version. Both messages have the command that installs it.
    """
    needed = f"{library} {at_least} or newer" + ("" if below is None else f", but older than {below}")
    command = f"run: pip install --upgrade 'variable_batch_size[{extra}]'"
    try:
        found = metadata.version(library)
    except metadata.PackageNotFoundError:
        message = f"this needs {needed}, which is not installed; {command}"
        raise ModuleNotFoundError(message, name=library) from None
    if TorchVersion(found) < at_least or (below is not None and TorchVersion(found) >= below):
        raise ImportError(f"this needs {needed}, but {found} is installed; {command}")
