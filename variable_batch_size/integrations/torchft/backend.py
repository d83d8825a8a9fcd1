"""The backend of replica groups that fail and come back."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from logging import WARNING
from threading import Timer
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torchft import Manager

from variable_batch_size._log import log
from variable_batch_size._validation import type_error, value_error
from variable_batch_size.backend import Backend, BrokenStepError, DistributedBackend, ElasticBackend
from variable_batch_size.backend.flat_messages import FlatMessages
from variable_batch_size.checkpoint.parts import Stateful
from variable_batch_size.integrations.torchft.quorum import QuorumClient
from variable_batch_size.world import World

_LENGTHS = "what is summed (gradients, and the names of log())"
_SILENCE = 10.0  # seconds


@final
class TorchftBackend(ElasticBackend):
    """The replica groups of a `torchft.Manager`; some may fail or join at any update.

    The quorum of an update says which group computes which microbatches of its batch, which depends on (seed, epoch,
    trace, update) alone. Loop over `vbs.updates`, which asks for the quorum. The groups sum after their last
    `backward()`. If one is lost before the others have the sum, they make the update again.

    Ahead of each sum the groups compare `facts`, and a hash of the quorums of all updates that their models have taken:
    two groups may have committed different sums as update t, if one was frozen in between. The majority decides, of
    those that have not just come. A group with other facts ends, and one with another model takes over the state of the
    others.

    A group is one process, or several that shard the model by FSDP2, each of which sums with those of its rank in other
    groups.

    Args:
        manager: made with `use_async_quorum=False`, and without `state_dict` and `load_state_dict`.

    Raises:
        TypeError: if it is not a `torchft.Manager`.
        ValueError: if the quorum is asynchronous; or if a group of several processes has others in torch.distributed,
            or an `init_sync`, which would mix the first weights of the groups.
    """

    def __init__(self, manager: Manager) -> None:
        """Check the manager, and put a client between it and the lighthouse; see `QuorumClient`."""
        if not isinstance(manager, Manager):
            raise type_error("manager must be a torchft.Manager", manager, "pass the one of this replica group")
        if manager._use_async_quorum:
            requirement = "a group that comes back must take part at once"
            raise value_error(requirement, "use_async_quorum=True", "pass use_async_quorum=False to the Manager")
        super().__init__(_processes_of(manager) if manager._group_world_size > 1 else None)
        self._manager = manager
        self._groups = _Groups(manager)
        self._client = manager._client = QuorumClient(manager)
        self._parts: dict[str, Stateful] = {}
        self._met = False  # whether the quorum of the next sum is known
        self._held_state: dict[str, Any] | None = None  # that the quorum has brought, still to be loaded
        self._failure: Exception | None = None  # of a state_dict
        self._taken = ""  # a hash of the updates that this model has taken, each of a quorum
        self._has_trained = False  # whether it has taken one in this process
        self._model_differs = False  # whether other groups have taken others

    def register(self, **parts: Stateful) -> None:
        """Register the objects whose state a group that comes back loads from another group.

        Args:
            parts: at least `model=` and `optimizer=`, which are saved and loaded in this order.

        Raises:
            TypeError: if a part has no `state_dict` and `load_state_dict`.
        """
        for name, part in parts.items():
            if not isinstance(part, Stateful):
                raise type_error(f"{name} must have state_dict() and load_state_dict()", part, "leave it out")
        self._manager.register_state_dict_fn("variable_batch_size", self._hold_state, self._collect_state)
        self._parts = parts

    # The quorum. -----------------------------------------------------------------------------------------------------

    def meet(self, updates: int) -> bool:
        """Wait until it is known which groups make the next update, and load their state if this one is behind.

        Args:
            updates: number of updates that this group has made.

        Returns:
            Whether a state was loaded.

        Raises:
            RuntimeError: if there is no quorum: too few groups, or no lighthouse.
            ValueError: if this group has another number of processes than the others.
        """
        if self._met:
            return False
        if not self._parts:
            raise RuntimeError(
                "a group that comes back must get the state of another one, but none is registered; call "
                "backend.register(model=model, optimizer=optimizer) before the loop"
            )
        # torchft sends a state to the groups that are behind in updates: a group whose model differs from the others'
        # reports 0 updates, to get their state.
        reported = 0 if self._model_differs else updates
        self._has_failed()  # only to raise if a process of this group has ended, for which torchft would wait
        self._request_quorum(reported)
        while self._has_failed():  # a group was lost meanwhile
            self._request_quorum(reported, again=True)
        self._set_worlds()
        if self._model_differs and self._held_state is None:  # the others are gone, so this model counts
            self._set_updates(updates)
        self._met, self._model_differs = True, False
        if self._held_state is None:
            return False
        self._load_state(self._held_state)
        return True

    def _set_worlds(self) -> None:
        """Set the rank of this group among the groups of the quorum, and of this process among all their processes."""
        group_rank, groups = self._manager.participating_rank(), self._manager.num_participants()
        if group_rank is None:
            raise RuntimeError(
                "every group of a quorum must take part, but this one is a spare; pass "
                "world_size_mode=WorldSizeMode.DYNAMIC to the Manager"
            )
        self._groups.world = World(group_rank, groups)
        world_of_group = self.job.world  # this process within its group
        self.world = World(group_rank * world_of_group.size + world_of_group.rank, groups * world_of_group.size)

    def _request_quorum(self, updates: int, *, again: bool = False) -> None:
        """Ask the lighthouse which groups take part in the next update, of which torchft sends a state to those behind.

        Args:
            updates: number of updates that this group reports to have made.
            again: whether the last quorum has lost a group.
        """
        notice = Timer(_SILENCE, self._log, ["Waits for a quorum of replica groups"])
        notice.daemon = True
        notice.start()
        try:
            if again:
                self._manager.should_commit()  # False: the next quorum is a new one
            self._held_state = None  # which this process may have got, and another one of its group not
            self._set_updates(updates)
            self._manager.start_quorum()
        except ValueError:  # a group of another size
            raise
        except Exception as error:
            raise RuntimeError(
                f"an update needs a quorum of replica groups, but there is none ({error}); see that the lighthouse, "
                f"at least min_replica_size groups and all processes of this one run, and restore the newest checkpoint"
            ) from error
        finally:
            notice.cancel()
        if self._failure is not None:
            raise _state_error(self._failure) from self._failure

    def _has_failed(self) -> bool:
        """Return whether the manager of any process of this group has an error; all of them have to call it.

        Raises:
            RuntimeError: if a process of the group has ended.
        """
        errors = torch.full((1,), float(self._manager.errored() is not None), device=self.job.device)
        try:
            self.job.all_reduce_sum([errors])
        except RuntimeError as error:
            raise RuntimeError(
                f"an update needs all processes of a replica group, but one has ended ({error}); end the others, and "
                f"start the group again"
            ) from error
        return bool(errors.item())

    def _set_updates(self, updates: int) -> None:
        """Tell torchft how many updates this group has made; it sends the state to groups that have made fewer."""
        self._manager.load_state_dict({"step": updates, "batches_committed": self._manager.batches_committed()})

    def _log(self, message: str) -> None:
        """Log a message once for all processes of this group."""
        if self.job.world.rank == 0:
            log(message, update=self._manager.current_step())

    def part(self, updates: int) -> None:
        """Stay after the last update, number `updates`, until groups that have missed it have loaded the state."""
        try:
            self.meet(updates)
            self._gather_messages("")  # returns when all groups have called it
        except RuntimeError as error:  # the others have ended
            log(f"Ends without the others: {error}", update=updates)

    # The sum. --------------------------------------------------------------------------------------------------------

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum the tensors over the groups of the quorum, in place, and agree that the update counts.

        The groups compare lengths and settings before, because gloo ends a process that gets another length.

        Raises:
            BrokenStepError: if it does not count: a group was lost, or has another model or other settings.
            RuntimeError: if this group has other settings than most; or if no quorum was asked for.
        """
        if not self._met:
            raise RuntimeError(
                "replica groups sum once an update, in the quorum of vbs.updates, but it was asked for none; loop over "
                "vbs.updates(), with one optimizer a sampler, and evaluate with backend=vbs.backend.LocalBackend()"
            )
        self._met, self._groups.device = False, tensors[0].device
        facts = {**self.facts, _LENGTHS: [(str(tensor.dtype), tensor.numel()) for tensor in tensors]}
        received, differing = "", list[str]()
        with suppress(BrokenStepError):  # which all processes of the group find out below
            received, differing = self._compare_groups(facts)
            self._groups.all_reduce_sum(tensors)
        if self._has_failed():  # asked here, since torchft would wait for a process that has ended
            self._manager._pg.abort()  # with the connections, or others would wait for this group
        update_counts = self._manager.should_commit()
        if differing:
            raise RuntimeError(
                f"replica groups must train alike, but this one differs from the others in {', '.join(differing)}; "
                f"start all with the same script and arguments, and register what changes, such as a scheduler"
            )
        if not update_counts:
            raise BrokenStepError("the groups of the quorum have not all taken the sum")
        self.received, self._has_trained = received, True
        self._taken = _hash([self._taken, self._manager.current_step(), self._client.members])

    def _compare_groups(self, facts: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Compare the settings and the models of all groups, so that no group adds gradients that do not fit.

        If any differ, report an error to torchft: no group then makes the sum.

        Returns:
            The text that the first group has posted, and the facts in which this group differs from the majority.
        """
        digests = {name: zlib.crc32(str(value).encode()) for name, value in facts.items()}
        message = [self._has_trained, self._taken, _hash(sorted(digests.items())), self.posted]
        votes, taken, hashes, texts = zip(*self._gather_messages(message), strict=True)  # (groups,) each
        if len({*zip(taken, hashes, strict=True)}) == 1:  # all groups are alike
            return texts[0], []
        of_most = _majority(self._gather_messages(digests), votes)  # a group that has just come has no vote
        self._manager.report_error(RuntimeError("replica groups have different models or settings"))
        differing = sorted(name for name in {**digests, **of_most} if digests.get(name) != of_most.get(name))
        self._model_differs = not differing and self._taken != _majority(taken, votes)
        if self._model_differs:
            log("This replica group has made an update alone; it takes over the model of the others", level=WARNING)
        return "", differing

    def _gather_messages(self, message: object) -> list[Any]:
        """Return the messages of all groups, values of JSON, in the order of their ranks."""
        return [json.loads(text) for text in self._groups._gather_bytes(json.dumps(message).encode())]

    # The state, of which torchft saves one in a thread while this one waits for the quorum. --------------------------

    def _collect_state(self) -> dict[str, Any]:
        """Return the state for a group that comes back, and keep an error for `meet`, which torchft does not show."""
        try:
            return {"taken": self._taken, **{name: part.state_dict() for name, part in self._parts.items()}}
        except Exception as error:
            self._failure = error
            raise

    def _hold_state(self, state: dict[str, Any]) -> None:
        """Keep a state that torchft has received from another group, until `meet` loads it."""
        self._held_state = state

    def _load_state(self, state: dict[str, Any]) -> None:
        """Load the state of another group into the registered parts."""
        self._held_state = None
        try:
            for name, part in self._parts.items():
                part.load_state_dict(state[name])
        except Exception as error:
            raise _state_error(error) from error
        self._taken = state["taken"]
        self._log(f"Takes over the state of another group, of update {self._manager.current_step()}")


@final
class _Groups(Backend):
    """The groups of a quorum: each process sums with those of its rank in the others."""

    device = torch.device("cpu")  # of the last gradients: NCCL sums nothing on the CPU

    def __init__(self, manager: Manager) -> None:
        super().__init__(World())
        self._manager, self._messages = manager, FlatMessages()

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum the tensors over the replica groups of the quorum, in place.

        Raises:
            BrokenStepError: if a group is lost, so that the sum is not valid.
        """

        def reduce(flat: Tensor) -> None:
            """Sum a flat tensor over the groups, in place, on the device of the gradients."""
            on_device = flat.to(self.device)
            self._manager.allreduce(on_device, reduce_op=dist.ReduceOp.SUM).wait()  # which keeps an error of the work
            flat.copy_(on_device)

        self._messages.reduce_flat(tensors, reduce)
        if self._manager.errored() is not None:
            raise BrokenStepError("a replica group was lost, or has other settings")


def _processes_of(manager: Manager) -> DistributedBackend:
    """Return the backend that sums over the processes of this replica group, after a check that torchft knows them."""
    expected = World(manager._group_rank, manager._group_world_size)
    initialized = World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    if initialized != expected:
        requirement = f"torch.distributed must have the processes of this replica group, {expected}"
        remedy = "call init_process_group() first, with the rank and world_size of the Manager"
        raise value_error(requirement, initialized or "not initialized", remedy)
    if manager._init_sync:  # which would take each process's first state from another group
        requirement = "replica groups of several processes must begin with the same weights, which they compare"
        raise value_error(requirement, "init_sync=True", "pass init_sync=False to the Manager")
    return DistributedBackend()


def _state_error(error: Exception) -> RuntimeError:
    """Return the error to raise if a registered object's `state_dict` or `load_state_dict` has failed."""
    return RuntimeError(
        f"what is registered must be saved by one group and loaded by another, but that failed with "
        f"{type(error).__name__}: {error}; build the same objects in every group"
    )


def _hash(value: object) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:16]


def _majority(values: Sequence[Any], votes: Sequence[bool]) -> Any:
    """Return the most frequent one of the groups' values; of several, the first.

    Args:
        values: the value of each group.
        votes: whether each group's value counts; if none does, all count.
    """
    candidates = [value for value, vote in zip(values, votes, strict=True) if vote] or [*values]
    return max(candidates, key=candidates.count)
