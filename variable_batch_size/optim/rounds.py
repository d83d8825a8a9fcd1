"""Rounds of sums over the ranks, each of all buckets and then of one small message.

What has left cannot be called back. A rank that has to drop what it has sent completes the round with zeros and a flag
in the message. The round is then void on all ranks, and those that are in `step()` send theirs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.backend.channel import Channel, Started
from variable_batch_size.optim.accumulation import scalar_dtype
from variable_batch_size.optim.buckets import Bucket

RESTART = (
    "so that the ranks may have made different updates; restart all ranks from the last checkpoint, or restore it on "
    "every rank"
)


@final
class Rounds:
    """The sums of a training over the ranks, one after another.

    Args:
        backend: backend of the optimizer.

    Attributes:
        buckets: the buckets of a round, in the order in which they are summed.
        left: number of buckets of the present round that have left.
    """

    def __init__(self, backend: Backend) -> None:
        self.buckets: list[Bucket] = []
        self.left = 0
        self._backend = backend
        self._channel: Channel | None = None
        self._under_way: list[Started] = []
        self._message: Tensor | None = None  # the last one
        self._begun = 0  # rounds that this rank has begun since the last one that counted
        self._settling = False  # whether the other ranks may take a round as complete that this one has not

    @property
    def ready(self) -> bool:
        """Whether buckets may leave before `step()`.

        The length of the message must be known. And a void round may wait for ranks that wait for what this one does
        after backward, so that only `step()` waits for it.
        """
        return self._message is not None and not self._under_way

    # A round. -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Expect the gradients of all buckets again."""
        self.left = 0
        for bucket in self.buckets:
            bucket.reset()

    def send(self, bucket: Bucket) -> None:
        """Start the sum of a bucket, which `wait` has made free, and which holds the share of this rank."""
        self.left += 1
        self._start(bucket.flat)

    def end(self, tensors: Sequence[Tensor], parameters: Sequence[Tensor], *, flag: Tensor | None = None) -> Tensor:
        """Send the message, wait for all sums, and return that of the message: a flag, and the numbers of all tensors.

        Args:
            tensors: what the ranks sum besides the gradients.
            parameters: all parameters of the optimizer.
            flag: what the flag is if it is not 0, 0-D.

        Raises:
            RuntimeError: if another rank does not take part.
        """
        message = _packed(tensors, parameters)  # (1 + sum of numels,)
        if flag is not None:
            message[0] = flag
        self._message, self._settling = message, True
        self._begun += 1
        self._start(message)
        self.wait()
        self._settling = False
        return message

    def wait(self) -> None:
        """Wait for all that is under way.

        Raises:
            RuntimeError: if another rank does not take part.
        """
        try:
            while self._under_way:
                self._under_way[0].wait()
                del self._under_way[0]
        except RuntimeError as error:
            self._channel = None
            raise RuntimeError(f"a rank does not take part in the sum of the gradients, {RESTART}: {error}") from error

    def count(self) -> None:
        """Note that the last round counts, on every rank."""
        self._begun = 0

    def void(self, *, always: bool = False) -> None:
        """Complete the round so that it does not count on any rank, if some of it has left; do not wait for it.

        The next one has to `begin`.

        Args:
            always: whether to send a void round also if nothing has left.

        Raises:
            RuntimeError: if the other ranks may have taken it as complete.
        """
        if self._settling:
            raise RuntimeError(
                f"a step must be discarded before its gradients are summed over the ranks, but an exception came while "
                f"they were, {RESTART}"
            )
        known = self._message is not None and self._channel is not None
        if self.left or (always and known and self.buckets):
            if self._message is None:
                raise RuntimeError(f"an exception came while the first gradients were sent, {RESTART}")
            self._send_zeros(self._message)

    # All ranks together. ------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Forget a round that the other ranks may have taken as complete, because a state is loaded on every rank."""
        if self._settling:
            self._settling, self._channel = False, None
            self.begin()

    def state(self) -> list[int]:
        """Return what `level` needs to know of every rank."""
        return [self._begun, self._channel is None]

    def level(self, states: Sequence[Sequence[int]]) -> None:
        """Complete the rounds that other ranks have begun; every rank has to call it, with the same states.

        If a rank has lost its channel, all of them drop theirs, and the buckets, in which sums may still arrive.
        """
        if any(closed for _, closed in states):
            self._channel, self._under_way, self.buckets = None, [], []
        else:
            for _ in range(max(begun for begun, _ in states) - self._begun):
                assert self._message is not None  # the ranks had as many rounds before
                self._send_zeros(self._message)
            self.wait()
        self._begun = 0

    def use(self, buckets: list[Bucket]) -> None:
        """Sum other buckets from now on; every rank has to call it."""
        self.buckets = buckets
        self._channel = self._channel or self._backend.open_channel()

    # Details. -----------------------------------------------------------------------------------------------------

    def _send_zeros(self, message: Tensor) -> None:
        """Send what is left of a round, and that it is void."""
        for bucket in self.buckets[self.left :]:
            self._start(bucket.flat.zero_())
        ending = torch.zeros_like(message)
        ending[0] = 1
        self._start(ending)
        self._begun += 1
        self.left = 0

    def _start(self, flat: Tensor) -> None:
        assert self._channel is not None
        self._under_way.append(self._channel.start_sum(flat))


def _packed(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Return 0 and then the numbers of all tensors, as one flat tensor on the device of the parameters."""
    parts = [tensor.real if tensor.is_complex() else tensor for tensor in tensors]
    flag = torch.zeros(1, dtype=scalar_dtype(parameters), device=parameters[0].device)
    return torch.cat([flag, *(part.reshape(-1).to(flag) for part in parts)])
