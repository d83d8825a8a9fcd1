"""torchft: replica groups that fail and come back within a training whose updates stay the same."""

from __future__ import annotations

import hashlib
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import WARNING
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from variable_batch_size._log import log
from variable_batch_size._validation import type_error, value_error
from variable_batch_size.backend import BrokenStepError, ElasticBackend
from variable_batch_size.backend.flat_messages import FlatMessages
from variable_batch_size.checkpoint.parts import Stateful
from variable_batch_size.integrations.versions import require_version
from variable_batch_size.world import World

require_version("torchft", "0.2.0", "torchft")

from torchft import Manager  # noqa: E402

# Bytes of the parts of a letter: of the first group, and of each one.
_NONCE, _LENGTH, _TEXT = 8, 2, 4096
_CHAIN, _FACT, _FACTS = 8, 2, 128  # the last one is the number of facts that are told apart
_OWN = _CHAIN + _FACT * _FACTS


@final
class TorchftBackend(ElasticBackend):
    """The replica groups of a `torchft.Manager`, each of one process, of which some may fail or join at any update.

    The quorum of an update says which group computes which microbatches of its batch, which depends on (seed, epoch,
    trace, update) alone. If a group is lost before the others have the sum, they make the update again. Loop over
    `vbs.updates`, which asks for the quorum.

    Two groups may have committed different sums as update t, if one was frozen in between. Each sum therefore carries
    a random number, and every group a hash of those of all its updates: where they differ, the update is made again,
    after the fewer groups have taken over the state of the others.

    Args:
        manager: made with `use_async_quorum=False`, and without `state_dict` and `load_state_dict`.

    Raises:
        TypeError: if it is not a `torchft.Manager`.
        ValueError: if the quorum is asynchronous, or a group has several processes.
    """

    def __init__(self, manager: Manager) -> None:
        super().__init__()
        if not isinstance(manager, Manager):
            raise type_error("manager must be a torchft.Manager", manager, "pass the one of this replica group")
        if manager._use_async_quorum:
            requirement = "a group must know its share of an update before it computes it"
            raise value_error(requirement, "use_async_quorum=True", "pass use_async_quorum=False to the Manager")
        if manager._group_world_size > 1:
            found = f"{manager._group_world_size} processes"
            raise value_error("a replica group must be one process", found, "pass world_size=1 to each Manager")
        self._manager, self._messages = manager, FlatMessages()
        self._parts: dict[str, Stateful] = {}
        self._met = False  # whether the quorum of the next update is there
        self._loaded = False  # whether it has brought a state
        self._chain = bytes(_CHAIN)  # of all sums that this model has taken
        self._differs = False  # whether other groups have taken others
        self._facts: Mapping[str, Any] = {}
        self._names: list[str] = []
        self._failure: Exception | None = None  # of a state_dict or a load_state_dict

    def register(self, **parts: Stateful) -> None:
        """Name what a group that comes back takes over, in this order: at least `model=` and `optimizer=`.

        Raises:
            TypeError: if a part has no `state_dict` and `load_state_dict`.
        """
        for name, part in parts.items():
            if not isinstance(part, Stateful):
                raise type_error(f"{name} must have state_dict() and load_state_dict()", part, "leave it out")
        self._manager.register_state_dict_fn("variable_batch_size", self._load, self._save)
        self._parts = parts

    # The world. ------------------------------------------------------------------------------------------------------

    def meet(self, updates: int) -> bool:
        """Wait for the quorum of the next update, and for the state of another group if this one is behind.

        Raises:
            RuntimeError: if there is none: too few groups, or no lighthouse.
        """
        if self._met:
            return False
        if not self._parts:
            raise RuntimeError(
                "a group that comes back must get the state of another one, but none is registered; call "
                "backend.register(model=model, optimizer=optimizer) before the loop"
            )
        self._count(0 if self._differs else updates)  # torchft sends a state to the groups that are behind
        self._loaded = False
        self._wait_for_quorum()
        rank, size = self._manager.participating_rank(), self._manager.num_participants()
        if rank is None:
            raise RuntimeError(
                "every group of a quorum must take part, but this one is a spare; pass "
                "world_size_mode=WorldSizeMode.DYNAMIC to the Manager"
            )
        if self._differs and not self._loaded:  # the others are gone
            self._count(updates)
        self.world, self._met, self._differs = World(rank, size), True, False
        return self._loaded

    def _count(self, updates: int) -> None:
        """Let torchft count updates from here."""
        self._manager.load_state_dict({"step": updates, "batches_committed": self._manager.batches_committed()})

    def _wait_for_quorum(self) -> None:
        try:
            self._manager.start_quorum()
            while self._manager.errored() is not None and self._failure is None:  # a group was lost meanwhile
                self._manager.should_commit()  # False: the next quorum is a new one
                self._manager.start_quorum()
        except Exception as error:
            if self._failure is None:
                raise RuntimeError(
                    f"an update needs a quorum of replica groups, but there is none ({error}); see that the lighthouse "
                    f"and at least min_replica_size groups run, and restore the newest checkpoint"
                ) from error
        if self._failure is not None:
            raise RuntimeError(
                f"what is registered must be saved by one group and loaded by another, but that failed with "
                f"{type(self._failure).__name__}: {self._failure}; build the same objects in every group"
            ) from self._failure

    def part(self, updates: int) -> None:
        """Wait until the groups that have missed the last update have taken over the state."""
        try:
            self.meet(updates)
            self._sum(torch.zeros(1))
        except RuntimeError as error:  # the others have ended
            log(f"Ends without the others: {error}", update=updates)

    # The sum. --------------------------------------------------------------------------------------------------------

    def announce(self, facts: Mapping[str, Any]) -> None:
        """Say what all groups of the next sum must have in common."""
        self._facts = facts

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum the tensors over the groups of the quorum, in place, and agree that the update counts.

        A letter goes before them, because gloo ends the process of a group that gets a message of another length.

        Raises:
            BrokenStepError: if it does not count: a group was lost, or has another model or other settings.
            RuntimeError: if this group has other settings than most, or no quorum was asked for.
        """
        if not self._met:
            raise RuntimeError(
                "groups that come and go sum once an update, the gradients, in the quorum that vbs.updates has asked "
                "for; loop over vbs.updates(loader, optimizer), with one optimizer for a sampler, and evaluate with "
                "backend=vbs.backend.LocalBackend()"
            )
        shapes = [(str(tensor.dtype), tensor.numel()) for tensor in tensors]
        letter = self._letter({**self._facts, "what is summed (gradients, and the names of log())": shapes})
        letter = letter.to(tensors[0].device)
        self._sum(letter)
        message, differing = letter.cpu().round().to(torch.uint8).numpy().tobytes(), list[str]()
        if self._manager.errored() is None:
            differing = self._check(message)
        if self._manager.errored() is None:
            self._messages.reduce(tensors, self._sum)
        self._met = False
        counts = self._manager.should_commit()
        if differing:
            raise RuntimeError(
                f"all replica groups must train alike, but this one differs from the others in {', '.join(differing)}; "
                f"start it with the same script and arguments, and register what changes with the updates, such as a "
                f"scheduler"
            )
        if not counts:
            raise BrokenStepError("the groups of the quorum have not all taken the sum")
        begin = _NONCE + _LENGTH
        length = int.from_bytes(message[_NONCE:begin], "big")
        self.received = message[begin : begin + length].decode()
        self._chain = hashlib.sha256(self._chain + message).digest()[:_CHAIN]

    def _sum(self, flat: Tensor) -> None:
        self._manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM).wait()  # an error is kept by the manager

    def _letter(self, facts: Mapping[str, Any]) -> Tensor:
        """Return bytes, of which each group writes its own, as numbers."""
        (rank, size), text = (self.world.rank, self.world.size), self.posted.encode()
        if len(text) > _TEXT:
            raise value_error(f"the answer of a controller must have at most {_TEXT} bytes", len(text), "shorten it")
        written = bytearray(_NONCE + _LENGTH + _TEXT + size * _OWN)
        if rank == 0:
            head = secrets.token_bytes(_NONCE) + len(text).to_bytes(_LENGTH, "big") + text
            written[: len(head)] = head
        own = self._chain
        self._names = sorted(facts)[:_FACTS]
        for name in self._names:
            own += zlib.crc32(f"{name}: {facts[name]}".encode()).to_bytes(4, "big")[:_FACT]
        begin = len(written) + (rank - size) * _OWN
        written[begin : begin + len(own)] = own
        self.posted = ""
        return torch.frombuffer(written, dtype=torch.uint8).float()

    def _check(self, message: bytes) -> list[str]:
        """Report an error unless all groups have the same model and settings; return in what this one differs."""
        rows = [message[at : at + _OWN] for at in range(_NONCE + _LENGTH + _TEXT, len(message), _OWN)]
        if len(set(rows)) == 1:
            return []
        self._manager.report_error(RuntimeError("replica groups have different models or settings"))
        mine = rows[self.world.rank]
        facts, others = mine[_CHAIN:], _most([row[_CHAIN:] for row in rows])
        if facts != others:
            parts = [slice(at, at + _FACT) for at in range(0, len(facts), _FACT)]
            found = [name for name, part in zip(self._names, parts, strict=False) if facts[part] != others[part]]
            return found or ["the names of its settings"]
        self._differs = mine[:_CHAIN] != _most([row[:_CHAIN] for row in rows])
        if self._differs:
            log("This replica group has made an update alone; it takes over the model of the others", level=WARNING)
        return []

    # The state. ------------------------------------------------------------------------------------------------------

    def _save(self) -> dict[str, Any]:
        with self._kept():
            return {"chain": self._chain.hex(), **{name: part.state_dict() for name, part in self._parts.items()}}

    def _load(self, state: dict[str, Any]) -> None:
        with self._kept():
            for name, part in self._parts.items():
                part.load_state_dict(state[name])
        self._chain, self._loaded = bytes.fromhex(state["chain"]), True

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep an exception for the thread of the loop: torchft would take it for a group that is lost."""
        try:
            yield
        except Exception as error:
            self._failure = error
            raise


def _most(rows: Sequence[bytes]) -> bytes:
    """Return the most frequent one, of equally frequent ones the first."""
    return max(rows, key=lambda row: (rows.count(row), -rows.index(row)))
