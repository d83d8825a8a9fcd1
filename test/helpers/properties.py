"""How many examples a property has: the profile "default" of `make test`, and "all" of `make nightly`.

The examples are the same in every run of a profile, so that no run fails by chance; `make fuzz` draws new ones.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

FIXED = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("default", FIXED, max_examples=30)
settings.register_profile("all", FIXED, max_examples=200)


def examples(number: int) -> settings:
    """Return settings for a property: a third of the examples, and twice as many in `make nightly`."""
    return settings(max_examples=max(1, number * settings().max_examples // 100))
