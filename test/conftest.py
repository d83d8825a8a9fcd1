"""What holds for all tests: the profile of Hypothesis, and which process runs which test."""

from __future__ import annotations

from hypothesis import settings

import helpers.properties  # noqa: F401
from helpers.collection import pytest_xdist_make_scheduler  # noqa: F401

settings.load_profile("default")  # before --hypothesis-profile, which overrides it
