"""What an update issues: operations, shapes, dtypes and Python numbers, as a device that compiles graphs sees them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from helpers.xla_graphs import Training, rounds_of
from variable_batch_size.backend import Backend, detection
from variable_batch_size.backend.sent_numbers import SentNumbers, copy_to_device

WARM = 3  # updates of one microbatch, and of several, after which nothing is new


class Recorder(TorchDispatchMode):
    """Records the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not str(func).startswith(("profiler", "aten.lift_fresh")):  # the latter sends a number
            self.operations.append(f"{func}({', '.join(map(_text, [*args, *sorted(kwargs.items())]))})")
        return func(*args, **kwargs)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, torch.ScriptObject):  # such as a process group
        return "object"
    return f"{value.dtype}{[*value.shape]}" if isinstance(value, Tensor) else repr(value)


def _send(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Send numbers, which is no part of an update's operations."""
    with _disable_current_modes():
        return copy_to_device(values, dtype, device)


def compile_on_the_cpu() -> AbstractContextManager[object]:
    """Treat the CPU as a device that compiles graphs."""
    sent = partial(SentNumbers, send=_send)
    return patch.multiple(detection, _COMPILING={"cpu"}, SentNumbers=sent)


def fingerprints(
    training: Training, wrap: Callable[[nn.Module], nn.Module] | None = None
) -> dict[int, list[tuple[str, ...]]]:
    """Return the different records of the updates after the first ones, by their number of microbatches."""
    found: dict[int, dict[tuple[str, ...], None]] = defaultdict(dict)
    made = {False: 0, True: 0}
    with Recorder() as recorder:
        for rounds in rounds_of(training, 5, torch.device("cpu"), wrap):
            made[rounds > 1] += 1
            if rounds and made[rounds > 1] > WARM:
                found[rounds][tuple(recorder.operations)] = None
            recorder.operations.clear()
    return {rounds: [*records] for rounds, records in found.items()}


def differences(found: dict[int, list[tuple[str, ...]]]) -> dict[int, list[tuple[str, str]]]:
    """Return where two records of as many microbatches differ, at most three places of each."""
    return {
        rounds: [pair for pair in zip_longest(*records[:2], fillvalue="") if pair[0] != pair[1]][:3]
        for rounds, records in found.items()
        if len(records) > 1
    }


def in_processes(backend: Backend, cases: Mapping[str, tuple[Training, str]]) -> dict[str, Any]:
    """Train each case, of one kind of wrapper, in one of several processes; return the differences."""
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": DistributedDataParallel, "fsdp2": _shard}
    with compile_on_the_cpu():
        return {
            name: differences(fingerprints(training, wrappers.get(kind))) for name, (training, kind) in cases.items()
        }


def _shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (get_world_size(),))
    for part in model.children():
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)
