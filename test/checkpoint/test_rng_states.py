"""The states of random generators as text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from variable_batch_size.checkpoint import rng_states


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    generator, states = np.random.get_bit_generator(), rng_states.current()
    yield
    np.random.set_bit_generator(generator)
    rng_states.go_on(states)


def draw() -> list[Any]:
    """Normal ones too: they come in pairs, of which one is kept for the next draw."""
    numbers = [torch.rand(3).tolist(), torch.randn(1).item()]
    return [*numbers, np.random.random(3).tolist(), np.random.randn(), random.random(), random.gauss(0, 1)]


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64])
@pytest.mark.parametrize("drawn", [0, 1, 700])
def test_what_follows_is_drawn_again(kind: Any, drawn: int) -> None:
    np.random.set_bit_generator(kind(drawn))
    for _ in range(drawn):
        draw()
    states = rng_states.current()
    expected = [draw() for _ in range(3)]
    rng_states.go_on(states)
    assert [draw() for _ in range(3)] == expected
