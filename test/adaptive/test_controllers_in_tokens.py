"""Controllers whose batch sizes are in tokens."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from variable_batch_size.adaptive import ControlInput, NoiseScale
from variable_batch_size.testing import run_ranks

LENGTHS = np.random.default_rng(2).integers(1, 25, 150).tolist()


@dataclass(frozen=True)
class Wild:
    """Any sizes, also those that are out of bounds."""

    most: int

    def __call__(self, input: ControlInput) -> int:
        return 1 + (input.updates * 37 + input.samples * 11 + (input.batch_size or 0) * 5) % self.most


def text(number: int) -> torch.Tensor:
    """A sample: (tokens, 3)."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(LENGTHS[number], 3, generator=generator, dtype=torch.float64)


def train(
    backend: Any, adaptive: vbs.AdaptiveTrace, numbers: list[int], until: int | None = None, state: Any = None
) -> Any:
    """Train for two epochs; return the state, the weight, and the samples and size of each update on this rank."""
    world = backend.world
    options: dict[str, Any] = {"lengths": numbers, "max_tokens": 60, "epochs": 2}
    sampler = vbs.CustomSampler(len(numbers), adaptive, world.size, world.rank, **options)
    model = torch.nn.Linear(3, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=60, backend=backend)
    if state is not None:
        model.load_state_dict(copy.deepcopy(state[0]))
        optimizer.load_state_dict(copy.deepcopy(state[1]))
    made: list[tuple[int, list[int], int]] = []
    for epoch in vbs.remaining_epochs(sampler, optimizer):
        for update in vbs.updates(sampler, optimizer):
            taken, size = list[int](), optimizer.batch.batch_size
            for rows in update:
                taken += rows if optimizer.microbatch.samples else []
                tokens = torch.cat([text(row)[: numbers[row]] for row in rows])
                optimizer.backward((model(tokens)[:, 0] - tokens.sum(1).sin()).square().mean())
                optimizer.step()
            made.append((epoch, taken, size))
            if optimizer.updates == until:
                return (model.state_dict(), optimizer.state_dict()), None, made
    return None, model.weight.tolist(), made


def check_epochs(by_rank: list[Any], numbers: list[int]) -> None:
    """Each sample comes once an epoch, and batch sizes are what samples count."""
    epochs: dict[int, list[int]] = {}
    for updates in zip(*by_rank, strict=True):
        taken = [row for _, rows, _ in updates for row in rows]
        assert {size for *_, size in updates} == {sum(numbers[row] for row in taken)}
        epochs.setdefault(updates[0][0], []).extend(taken)
    assert all(sorted(taken) == [*range(len(numbers))] for taken in epochs.values())
    assert len(epochs) == 2


@given(
    st.integers(1, 400), st.integers(1, 6), st.sampled_from([4, 9]), st.integers(2, 150), st.integers(1, 3), st.data()
)
@examples(12)
def test_each_sample_comes_once_an_epoch_whatever_a_controller_chooses(most, every, delay, samples, ranks, data):
    adaptive, numbers = vbs.AdaptiveTrace(Wild(most), every=every, delay=delay), LENGTHS[:samples]
    whole = [made for *_, made in run_ranks(lambda backend: train(backend, adaptive, numbers), ranks)]
    check_epochs(whole, numbers)
    stop = data.draw(st.integers(1, max(1, len(whole[0]) - 1)))
    parts = run_ranks(lambda backend: train(backend, adaptive, numbers, until=stop), ranks)
    after = data.draw(st.integers(1, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rest = run_ranks(lambda backend: train(backend, adaptive, numbers, state=parts[0][0]), after)
    pooled = [
        [(u[0][0], [row for _, rows, _ in u for row in rows], u[0][2]) for u in zip(*by_rank, strict=True)]
        for by_rank in ([made for *_, made in parts], [made for *_, made in rest])
    ]
    check_epochs([[*pooled[0], *pooled[1]]], numbers)


@pytest.mark.filterwarnings("ignore:In most of the latest updates ranks were idle")
def test_the_noise_of_tokens_decides_alike_in_any_world():
    adaptive = vbs.AdaptiveTrace(NoiseScale(0.5), start=120, every=3, delay=4, bounds=(60, 900))
    first, *others = [run_ranks(lambda backend: train(backend, adaptive, LENGTHS), ranks)[0] for ranks in (1, 2, 3)]
    sizes = [size for *_, size in first[2]]
    assert len({size // 100 for size in sizes}) > 1
    for other in others:
        assert [size for *_, size in other[2]] == sizes
        np.testing.assert_allclose(other[1], first[1], rtol=1e-10)


@pytest.mark.parametrize(("options", "found"), [({"bounds": (8, 100)}, 8), ({"start": 30}, 30)])
def test_sizes_leave_each_update_a_sample(options, found):
    adaptive = vbs.AdaptiveTrace(Wild(9), **options)
    message = f"with lengths= a controller must choose at least 48 tokens, twice the longest sample, got {found}; pass"
    with pytest.raises(ValueError, match=message):
        vbs.CustomSampler(150, adaptive, 1, 0, lengths=LENGTHS, max_tokens=60)
