"""How many operations an update dispatches more than a loop by hand, as benchmarks/operations.py counts them."""

from importlib import import_module
from pathlib import Path

import pytest


@pytest.mark.parametrize(("microbatches", "most"), [(1, 15), (4, 100)])
def test_a_rule_dispatches_few_operations_more_than_a_loop_by_hand(monkeypatch, microbatches, most):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    operations = import_module("operations")
    hand = operations.by_hand(microbatches)
    more = {rule: operations.of_rule(options, microbatches) - hand for rule, options in operations.RULES.items()}
    assert more["linear"] <= 0
    assert max(more.values()) <= most, more
