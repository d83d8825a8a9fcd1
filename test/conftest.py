"""What holds for all tests: the profile of Hypothesis, what a test that is slow must say, and which process runs it."""

from __future__ import annotations

from hypothesis import settings

import helpers.properties  # noqa: F401
from helpers.collection import pytest_collection_modifyitems, pytest_xdist_make_scheduler  # noqa: F401

settings.load_profile("default")  # before --hypothesis-profile, which overrides it
