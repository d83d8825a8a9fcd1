"""RNG states as text."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from variable_batch_size.checkpoint.rng_states import get_rng_states, set_rng_states


@pytest.fixture(autouse=True)
def restored_rngs():
    generator, states = np.random.get_bit_generator(), get_rng_states()
    yield
    np.random.set_bit_generator(generator)
    set_rng_states(states)


def draw():
    """Draw from every RNG, normal numbers too: they are drawn in pairs, and the state holds the second one."""
    numbers = [torch.rand(3).tolist(), torch.randn(1).item()]
    return [*numbers, np.random.random(3).tolist(), np.random.randn(), random.random(), random.gauss(0, 1)]


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64])
@pytest.mark.parametrize("drawn", [0, 1, 700])
def test_restored_states_draw_the_same_numbers(kind, drawn):
    np.random.set_bit_generator(kind(drawn))
    for _ in range(drawn):
        draw()
    states = get_rng_states()
    expected = [draw() for _ in range(3)]
    set_rng_states(states)
    assert [draw() for _ in range(3)] == expected
