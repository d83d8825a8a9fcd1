"""The environment of a local Ray cluster: nothing is written into the home folder, and processes find the helpers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.pages import ROOT


@contextmanager
def ray_environment(folder: Path, **variables: str) -> Iterator[None]:
    """Set variables of the environment, further ones too, within a block."""
    token = folder / "token"
    token.write_text(secrets.token_hex(32))  # Ray would write one into the home folder; it is used where there is one
    own = {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'test'}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_AUTH_MODE", raising=False)
        for name, value in {**own, **variables}.items():
            patch.setenv(name, value)
        yield
