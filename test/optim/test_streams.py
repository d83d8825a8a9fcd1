"""Streams: each update takes its rows in one order, in any world, and a training resumes in any other."""

import copy
import io
import itertools
import json
import math
import os
import random
import signal
import warnings
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing import ProcessExitedException
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import variable_batch_size as vbs
from helpers.interrupts import Interrupt
from helpers.processes import run_job
from helpers.properties import examples
from helpers.streams import StreamTraining, expected_rows, in_order, loss, streams_of, train_whole
from variable_batch_size.data.streams.rows import digest
from variable_batch_size.data.streams.shards import as_text

PASSES = 2


@given(st.integers(0, 10**6), st.lists(st.integers(1, 4), min_size=1, max_size=4))
@examples(100)
def test_updates_take_the_same_rows_in_any_world_and_resume_in_any_other(seed, worlds):
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 5, 40, rng.randrange(100)]) for _ in range(rng.randint(1, 5))]
    sizes, tokens = [rng.choice([1, 3, 20, 64]) for _ in range(2000)], rng.random() < 0.3
    trace = iter(sizes)
    expected = [rows for _ in range(PASSES) for rows in expected_rows(lengths, trace, tokens=tokens)]
    stops = sorted(rng.randint(0, len(expected)) for _ in worlds[1:])
    state, found = None, []

    def part(backend, until):
        run = StreamTraining(backend, sizes, streams_of(lengths, seed), tokens=tokens)
        used = []
        if state is not None:
            run.load(copy.deepcopy(state))
        while run.updates.passes < PASSES and run.optimizer.updates < until:
            used += run.run(until)
        return used, run.state(), [parameter.item() for parameter in run.model.parameters()]

    for world, until in zip(worlds, [*stops, math.inf], strict=True):
        ranks = vbs.testing.run_ranks(lambda backend, until=until: part(backend, until), world)
        found += in_order([used for used, *_ in ranks], len(lengths))
        states = [one["stream"] for _, one, _ in ranks]
        assert all(one == states[0] for one in states)
        state = ranks[-1][1]
    assert found == expected
    for *_, weights in ranks:
        assert weights == pytest.approx(train_whole(expected, tokens=tokens), rel=1e-12, abs=1e-14)


LENGTHS, SIZES = [45, 15, 8], [7, 1, 20, 12, 9, 4, 3] * 9
ALONE, SLOW = vbs.backend.LocalBackend(), pytest.mark.slow("interrupts each line")


def killed(backend, folder, journal, stop):
    """Train, journal the rows of this rank, and end by SIGKILL within update `stop`."""
    run = StreamTraining(backend, SIZES, streams_of(LENGTHS, 3))
    with vbs.Checkpoint(folder, model=run.model, optimizer=run.optimizer, stream=run.updates) as checkpoint:
        checkpoint.restore()
        path, begun = journal / f"{run.optimizer.updates}-{backend.world.rank}", run.optimizer.updates
        while run.updates.passes < PASSES:
            for update in run.updates:
                used = []
                for rows in update:
                    if run.optimizer.updates == stop:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if run.optimizer.microbatch.samples:
                        used += rows.tolist()
                    run.optimizer.backward(loss(run.model, rows, tokens=False))
                    run.optimizer.step()
                with path.open("a") as file:
                    file.write(json.dumps(used) + "\n")
                if run.optimizer.updates % 2 == 0:
                    checkpoint.save()
    return begun


@pytest.mark.slow("starts processes")
def test_killed_trainings_resume_on_other_numbers_of_ranks(tmp_path):
    journal, worlds, stops = tmp_path / "journal", [1, 2, 3, 2], [5, 10, 15, None]
    journal.mkdir()
    begins = []
    for world, stop in zip(worlds, stops, strict=True):
        begins.append(0 if not begins else stops[len(begins) - 1] // 2 * 2)
        if stop is None:
            assert run_job("gloo", killed, tmp_path / "saved", journal, stop, ranks=world) == [begins[-1]] * world
        else:
            with pytest.raises(ProcessExitedException):
                run_job("gloo", killed, tmp_path / "saved", journal, stop, ranks=world)
    found = []
    for begin, end, world in zip(begins, [*begins[1:], None], worlds, strict=True):
        texts = [(journal / f"{begin}-{rank}").read_text().splitlines() for rank in range(world)]
        read = [[json.loads(line) for line in lines][: end and end - begin] for lines in texts]
        found += in_order(read, len(LENGTHS))
    trace = iter(SIZES)
    assert found == [rows for _ in range(PASSES) for rows in expected_rows(LENGTHS, trace, tokens=False)]


def test_a_training_that_stops_in_a_pass_makes_no_further_one():
    streams = streams_of(LENGTHS, 3)
    run = StreamTraining(ALONE, 20, streams)
    run.run()
    run.run(until=6)
    assert (run.updates.passes, run.optimizer.updates) == (1, 6)
    streams = streams_of(LENGTHS, 3)
    again = StreamTraining(ALONE, 20, streams)
    again.load(run.state())
    while again.updates.passes < 3:
        again.run()
    assert again.optimizer.samples == 3 * sum(LENGTHS)
    assert all(stream.epochs == [1, 2] for stream in streams)


class Frozen:
    """A stream whose state stands still, or is the one that was loaded."""

    state = 0

    def __iter__(self):
        yield from torch.arange(12 * self.state, 60).split(4)

    def state_dict(self):
        return {"state": self.state}

    def load_state_dict(self, state):
        self.state = state["state"]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_state_that_stands_still_is_told(resumed):
    run = StreamTraining(ALONE, 4, [Frozen()])
    if resumed:
        run.load({**run.state(), "stream": {"version": 2, "passes": 0, "shards": [
            as_text({"ended": False, "used": 12, "own": {"state": 1}})]}})  # fmt: skip
    else:
        run.run(until=1)
        run.state()
    run.run(until=4)
    with pytest.warns(UserWarning, match=r"^The state of a stream must move with its rows, .* shard 0, a Frozen"):
        run.state()


class FrozenDataset(IterableDataset):
    def __iter__(self):
        yield from range(60)

    def state_dict(self):
        return {"row": 0}

    def load_state_dict(self, state):
        pass


def test_a_loader_whose_dataset_stands_still_raises():
    run = StreamTraining(ALONE, 8, [StatefulDataLoader(FrozenDataset(), batch_size=4)])
    run.run(until=1)
    run.state()
    run.run(until=3)
    with pytest.raises(RuntimeError, match="must move with its rows, but 4 items of shard 0, a StatefulDataLoader"):
        run.state()


@pytest.mark.parametrize("trace", [None, 8])
def test_ranks_whose_keys_differ_raise(trace):
    def one(backend):
        rows = [torch.arange(number, number + 8) for number in (0, 8)]
        shift = backend.world.rank
        key = {"key": lambda item: f"rollout {item[-1] + shift * (item[-1] > 8)}"}
        StreamTraining(backend, trace, [rows] if trace else rows, **key).run()

    told = pytest.raises(ValueError, match=r"all ranks must read the same items, got keys .*rollout 15.*rollout 16")
    with told, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vbs.testing.run_ranks(one, 2)


class Counter:
    """A stream that is its own iterator."""

    def __init__(self, rows=12):
        self.rows, self.number = rows, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.number == self.rows:
            raise StopIteration
        self.number += 3
        return torch.arange(self.number - 3, self.number)


@SLOW
@pytest.mark.parametrize("trace", [5, None])
@pytest.mark.parametrize("file", ["data/streams/shards.py", "optim/loops/arriving.py"])
def test_an_interrupt_at_any_line_loses_no_row(file, trace):
    interrupted = True
    for line in itertools.count(1):
        stream, used = Counter(), {}
        run = StreamTraining(ALONE, trace, [stream] if trace else stream)

        def loop(run, used):
            for update in run.updates:
                used[run.optimizer.updates] = own = []
                for rows in update:
                    own += rows.tolist()
                    run.optimizer.backward(loss(run.model, rows, tokens=False))
                    run.optimizer.step()

        try:
            with Interrupt(line, file):
                loop(run, used)
            interrupted = False
        except KeyboardInterrupt:
            run.optimizer.discard_step()
            if not (trace and run.updates.passes):
                loop(run, used)
        assert list(itertools.chain(*used.values())) == [*range(12)], line
        if not interrupted:
            break  # fewer lines


@pytest.mark.parametrize("when", ["in the loop", "after break", "after an exception"])
@pytest.mark.parametrize("trace", [5, 4])
def test_a_state_of_an_update_that_has_begun_uses_no_row_twice(when, trace):
    """Neither in the run that goes on, nor in one that resumes."""
    states = []

    def loop(run, used):
        for update in run.updates:
            used[run.optimizer.updates] = own = []
            if run.optimizer.updates == 1 and not states:
                if when == "after break":
                    break
                if when == "in the loop":
                    states.append(run.state())
            for rows in update:
                own += rows.tolist()
                run.optimizer.backward(loss(run.model, rows, tokens=False))
                if when == "after an exception" and run.optimizer.updates == 1 and not states:
                    raise ZeroDivisionError
                run.optimizer.step()

    run, used = StreamTraining(ALONE, trace, [Counter()]), {}
    with suppress(ZeroDivisionError):
        loop(run, used)
    if not states:
        run.optimizer.discard_step()
        states.append(run.state())
        loop(run, used)
    assert list(itertools.chain(*used.values())) == [*range(12)]
    run, resumed = StreamTraining(ALONE, trace, [Counter()]), {0: used[0]}
    run.load(states[0])
    loop(run, resumed)
    assert resumed == used


def test_a_stream_that_is_its_own_iterator_has_one_pass():
    run = StreamTraining(ALONE, 5, [Counter()])
    run.run()
    with pytest.raises(RuntimeError, match=r"shard 0, a Counter, is its own iterator .* must restart in each pass"):
        run.run()


def test_states_and_streams_that_do_not_fit_raise():
    run = StreamTraining(ALONE, 5, [[torch.arange(9)]])
    with pytest.raises(ValueError, match="a state of streams must be of version 2"):
        run.updates.load_state_dict({"version": 1, "ranks": []})
    with pytest.raises(ValueError, match="streams must be as many as were saved, 2, got 1"):
        run.updates.load_state_dict(StreamTraining(ALONE, 5, [[], ()]).updates.state_dict())
    with pytest.raises(ValueError, match=r"has streams=, vbs.updates\(\) reads them, got a list; call"):
        vbs.updates([], run.optimizer)
    with pytest.raises(IndexError, match="step must be < 2, because trace has 2 steps"):
        StreamTraining(ALONE, [4, 5], [[torch.arange(16)]]).run()


def test_a_checkpoint_without_the_state_of_the_streams_raises(tmp_path):
    run = StreamTraining(ALONE, 5, [[torch.arange(9)]])
    told = pytest.raises(RuntimeError, match=r"needs the state of the streams, .* has none; pass stream=updates to Che")
    with told, vbs.Checkpoint(tmp_path, model=run.model, optimizer=run.optimizer):
        pass


class Numbers(IterableDataset[int]):
    """All numbers in each worker, or a part in each."""

    def __init__(self, end, *, shared=True):
        self.end, self.shared = end, shared

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker and self.shared else (0, 1)
        yield from range(first, self.end, step)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow("starts workers"))])
def test_a_stateful_loader_resumes(workers):
    def training():
        return StreamTraining(ALONE, SIZES, [StatefulDataLoader(Numbers(50), batch_size=8, num_workers=workers)])

    run = training()
    used = run.run(until=3)
    file = io.BytesIO()
    torch.save(run.state(), file)
    file.seek(0)
    again = training()
    again.load(torch.load(file, weights_only=True))
    used += again.run()
    assert sorted(itertools.chain(*used)) == [*range(50)]
    assert [len(rows) for rows in used[:4]] == SIZES[:4]


def test_a_stream_whose_items_are_all_used_skips_nothing():
    run, again = (StreamTraining(ALONE, 4, [StatefulDataLoader(Numbers(12), batch_size=4)]) for _ in range(2))
    used = run.run(until=1)
    again.load(run.state())
    assert used + again.run() == [[*range(4)], [*range(4, 8)], [*range(8, 12)]]


@pytest.mark.parametrize("shared", [False, True])
def test_workers_that_do_not_share_the_rows_are_told(shared):
    run = StreamTraining(ALONE, 4, [DataLoader(Numbers(12, shared=shared), 3, num_workers=2)])
    told = r"^The workers of the loader begin with the same rows, so that .*; let each read its own part"
    with nullcontext() if shared else pytest.warns(UserWarning, match=told):
        run.run()
    assert run.optimizer.samples == 12 * (2 - shared)


def test_ranks_that_bring_the_same_rows_are_told_and_those_of_a_whole_batch_need_them():
    def one(backend, shared):
        run = StreamTraining(backend, None, [torch.arange(8) + shared * backend.world.rank], shared=shared)
        run.run()
        return run.optimizer.samples

    with pytest.warns(UserWarning, match="^Ranks 0 and 1 begin with the same rows, .*let each read its own part"):
        assert vbs.testing.run_ranks(lambda backend: one(backend, False), 2) == [16, 16]
    with pytest.raises(ValueError, match="all ranks must be given the same rows, got other rows, digests"):
        vbs.testing.run_ranks(lambda backend: one(backend, True), 2)


def test_rows_of_any_kind_have_a_digest_or_none():
    rows = [torch.ones(2), {"a": [np.ones(3)[::-1], "b"]}, (torch.tensor([1.0, float("nan")]), 3)]
    assert all(digest(one) == digest(one) != "" for one in rows)
    assert len({digest(one) for one in [torch.ones(2), torch.ones(2).double(), torch.ones(2, 1)]}) == 3
    assert [digest(one) for one in (lambda: 0, torch.ones(2).to_sparse())] == ["", ""]


def test_parts_that_cannot_be_joined_are_named():
    one = torch.ones(2)
    for parts in ([torch.ones(2, 3), torch.ones(2, 4)], [{"a": one}, {"a": one, "b": one}]):
        with pytest.raises(ValueError, match=r"the same fields, of the same shape but for the rows, .*collate_fn="):
            StreamTraining(ALONE, 4, [parts]).run()


@pytest.mark.parametrize(("on_end", "sizes"), [("stop", [4, 5]), ("hold", [4, 5, 5, 2]), ("cycle", [4, 5, 4, 3])])
def test_a_trace_may_end_the_loop(on_end, sizes):
    used = StreamTraining(ALONE, vbs.BatchTrace.of([4, 5], on_end=on_end), [[torch.arange(16)]]).run()
    assert [len(update) for update in used] == sizes


def test_a_stream_that_ends_after_it_has_raised_is_not_over():
    """A generator that has raised ends: its other rows would be lost without a word."""

    class Fails:
        def __iter__(self):
            for row in range(0, 40, 4):
                if row == 16:
                    raise OSError("network")
                yield torch.ones(4, 3)

    source = vbs.ArrivingBatches(trace="0:8", streams=[Fails()], num_replicas=1, rank=0)
    model = torch.nn.Linear(3, 1)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), source)
    updates = vbs.updates(source, optimizer)
    for error, words in [(OSError, "network"), (RuntimeError, "must continue after an"), (RuntimeError, "must")]:
        with pytest.raises(error, match=words):  # noqa: PT012 (in one of these updates)
            for update in updates:
                for rows in update:
                    optimizer.backward(model(rows).mean())
                    optimizer.step()
    assert (optimizer.updates, updates.passes) == (2, 0)


def test_a_trace_that_stops_ends_the_training():
    trace = vbs.BatchTrace.from_sizes([8, 8, 8], on_end="stop")
    source = vbs.ArrivingBatches(trace=trace, streams=[[torch.ones(4, 3)] * 30], num_replicas=1, rank=0)
    model = torch.nn.Linear(3, 1)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), source)
    updates = vbs.updates(source, optimizer)
    while updates.passes < 3 and not optimizer.done:
        for update in updates:
            for rows in update:
                optimizer.backward(model(rows).mean())
                optimizer.step()
    assert optimizer.updates == 3
