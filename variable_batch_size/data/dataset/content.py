"""What the rows of a dataset are, by a few of them: ranks, and a run that resumes, must read the same rows.

Equal lengths do not say that: a `random_split` without a seed, or a dataset that was cut for each rank, has the length
that is right. Rows are read twice, under two seeds that are the same on every rank; where they differ, an augmentation
is random, and only the indices of a `Subset` are compared.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from variable_batch_size._log import log
from variable_batch_size.backend.generators import kept_states, seed_host
from variable_batch_size.data.dataset.seeded import Indices, Seeded

ROWS = 8
_lock = threading.Lock()  # ranks that are threads share the generators


@final
class Content:
    """What the rows of a dataset are.

    Args:
        dataset: the dataset; None if only its length is known.
        seed: chooses the rows that are read.
        fingerprint: what the user calls the rows; then none is read.
    """

    def __init__(self, dataset: Any, seed: int, fingerprint: str | None = None) -> None:
        self._dataset, self._seed, self._fingerprint = dataset, seed, fingerprint

    def __deepcopy__(self, memo: Any) -> Content:
        return self  # the dataset of a copied sampler is the same

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: the digest in place of the dataset, which may be large."""
        return {"_dataset": None, "_seed": self._seed, "_fingerprint": self.digest()}

    def digest(self) -> str:
        """Return a text that is equal on two ranks if they read the same rows, and empty if that cannot be compared.

        So a run finds out that its ranks have different datasets, such as ones that were split without a seed. The
        first call reads `ROWS` rows twice, and moves no random state of torch, NumPy or `random`.
        """
        if self._fingerprint is None and hasattr(self._dataset, "__getitem__"):
            hash_of_indices, hash_of_rows = _digest_of_indices(self._dataset), self._digest_of_rows()
            if hash_of_indices or hash_of_rows:
                self._fingerprint = f"{hash_of_indices or 'all'} {hash_of_rows or 'random'}"
        self._dataset = None  # it is read once
        return self._fingerprint or ""

    def _digest_of_rows(self) -> str | None:
        """Return a hash of a few rows of the dataset; None if they cannot be read in this process, or are random.

        Each row is read twice, under two seeds: if the hashes differ, an augmentation draws random numbers. A message
        in the log says why there is no hash.
        """
        size = len(self._dataset)
        indices = np.random.default_rng(self._seed).choice(size, min(ROWS, size), replace=False).tolist()
        try:
            dataset = _without_handles(self._dataset)
            with _lock, kept_states():
                hash_of_rows = _hash_rows(dataset, indices, self._seed, random_seed=1)
                hash_with_other_seed = _hash_rows(dataset, indices, self._seed, random_seed=2)
        except Exception as error:  # what only workers can read, for example
            log(f"The rows of ranks are not compared: dataset[{indices[0]}] raises {error!r:.100}.")
            return None
        if hash_of_rows != hash_with_other_seed:  # an augmentation draws random numbers
            log("The rows of ranks are not compared: they are random. Pass vbs.Seeded(dataset), or fingerprint=.")
            return None
        return hash_of_rows


def _hash_rows(dataset: Any, indices: list[int], seed: int, random_seed: int) -> str:
    """Return a hash of some rows of a dataset.

    Args:
        dataset: the dataset.
        indices: which rows.
        seed: the seed of the sampler, from which the random numbers of a `Seeded` dataset follow.
        random_seed: seed of the generators of torch, NumPy and `random`, from which those of other datasets follow.
    """
    seed_host(random_seed)
    digest = hashlib.sha256()
    read_batch = getattr(dataset, "__getitems__", None)  # as a loader reads them
    rows = read_batch(Indices(indices, seed, 0)) if callable(read_batch) else map(dataset.__getitem__, indices)
    for row in rows:
        _update_digest(digest, row)
    return digest.hexdigest()[:16]


def _digest_of_indices(dataset: Any) -> str | None:
    """Return a hash of the indices of a `Subset`, and of the subsets within it; None if the dataset is no subset.

    Two ranks whose `random_split` had different seeds have different indices.
    """
    digest = None
    while isinstance(dataset, (Subset, Seeded)):
        if isinstance(dataset, Subset):
            digest = digest or hashlib.sha256()
            indices = np.asarray(dataset.indices)
            is_integer = indices.dtype.kind in "iu"
            digest.update(indices.astype("<i8").tobytes() if is_integer else repr(indices).encode())
        dataset = dataset.dataset
    return None if digest is None else digest.hexdigest()[:16]


def _without_handles(value: Any) -> Any:
    """Return a shallow copy of a dataset, and of the datasets within it, which opens files by itself when it is read.

    Without the copy, workers of a loader would inherit a file that this process has opened. A dataset with `__del__`,
    which would close what the copy shares, and one that Python cannot copy in this way, is returned itself.
    """
    if type(value) in (list, tuple) and any(isinstance(item, Dataset) for item in value):
        return type(value)(map(_without_handles, value))
    if not isinstance(value, Dataset) or hasattr(type(value), "__del__") or not hasattr(value, "__dict__"):
        return value
    try:
        copy = object.__new__(type(value))  # without __init__, which may need arguments
    except TypeError:
        return value
    vars(copy).update({name: _without_handles(attribute) for name, attribute in vars(value).items()})
    return copy


def _update_digest(digest: Any, value: Any) -> None:
    """Add a row of a dataset, or a value within it, to a hash: its bytes, with type and shape where needed.

    Args:
        digest: a hash object of hashlib, which is changed.
        value: a tensor, array, image, number, text, or a mapping, list, tuple or dataclass of such. Of anything else
            only the name of its type counts.
    """
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        digest.update(repr((value.dtype, tuple(value.shape))).encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (str, bytes, int, float, complex, np.generic, type(None))):
        digest.update(repr(value).encode())
    elif isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: repr(item[0]))  # of a set of strings in any order
        _update_digest(digest, items)
    elif isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        digest.update(f"{len(value)} of".encode())
        for item in value:
            _update_digest(digest, item)
    elif is_dataclass(value):
        _update_digest(digest, [getattr(value, field.name) for field in fields(value)])
    elif hasattr(value, "tobytes"):  # an array or an image
        shape = getattr(value, "shape", getattr(value, "size", None))
        digest.update(repr((getattr(value, "dtype", None), shape)).encode())
        digest.update(value.tobytes())
    else:
        digest.update(type(value).__qualname__.encode())
