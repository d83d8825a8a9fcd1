"""Each sample once, for any dataset, batch and world; the same number of batches on every rank."""

from __future__ import annotations

import math
import sys
from collections import Counter
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.properties import examples


@examples(150)
@given(n=st.integers(1, 300), world=st.integers(1, 9), minibatch_size=st.integers(1, 70), fixed_shape=st.booleans())
def test_every_sample_counts_once_and_every_rank_has_the_same_number_of_batches(n, world, minibatch_size, fixed_shape):
    samplers = [vbs.EvaluationSampler(n, world, rank, minibatch_size, fixed_shape=fixed_shape) for rank in range(world)]
    dealt = [list(sampler) for sampler in samplers]  # [rank][batch]
    counted = []
    for batch in range(len(samplers[0])):
        for sampler, batches in zip(samplers, dealt, strict=True):
            rows, samples = Counter(batches[batch]), sampler.samples(batch)
            assert len(set(rows.values())) == 1, "a mean over the rows is not the mean over the samples"
            assert len(batches[batch]) == minibatch_size if fixed_shape else len(rows) <= minibatch_size
            assert samples in (0, len(rows))
            counted += [sorted(rows)] if samples else []
    assert list(chain(*counted)) == list(range(n))  # in the order of the dataset
    assert {len(batches) for batches in dealt} == {len(sampler) for sampler in samplers} == {len(dealt[0])}
    if not fixed_shape:
        assert len(dealt[0]) == math.ceil(math.ceil(n / minibatch_size) / world)


@pytest.mark.parametrize(
    ("n", "fixed_shape", "expected"),
    [
        (1, False, [[[0]], [[0]], [[0]]]),  # a world larger than the dataset
        (1, True, [[[0, 0]], [[0, 0]], [[0, 0]]]),
        (4, False, [[[0, 1]], [[2, 3]], [[0, 1]]]),
        (5, True, [[[0, 0]], [[1, 2]], [[3, 4]]]),
        (7, False, [[[0], [5, 6]], [[1, 2], [0]], [[3, 4], [1, 2]]]),
    ],
)
def test_small_datasets_and_large_worlds(n, fixed_shape, expected):
    found = [list(vbs.EvaluationSampler(n, 3, rank, minibatch_size=2, fixed_shape=fixed_shape)) for rank in range(3)]
    assert found == expected


def test_a_long_dataset_is_read_in_chunks():
    sampler = vbs.EvaluationSampler(100_001, 1, 0, minibatch_size=7, fixed_shape=False)
    assert list(chain(*sampler)) == list(range(100_001))
    assert next(iter(vbs.EvaluationSampler(2**40, 2, 1, minibatch_size=4))) == [4, 5, 6, 7]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_a_loader_yields_all_batches_in_every_pass(options):
    dataset = TensorDataset(torch.arange(10))
    sampler = vbs.EvaluationSampler(dataset, 1, 0, minibatch_size=4, fixed_shape=False)
    loader = DataLoader(dataset, batch_sampler=sampler, **options)
    assert len(loader) == len(sampler) == 3
    for epoch in range(2):
        assert [x.tolist() for (x,) in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
        assert sampler.passes == epoch + 1


def test_the_shape_is_fixed_by_default_on_xla(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    assert list(vbs.EvaluationSampler(3, 1, 0, 2)) == [[0], [1, 2]]
    monkeypatch.setitem(sys.modules, "torch_xla", sys)  # what only has to be there
    assert list(vbs.EvaluationSampler(3, 1, 0, 2)) == [[0, 0], [1, 2]]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0,), ValueError, r"^dataset_size must be an integer >= 1, got 0; pass a dataset with .* at least one sample"),
        ((object(),), TypeError, r"^dataset_size must be an integer >= 1, got <.*; pass a dataset with a length"),
        ((5, 2, 2), ValueError, r"0 <= rank < num_replicas, got rank=2 and num_replicas=2; pass"),
        ((5, 2), ValueError, r"^num_replicas and rank must be passed together, got num_replicas=2 and rank=None; pass"),
        ((5, 1, 0, 0), ValueError, r"^minibatch_size must be an integer >= 1, got 0; pass"),
    ],
)
def test_rejects(arguments, error, match):
    with pytest.raises(error, match=match):
        vbs.EvaluationSampler(*arguments)


def test_rejects_several_processes_without_a_process_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    with pytest.raises(RuntimeError, match=r"is \d+, but torch\.distributed is not initialized: each process would"):
        vbs.EvaluationSampler(5)
