"""`make test-integrations` runs the tests of every framework: none is left out because it is missing."""

from __future__ import annotations

import os

import pytest

from helpers.frameworks import NEEDED, missing


@pytest.mark.skipif("INTEGRATIONS" not in os.environ, reason="make test-integrations checks it")
def test_every_framework_is_there():
    assert not [name for word in NEEDED for name in missing(word)]
