"""What ranks claim to share: who writes it, and whether it is the same on all of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import checkpoint, updates
from helpers.processes import run_job
from helpers.properties import examples
from helpers.reference import Training, network, training
from helpers.worlds import Layout, Place
from variable_batch_size.backend import Backend
from variable_batch_size.checkpoint import shards
from variable_batch_size.checkpoint.saving import COMPARED_EVERY
from variable_batch_size.checkpoint.shards import assign
from variable_batch_size.checkpoint.shared_state import byte_sums
from variable_batch_size.testing import run_ranks


@examples(200)
@given(
    sizes=st.lists(st.integers(1, 1000), max_size=30),
    world_size=st.integers(1, 9),
    others=st.integers(0, 3000),
    smallest=st.integers(1, 2000),
)
def test_the_ranks_write_equally_much(sizes: list[int], world_size: int, others: int, smallest: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SMALLEST", smallest)
        ranks = assign({str(number): size for number, size in enumerate(sizes)}, world_size, others)
    writers, loads = max(1, min(world_size, sum(sizes) // smallest)), Counter[int]()
    for number, size in enumerate(sizes):
        loads[ranks[str(number)]] += size
    assert set(loads) <= {index * world_size // writers for index in range(writers)}
    mean = (sum(sizes) + others) / writers
    assert all(load + (0 if rank else others) <= mean + max(sizes) for rank, load in loads.items())


@given(
    contents=st.binary(max_size=70),
    kind=st.sampled_from([torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]),
    place=st.integers(0, 10**6),
    bit=st.integers(0, 7),
)
def test_each_bit_changes_a_sum(contents: bytes, kind: torch.dtype, place: int, bit: int) -> None:
    size = len(contents) // kind.itemsize * kind.itemsize
    if not size:
        return
    changed = bytearray(contents[:size])
    changed[place % size] ^= 1 << bit
    one, other = (torch.frombuffer(bytearray(own[:size]), dtype=kind) for own in (contents, changed))
    assert byte_sums({"a": one}) != byte_sums({"a": other})
    assert byte_sums({"a": one}) == byte_sums({"a": one.clone()})


def change_weight(run: Training) -> None:
    with torch.no_grad():
        run.model.get_parameter("2.bias")[0] += 1e-12


def change_state(run: Training) -> None:
    next(iter(run.optimizer.state.values()))["momentum_buffer"].view(-1)[0] += 1e-12


def drop_state(run: Training) -> None:
    del next(iter(run.optimizer.state.values()))["momentum_buffer"]


CHANGES = [
    (
        change_weight,
        r"2\.bias of the model \(Sequential\) on rank 1 is another one than on rank 0; write weights",
    ),
    (change_state, r"state/0\.weight/momentum_buffer of the optimizer \(LinearRuleOptimizer\) on rank 1 is another"),
    (drop_state, r"state/0\.weight/momentum_buffer of the optimizer \(LinearRuleOptimizer\) on rank 1 is another"),
]


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_ranks_that_differ_in_what_they_share_are_told_at_the_first_save(
    change: Any, told: str, tmp_path: Path
) -> None:
    def train(backend: Backend) -> None:
        run = training(backend=backend, hyperparameters={"lr": 0.01, "momentum": 0.9}).run(2)
        with checkpoint(tmp_path, run) as saves:
            if backend.world.rank == 1:
                change(run)
            for wait in (True, False):
                with pytest.raises(RuntimeError, match=told):
                    saves.save(wait)

    run_ranks(train, 3)
    assert updates(tmp_path) == []


def test_contents_are_compared_at_every_tenth_save(tmp_path: Path) -> None:
    """A save between two of these is as fast as without."""

    def train(backend: Backend) -> int:
        run, saved = training(backend=backend).run(1), 0
        with checkpoint(tmp_path, run) as saves:
            for _ in range(2 * COMPARED_EVERY):
                try:
                    saves.save(wait=False)
                except RuntimeError:
                    return saved
                saved += 1
                if backend.world.rank == 1:
                    change_weight(run)
        return saved

    assert run_ranks(train, 2) == 2 * [COMPARED_EVERY]


def test_buffers_may_differ(tmp_path: Path) -> None:
    def train(backend: Backend) -> None:
        run = training(backend=backend).run(1)
        run.model.register_buffer("seen", torch.full((3,), backend.world.rank))
        with checkpoint(tmp_path, run) as saves:
            saves.save()

    run_ranks(train, 2)
    assert updates(tmp_path) == [1]


def shards_without_elements(backend: Backend, folder: Path) -> None:
    """Save a model whose tensors have fewer rows than there are ranks."""
    run = Place.of(Layout(shards=3), backend).training(model=network(width=2))
    run.run(2)
    with checkpoint(folder, run) as saves:
        saves.save()


@pytest.mark.slow("starts processes")
def test_ranks_without_a_part_of_a_tensor_differ_in_nothing(tmp_path: Path) -> None:
    run_job("gloo", shards_without_elements, tmp_path / "saved", ranks=3)
    assert updates(tmp_path / "saved") == [2]


def replicas(backend: Backend, folder: Path) -> list[str]:
    """Save on two replicas of two shards; on rank 3 a shard differs from that of rank 1."""
    run, errors = Place.of(Layout(2, 2), backend).training(), list[str]()
    run.run(2)
    with checkpoint(folder, run) as saves:
        saves.save()
    again = checkpoint(folder, run)
    if backend.world.rank == 3:
        with torch.no_grad():
            next(iter(run.model.parameters())).to_local().add_(1e-9)
    try:
        again.save()
    except RuntimeError as error:
        errors.append(str(error))
    return errors


@pytest.mark.slow("starts processes")
def test_replicas_of_a_shard_are_compared(tmp_path: Path) -> None:
    for errors in run_job("gloo", replicas, tmp_path / "saved", ranks=4):
        assert len(errors) == 1
        assert "0.weight of the model" in errors[0]
        assert "on rank 3 is another one" in errors[0]


@pytest.mark.slow("restores on 128 ranks")
def test_128_ranks_restore_what_two_have_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reads the small files for all of them."""
    monkeypatch.setattr(shards, "SMALLEST", 1)
    read, ranks = list[str](), 128

    def save(backend: Backend) -> None:
        with checkpoint(tmp_path, training(backend=backend).run(3)) as saves:
            saves.save()

    def restore(backend: Backend) -> int:
        run = training(backend=backend)
        saves = checkpoint(tmp_path, run)
        original = saves._folder.texts
        monkeypatch.setattr(
            saves._folder, "texts", lambda name: [*map(str, original(name))] + (read.append(name) or [])
        )
        assert saves.restore()
        saves.close()
        return run.optimizer.updates

    run_ranks(save, 2)
    assert run_ranks(restore, ranks) == ranks * [3]
    assert len(read) == 1
