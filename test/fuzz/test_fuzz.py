"""A small share of the search: random trainings with the package and with the twin; `make fuzz` runs many more."""

from __future__ import annotations

import sys

import pytest

from fuzz.processes import EXPECTED_WARNINGS
from fuzz.search import run_case
from helpers.commands import run

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}:{category.__name__}") for message, category in EXPECTED_WARNINGS
]


@pytest.mark.parametrize("seed", range(40))
def test_a_random_training_equals_its_twin(seed):
    outcome = run_case(seed)
    assert outcome.kind != "finding", f"PYTHONPATH=test python -m fuzz --case {seed}: {outcome.message}"


@pytest.mark.slow("starts four processes")
@pytest.mark.torch
def test_random_trainings_equal_one_process_whoever_sums():
    ended = run(sys.executable, "-m", "fuzz.sums", "--number", "15", "--seed", "31", PYTHONPATH="test")
    assert ended.returncode == 0, ended.stdout
