"""The backend of replica groups that fail and come back."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from logging import WARNING
from queue import Empty, SimpleQueue
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torchft import Manager
from torchft.utils import get_stream_context

from variable_batch_size._log import log
from variable_batch_size._validation import type_error, value_error
from variable_batch_size.backend import BrokenStepError, DistributedBackend, ElasticBackend
from variable_batch_size.backend.flat_messages import FlatMessages
from variable_batch_size.checkpoint.parts import Stateful
from variable_batch_size.integrations.torchft import letter
from variable_batch_size.integrations.torchft.quorum import QuorumClient
from variable_batch_size.world import World

_LENGTHS = "what is summed (gradients, and the names of log())"
_SILENCE = 10  # seconds


@final
class TorchftBackend(ElasticBackend):
    """The replica groups of a `torchft.Manager`, of which some may fail or join at any update.

    The quorum of an update says which group computes which microbatches of its batch, which depends on (seed, epoch,
    trace, update) alone. If a group is lost before the others have the sum, they make the update again. Loop over
    `vbs.updates`, which asks for the quorum.

    It is found while the update is computed, for the groups of the last one. If they have changed, or one of them needs
    the state, the update is dealt anew. A thread of this class makes all calls of the manager that wait for others;
    until `end_sum` it is the only one to use it.

    Two groups may have committed different sums as update t, if one was frozen in between. Each sum therefore carries
    a random number, and every group a hash of those of all its updates: where they differ, the fewer groups take over
    the state of the others.

    A group is one process, or several that shard the model by FSDP2, each of which sums with those of its rank in other
    groups, after the last `backward()`. The quorum then comes before the update.

    Args:
        manager: made with `use_async_quorum=False`, and without `state_dict` and `load_state_dict`.

    Raises:
        TypeError: if it is not a `torchft.Manager`.
        ValueError: if the quorum is asynchronous; or if a group of several processes has others in torch.distributed,
            or an `init_sync`, which would mix the first weights of the groups.
    """

    def __init__(self, manager: Manager) -> None:
        if not isinstance(manager, Manager):
            raise type_error("manager must be a torchft.Manager", manager, "pass the one of this replica group")
        if manager._use_async_quorum:
            requirement = "a group that comes back must take part at once"
            raise value_error(requirement, "use_async_quorum=True", "pass use_async_quorum=False to the Manager")
        super().__init__(_processes_of(manager) if manager._group_world_size > 1 else None)
        manager._client = QuorumClient(manager)
        self._manager, self._messages = manager, FlatMessages()
        self._parts: dict[str, Stateful] = {}
        self._met = False  # whether an update may be computed
        self._steady = False  # whether the last sum held, so that the next quorum is likely to be the same
        self._thread = ThreadPoolExecutor(1, "torchft_sum")
        self._quorum: Future[World] | None = None  # asked for, and not known to be that of `world`
        self._groups = World()  # this group, and the number of groups, of which each has a part of `world`
        self._found: World | None = None  # those of the last quorum
        self._state: dict[str, Any] | None = None  # that it has brought, still to be loaded
        # For a state, while the quorum is found; None: it is there.
        self._requests: SimpleQueue[Future[dict[str, Any]] | None] = SimpleQueue()
        self._tasks = list[Future[None]]()  # of the sum under way
        self._works = list[Any]()
        self._message, self._differing = b"", list[str]()
        self._chain = letter.START  # of all sums that this model has taken
        self._trains = False  # whether it has taken one in this process
        self._differs = False  # whether other groups have taken others
        self._facts: Mapping[str, Any] = {}
        self._failure: Exception | None = None  # of a state_dict

    def register(self, **parts: Stateful) -> None:
        """Name what a group that comes back takes over, in this order: at least `model=` and `optimizer=`.

        Raises:
            TypeError: if a part has no `state_dict` and `load_state_dict`.
        """
        for name, part in parts.items():
            if not isinstance(part, Stateful):
                raise type_error(f"{name} must have state_dict() and load_state_dict()", part, "leave it out")
        self._manager.register_state_dict_fn("variable_batch_size", self._take, self._save)
        self._parts = parts

    # The world. ------------------------------------------------------------------------------------------------------

    def meet(self, updates: int) -> bool:
        """Ask for the quorum of the next update; wait for it, and for a state if this group is behind, after a change.

        Raises:
            RuntimeError: if there is none: too few groups, or no lighthouse.
            ValueError: if this group has another number of processes than the others.
        """
        if self._met:
            return False
        if not self._parts:
            raise RuntimeError(
                "a group that comes back must get the state of another one, but none is registered; call "
                "backend.register(model=model, optimizer=optimizer) before the loop"
            )
        if self._quorum is None:
            self._quorum = self._thread.submit(self._ask, updates)
            self._quorum.add_done_callback(lambda _: self._requests.put(None))
            if self._steady:
                self._met = True
                return False
        while (request := self._next_request()) is not None:
            self._answer(request)
        quorum, self._quorum = self._quorum, None
        self._groups, self._met, own = quorum.result(), True, self.job.world
        self.world = World(self._groups.rank * own.size + own.rank, self._groups.size * own.size)
        state, self._state = self._state, None
        if state is not None:
            self._load(state)
            self._log(f"Takes over the state of another group, of update {self._manager.current_step()}")
        return state is not None

    def _confirm(self) -> None:
        """Wait for the quorum, if it is not there; raise BrokenStepError unless the update may go on."""
        if self._quorum is None:
            return
        request = self._next_request()
        if request is None and self._found == self._groups and self._state is None:
            self._quorum = None
            return
        for task in self._tasks:  # which the thread would make in a quorum that is known later
            if not task.cancel():
                task.result()
        self._requests.put(request)
        self._met, self._steady, self.posted = False, False, ""
        raise BrokenStepError("the groups have changed, or one of them needs the state")

    def _ask(self, updates: int) -> World:
        """Return this group and the number of groups of the next quorum, in the thread."""
        behind = 0 if self._differs else updates  # torchft sends a state to the groups that are behind
        self._found = None
        self._has_failed()  # torchft would wait for a process that has ended
        self._start_quorum(behind)
        while self._has_failed() and self._failure is None:  # a group was lost meanwhile
            self._start_quorum(behind, again=True)
        rank, size = self._manager.participating_rank(), self._manager.num_participants()
        if rank is None:
            raise RuntimeError(
                "every group of a quorum must take part, but this one is a spare; pass "
                "world_size_mode=WorldSizeMode.DYNAMIC to the Manager"
            )
        if self._differs and self._state is None:  # the others are gone
            self._count(updates)
        self._differs, self._found = False, World(rank, size)
        return self._found

    def _start_quorum(self, updates: int, *, again: bool = False) -> None:
        try:
            if again:
                self._manager.should_commit()  # False: the next quorum is a new one
            self._state = None  # which this process may have got, and another one of its group not
            self._count(updates)
            self._manager.start_quorum()
        except ValueError:  # a group of another size
            raise
        except Exception as error:
            raise RuntimeError(
                f"an update needs a quorum of replica groups, but there is none ({error}); see that the lighthouse, "
                f"at least min_replica_size groups and all processes of this one run, and restore the newest checkpoint"
            ) from error

    def _has_failed(self) -> bool:
        """Return whether the manager of a process of this group has an error; all of them have to call it."""
        failed = torch.full((1,), float(self._manager.errored() is not None), device=self.job.device)
        try:
            self.job.all_reduce_sum([failed])
        except RuntimeError as error:
            raise RuntimeError(
                f"an update needs all processes of a replica group, but one has ended ({error}); end the others, and "
                f"start the group again"
            ) from error
        return bool(failed.item())

    def _count(self, updates: int) -> None:
        """Let torchft count updates from here."""
        self._manager.load_state_dict({"step": updates, "batches_committed": self._manager.batches_committed()})

    def part(self, updates: int) -> None:
        """Wait until the groups that have missed the last update have taken over the state."""
        try:
            self._steady = False
            self.meet(updates)
            self._sum(torch.zeros(1)).wait()
        except RuntimeError as error:  # the others have ended
            log(f"Ends without the others: {error}", update=updates)

    # The sum. --------------------------------------------------------------------------------------------------------

    def announce(self, facts: Mapping[str, Any]) -> None:
        """Say what all groups of the next sum must have in common."""
        self._facts = facts

    def begin_sum(self, like: Tensor, shapes: Sequence[object]) -> None:
        """Send a letter to all groups, before all else: gloo ends the process of one that gets another length.

        Raises:
            RuntimeError: if no quorum was asked for.
        """
        if not self._met:
            raise RuntimeError(
                "groups that come and go sum once an update, the gradients, in the quorum that vbs.updates has asked "
                "for; loop over vbs.updates(loader, optimizer), with one optimizer for a sampler, and evaluate with "
                "backend=vbs.backend.LocalBackend()"
            )
        self._works, self._message, self._differing = [], b"", []
        self._tasks = [self._thread.submit(self._compare, like.device, {**self._facts, _LENGTHS: shapes})]

    def send(self, flat: Tensor) -> None:
        """Begin to sum a flat message over the groups, in place, after the letter and those before."""
        stream = None if flat.device.type == "cpu" else torch.accelerator.current_stream(flat.device)
        self._tasks.append(self._thread.submit(self._send, flat, stream))

    def end_sum(self, tensors: Sequence[Tensor], *, holds: bool = True) -> None:
        """Sum the last tensors over the groups of the quorum, in place, and agree that the update counts.

        Raises:
            BrokenStepError: if it does not count: a group was lost, or has another model or other settings.
            RuntimeError: if this group has other settings than most.
        """
        self._confirm()
        for task in self._tasks:
            task.result()
        broken = tensors[0].new_full((1,), float(not holds))  # the number of groups whose sum is
        if self._message and self._manager.errored() is None:
            self._messages.reduce([*tensors, broken], lambda flat: self._sum(flat).wait())
            for work in self._works:
                work.wait()
            if self._manager.errored() is None and broken.item():
                self._manager.report_error(RuntimeError("a replica group has sent what it should not"))
        self._met, self._steady, self._works = False, False, []
        if self._has_failed():  # asked here, since torchft would wait for a process that has ended
            self._manager._pg.abort()  # and with `works` the connections, or others would wait for this group
        counts = self._manager.should_commit()
        if self._differing:
            raise RuntimeError(
                f"all replica groups must train alike, but this one differs from the others in "
                f"{', '.join(self._differing)}; start it with the same script and arguments, and register what changes "
                f"with the updates, such as a scheduler"
            )
        if not counts:
            raise BrokenStepError("the groups of the quorum have not all taken the sum")
        self.received = letter.text_of(self._message)
        # Others may need the state of some processes of this group: these have to be asked before the first forward.
        self._steady = self.job.world.size == 1
        self._chain, self._trains = letter.next_chain(self._chain, self._message), True

    # In the thread, if the quorum is that of `world`, until an error: then nothing more is sent.

    def _compare(self, device: torch.device, facts: Mapping[str, Any]) -> None:
        if self._found != self._groups or self._state is not None:
            return
        written = letter.write(self._groups, self.posted, self._chain, facts, votes=self._trains)
        self.posted = ""
        stream = torch.Stream(device) if device.type != "cpu" else None  # for which backward() need not have ended
        with get_stream_context(stream):
            summed = torch.frombuffer(written, dtype=torch.uint8).float().to(device)
            self._sum(summed).wait()
            read = summed.cpu()
        if self._manager.errored() is None:
            self._message = read.round().to(torch.uint8).numpy().tobytes()
            self._check(facts)

    def _send(self, flat: Tensor, stream: torch.Stream | None) -> None:
        if self._message and self._manager.errored() is None:
            with get_stream_context(stream):
                self._works.append(self._sum(flat))

    def _sum(self, flat: Tensor) -> Any:
        return self._manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM)  # which keeps an error of the work

    def _check(self, facts: Mapping[str, Any]) -> None:
        """Report an error unless all groups have the same model and settings."""
        found = letter.differences(self._message, self._groups.rank, facts)
        if found is None:
            return
        self._manager.report_error(RuntimeError("replica groups have different models or settings"))
        self._differing, other_model = found
        self._differs = other_model and not self._differing
        if self._differs:
            log("This replica group has made an update alone; it takes over the model of the others", level=WARNING)

    # The state, which the thread of the loop saves and loads, between two updates. ------------------------------------

    def _next_request(self) -> Future[dict[str, Any]] | None:
        """Wait for the request of a state, or for the quorum: None."""
        waited = 0
        while True:
            try:
                return self._requests.get(timeout=_SILENCE)
            except Empty:
                waited += _SILENCE
                self._log(f"Has waited for a quorum of replica groups for {waited} s")

    def _log(self, message: str) -> None:
        if self.job.world.rank == 0:
            log(message, update=self._manager.current_step())

    def _save(self) -> dict[str, Any]:
        """Return the state, in a thread of torchft."""
        request: Future[dict[str, Any]] = Future()
        self._requests.put(request)
        while not wait([request], 1.0).done:
            if not threading.main_thread().is_alive():  # it may have ended by an exception
                raise RuntimeError("the loop has ended")
        return request.result()

    def _take(self, state: dict[str, Any]) -> None:
        self._state = state

    def _answer(self, request: Future[dict[str, Any]]) -> None:
        try:
            state = {"chain": self._chain.hex(), **{name: part.state_dict() for name, part in self._parts.items()}}
        except Exception as error:
            self._failure = error  # torchft takes it for a group that is lost
            request.set_exception(error)
            raise _failed(error) from error
        request.set_result(state)

    def _load(self, state: dict[str, Any]) -> None:
        try:
            for name, part in self._parts.items():
                part.load_state_dict(state[name])
        except Exception as error:
            raise _failed(error) from error
        self._chain = bytes.fromhex(state["chain"])


def _processes_of(manager: Manager) -> DistributedBackend:
    """Return the backend of the processes of a replica group."""
    own = World(manager._group_rank, manager._group_world_size)
    found = World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    if found != own:
        requirement = f"torch.distributed must have the processes of this replica group, {own}"
        remedy = "call init_process_group() first, with the rank and world_size of the Manager"
        raise value_error(requirement, found or "not initialized", remedy)
    if manager._init_sync:  # which would take each process's first state from another group
        requirement = "replica groups of several processes must begin with the same weights, which they compare"
        raise value_error(requirement, "init_sync=True", "pass init_sync=False to the Manager")
    return DistributedBackend()


def _failed(error: Exception) -> RuntimeError:
    return RuntimeError(
        f"what is registered must be saved by one group and loaded by another, but that failed with "
        f"{type(error).__name__}: {error}; build the same objects in every group"
    )
