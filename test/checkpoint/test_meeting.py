"""Ranks that are any number of updates apart meet after the same updates, to save or to stop."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from variable_batch_size.checkpoint.meeting import Meetings
from variable_batch_size.world import World

LONG = 10_000  # updates; no rank makes that many


def ranks(store: dist.Store, size: int) -> list[Meetings]:
    return [Meetings(store, "test", World(rank, size)) for rank in range(size)]


def test_ranks_meet_after_the_same_updates_at_any_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meeting after meeting; a rank that wants one asks until it has been held."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    now = 0.0

    def clock() -> float:
        """An update takes 1 ms, and a check so long that it is made after each update, or after about 20."""
        nonlocal now
        now += rng.choice([1e-6, 2e-4])
        return now

    monkeypatch.setattr(f"{Meetings.__module__}.time", SimpleNamespace(perf_counter=clock))
    for _ in range(200):
        size, number = rng.randint(1, 6), rng.randint(1, 3)
        meetings, passed, held = ranks(dist.HashStore(), size), [0] * size, [list[int]() for _ in range(size)]
        wanting = [set(rng.sample(range(size), rng.randint(1, size))) for _ in range(number)]
        when = [rng.randint(0, 20) for _ in range(number)]  # updates from one meeting to the next request
        pace = [rng.choice([1, 1, 4, 16]) for _ in range(size)]  # updates of a rank relative to the others
        while any(len(updates) < number for updates in held):
            (rank,) = rng.choices(range(size), pace)
            behind = min(made for made, updates in zip(passed, held, strict=True) if len(updates) < number)
            if (due := len(held[rank])) < number and passed[rank] < behind + 100:
                passed[rank] += 1
                now += 1e-3
                since = passed[rank] - (held[rank][-1] if held[rank] else 0)
                if meetings[rank].after_update(rank in wanting[due] and since > when[due]):
                    held[rank].append(passed[rank])
            assert max(passed) < LONG
        assert all(updates == held[0] for updates in held)


class Scheduler:
    """Runs threads one at a time, from one use of the store to the next, in random order."""

    def __init__(self, rng: random.Random, size: int) -> None:
        self.rng, self.waiting, self.running = rng, dict[int, threading.Event](), size
        self.change = threading.Condition()

    def wait(self, rank: int) -> None:
        with self.change:
            self.waiting[rank] = event = threading.Event()
            self.change.notify()
        event.wait()

    def end(self) -> None:
        with self.change:
            self.running -= 1
            self.change.notify()

    def run(self) -> None:
        while True:
            with self.change:
                self.change.wait_for(lambda: len(self.waiting) == self.running)
                if not self.running:
                    return
                event = self.waiting.pop(self.rng.choice(sorted(self.waiting)))
            event.set()


class ScheduledStore:
    """A real store that one thread at a time uses."""

    def __init__(self, store: dist.Store, scheduler: Scheduler, rank: int) -> None:
        self.store, self.scheduler, self.rank = store, scheduler, rank

    def __getattr__(self, name: str) -> Any:
        self.scheduler.wait(self.rank)
        return getattr(self.store, name)


def test_ranks_meet_after_the_same_update_for_any_order_of_store_accesses() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        size = rng.randint(2, 3)
        meetings, scheduler = ranks(dist.HashStore(), size), Scheduler(rng, size)
        when = [rng.choice([0, 1, 2, LONG]) for _ in meetings]
        when[0] = min(when[0], 2)

        def run(rank: int) -> int:
            meeting, passed = meetings[rank], 1  # noqa: B023 (it ends before the next iteration)
            meeting._store = ScheduledStore(meeting._store, scheduler, rank)  # type: ignore[assignment] # noqa: B023
            while not meeting.after_update(passed > when[rank]):  # noqa: B023
                passed += 1
                meeting._reserved = min(meeting._reserved, passed)  # checks after each update
            scheduler.end()  # noqa: B023
            return passed

        with ThreadPoolExecutor(size) as pool:
            found = [pool.submit(run, rank) for rank in range(size)]
            scheduler.run()
            assert len({future.result() for future in found}) == 1, seed


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_concurrent_ranks_meet_after_the_same_update(kind: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)

    def run(meeting: Meetings, seed: int, when: float) -> int:
        rng, passed = random.Random(seed), 1
        began = time.perf_counter()
        while not meeting.after_update(time.perf_counter() - began > when):
            passed += 1
            time.sleep(rng.choice([0, 1e-5, 1e-4]))
        return passed

    server = dist.HashStore() if kind == "hash" else dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30))
    for number in range(20 if kind == "hash" else 5):
        size = rng.randint(1, 5)
        clients = [server if kind == "hash" else server.clone() for _ in range(size)]
        with ThreadPoolExecutor(size) as pool:
            found = [
                pool.submit(
                    run,
                    Meetings(client, str(number), World(rank, size)),
                    rng.getrandbits(32),
                    rng.uniform(0, 0.05),
                )
                for rank, client in enumerate(clients)
            ]
            assert len({future.result() for future in found}) == 1, seed


def test_a_single_rank_meets_immediately() -> None:
    (meeting,) = ranks(dist.HashStore(), 1)
    assert [meeting.after_update(wanted) for wanted in (False, False, True)] == [False, False, True]


def test_ranks_at_the_same_update_meet_immediately_unless_one_has_continued() -> None:
    meetings = ranks(dist.HashStore(), 2)
    assert [meetings[rank].after_update(rank == 0) for rank in (0, 1)] == [True, True]
    meetings = ranks(dist.HashStore(), 2)
    assert [meetings[rank].after_update(rank == 0) for rank in (1, 0)] == [False, False]


def test_the_interval_between_checks_keeps_their_cost_small() -> None:
    (meeting,) = ranks(dist.HashStore(), 1)
    meeting._updates, meeting._check_seconds = 1, 1e-3  # one update since the last check; 1 % of 100 ms
    for update_seconds, interval in [(0.2, 1), (0.11, 1), (0.021, 5), (0.0011, 91)]:
        assert meeting._interval(meeting._checked_time + update_seconds) == interval
    meeting._check_seconds = 0.1  # 1 % of 10 s, which is more than the longest interval
    assert meeting._interval(meeting._checked_time + 0.3) == 4


def test_a_rank_makes_its_last_updates_although_the_process_with_the_store_has_ended() -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    late = Meetings(dist.TCPStore("localhost", server.port, is_master=False), "test", World(1, 2))
    assert not late.after_update(False)
    del server
    assert not any(late.after_update(wanted) for wanted in (False, True, False, True))
