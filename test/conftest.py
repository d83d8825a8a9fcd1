"""Properties have the same examples in every run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from helpers.groups import pytest_xdist_make_scheduler  # noqa: F401

settings.register_profile(
    "same", derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("same")
