"""fit() against all sizes, and find_minibatch_size() under real memory limits."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.splitting import split_sizes
from variable_batch_size.data.fit import BatchFit, Elastic

# ------------------------------------------------------------------------------------------------- the best split


def dealt(sizes, world_size, rows):
    """Of the microbatches 0, 1, ..., of which number i goes to rank i mod W: the rounds, and the rows of all ranks."""
    shares = [sizes[rank::world_size] or [sizes[rank % len(sizes)]] for rank in range(world_size)]  # one is replayed
    return max(map(len, shares)), sum(rows or size for share in shares for size in share)


@pytest.mark.parametrize(("fixed_shape", "largest"), [(True, 256), (False, 128)])
def test_fit_is_the_best_of_all_sizes(fixed_shape, largest):
    for batch in [*range(1, 8), *random.Random(0).sample(range(8, largest + 1), 10)]:
        best = {}
        for m in range(1, 49):
            for world in range(1, 14):
                sizes = split_sizes(batch, m, fixed_shape, world)
                rounds, rows = dealt(sizes, world, m if fixed_shape else None)
                tried = rounds, rows - batch, m, len(sizes)
                best[world] = min(best.get(world, tried), tried)
                rounds, _, size, count = best[world]
                assert vbs.fit_batch(batch, m, world, fixed_shape=fixed_shape) == (size, rounds, count), (
                    batch,
                    m,
                    world,
                )


@examples(60)
@given(
    batch=st.integers(1, 400),
    largest=st.integers(1, 70),
    world=st.integers(1, 9),
    tail=st.integers(0, 20),
    fixed_shape=st.booleans(),
)
def test_a_sampler_needs_as_many_rounds_as_fit_says(batch, largest, world, tail, fixed_shape):
    size, rounds, microbatches = vbs.fit_batch(batch, largest, world, fixed_shape=fixed_shape)
    assert size <= largest
    samplers = [
        vbs.CustomSampler(batch + tail, [batch, 1], world, rank, size, on_end="hold", fixed_shape=fixed_shape)
        for rank in range(world)
    ]
    first_step = [sampler.plan.step(sampler.plan.epoch(0), 0, sampler.dealing) for sampler in samplers]
    dealt = [step.rounds(sampler.world) for step, sampler in zip(first_step, samplers, strict=True)]
    assert max(dealt) == rounds
    assert first_step[0].num_microbatches == microbatches
    for sampler, number in zip(samplers, dealt, strict=True):
        assert len(list(sampler)) == number + tail  # the steps that follow are of one sample each


def test_fit_of_a_large_batch_uses_the_same_split():
    fit = vbs.fit_batch(65536, 4096, 8, fixed_shape=True)
    assert fit == BatchFit(minibatch_size=4096, rounds=2, microbatches=16)
    size, rounds, count = vbs.fit_batch(65521, 4000, 7, fixed_shape=True)
    assert (rounds, count) == (3, len(split_sizes(65521, size, True)))
    assert vbs.fit_batch(2**53, 1024, 8, fixed_shape=True).rounds == 2**40


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8", 2**53 + 1, None])
@pytest.mark.parametrize("name", ["global_batch_size", "max_minibatch_size", "world_size"])
def test_fit_rejects_wrong_numbers(name, value):
    numbers = {"global_batch_size": 8, "max_minibatch_size": 4, "world_size": 2, name: value}
    with pytest.raises(
        ValueError if type(value) is int else TypeError, match=f"^{name} must be an integer >= 1.*, got .*; pass"
    ):
        vbs.fit_batch(**numbers)


# ------------------------------------------------------------------------------------- the largest that memory holds


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Keep what is there already out of the garbage collections, of which there is one a trial."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Device(nn.Module):
    """A model on a device that holds so many rows."""

    def __init__(self, rows, error=torch.OutOfMemoryError):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.rows, self.error = rows, error
        self.cycle = [self]  # as in models that know their parts' owner: only the collector frees it

    def forward(self, x):
        if len(x) > self.rows:
            raise self.error()
        return x * self.weight


def mean(model, batch):
    return model(batch).mean()


@examples(60)
@given(rows=st.integers(1, 300), start=st.integers(1, 400), limit=st.integers(1, 400))
def test_finds_the_largest_size_from_any_start(rows, start, limit):
    tried = []

    def loss(model, batch):
        tried.append(len(batch))
        return mean(model, batch)

    found = vbs.find_minibatch_size(lambda: Device(rows), loss, torch.ones(1, 3), start=start, limit=limit)
    assert found == min(rows, limit)
    assert max(tried) <= limit
    assert tried[0] == min(start, limit)
    assert len(set(tried)) <= 2 + 2 * max(rows, start).bit_length()


OUT_OF_MEMORY = [
    torch.OutOfMemoryError,
    MemoryError,
    lambda: RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
    lambda: RuntimeError("std::bad_alloc"),
    lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    lambda: RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: Error loading program"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error())[:20] or error.__name__)
def test_recognizes_all_messages_of_exhausted_memory(error):
    assert vbs.find_minibatch_size(lambda: Device(1, error), mean, torch.ones(1, 3), start=1, limit=2) == 1
    with pytest.raises(MemoryError, match=r"^a microbatch of one row must fit into memory .* raised .+; use"):
        vbs.find_minibatch_size(lambda: Device(0, error), mean, torch.ones(1, 3), start=1)


@pytest.mark.parametrize("error", [ValueError, RuntimeError("shapes do not match"), KeyboardInterrupt])
def test_other_exceptions_propagate(error):
    kind = error if isinstance(error, type) else type(error)
    with pytest.raises(kind):
        vbs.find_minibatch_size(lambda: Device(5, lambda: error), mean, torch.ones(1, 3))


def test_trials_release_their_memory():
    made = []

    def model():
        assert not any(ref() is not None for ref in made)
        made.append(weakref.ref(device := Device(5)))
        return device

    def loss(model, batch):
        made.append(weakref.ref(batch))
        return mean(model, batch)

    assert vbs.find_minibatch_size(model, loss, torch.ones(1, 3)) == 5
    assert len(made) == 6 + 2 * 4 + 2  # models for 1, 2, 4, 8, 6 and 5 rows; two batches, or one where it fails
    assert not any(ref() is not None for ref in made)


def test_a_trial_repeats_the_example_and_runs_two_microbatches():
    seen = []

    def loss(model, batch):
        (data, more), target = batch["input"], batch["target"]
        assert data.tolist() == len(data) * [[1, 2, 3]]
        assert more.shape == (len(data), 1, 2)
        assert target.tolist() == len(data) * [7]
        gradient = next(model.parameters()).grad
        seen.append((len(data), gradient is not None))
        return mean(model, data)

    example = {"input": (torch.tensor([[1.0, 2, 3]]), torch.zeros(1, 1, 2)), "target": torch.tensor([7])}
    assert vbs.find_minibatch_size(lambda: Device(3), loss, example, limit=3) == 3
    assert seen == [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]


def test_a_trial_includes_the_state_of_the_optimizer():
    sizes = []

    def optimizer(parameters):
        made.append(torch.optim.Adam(parameters))
        return made[-1]

    def loss(model, batch):
        sizes.append(len(made[-1].state))
        return mean(model, batch)

    made = []
    assert vbs.find_minibatch_size(lambda: Device(9), loss, torch.ones(1, 3), limit=1, optimizer_fn=optimizer) == 1
    assert sizes == [0, 1]


def test_trials_leave_the_random_generator_as_it_was():
    def loss(model, batch):
        return mean(model, nn.functional.dropout(batch))

    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    vbs.find_minibatch_size(lambda: Device(3), loss, torch.ones(1, 3), limit=9)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("example", "error", "match"),
    [
        (torch.ones(2, 3), ValueError, "^the example must be a batch of one row, got 2 rows; pass"),
        (torch.tensor(1.0), TypeError, "^each field of a batch must have rows, got tensor"),
        ((torch.ones(1, 3), 5), TypeError, "^each field of a batch must have rows, got 5 "),
    ],
)
def test_rejects_an_example_without_exactly_one_row(example, error, match):
    with pytest.raises(error, match=match):
        vbs.find_minibatch_size(lambda: Device(5), mean, example)


@pytest.mark.parametrize("model", [torch.nn.Linear(3, 1), None])
def test_rejects_a_model_that_is_no_function(model):
    requirement = r"^model_fn must be a function that creates the model of each trial, got .*; pass one, such as lambda"
    with pytest.raises(TypeError, match=requirement):
        vbs.find_minibatch_size(model, mean, torch.ones(1, 3))


@pytest.mark.parametrize("name", ["start", "limit"])
def test_rejects_sizes_that_are_not_integers(name):
    sizes = {name: 0}
    with pytest.raises(ValueError, match=f"^{name} must be an integer >= 1, got 0; pass"):
        vbs.find_minibatch_size(lambda: Device(5), mean, torch.ones(1, 3), **sizes)


ALLOCATE = """
import resource, torch, variable_batch_size as vbs
from pathlib import Path

torch.set_num_threads(1)
ROW = 1 << 17  # numbers, of 4 bytes, that the loss holds for each row until its backward

def loss(model, x):
    return (model(x).expand(-1, ROW).exp() * x).mean()  # two such: the exponential and the product

def below(rows):
    return vbs.find_minibatch_size(lambda: torch.nn.Linear(1, 1), loss, torch.ones(1, 1), start=rows, limit=rows)

below(1)  # what is loaded and started for good
room = 128 << 20
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
found = vbs.find_minibatch_size(lambda: torch.nn.Linear(1, 1), loss, torch.ones(1, 1))
assert below(found + 1) == found
print(found, room // (4 * ROW))
"""


@pytest.mark.slow("exhausts memory")
@pytest.mark.torch
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
def test_with_memory_that_is_really_exhausted():
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is the system's again, unbroken
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATE], capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    found, rows = map(int, done.stdout.split())
    assert rows / 5 < found <= rows / 2  # a row is held two times at least


@examples(200)
@given(batch=st.integers(1, 2000), largest=st.integers(1, 200), gpus=st.integers(1, 16))
def test_takes_the_fewest_steps_and_then_the_smallest_batch_size(batch, largest, gpus):
    found = vbs.elastic(*map(np.int64, (batch, largest, gpus)))
    assert {*map(type, found)} == {int, bool}
    steps = -(-batch // (largest * gpus))
    assert found == Elastic(steps, found.batch_size, batch, gpus, True)
    assert -(-batch // (steps * gpus)) == found.batch_size <= largest


def test_a_sampler_computes_exactly_that_batch():
    found = vbs.elastic(100, 30, 3)
    assert found == (2, 17, 100, 3, True)
    ranks = [
        list(vbs.CustomSampler(100, 100, found.gpus, rank, found.batch_size, fixed_shape=False))
        for rank in range(found.gpus)
    ]
    assert [len(microbatches) for microbatches in ranks] == [found.steps] * found.gpus
    assert sorted(sample for rank in ranks for microbatch in rank for sample in microbatch) == list(range(100))


@pytest.mark.parametrize("wrong", [{"gpus": 0}, {"gpus": 1.5}, {"global_batch_size": 0}, {"max_gpu_batch_size": "8"}])
def test_refuses_wrong_numbers(wrong):
    with pytest.raises((TypeError, ValueError), match="must be an integer >= 1"):
        vbs.elastic(**{"global_batch_size": 8, "max_gpu_batch_size": 4, "gpus": 2} | wrong)
