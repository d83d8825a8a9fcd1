"""Streams of rows, one on each rank: each update takes its batch, and every row is used once, whatever ends first."""

import io
import itertools
import math
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import variable_batch_size as vbs
from helpers.interrupts import Interrupt
from helpers.properties import examples
from variable_batch_size.data.streams.workers import digest


class Chunks:
    """Rows of a rank, in parts of random sizes, with a state."""

    def __init__(self, rows, seed):
        self.rows, self.rng, self.read = rows, random.Random(seed), 0

    def __iter__(self):
        while self.read < len(self.rows):
            begin = self.read
            self.read = min(len(self.rows), begin + self.rng.choice([1, 2, 7, 30]))
            yield torch.tensor([*self.rows[begin : self.read]])
        self.read = 0

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


def source(backend, trace, **options):
    model, world = nn.Linear(1, 1).double(), backend.world
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    arriving = vbs.ArrivingBatches(3, trace=trace, num_replicas=world.size, rank=world.rank, **options)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = vbs.ConstantOptimizer(inner, arriving, backend=backend)
    optimizer.model = model
    return optimizer


def train(optimizer, updates, until=float("inf")):
    """Train, and return the rows of this rank in each update."""
    found = []
    for update in updates:
        found.append([])
        for rows in update:
            if optimizer.microbatch.samples:
                found[-1] += rows.flatten().tolist()
            optimizer.backward(optimizer.model(rows.double().view(-1, 1)).mean())
            optimizer.step()
        if optimizer.updates >= until:
            break
    return found


def check(ranks, sizes, streams):
    left = sum(map(len, streams))
    for step, size in enumerate(sizes):
        taken = [len(used[step]) for used in ranks]
        assert sum(taken) == min(size, left)
        left -= sum(taken)
        ended = [sum(map(len, used[: step + 1])) == len(rows) for used, rows in zip(ranks, streams, strict=True)]
        going_on = [number for number, over in zip(taken, ended, strict=True) if not over]
        assert not going_on or max(going_on) - min(going_on) <= 1  # as near to equal as the ends allow
        assert all(number <= max(going_on, default=number) + 1 for number in taken)
    assert left == 0
    for used, rows in zip(ranks, streams, strict=True):
        assert [row for update in used for row in update] == [*rows]


@given(st.integers(0, 10**6), st.integers(1, 4))
@examples(60)
def test_every_row_is_used_once(seed, world):
    rng = random.Random(seed)
    bounds = np.cumsum([0, *(rng.choice([0, 1, 5, 40, rng.randrange(200)]) for _ in range(world))]).tolist()
    streams = [range(begin, end) for begin, end in itertools.pairwise(bounds)]
    sizes = [rng.choice([1, 3, 20, 64]) for _ in range(300)]
    total, steps = np.cumsum(sizes), 0
    steps = int(np.searchsorted(total, bounds[-1])) + (bounds[-1] > 0)

    def one(backend):
        optimizer = source(backend, sizes)
        return train(optimizer, vbs.updates(Chunks(streams[backend.world.rank], seed), optimizer))

    ranks = vbs.testing.run_ranks(one, world)
    assert all(len(used) == steps for used in ranks)
    check(ranks, sizes[:steps], streams)


STREAMS = [range(45), range(45, 60)]
SIZES = [7, 1, 20, 12, 9, 4, 3, 2, 2]


def run(backend):
    optimizer = source(backend, SIZES)
    return train(optimizer, vbs.updates(Chunks(STREAMS[backend.world.rank], 1), optimizer))


@pytest.mark.parametrize("later", [False, True])
def test_a_checkpoint_without_the_state_of_the_stream_raises(later, tmp_path):
    """Where a loop begins after the checkpoint was created, its first `step()` says so."""
    optimizer = source(vbs.backend.LocalBackend(), SIZES)
    stream = Chunks(STREAMS[0], 1)
    updates = vbs.updates([] if later else stream, optimizer)
    options = {"model": optimizer.model, "optimizer": optimizer, "loader": stream}

    def begin():
        with vbs.Checkpoint(tmp_path / "one", **options) as checkpoint:
            train(optimizer, vbs.updates(stream, optimizer), until=1)
            checkpoint.step()

    with pytest.raises(RuntimeError, match=r"must have the state of the stream.* pass stream=updates to Checkpoint"):
        begin()
    assert optimizer.updates == later
    with vbs.Checkpoint(tmp_path / "two", **options, stream=updates) as checkpoint:
        checkpoint.save()


@pytest.mark.parametrize("stop", [1, 3, 5, 6, 7, 8, 9])
def test_a_training_resumes_with_the_rows_that_were_read_ahead(stop, tmp_path):
    """Also where the stream of one rank has ended, and its source would begin again; or after the last update."""
    expected = vbs.testing.run_ranks(run, 2)

    def part(backend, seed, until):
        optimizer = source(backend, SIZES)
        updates = vbs.updates(Chunks(STREAMS[backend.world.rank], seed), optimizer)
        with vbs.Checkpoint(tmp_path, model=optimizer.model, optimizer=optimizer, stream=updates) as checkpoint:
            checkpoint.restore()
            used = train(optimizer, updates, until)
            checkpoint.save()
        return used

    begun = vbs.testing.run_ranks(lambda backend: part(backend, 1, stop), 2)
    resumed = vbs.testing.run_ranks(lambda backend: part(backend, 5, math.inf), 2)
    assert [one + other for one, other in zip(begun, resumed, strict=True)] == expected


def states(world, **options):
    def one(backend):
        optimizer = source(backend, SIZES, **options)
        updates = vbs.updates(Chunks(STREAMS[0], 1), optimizer)
        train(optimizer, updates, until=3)
        return {"optimizer": optimizer.state_dict(), "updates": updates.state_dict()}

    return vbs.testing.run_ranks(one, world)


def test_streams_of_ranks_do_not_resume_in_another_world():
    state = states(2)[0]["updates"]
    optimizer = source(vbs.backend.LocalBackend(), SIZES)
    updates = vbs.updates(Chunks(STREAMS[0], 1), optimizer)
    with pytest.raises(
        ValueError, match=r"go on with 2 ranks, as they were saved, .*1 ranks; resume on as many, or read"
    ):
        updates.load_state_dict(state)


def test_a_stream_that_all_ranks_read_resumes_in_any_world():
    def alone(backend):
        optimizer = source(backend, SIZES)
        return train(optimizer, vbs.updates(Chunks(STREAMS[0], 1), optimizer))

    expected = alone(vbs.backend.LocalBackend())
    state = states(2, shared=True)[1]

    def one(backend):
        optimizer = source(backend, SIZES, shared=True)
        updates = vbs.updates(Chunks(STREAMS[0], 9), optimizer)
        optimizer.load_state_dict(state["optimizer"])
        updates.load_state_dict(state["updates"])
        return train(optimizer, updates)

    ranks = vbs.testing.run_ranks(one, 3)
    together = [[*itertools.chain(*(used[step] for used in ranks))] for step in range(len(ranks[0]))]
    assert together == expected[3:]


def leave_update_2(optimizer, updates):
    """Leave the loop at the top of the update, and return the state as it is there."""
    for update in updates:
        if optimizer.updates == 2:
            return {"optimizer": optimizer.state_dict(), "stream": updates.state_dict()}
        for rows in update:
            optimizer.backward(optimizer.model(rows.double().view(-1, 1)).mean())
            optimizer.step()
    return None


def test_rows_of_an_update_that_was_not_made_come_again():
    """To a new loop over the iterator, and from a state at the top of the update."""
    expected, optimizer = run(vbs.backend.LocalBackend()), source(vbs.backend.LocalBackend(), SIZES)
    rows = iter(Chunks(STREAMS[0], 1))
    leave_update_2(optimizer, vbs.updates(rows, optimizer))
    assert train(optimizer, vbs.updates(rows, optimizer)) == expected[2:]

    optimizer, again = (source(vbs.backend.LocalBackend(), SIZES) for _ in range(2))
    state = leave_update_2(optimizer, vbs.updates(Chunks(STREAMS[0], 1), optimizer))
    updates = vbs.updates(Chunks(STREAMS[0], 1), again)
    again.load_state_dict(state["optimizer"])
    updates.load_state_dict(state["stream"])
    assert train(again, updates) == expected[2:]


class Counter:
    """A stream that is its own iterator, as hand-written ones are, with a state."""

    def __init__(self, rows=18):
        self.rows, self.number = rows, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.number == self.rows:
            raise StopIteration
        self.number += 3
        return torch.arange(self.number - 3, self.number)

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


@pytest.mark.parametrize("until", [3, 4, 5])
def test_a_stream_goes_back_in_the_process(until):
    """As when a notebook's cell runs again."""
    optimizer = source(vbs.backend.LocalBackend(), "0:3 2:4")
    updates = vbs.updates(Counter(), optimizer)
    begun = train(optimizer, updates, 2)
    states = optimizer.state_dict(), updates.state_dict()
    train(optimizer, updates, until)
    optimizer.load_state_dict(states[0])
    updates.load_state_dict(states[1])
    assert list(itertools.chain(*begun, *train(optimizer, updates))) == [*range(18)]


def test_a_state_is_taken_between_steps():
    optimizer = source(vbs.backend.LocalBackend(), "0:9")
    updates = vbs.updates(Counter(), optimizer)
    for number, rows in enumerate(next(iter(updates))):
        if number == 1:
            with pytest.raises(RuntimeError, match="must be called between steps"):
                updates.state_dict()
        optimizer.backward(optimizer.model(rows.double().view(-1, 1)).mean())
        optimizer.step()
    assert updates.state_dict()["version"] == 1


@pytest.mark.parametrize("file", ["data/streams/stream.py", "optim/loops/arriving.py"])
def test_an_interrupt_at_any_line_loses_no_row(file):
    interrupted = True
    for line in itertools.count(1):
        optimizer, stream, used = source(vbs.backend.LocalBackend(), "0:5"), Counter(12), {}

        def loop(optimizer, stream, used):
            for update in vbs.updates(stream, optimizer):
                used[optimizer.updates] = own = []
                for rows in update:
                    own += rows.tolist()
                    optimizer.backward(optimizer.model(rows.double().view(-1, 1)).mean())
                    optimizer.step()

        try:
            with Interrupt(line, file):
                loop(optimizer, stream, used)
            interrupted = False
        except KeyboardInterrupt:
            optimizer.discard_step()
            loop(optimizer, stream, used)
        assert list(itertools.chain(*used.values())) == [*range(12)], line
        if not interrupted:
            break  # fewer lines


class Numbers(IterableDataset[int]):
    """All numbers in each worker, or a part in each."""

    def __init__(self, end, *, shared=True):
        self.end, self.shared = end, shared

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker and self.shared else (0, 1)
        yield from range(first, self.end, step)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("trace", [4, None])
def test_workers_that_do_not_share_the_rows_are_told(shared, trace):
    optimizer = source(vbs.backend.LocalBackend(), trace)
    told = r"^The workers of the loader begin with the same rows, so that .*; let each read its own part"
    with nullcontext() if shared else pytest.warns(UserWarning, match=told):
        for update in vbs.updates(DataLoader(Numbers(12, shared=shared), 3, num_workers=2), optimizer):
            for rows in update:
                optimizer.backward(optimizer.model(rows.double().view(-1, 1)).mean())
                optimizer.step()
    assert optimizer.samples == 12 * (2 - shared)


def test_rows_of_any_kind_have_a_digest_or_none():
    """What cannot be told apart is not warned of."""

    class Odd:
        def __getstate__(self):
            raise ValueError

    rows = [torch.ones(2), {"a": [np.ones(3)[::-1], "b"]}, (torch.tensor([1.0, float("nan")]), 3)]
    assert all(digest(one) == digest(one) != "" for one in rows)
    assert len({digest(one) for one in [torch.ones(2), torch.ones(2).double(), torch.ones(2, 1)]}) == 3
    assert [digest(one) for one in (Odd(), torch.ones(2).to_sparse())] == ["", ""]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("trace", ["0:8", None])
def test_ranks_that_do_not_share_the_rows_are_told(shared, trace):
    def one(backend):
        optimizer, rank = source(backend, trace), backend.world.rank
        first, step = (rank, 2) if shared else (0, 1)
        train(optimizer, vbs.updates([torch.arange(first + 8 * k, 8 * k + 8, step) for k in range(3)], optimizer))
        return optimizer.samples

    told = r"^Ranks 0 and 1 begin with the same rows, .*; let each read its own part, by rank and num_replicas"
    with nullcontext() if shared else pytest.warns(UserWarning, match=told):
        assert vbs.testing.run_ranks(one, 2) == 2 * [24 * (2 - shared)]


def test_rows_that_cannot_be_read_again_are_not_saved():
    optimizer = source(vbs.backend.LocalBackend(), 4)
    chunks = Chunks(STREAMS[0], 1)
    arrays = type("Arrays", (), {
        "__iter__": lambda self: (rows.numpy() for rows in chunks), "state_dict": lambda self: {},
    })()  # fmt: skip
    updates = vbs.updates(arrays, optimizer)
    for update in updates:
        for rows in update:
            optimizer.backward(optimizer.model(torch.from_numpy(rows).double().view(-1, 1)).mean())
            optimizer.step()
        break
    with pytest.raises(TypeError, match=r"rows that were read ahead, must be tensors, numbers and strings in dicts"):
        updates.state_dict()


def test_a_source_without_a_state_keeps_no_rows():
    optimizer = source(vbs.backend.LocalBackend(), 4)
    chunks = [torch.arange(10), torch.arange(10, 20)]
    updates = vbs.updates(chunks, optimizer)
    train(optimizer, updates, until=1)
    again = source(vbs.backend.LocalBackend(), 4)
    later = vbs.updates([torch.arange(optimizer.samples, 20)], again)  # the user skips
    again.load_state_dict(optimizer.state_dict())
    later.load_state_dict(updates.state_dict())
    assert [*itertools.chain(*train(again, later))] == [*range(4, 20)]


@pytest.mark.parametrize("traces", [(4, 6), (4, None), ([4, 4, 4], [4, 6, 2])])
def test_ranks_must_have_one_trace(traces):
    def one(backend):
        optimizer = source(backend, traces[backend.world.rank])
        return train(optimizer, vbs.updates(Chunks(range(12 * backend.world.rank, 12), 1), optimizer))

    with pytest.raises((ValueError, RuntimeError), match=r"the same trace|the same calls in the same order"):
        vbs.testing.run_ranks(one, 2)


def test_parts_that_cannot_be_joined_are_named():
    one = torch.ones(2)
    for parts in ([torch.ones(2, 3), torch.ones(2, 4)], [{"a": one}, {"a": one, "b": one}]):
        optimizer = source(vbs.backend.LocalBackend(), 4)
        with pytest.raises(ValueError, match=r"the same fields, of the same shape but for the rows, .*collate_fn="):
            train(optimizer, vbs.updates(parts, optimizer))


@pytest.mark.parametrize(("on_end", "sizes"), [("stop", [4, 5]), ("hold", [4, 5, 5, 2]), ("cycle", [4, 5, 4, 3])])
def test_a_trace_may_end_the_loop(on_end, sizes):
    """Only with "stop" before the stream, of 16 rows, does."""
    optimizer = source(vbs.backend.LocalBackend(), vbs.BatchTrace.of([4, 5], on_end=on_end))
    used = train(optimizer, vbs.updates(Chunks(range(16), 1), optimizer))
    assert [len(update) for update in used] == sizes
    assert [row for update in used for row in update] == [*range(sum(sizes))]


def test_a_stream_that_is_longer_than_its_trace_raises():
    optimizer = source(vbs.backend.LocalBackend(), [4, 5])
    with pytest.raises(IndexError, match=r"step must be < 2, because trace has 2 steps"):
        train(optimizer, vbs.updates(Chunks(STREAMS[0], 1), optimizer))


def test_rows_are_taken_by_what_they_count():
    """As few as count each rank's part of the batch, in tokens."""
    lengths = [3, 0, 4, 1, 1, 6, 2, 2, 5, 1]
    optimizer = source(vbs.backend.LocalBackend(), 6, counts=lambda rows: [lengths[row] for row in rows.tolist()])
    used = train(optimizer, vbs.updates([torch.arange(0, 4), torch.arange(4, 10)], optimizer))
    assert used == [[0, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert optimizer.samples == sum(lengths)


def test_a_state_of_another_version_is_refused():
    with pytest.raises(ValueError, match=r"a state of streams must be of version 1"):
        vbs.updates([], source(vbs.backend.LocalBackend(), 3)).load_state_dict({"version": 2})


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow("starts workers"))])
def test_a_stateful_loader_resumes(workers):
    def loader():
        return StatefulDataLoader(Numbers(50), batch_size=8, num_workers=workers)

    optimizer = source(vbs.backend.LocalBackend(), SIZES)
    updates = vbs.updates(loader(), optimizer)
    used = train(optimizer, updates, until=3)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "stream": updates.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    optimizer = source(vbs.backend.LocalBackend(), [*SIZES, *[30] * 9])
    updates = vbs.updates(loader(), optimizer)
    optimizer.load_state_dict(state["optimizer"])
    updates.load_state_dict(state["stream"])
    used += train(optimizer, updates)
    assert sorted(itertools.chain(*used)) == [*range(50)]
    assert [len(rows) for rows in used[:5]] == SIZES[:5]
