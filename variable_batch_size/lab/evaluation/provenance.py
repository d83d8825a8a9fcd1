"""Where a record comes from: versions, commit and processor, and hashes of the task's source and of its data."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from variable_batch_size.lab.evaluation.task import Task, dataset_of

SAMPLES = 64  # of a dataset that has no tensors, which are hashed
DIGITS = 16


@lru_cache(maxsize=1)
def environment() -> dict[str, Any]:
    """Return versions, the commit of the library and the processor of this process."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "variable_batch_size": importlib.import_module("variable_batch_size").__version__,
        "commit": _commit(),
        "cpu": _processor(),
        "cores": os.cpu_count(),
    }


def source_hash(task: Task) -> str | None:
    """Return the SHA-256 of the file that defines a task, 16 hexadecimal digits; None if there is no such file.

    What it imports is not part of it.
    """
    try:
        path = inspect.getsourcefile(task if isinstance(task, ModuleType) else type(task))
        return None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()[:DIGITS]
    except (OSError, TypeError):
        return None


_data: dict[int, str | None] = {}  # by the id of the dataset, which `dataset_of` keeps


def data_hash(task: Task) -> str | None:
    """Return the SHA-256 of a task's dataset, 16 hexadecimal digits; None if two reads differ, as of random crops.

    Of a `TensorDataset` it is that of all tensors, of others that of 64 samples and of their number.
    """
    dataset: Any = dataset_of(task)
    if id(dataset) not in _data:
        found = _read(dataset)
        _data[id(dataset)] = found if type(dataset) is TensorDataset or found == _read(dataset) else None
    return _data[id(dataset)]


def _read(dataset: Any) -> str | None:
    number, found = len(dataset), hashlib.sha256()
    whole = type(dataset) is TensorDataset
    items = [dataset.tensors] if whole else (dataset[number * at // SAMPLES] for at in range(min(number, SAMPLES)))
    try:
        for part in (number, *(leaf for item in items for leaf in _leaves(item))):
            found.update(part.tobytes() if hasattr(part, "tobytes") else repr(part).encode())
    except TypeError:  # an object of which nothing is known
        return None
    return found.hexdigest()[:DIGITS]


def _leaves(item: Any) -> Iterator[Any]:
    if isinstance(item, Mapping):
        item = [part for pair in item.items() for part in pair]
    if isinstance(item, Tensor):
        yield item.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() if item.numel() else item.shape
    elif isinstance(item, (str, bytes, int, float, complex, type(None))) or hasattr(item, "tobytes"):
        yield item
    elif isinstance(item, Sequence):
        for part in item:
            yield from _leaves(part)
    else:
        raise TypeError(type(item).__name__)


def _commit() -> str | None:
    """Return the commit of the library, with -dirty after it if files are changed; None outside of its repository."""
    git = ["git", "-C", str(Path(__file__).parent)]
    described = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        known = [*git, "ls-files", "--error-unmatch", Path(__file__).name]
        if subprocess.run(known, capture_output=True, check=False).returncode:
            return None
        return subprocess.run(described, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:  # there is no git
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
