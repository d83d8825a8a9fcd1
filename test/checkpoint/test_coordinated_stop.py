"""Ranks that run apart by any number of updates stop after the same one."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from variable_batch_size.checkpoint.coordinated_stop import CommonStop
from variable_batch_size.world import World

LONG = 10_000  # updates; nobody goes on that far


def ranks(store: dist.Store, size: int) -> list[CommonStop]:
    return [CommonStop(store, "test", World(rank, size)) for rank in range(size)]


def test_all_stop_after_the_same_update_however_far_apart_they_are() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        size, when = rng.randint(1, 6), rng.randint(0, 20)
        stops, passed, last = ranks(dist.HashStore(), size), [0] * size, {}
        wanting = set(rng.sample(range(size), rng.randint(1, size)))
        pace = [rng.choice([1, 1, 4, 16]) for _ in range(size)]  # how often a rank's turn comes, relative to others
        while len(last) < size:
            (rank,) = rng.choices(range(size), pace)
            if rank not in last:
                passed[rank] += 1
                if stops[rank].after_update(rank in wanting and passed[rank] > when):
                    last[rank] = passed[rank]
            assert max(passed) < LONG
        assert len(set(last.values())) == 1


class Turns:
    """Lets threads go on one at a time, from one use of the store to the next, in an order that is drawn."""

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

    def give(self) -> None:
        while True:
            with self.change:
                self.change.wait_for(lambda: len(self.waiting) == self.running)
                if not self.running:
                    return
                event = self.waiting.pop(self.rng.choice(sorted(self.waiting)))
            event.set()


class InTurns:
    """A real store that is used in turns."""

    def __init__(self, store: dist.Store, turns: Turns, rank: int) -> None:
        self.store, self.turns, self.rank = store, turns, rank

    def __getattr__(self, name: str) -> Any:
        self.turns.wait(self.rank)
        return getattr(self.store, name)


def test_no_order_in_which_they_use_the_store_takes_them_apart() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        size = rng.randint(2, 3)
        stops, turns = ranks(dist.HashStore(), size), Turns(rng, size)
        when = [rng.choice([0, 1, 2, LONG]) for _ in stops]
        when[0] = min(when[0], 2)

        def run(rank: int) -> int:
            stop, passed = stops[rank], 1  # noqa: B023 (it ends before the next round)
            stop._store = InTurns(stop._store, turns, rank)  # type: ignore[assignment] # noqa: B023
            while not stop.after_update(passed > when[rank]):  # noqa: B023
                passed += 1
                stop._reserved = min(stop._reserved, passed)  # asks after each update
            turns.end()  # noqa: B023
            return passed

        with ThreadPoolExecutor(size) as pool:
            found = [pool.submit(run, rank) for rank in range(size)]
            turns.give()
            assert len({future.result() for future in found}) == 1, seed


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_ranks_that_run_at_once_stop_after_the_same_update(kind: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)

    def run(stop: CommonStop, seed: int, when: float) -> int:
        rng, passed = random.Random(seed), 1
        began = time.perf_counter()
        while not stop.after_update(time.perf_counter() - began > when):
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
                    run, CommonStop(client, str(number), World(rank, size)), rng.getrandbits(32), rng.uniform(0, 0.05)
                )
                for rank, client in enumerate(clients)
            ]
            assert len({future.result() for future in found}) == 1, seed


def test_a_lone_rank_stops_at_once() -> None:
    (stop,) = ranks(dist.HashStore(), 1)
    assert [stop.after_update(wanted) for wanted in (False, False, True)] == [False, False, True]


def test_level_ranks_stop_at_once_unless_one_has_gone_on() -> None:
    stops = ranks(dist.HashStore(), 2)
    assert [stops[rank].after_update(rank == 0) for rank in (0, 1)] == [True, True]
    stops = ranks(dist.HashStore(), 2)
    assert [stops[rank].after_update(rank == 0) for rank in (1, 0)] == [False, False]


def test_a_rank_asks_as_seldom_as_keeps_the_cost_small() -> None:
    (stop,) = ranks(dist.HashStore(), 1)
    stop._passed, stop._cost = 1, 1e-3  # one update since it asked; seconds, which are a hundredth of 100 ms
    for update, ahead in [(0.2, 1), (0.11, 1), (0.021, 5), (0.0011, 91)]:
        assert stop._ahead(stop._asked_when + update) == ahead
    stop._cost = 0.1  # a hundredth of 10 s, after which it would be too late
    assert stop._ahead(stop._asked_when + 0.3) == 4
