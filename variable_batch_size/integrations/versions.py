"""The version of a trainer, checked when its integration is imported."""

from __future__ import annotations

from importlib import metadata

from torch.torch_version import TorchVersion


def require_version(library: str, at_least: str, extra: str, *, below: str | None = None) -> None:
    """Raise ImportError, with the command that mends it, if a library is missing, too old, or as new as `below`."""
    try:
        installed = metadata.version(library)
    except metadata.PackageNotFoundError:
        installed = "none"
    too_new = below is not None and installed != "none" and TorchVersion(installed) >= below
    if installed == "none" or TorchVersion(installed) < at_least or too_new:
        versions = f"{library} {at_least} or newer" + ("" if below is None else f", but older than {below}")
        remedy = f"run: pip install --upgrade 'variable_batch_size[{extra}]'"
        raise ImportError(f"this needs {versions}, got {installed}; {remedy}")
