"""Let the hosts of all ranks agree through a key-value store, without a collective and without a device.

What hosts know goes through an `Agreement`: wishes to stop or save, decisions, the state of files. What devices know
rides in the message of the gradients instead, and a number that shows whether ranks differ. A collective could not tell
which rank waits in another one; here a rank that waits names those that are missing.

`gather` is for calls that every rank makes, such as `Checkpoint.save()`. Between such calls no rank waits for another:
`after_update` lets all ranks meet after the same update, although they can be any number of updates apart, because
devices execute work that the host has queued. Each rank reserves, in the store, the updates that it makes before it
next looks for a request. A rank that wants to meet writes the request first and then reads the reservations: all ranks
meet after the last reserved update. A rank that reserves too late sees the request when it looks next.

torch's own collectives over a store are private, block the only connection of a process, and leave their keys.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import starmap
from typing import final
from uuid import uuid4
from weakref import WeakMethod

import torch.distributed as dist

from variable_batch_size.backend.base import Backend
from variable_batch_size.backend.departure import LEFT, AskedOnce, has_ended, identity, register_leave

_MAX_SHARE = 0.005  # largest share of an update's time to spend on looks into the store
_MAX_INTERVAL = 0.5  # seconds between two looks, unless one update takes longer
_MAX_PAUSE = 0.05  # seconds between two looks of a rank that waits
_SECONDS_TO_LOOK = 1.0  # interval at which a rank that waits looks whether the processes of the others live
_KEPT = 64  # published texts that stay, as hosts may be some updates apart where devices execute later

_BASE = "variable_batch_size"
_WAITS, _PASSED = "waits", "passed"  # keys: a call in which a rank waits; the error of a rank that has passed it by
_REQUESTED, _LAST = "requested", "last"  # keys of a meeting: that a rank wants it; the update after which it is held


@final
class AbsentRankError(RuntimeError):
    """A rank has not come to a call that all ranks must make."""


@final
class Agreement:
    """Exchanges texts between the hosts of all ranks, and lets them act after the same update.

    Every rank has to create one at the same place of the program, and between the same updates; it waits for the
    others. A world of one has no store.

    Args:
        backend: has the world and the store. A rank waits for others as long as the store's `timeout`.

    Attributes:
        world: this rank, and the number of ranks.
        leave: lets ranks that wait for this one know that it has ended.
        restores: how often all ranks have restored a state.
    """

    def __init__(self, backend: Backend) -> None:
        """Connect the ranks: give them a store under a new name, and let each know the processes of the others."""
        self._backend, self.world = backend, backend.world
        self._gathered, self.restores = 0, 0  # number of calls of `gather` and of `forget` so far
        self._wishes: set[str] = set()  # of this rank, for the next meeting
        self._granted: set[str] = set()  # wishes of all ranks at the meetings so far, until `take_granted`
        self._restart_counts()
        if self.world.size > 1:
            store = backend.store()
            self._patience = store.timeout.total_seconds()  # type: ignore[attr-defined]
            # The only collective: a launcher may keep a store in which earlier ranks have left keys, so that the name
            # must be new; and it does not wait for a rank that was killed.
            token_and_identity = json.dumps([uuid4().hex, identity()])
            identities = [json.loads(text) for text in backend._gather_bytes(token_and_identity.encode())]
            self._store = AskedOnce(dist.PrefixStore(f"{_BASE}/{identities[0][0]}", store))
            self._processes = [process for _, process in identities]  # identity of each rank's process, by rank
            self.leave = register_leave(self, self.world, self._store, in_memory=isinstance(store, dist.HashStore))
            weak_look = WeakMethod(self._look_while_waiting)  # so that the backend does not keep this object alive

            def look() -> None:
                """Look whether another rank waits in a call that this one has left out."""
                look_while_waiting = weak_look()
                if look_while_waiting is not None:
                    look_while_waiting()

            backend.while_waiting = look

    def _restart_counts(self) -> None:
        """Count updates, and meetings of the ranks after an update, from 0 again."""
        self._updates = 0
        self._meetings, self._met_at = 0, 0  # meetings so far, and the update after which the last one was held
        self._reserved = 1  # the update up to which this rank continues without a look; at first one after a meeting
        self._next: int | None = None  # update after which all ranks meet, once it is agreed
        # Update and time of the last look for a request, and the mean seconds that a look takes.
        self._looked_at, self._looked_time, self._look_seconds = 0, time.perf_counter(), 0.0

    # Calls that every rank makes, in the same order. --------------------------------------------------------------

    def gather(self, call: str, message: str, patience: float | None = None) -> list[str]:
        """Return the messages of all ranks, by rank.

        Each rank writes its message to the store, rank 0 joins them to one list, and the others wait for that list.

        Args:
            call: name of the call that every rank has to make, for an error.
            message: a text of any length.
            patience: seconds to wait for the others. Default: the timeout of the store.

        Raises:
            RuntimeError: on every rank, if ranks are in different calls; or if a rank has ended or does not come.
        """
        if self.world.size == 1:
            return [message]
        self._gathered += 1
        call_number = self._gathered
        keys = {rank: f"{call_number}/{rank}" for rank in range(self.world.size)}
        list_key = f"{call_number}/all"  # of the list of all messages, which rank 0 writes
        with _absence_if_store_ends(call):
            self._store.set(keys[self.world.rank], json.dumps([call, message]))
            if self.world.rank == 0:
                self._wait_for_keys(call, keys, patience=patience)
                texts = [text.decode() for text in self._store.multi_get([*keys.values()])]
                self._store.set(list_key, f"[{','.join(texts)}]")
                # All ranks have read the list of the call before, as they have come to this one: it can be deleted.
                for key in (*keys.values(), f"{call_number - 1}/all"):
                    self._store.delete_key(key)
            else:
                self._wait_for_keys(call, keys, ready=list_key, patience=patience)
            answers = json.loads(self._store.get(list_key))  # by rank: its call, and its message
        call_of_rank_0, _ = answers[0]
        for rank, (call, _) in enumerate(answers):
            if call != call_of_rank_0:
                raise RuntimeError(
                    f"all ranks must make the same calls in the same order, but rank 0 is in {call_of_rank_0} and "
                    f"rank {rank} in {call}; call both on every rank, after the same updates"
                )
        return [text for _, text in answers]

    def forget(self) -> None:
        """Count updates from 0 again, as every rank restores a state.

        Until then ranks may have made unequal numbers of updates, so that their counts cannot be compared.
        """
        self.restores += 1
        self._restart_counts()

    def run_on_all(self, call: str, work: Callable[[], str]) -> list[str]:
        """Call `work` on this rank, exchange results with the other ranks, and return them by rank.

        Every rank makes this call, so that an error of one rank ends it on all of them.

        Args:
            call: name of the call, as for `gather`.
            work: what this rank does; returns a text for the other ranks.

        Raises:
            RuntimeError: on every rank, with the same text, if `work` failed on one of them.
        """
        failure = None
        try:
            message = "+" + work()  # the first character tells the others whether it is a result, or "-" and an error
        except Exception as error:
            failure = error
            message = f"-{error}"
        messages = self.gather(call, message)
        for message in messages:
            if not message.startswith("+"):
                raise RuntimeError(message[1:]) from failure
        return [message[1:] for message in messages]

    def run_on_rank_0(self, call: str, work: Callable[[], str]) -> str:
        """Call `work` on rank 0, and return its result on every rank; raise as `run_on_all` does."""
        return self.run_on_all(call, lambda: "" if self.world.rank else work())[0]

    def any_rank(self, call: str, condition: bool) -> bool:
        """Return whether a condition is true on any rank; every rank makes this call.

        Args:
            call: name of the call, for an error.
            condition: the condition on this rank.
        """
        return "1" in self.gather(call, str(int(condition)))

    # What one rank publishes, and no other rank waits for before it needs it. --------------------------------------

    def publish(self, name: str, number: int, text: str) -> None:
        """Publish a text, which other ranks get by `wait_for`, and delete an old one.

        Args:
            name: what the text is about.
            number: number of the text, which counts up; the one of `_KEPT` numbers before is deleted.
            text: the text.
        """
        if self.world.size > 1:
            self._store.set(self._key_of(name, number), text)
            self._store.delete_key(self._key_of(name, number - _KEPT))

    def wait_for(self, name: str, number: int) -> str:
        """Wait for the text that rank 0 publishes, and return it; for the arguments see `publish`.

        Raises:
            RuntimeError: if rank 0 has ended or does not publish it.
        """
        key, call = self._key_of(name, number), f"{name} {number}"
        with _absence_if_store_ends(call):
            self._wait_for_keys(call, {0: key})
            return str(self._store.get(key).decode())

    def _key_of(self, name: str, number: int) -> str:
        """Return the key of a text, which ranks count from 0 after each restore."""
        return f"{self.restores} restores/{name}/{number}"

    # Meetings after updates. --------------------------------------------------------------------------------------

    def wish(self, word: str) -> None:
        """Ask for something that all ranks are to do after the same update, by a word such as "stop".

        Further wishes with the same word have no effect until `take_granted` has returned True for it.
        """
        if word in self._granted:
            return
        if self.world.size > 1:
            self._wishes.add(word)
        else:
            self._granted.add(word)

    def take_granted(self, word: str) -> bool:
        """Return whether all ranks are to do now what one of them has asked for by `wish(word)`.

        They are once the ranks have met, after the same update; the result is True only once for a wish, on every rank.
        """
        granted = word in self._granted
        self._granted.discard(word)
        return granted

    def after_update(self) -> None:
        """Count an update, and meet the other ranks if that was agreed, to learn their wishes.

        Every rank calls it after each update. It costs nothing but for a look into the store from time to time.
        """
        if self.world.size == 1:
            return
        self._updates += 1
        # Updates may be slower than those by which the reservation was chosen: a look then lowers it.
        is_due = self._updates >= self._reserved or time.perf_counter() - self._looked_time > _MAX_INTERVAL
        if self._next is None and (self._wishes or is_due):
            # If the process with the store has ended, either the training is over, or the next sum of gradients fails.
            with suppress(dist.DistNetworkError):
                self._look_for_request()
        if self._next is not None and self._updates >= self._next:
            self._meet_ranks()

    def _look_for_request(self) -> None:
        """Look whether a rank wants all to meet after the same update, and agree on that update; or request it.

        A rank with wishes requests a meeting. Any other rank reserves the updates that it makes before it looks next:
        all ranks meet after the last reserved update.
        """
        look_began = time.perf_counter()
        self._check_no_call_passed(self._updates)
        if self._wishes:
            self._store.set(self._meeting_key(_REQUESTED), "")
        else:
            self._reserve_until(self._updates + self._updates_to_next_look(look_began))
        # A rank writes its reservation before it looks for a request, and a rank that wants to meet writes its request
        # before it reads the reservations. So either the first one sees the request, or the second one sees the
        # reservation: no rank passes the update of the meeting.
        if self._store.check([self._meeting_key(_REQUESTED)]):
            self._reserve_until(self._updates)  # this rank makes no further update before it knows the next meeting
            last_reserved = max(map(self._reserved_by, range(self.world.size)))
            # Ranks may find different ones: the first one that is written counts.
            self._next = int(self._store.compare_set(self._meeting_key(_LAST), "", str(last_reserved)))
        self._looked_at, self._looked_time = self._updates, time.perf_counter()
        self._look_seconds += (self._looked_time - look_began - self._look_seconds) / 4  # a moving average

    def _meet_ranks(self) -> None:
        """Exchange wishes with all ranks, after the update of the meeting; all wishes are granted on all ranks."""
        message = json.dumps(sorted(self._wishes))
        keys = [self._meeting_key(name) for name in (_REQUESTED, _LAST, *range(self.world.size))]  # of this meeting
        self._meetings, self._met_at, self._reserved = self._meetings + 1, self._updates, self._updates + 1
        self._wishes, self._next = set(), None
        wishes = self.gather("optimizer.step()", message)
        if self.world.rank == 0:
            for key in keys:
                self._store.delete_key(key)
        self._granted.update(*map(json.loads, wishes))

    def _meeting_key(self, name: object) -> str:
        """Return the key in the store of something of the next meeting: a rank's reservation, or another name.

        The counts in it are the same on all ranks, and no earlier meeting had the same key.
        """
        return f"{self.restores} restores, {self._meetings} meetings/{name}"

    def _reserve_until(self, update: int) -> None:
        """Tell the other ranks that this one makes all updates up to number `update` before it looks for a request."""
        self._reserved = update
        self._store.set(self._meeting_key(self.world.rank), str(update))

    def _reserved_by(self, rank: int) -> int:
        """Return the last update that a rank has reserved: if it has written none, the one after the last meeting.

        The latter is reserved for every rank, as `_meet_ranks` says.
        """
        key = self._meeting_key(rank)
        return int(self._store.get(key)) if self._store.check([key]) else self._met_at + 1

    def _updates_to_next_look(self, now: float) -> int:
        """Return the number of updates until the next look into the store, so that looks take a small share of time.

        Args:
            now: the time, in seconds of `time.perf_counter`.
        """
        update_seconds = (now - self._looked_time) / (self._updates - self._looked_at)
        interval = min(self._look_seconds / _MAX_SHARE, _MAX_INTERVAL)  # seconds between two looks
        return max(1, math.ceil(interval / max(update_seconds, 1e-9)))

    def drop_store(self) -> None:
        """Let go of the store, and of its threads."""
        del self._store

    # Waiting. -----------------------------------------------------------------------------------------------------

    def _wait_for_keys(
        self, call: str, keys: Mapping[int, str], ready: str = "", patience: float | None = None
    ) -> None:
        """Wait until the keys of ranks, or the key `ready`, are in the store.

        It polls the store, and ends with an error that names the ranks which do not come.

        Args:
            call, patience: see `gather`.
            keys: the key that each rank writes, by rank.
            ready: the key that rank 0 writes when it has seen `keys`; "" to wait for these themselves.

        Raises:
            AbsentRankError: if a rank has ended or does not come.
        """
        awaited = [ready] if ready else [*keys.values()]
        writers = [*keys.items(), (0, ready)] if ready else [*keys.items()]  # ranks, and what each has to write
        began = time.monotonic()
        pause = 0.0  # seconds
        patience = self._patience if patience is None else patience
        next_look = began + _SECONDS_TO_LOOK
        while not self._store.check(awaited):
            waited = time.monotonic() - began
            ended = self._backend.rank_has_ended or self._store.check([LEFT])
            if time.monotonic() > next_look:
                next_look += _SECONDS_TO_LOOK
                ended = ended or any(starmap(self._has_left, writers))
                self._store.set(_WAITS, json.dumps([self._gathered, self._updates, self.world.rank, call]))
            if (ended or waited > _SECONDS_TO_LOOK) and self._store.check([_PASSED]):
                raise AbsentRankError(self._store.get(_PASSED).decode())
            # Checked once more: a rank that has ended may have written its key before.
            if (ended or waited > patience) and not self._store.check(awaited):
                missing = {rank: key for rank, key in keys.items() if not self._store.check([key])} or {0: ready}
                gone = [rank for rank, key in missing.items() if self._has_left(rank, key)]
                absent = [str(rank) for rank in gone or missing]  # if some have ended, the others are only late
                who = f"rank {absent[0]} has" if len(absent) == 1 else f"ranks {', '.join(absent)} have"
                why = "and a rank has ended" if ended else f"for {patience:g} s"
                raise AbsentRankError(
                    f"every rank must come to {call}, but {who} not, {why}; see the output of all ranks, and make the "
                    f"same calls on each"
                )
            # Not `store.wait`: it would block the store's connection, which the threads of this process share.
            time.sleep(pause)
            pause = min(waited / 8 + 1e-5, _MAX_PAUSE)

    def _look_while_waiting(self) -> None:
        """Raise an error if another rank waits in a call while this one waits for it in the sum of the next update.

        The backend calls it every second during a sum, because the two ranks would wait for each other for ever.
        """
        with suppress(dist.DistNetworkError):
            self._check_no_call_passed(self._updates + 1)

    def _check_no_call_passed(self, made: int) -> None:
        """Raise AbsentRankError if another rank waits in a call that this one has left out; that rank raises it, too.

        Both ranks would otherwise wait for each other, one in the call and one in the sum of gradients.

        Args:
            made: number of updates that this rank has made, with the one whose sum it waits for.
        """
        if not self._store.check([_WAITS]):
            return
        call_number, updates, rank, call = json.loads(self._store.get(_WAITS))
        if (
            call_number > self._gathered and made > updates
        ):  # this rank was not there, and has gone on to a later update
            sentence = (
                f"every rank must come to {call}, but rank {rank} waits there and rank {self.world.rank} makes the "
                f"next update; load, save, read metrics and change param_groups on every rank, after the same updates"
            )
            raise AbsentRankError(self._store.compare_set(_PASSED, "", sentence).decode())

    def _has_left(self, rank: int, key: str) -> bool:
        """Return whether a rank has left or was killed before it has written its key."""
        gone = self._store.check([f"{LEFT}/{rank}"]) or has_ended(self._processes[rank])
        return gone and not self._store.check([key])


@contextmanager
def _absence_if_store_ends(call: str) -> Iterator[None]:
    """Raise AbsentRankError, with the call in it, if the process with the store ends within the block."""
    try:
        yield
    except dist.DistNetworkError:
        raise AbsentRankError(
            f"every rank must come to {call}, but the process that holds the store, torchrun or rank 0, has ended; see "
            f"its output"
        ) from None
