"""The version of a trainer, checked when its integration is imported."""

from __future__ import annotations

from importlib import metadata

from torch.torch_version import TorchVersion


def require_version(library: str, at_least: str, extra: str, *, below: str | None = None) -> None:
    """Check that a library is installed in a supported version, before an integration imports it.

    Args:
        library: its name on PyPI.
        at_least: the oldest supported version.
        extra: the extra of this package that installs it, for the error.
        below: the first version that is too new; None: no limit.

    Raises:
        ImportError: if not, with the command that mends it.
    """
    try:
        installed = metadata.version(library)
    except metadata.PackageNotFoundError:
        installed = "none"
    too_new = below is not None and installed != "none" and TorchVersion(installed) >= below
    if installed == "none" or TorchVersion(installed) < at_least or too_new:
        versions = f"{library} {at_least} or newer" + ("" if below is None else f", but older than {below}")
        remedy = f"run: pip install --upgrade 'variable_batch_size[{extra}]'"
        raise ImportError(f"this needs {versions}, got {installed}; {remedy}")
