"""A world of threads that changes as a script says: who takes part in an attempt of an update, and which sums break."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from variable_batch_size.backend import BrokenStepError, ElasticBackend, World

TIMEOUT = 60.0


class Attempt(NamedTuple):
    """Who takes part in an attempt of an update, and whether its sum holds."""

    members: tuple[int, ...]
    holds: bool = True


class _Meeting:
    """What the members of an attempt share."""

    def __init__(self, attempt: Attempt, holders: Sequence[int]) -> None:
        self.attempt, self.holders = attempt, holders
        self.barrier = threading.Barrier(len(attempt.members), timeout=TIMEOUT)
        self.inputs: dict[int, Sequence[Tensor]] = {}
        self.facts: dict[int, str] = {}
        self.state: Any = None
        self.text = ""


class Script:
    """Attempts; after the last one, all members take part. A member of each one holds the model."""

    def __init__(self, size: int, attempts: Sequence[Attempt]) -> None:
        self.size, self._meetings, self._lock = size, list[_Meeting](), threading.Lock()
        self._attempts, self._begun = list(attempts), False
        self._holders: tuple[int, ...] = tuple(range(size))
        self._failed = False

    def meeting(self, number: int) -> _Meeting:
        """Return the meeting of an attempt."""
        with self._lock:
            if self._failed:
                raise threading.BrokenBarrierError
            while len(self._meetings) <= number:
                found = len(self._meetings)
                attempt = self._attempts[found] if found < len(self._attempts) else Attempt(tuple(range(self.size)))
                holders = [member for member in attempt.members if member in self._holders]
                if not holders:  # the members have all missed updates: one that has not joins them
                    attempt = Attempt((*attempt.members, self._holders[0]), attempt.holds)
                    holders = [self._holders[0]]
                if not self._begun:  # before the first update all begin with the state of one
                    holders = holders[:1]
                self._begun = self._begun or attempt.holds
                self._meetings.append(_Meeting(attempt, holders))
                if attempt.holds:
                    self._holders = attempt.members
            return self._meetings[number]

    def fail(self) -> None:
        """Let no thread wait any more."""
        with self._lock:
            self._failed = True
            for meeting in self._meetings:
                meeting.barrier.abort()


class ElasticThreads(ElasticBackend):
    """One of the threads."""

    def __init__(self, script: Script, number: int) -> None:
        super().__init__()
        self._script, self._number, self._next = script, number, 0
        self._meeting: _Meeting | None = None
        self.parts: list[Any] = []

    def meet(self, updates: int) -> bool:
        if self._meeting is not None:
            return False
        while self._number not in self._script.meeting(self._next).attempt.members:
            self._next += 1
        self._meeting = meeting = self._script.meeting(self._next)
        self._next += 1
        members, holders = meeting.attempt.members, meeting.holders
        if self._number == holders[0]:
            meeting.state = copy.deepcopy([part.state_dict() for part in self.parts])
        meeting.barrier.wait()
        loads = self._number not in holders
        if loads:
            for part, state in zip(self.parts, meeting.state, strict=True):
                part.load_state_dict(copy.deepcopy(state))
        self.world = World(members.index(self._number), len(members))
        return loads

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        meeting, self._meeting = self._meeting, None
        assert meeting is not None
        meeting.inputs[self.world.rank] = [tensor.detach() for tensor in tensors]
        meeting.facts[self.world.rank] = str(self.facts)
        if self.leads:
            meeting.text = self.posted
        meeting.barrier.wait()
        assert len({*meeting.facts.values()}) == 1, meeting.facts
        rows = [meeting.inputs[rank] for rank in range(self.world.size)]
        shapes = [[(tensor.shape, tensor.dtype) for tensor in row] for row in rows]
        assert all(own == shapes[0] for own in shapes), shapes
        sums = [sum(summands[1:], start=summands[0].clone()) for summands in zip(*rows, strict=True)]
        meeting.barrier.wait()
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.detach().copy_(total)
        if not meeting.attempt.holds:
            raise BrokenStepError("the script says so")
        self.received = meeting.text


def run_script(train: Callable[[ElasticThreads], Any], script: Script) -> list[Any]:
    """Run `train` on each thread, and return the results by their numbers."""
    results: dict[int, Any] = {}

    def run(number: int) -> None:
        try:
            results[number] = train(ElasticThreads(script, number))
        except BaseException as error:
            results[number] = error
            script.fail()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(script.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    failures = [one for one in results.values() if isinstance(one, BaseException)]
    for failure in sorted(failures, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise failure
    return [results[number] for number in range(script.size)]
