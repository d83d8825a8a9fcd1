"""A small share of the search: random trainings with the package and with the twin; `make fuzz` runs many more."""

from __future__ import annotations

import pytest

from fuzz.processes import EXPECTED_WARNINGS
from fuzz.search import run_case

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}:{category.__name__}") for message, category in EXPECTED_WARNINGS
]


@pytest.mark.parametrize("seed", range(40))
def test_a_random_training_equals_its_twin(seed: int) -> None:
    outcome = run_case(seed)
    assert outcome.kind != "finding", f"PYTHONPATH=test python -m fuzz --case {seed}: {outcome.message}"
