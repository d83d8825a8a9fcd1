"""Random numbers that a training draws for a sample or a microbatch: the same in any world, in any worker."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Literal, TypeVar, final

from torch.utils.data import Dataset

from variable_batch_size._validation import type_error
from variable_batch_size.backend.generators import kept_states, seed_host

T = TypeVar("T")


@final
class Indices(list[int]):
    """The indices of a microbatch, with what the random numbers of its samples depend on.

    Attributes:
        seed: of the sampler.
        epoch: the epoch.
    """

    def __init__(self, indices: Iterable[int] = (), seed: int = 0, epoch: int = 0) -> None:
        super().__init__(indices)
        self.seed, self.epoch = seed, epoch


def seed_of(stream: Literal["sample", "microbatch"], *numbers: int) -> int:
    """Return a seed in [0, 2^63) that depends on some numbers alone, and not on the rank or the worker of a loader.

    Args:
        stream: what the random numbers are for; seeds of different streams are independent.
        *numbers: what they depend on, such as seed, epoch and index of a sample.
    """
    digest = hashlib.sha256(repr((stream, *numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@final
class Seeded(Dataset[T], Generic[T]):
    """A dataset whose random numbers, as in an augmentation, depend on seed, epoch and index of a sample alone.

    The generators of torch, NumPy and `random` are seeded before each sample, and restored afterwards. Read it with a
    loader that has `batch_sampler=CustomSampler(..., reproducible=True)` and any number of workers, also persistent
    ones.

    Args:
        dataset: has a length, and `dataset[index]` for each index below it.

    Raises:
        TypeError: if the dataset has none of these, or is read by another sampler.
    """

    def __init__(self, dataset: Any) -> None:
        """Store the dataset, after a check that it has a length and an index."""
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise type_error("dataset must have a length and dataset[index]", dataset, "pass a map-style dataset")
        self.dataset = dataset

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> list[T]:
        """Return the samples of a microbatch; a loader calls it in the place of `__getitem__`.

        Before each sample the generators of torch, NumPy and `random` are seeded by seed, epoch and index of the
        sample, so that its augmentation is the same on any rank and in any worker. Afterwards they have the states that
        they had before.

        Args:
            indices: the list of a `CustomSampler` with `reproducible=True`, which holds seed and epoch.

        Raises:
            TypeError: if another sampler has made the list.
        """
        if not isinstance(indices, Indices):
            requirement = "vbs.Seeded must be read by a loader with batch_sampler=CustomSampler(..., reproducible=True)"
            raise type_error(requirement, indices, "read another sampler's samples from the dataset within")
        samples = list[T]()
        with kept_states():
            for index in indices:
                seed_host(seed_of("sample", indices.seed, indices.epoch, index))
                samples.append(self.dataset[index])
        return samples

    def __getitem__(self, index: int) -> T:
        """Refuse to return a sample, whose epoch is unknown.

        Raises:
            TypeError: always.
        """
        return self.__getitems__([index])[0]
