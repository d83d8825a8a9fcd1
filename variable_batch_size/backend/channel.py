"""Sums that are started and waited for later, beside the other collectives."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, final
from weakref import WeakKeyDictionary, WeakSet, ref

import torch.distributed as dist
from torch import Tensor

_SECONDS_AT_EXIT = 5


class Started(Protocol):
    """A sum that was started."""

    def wait(self) -> object:
        """Wait until the tensor holds the sum; on an accelerator only its stream waits."""


class Channel(Protocol):
    """Sums tensors over all ranks in the order in which they were started, independently of all other collectives."""

    def start_sum(self, flat: Tensor) -> Started:
        """Begin to replace a tensor by its sum over all ranks; every rank has to start the same sums in one order."""


@final
class GroupChannel:
    """A channel with a process group of its own.

    Groups are reused when a channel is dropped, unless one of its sums is incomplete: other ranks have not started it.

    Args:
        group: process group.
        number: number of the group among those of the same ranks.
        ranks: the default group.
    """

    def __init__(self, group: dist.ProcessGroup, number: int, ranks: dist.ProcessGroup) -> None:
        self.number, self.ranks = number, ref(ranks)
        self.works: list[Any] = []  # sums to wait for
        self._group: dist.ProcessGroup | None = group
        _channels.add(self)

    def start_sum(self, flat: Tensor) -> Started:
        """Begin to replace a tensor by its sum over all ranks."""
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        self.works.append(work)
        _unfinished.add(self)
        return _Started(self, work)

    def is_complete(self) -> bool:
        """Return whether all sums are complete, so that no rank has started fewer of them; does not wait."""
        try:
            return all(work.is_completed() and work.wait() for work in self.works)
        except RuntimeError:  # it has failed
            return False

    def close(self) -> None:
        """Let go of the process group."""
        self.works, self._group = [], None

    def wait(self, work: Any) -> None:
        """Wait for a sum."""
        work.wait()
        self.works.remove(work)
        if not self.works:
            _unfinished.discard(self)


@final
class _Started:
    def __init__(self, channel: GroupChannel, work: Any) -> None:
        self._channel, self._work = channel, work

    def wait(self) -> None:
        self._channel.wait(self._work)


_unfinished: set[GroupChannel] = set()
_channels: WeakSet[GroupChannel] = WeakSet()  # open ones
_groups: WeakKeyDictionary[dist.ProcessGroup, list[dist.ProcessGroup]] = WeakKeyDictionary()  # by ranks, by number


def close_channels() -> None:
    """Wait for sums that a loop has left, for a moment, and let go of all groups."""
    ends = time.monotonic() + _SECONDS_AT_EXIT
    with suppress(RuntimeError):  # a rank has ended, or is too late
        for channel in _unfinished:
            for work in channel.works:
                work.wait(timedelta(seconds=max(0.001, ends - time.monotonic())))
    for channel in _channels:
        channel.close()
    _groups.clear()


def used_numbers(group: dist.ProcessGroup) -> list[bool]:
    """Return, for each number, whether it is in use on this rank; of the same length on all ranks."""
    _unfinished.difference_update([channel for channel in _unfinished if channel.is_complete()])
    used = {channel.number for channel in _channels if channel.ranks() is group}
    return [number in used for number in range(len(_groups.get(group, ())))]


def open_channel(group: dist.ProcessGroup, number: int) -> GroupChannel:
    """Return a channel of all ranks; every rank has to call it, with the default group and the same number."""
    groups = _groups.setdefault(group, [])
    while len(groups) <= number:
        groups.append(_like(group))
    return GroupChannel(groups[number], number, group)


def _like(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new group of all ranks, with the backend and, if it is known, the timeout of `group`."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout = getattr(options, "_timeout", None)  # a debugging wrapper has none
    return dist.new_group(timeout=timeout, backend=dist.get_backend_config(group))  # type: ignore[no-any-return]
