"""Workers or ranks that do not share the rows of a stream: each of them reads all, and every row comes twice."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from variable_batch_size._log import stacklevel_of_user


def read_and_compare(batches: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator that warns if the first items of two workers of a loader are the same."""
    several = isinstance(batches, DataLoader) and batches.num_workers > 1
    return _Watched(iter(batches)) if several else iter(batches)


@final
class _Watched:
    """Yields the items of a loader, and warns if its first two are the same: each worker has made one."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items, self._first, self._number = items, None, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self._number += 1
        if self._number == 1:
            self._first = item
        elif self._number == 2:
            first = digest(self._first)
            self._first = None
            if first and first == digest(item):
                warnings.warn(
                    "The workers of the loader begin with the same rows, so that each row is used once by every "
                    "worker; let each read its own part of the stream, by torch.utils.data.get_worker_info()",
                    UserWarning,
                    stacklevel=stacklevel_of_user(),
                )
        return item


def digest(item: Any) -> str:
    """Return a digest of an item, by which readers of the same are found; "" if it cannot be told, as on a device."""
    try:
        return hashlib.sha256(pickle.dumps(_as_plain(item))).hexdigest()[:16]
    except Exception:  # of whatever the user's rows are
        return ""


def warn_of_ranks(digests: Mapping[int, str]) -> None:
    """Warn if two ranks begin with the same rows; `digests`: of their first items, by rank."""
    ranks = dict[str, int]()
    for rank, digest_of_rank in digests.items():
        first = ranks.setdefault(digest_of_rank, rank)
        if digest_of_rank and first != rank:
            warnings.warn(
                f"Ranks {first} and {rank} begin with the same rows, so that each row is used once by both; let each "
                f"read its own part, by rank and num_replicas of the ArrivingBatches, or pass shared=True",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )
            return


def _as_plain(item: Any) -> Any:
    """Return an item with the bytes of its tensors."""
    if isinstance(item, Tensor):
        if item.device.type != "cpu":
            raise TypeError("it is not read from a device")
        return str(item.dtype), tuple(item.shape), item.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(item, Mapping):
        return [(name, _as_plain(value)) for name, value in item.items()]
    return [*map(_as_plain, item)] if isinstance(item, (tuple, list)) else item
