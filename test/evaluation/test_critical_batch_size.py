"""The critical batch size of a quadratic is known; noise forbids an answer, and few values give no interval."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from helpers.branching_tasks import Quadratic
from variable_batch_size.evaluation import critical_batch_size


@pytest.mark.slow("trains")
def test_the_critical_batch_size_of_a_quadratic() -> None:
    """With linear scaling, the learning rate of batch 32 is 0.4, of 64 above 0.5: it diverges."""
    found = critical_batch_size(
        None, Quadratic(), batch_sizes=[8, 16, 32, 64, 128], samples=8192, rule="linear", tolerance=1.0
    )
    assert (found.value, found.low, found.high) == (32, 32, 32)
    assert [size.verdict for size in found.sizes] == ["within"] * 3 + ["beyond"] * 2
    assert "The critical batch size is 32" in str(found)
    json.dumps(found.as_json(), allow_nan=False)
    none = critical_batch_size(None, Quadratic(), batch_sizes=[8, 16, 32], samples=8192, rule="constant", tolerance=0.5)
    assert (none.value, none.low, none.high) == (32, 32, None)
    assert none.conclusion() == "The critical batch size is at least 32, the largest one that was tried."


def test_noise_forbids_an_answer_about_the_critical_batch_size() -> None:
    """Losses of the same samples in batches of 8 and 16 differ by noise only; the tolerance lies within it."""
    arguments: dict[str, Any] = {"batch_sizes": [8, 16], "samples": 2048, "rule": "root"}
    first = critical_batch_size(None, Quadratic(), **arguments)
    (_, size) = first.sizes
    found = critical_batch_size(None, Quadratic(), tolerance=max(0.0, size.difference.value), **arguments)
    assert found.sizes[1].verdict == "not told apart"
    assert (found.low, found.high) == (8, None)
    assert found.conclusion() == "The critical batch size is 8 or more: the noise allows no narrower answer."
    assert replace(found, high=16).conclusion().startswith("The critical batch size is between 8 and 16: the noise")


def test_the_critical_batch_size_checks_its_arguments() -> None:
    for sizes, message in (([8], "two or more"), ([16, 8], "the smallest first"), ([8, 1024], "at least 16 times")):
        with pytest.raises(ValueError, match=message):
            critical_batch_size(None, Quadratic(), batch_sizes=sizes, samples=8192)


def test_a_difference_without_an_interval_is_a_dash() -> None:
    found = critical_batch_size(None, Quadratic(), batch_sizes=[8, 16], samples=256, last=0.25)
    assert [row[1] for row in found.table()[1]] == ["-", "-"]
    assert found.sizes[1].verdict == "not told apart"
