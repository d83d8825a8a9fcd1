"""Ranks that are any number of updates apart meet after the same update, to stop or save."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, final

import pytest
import torch.distributed as dist

from helpers.agreements import agreements, in_threads
from variable_batch_size.backend import departure
from variable_batch_size.backend.agreement import AbsentRankError, Agreement
from variable_batch_size.world import World

Result = TypeVar("Result")
LONG = 3_000  # updates; no rank makes that many


@final
class Scheduler:
    """Runs threads one at a time, from one use of the store to the next, in random order and at random paces."""

    def __init__(self, rng, size):
        self.rng, self.waiting, self.running = rng, dict[int, threading.Event](), size
        self.pace = [rng.choice([1, 1, 4, 16]) for _ in range(size)]
        self.change = threading.Condition()

    def wait(self, rank):
        with self.change:
            self.waiting[rank] = event = threading.Event()
            self.change.notify()
        event.wait()

    def end(self):
        with self.change:
            self.running -= 1
            self.change.notify()

    def run(self):
        while True:
            with self.change:
                self.change.wait_for(lambda: len(self.waiting) == self.running)
                if not self.running:
                    return
                ranks = sorted(self.waiting)
                (rank,) = self.rng.choices(ranks, [self.pace[rank] for rank in ranks])
                event = self.waiting.pop(rank)
            event.set()


@final
class ScheduledStore:
    """A real store that one thread at a time uses."""

    def __init__(self, store, scheduler, rank):
        self.store, self.scheduler, self.rank = store, scheduler, rank

    def __getattr__(self, name):
        self.scheduler.wait(self.rank)
        return getattr(self.store, name)


def run_scheduled(rng, size, work, monkeypatch):
    """Run `work` on each rank, for random speeds and orders of all uses of the store."""
    ranks, scheduler, now = agreements(size * [dist.HashStore()]), Scheduler(rng, size), 0.0

    def clock():
        """Looks take so long that they are made after each update, or after about 20."""
        nonlocal now
        now += rng.choice([1e-6, 2e-4])
        return now

    def after_update(agreement):
        """An update takes 1 ms, and no rank is more than 100 updates ahead of another one."""
        nonlocal now
        now += rng.choice([*20 * [1e-3], 0.6])  # the slow ones take longer than any look was to wait for
        rank = agreement.world.rank
        while made[rank] > min(made) + 100:
            scheduler.wait(rank)
        made[rank] += 1
        original(agreement)

    original, made = Agreement.after_update, size * [0]
    patched = SimpleNamespace(perf_counter=clock, monotonic=lambda: 0.0, sleep=lambda seconds: None)
    monkeypatch.setattr(f"{Agreement.__module__}.time", patched)
    for rank, agreement in enumerate(ranks):
        monkeypatch.setattr(agreement, "after_update", partial(after_update, agreement))
        agreement._looked_time, agreement._look_seconds = 0.0, 0.0
        agreement._store = ScheduledStore(agreement._store, scheduler, rank)

    def run(rank):
        scheduler.wait(rank)  # begin, and use the clock, one at a time
        try:
            return work(ranks[rank])
        finally:
            scheduler.end()

    with ThreadPoolExecutor(size) as pool:
        found = [pool.submit(run, rank) for rank in range(size)]
        scheduler.run()
        return [future.result() for future in found]


def seeded():
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def test_a_wish_is_granted_soon_also_where_updates_have_become_slow(monkeypatch):
    """The last look was to be followed by hundreds of quick updates."""
    ranks, now, barrier = agreements(2 * [dist.HashStore()]), [0.0], threading.Barrier(2)

    def clock():
        now[0] += 1e-3
        return now[0]

    patched = SimpleNamespace(perf_counter=clock, monotonic=lambda: 0.0, sleep=lambda seconds: None)
    monkeypatch.setattr(f"{Agreement.__module__}.time", patched)

    def work(rank):
        for update in range(1200):
            if (rank, update) == (1, 803):
                ranks[rank].wish("stop")
            if barrier.wait() == 0:
                now[0] += 1e-3 if update < 800 else 1.0
            barrier.wait()
            ranks[rank].after_update()
            if ranks[rank].take_granted("stop"):
                return update
        return None

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    assert first == second <= 805


def test_ranks_meet_after_the_same_updates_for_any_order_of_their_accesses(monkeypatch):
    """Meeting after meeting, at any distance of the ranks, and each learns the wishes of all."""
    rng = seeded()
    for _ in range(50):
        size, number = rng.randint(2, 4), rng.randint(1, 3)
        when = [[rng.choice([0, 1, 2, 20, LONG]) for _ in range(size)] for _ in range(number)]
        for updates in when:
            updates[rng.randrange(size)] = rng.choice([0, 1, 5])

        def work(agreement):
            held, passed, begun = list[int](), 0, 0
            while len(held) < number:  # noqa: B023
                if passed - begun >= when[len(held)][agreement.world.rank]:  # noqa: B023
                    agreement.wish("stop")
                passed += 1
                agreement.after_update()
                if agreement.take_granted("stop"):
                    held.append(passed)
                    begun = passed
                assert passed < LONG
            return held

        found = run_scheduled(rng, size, work, monkeypatch)
        assert found == size * found[:1]


def test_ranks_that_were_interrupted_in_different_updates_meet_after_a_restore(monkeypatch):
    rng = seeded()
    for _ in range(30):
        before = [rng.randint(0, 3) for _ in range(rng.randint(2, 3))]
        when, odd = rng.choice([0, 1, 20]), rng.randrange(len(before))

        def work(agreement):
            rank = agreement.world.rank
            for _ in range(before[rank]):  # noqa: B023
                agreement.after_update()
            agreement.forget()
            agreement.gather("restore()", "")
            for update in range(LONG):
                if update >= when and rank == odd:  # noqa: B023
                    agreement.wish("stop")
                agreement.after_update()
                if agreement.take_granted("stop"):
                    return update
            raise AssertionError

        found = run_scheduled(rng, len(before), work, monkeypatch)
        assert found == len(before) * found[:1]


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_concurrent_ranks_meet_after_the_same_update(kind):
    rng = seeded()

    def run(agreement, seed, when):
        rng, passed = random.Random(seed), 0
        began = time.perf_counter()
        while not (agreement.take_granted("save") or agreement.take_granted("stop")):
            if time.perf_counter() - began > when:
                agreement.wish(rng.choice(["save", "stop"]))
            passed += 1
            agreement.after_update()
            time.sleep(rng.choice([0, 1e-5, 1e-4]))
        return passed, agreement.take_granted("stop")

    server = dist.HashStore() if kind == "hash" else dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30))
    for _ in range(20 if kind == "hash" else 5):
        size = rng.randint(2, 5)
        ranks = agreements([server if kind == "hash" else server.clone() for _ in range(size)])
        seeds = [(rng.getrandbits(32), rng.uniform(0, 0.05)) for _ in ranks]
        found = in_threads(lambda rank: run(ranks[rank], *seeds[rank]), size)  # noqa: B023
        assert found == size * found[:1]


class Member:
    """A party whose store is a file."""

    leave: Any

    def drop_store(self): ...


joined = []


def test_ranks_make_their_last_updates_although_the_process_with_the_store_has_ended():
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    clients = [dist.TCPStore("localhost", server.port, is_master=False) for _ in range(2)]
    _, late = agreements(clients)
    late.after_update()
    del server
    for _ in range(2, 6):
        late.wish("stop")
        late.after_update()
        assert not late.take_granted("stop")
    with pytest.raises(AbsentRankError, match=r"come to save\(\), but the process that holds the store, .*, has ended"):
        late.gather("save()", "")


def join(path):
    store = dist.FileStore(path, 9)
    joined.append(Member())
    joined[-1].leave = departure.register_leave(joined[-1], World(0, 1), store, in_memory=False)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # of Python 3.12 and later
@pytest.mark.parametrize("before", [False, True])
def test_a_fork_leaves_at_its_end_also_if_its_parent_has_joined(before, tmp_path):
    if before:
        join(str(tmp_path / "parent"))
    child = multiprocessing.get_context("fork").Process(target=join, args=(str(tmp_path / "child"),))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert dist.FileStore(str(tmp_path / "child"), 9).check([f"{departure.LEFT}/0"])
    assert not before or not dist.FileStore(str(tmp_path / "parent"), 9).check([f"{departure.LEFT}/0"])
    for member in joined:
        member.leave()
    joined.clear()
    departure._last_joined.clear()
