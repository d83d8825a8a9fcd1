"""How many operations an update dispatches more than a loop by hand, as benchmarks/operations.py counts them."""

from importlib import import_module
from pathlib import Path

import pytest


@pytest.fixture
def operations(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return import_module("operations")


# On a GPU the estimate, which the host reads on a CPU, takes about 30 operations on single numbers.
@pytest.mark.parametrize(
    ("device", "microbatches", "most", "most_differenced"),
    [("cpu", 1, 15, 15), ("cpu", 4, 100, 100), ("meta", 1, 45, 80), ("meta", 4, 10, 40)],
)
def test_a_rule_dispatches_few_operations_more_than_a_loop_by_hand(
    operations, device, microbatches, most, most_differenced
):
    hand = operations.by_hand(microbatches, device)
    more = {
        rule: operations.with_library(options, microbatches, device) - hand
        for rule, options in operations.RULES.items()
    }
    assert more["linear"] <= 0
    assert more.pop("adascale, differenced") <= most_differenced
    assert max(more.values()) <= most, more


@pytest.mark.parametrize(("device", "of_update", "of_microbatch"), [("cpu", 0, 1), ("meta", 1, 1)])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_log_dispatches_few_operations(operations, device, microbatches, of_update, of_microbatch):
    options = operations.RULES["linear"]
    without, with_log = (operations.with_library(options, microbatches, device, logs=logs) for logs in (False, True))
    assert 0 < with_log - without <= of_update + of_microbatch * microbatches
