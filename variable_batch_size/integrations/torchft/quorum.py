"""Quorums that connect replica groups of the same size, also those of a lighthouse that was started again."""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist
from torchft import Manager

from variable_batch_size._log import log
from variable_batch_size._validation import value_error

_SIZE = "variable_batch_size/processes"  # in the store of each group
_PATIENCE = timedelta(seconds=5)  # for the store of another group; later torchft reports that it is gone


@final
class QuorumClient:
    """The client of a manager, through which it asks for quorums.

    torchft connects the processes of one rank in all groups, at a place in the store of one of them that is named by
    the number of the quorum. A new lighthouse counts from 1 again: the number may be that of an earlier quorum, and the
    place may have its addresses. So the place gets the number of updates and the members, and a group connects in spite
    of a number that it knows if these are others, or if it needs the state.
    """

    def __init__(self, manager: Manager) -> None:
        """Take the place of the manager's client, and tell other groups how many processes this one has."""
        self._manager, self._client = manager, manager._client
        self.members: list[str] = []
        if manager._group_rank == 0:
            manager._store.set(_SIZE, str(manager._group_world_size))

    def _quorum(self, **request: Any) -> Any:
        """Ask for a quorum, and give it an address of its own at which its groups connect.

        torchft calls this in place of the client's method.
        """
        quorum = self._client._quorum(**request)
        if not self.members:  # each group compares itself with those that train
            self._check_size(quorum.store_address)
        members = sorted(quorum.replica_ids)
        if quorum.heal or members != self.members:
            self._manager._quorum_id = -1  # so that the manager connects, even if it knows the number of this quorum
        if members != self.members and self._manager._group_rank == 0:
            names = ", ".join(member.partition(":")[0] for member in members)
            log(f"Trains with {len(members)} replica groups: {names}", update=quorum.max_step)
        self.members = members
        quorum.store_address += f"/{quorum.max_step}/{zlib.crc32(str(members).encode())}"
        return quorum

    def _check_size(self, address: str) -> None:
        """Check that another replica group has as many processes as this one.

        Args:
            address: address of the store of that group, "HOST:PORT".

        Raises:
            ValueError: if it has not.
        """
        host, _, port = address.rpartition(":")
        try:
            store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_PATIENCE)
            size = int(store.get(_SIZE))
        except dist.DistError:  # that group is gone
            return
        if size != (processes := self._manager._group_world_size):
            requirement = f"a replica group must have as many processes as the others, {size}"
            raise value_error(requirement, processes, f"start this group with {size} processes")

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute from the client of torchft."""
        return getattr(self._client, name)
