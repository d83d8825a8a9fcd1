"""Where a training comes from: versions, commit and processor, and hashes of the task's source and of its data."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import platform
import subprocess
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset

from variable_batch_size._extras import import_extra
from variable_batch_size.lab.evaluation.task import dataset_of, load_task

SAMPLES = 64  # of a dataset that has no tensors, which are hashed
DIGITS = 16


@lru_cache(maxsize=1)
def environment() -> dict[str, Any]:
    """Return the versions, the library's commit and the processor, so that a report can say what made its numbers."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "variable_batch_size": importlib.import_module("variable_batch_size").__version__,
        "commit": _commit(),
        "cpu": _processor(),
        "cores": os.cpu_count(),
    }


@lru_cache(maxsize=8)
def task_facts(name: str, arguments: str, data_dir: str | None) -> dict[str, Any]:
    """Return the size and a hash of a task's dataset and a hash of its source file, so that changes of these are seen.

    Of a `TensorDataset` all tensors are hashed, of others 64 samples; the hash is None if they differ when they are
    read again, as random crops do. What the source file imports is not part of its hash, which is None without a file.

    Args:
        name, data_dir: see `load_task`.
        arguments: those of the task, as JSON.
    """
    task = load_task(name, json.loads(arguments), data_dir)
    dataset: Any = dataset_of(task)
    size = len(dataset)
    if type(dataset) is TensorDataset:
        digits: str | None = content_hash(dataset.tensors)
    else:
        rows = [size * number // SAMPLES for number in range(min(size, SAMPLES))]  # at equal distances
        first, second = (content_hash([dataset[row] for row in rows]) for _ in range(2))
        digits = first if first == second else None
    try:
        path = inspect.getsourcefile(task if isinstance(task, ModuleType) else type(task))
        source = None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()[:DIGITS]
    except (OSError, TypeError):
        source = None
    return {"samples in the dataset": size, "hash of the dataset": digits, "source of the task": source}


def content_hash(value: Any) -> str:
    """Return a hash of 16 hexadecimal digits of tensors, arrays and plain values in any containers.

    A tensor counts by its type, shape and bytes, wherever it is stored.
    """

    def to_plain(leaf: Any) -> Any:
        """Return a tensor as its dtype, shape and bytes; any other value unchanged."""
        if not isinstance(leaf, Tensor):
            return leaf
        numbers = leaf.detach().cpu().contiguous().view(-1)
        return str(leaf.dtype), tuple(leaf.shape), numbers.view(torch.uint8).numpy() if leaf.numel() else None

    return str(import_extra("joblib", "evaluation").hash(tree_map(to_plain, value), hash_name="sha1"))[:DIGITS]


def _commit() -> str | None:
    """Return the Git commit of the library, with "-dirty" if its files have changed since; None if it is not in Git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    describe_command = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        list_command = [*git, "ls-files", "--error-unmatch", Path(__file__).name]
        if subprocess.run(list_command, capture_output=True, check=False).returncode:
            return None
        return subprocess.run(describe_command, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:  # there is no git
        return None


def _processor() -> str:
    """Return the name of the processor, on Linux its model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
