"""PyTorch/XLA: lazy tensors whose graphs compile once, on TPU cores or on several cores of a CPU.

The only module that imports torch_xla, and it does so when it is first used. A replica is a process or, within
one, a thread with its own device; `launch` starts them, and on XLA:CPU makes it safe to have more than one: without
the settings of `_CPU_SETTINGS` and the step marker of `_take_turns`, replicas miss each other at the first collective.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from variable_batch_size._validation import check_int
from variable_batch_size.backend._xla_launch import Rendezvous, environment_with, run_by, run_child, run_threads
from variable_batch_size.backend.base import Backend
from variable_batch_size.preemption import EXIT_CODE, signal_notice
from variable_batch_size.world import World

# Python numbers that are 0, 1 or -1 travel as data too, as all others do: no graph compiles anew because a learning
# rate becomes 1.
_SETTINGS = {"XLA_NO_SPECIAL_SCALARS": "1"}
# Without aliasing nothing is donated: freeing a donated buffer that an execution still reads blocks, under the lock
# of the step marker or with the GIL held, and the other replicas never reach their collective.
_CPU_SETTINGS = _SETTINGS | {"PJRT_DEVICE": "CPU", "XLA_ENABLE_PARAM_ALIASING": "0"}

_SMALLEST, _LAST_BIT = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).eps

# Of the replicas in this process, once `launch` has made it safe.
_meeting: Rendezvous | None = None
_store: dist.Store | None = None


@final
class XlaBackend(Backend):
    """The replicas that PyTorch/XLA knows; the rank is this thread's.

    Raises:
        ModuleNotFoundError: when torch_xla is not installed.
        RuntimeError: when several replicas run on XLA:CPU that `launch` did not start; they would hang.
    """

    static_graph = True

    def __init__(self) -> None:
        runtime = _torch_xla("torch_xla.runtime")
        super().__init__(World(runtime.global_ordinal(), runtime.world_size()))
        self._on_cpu = runtime.device_type() == "CPU"
        if self._on_cpu and self.world.size > 1 and _meeting is None:
            raise RuntimeError(
                f"several replicas on XLA:CPU must be started by variable_batch_size.backend.xla.launch, "
                f"but these {self.world.size} were started otherwise and would hang at the first all-reduce"
            )

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """One call, which PyTorch/XLA lowers to one collective a dtype; XLA:CPU sums no bfloat16, so float32 there."""
        if self.world.size == 1 or not tensors:
            return
        if _meeting is not None:
            _meeting.wait()  # XLA:CPU ends the process when a rank stands alone in a collective for 15 s
        xm = _torch_xla("torch_xla.core.xla_model")
        sums = [t.float() if self._on_cpu and t.dtype == torch.bfloat16 else t for t in tensors]
        xm.all_reduce(xm.REDUCE_SUM, sums)
        for tensor, total in zip(tensors, sums, strict=True):
            if total is not tensor:
                tensor.copy_(total)

    def scalars(self, values: Sequence[float], like: Tensor) -> Sequence[Tensor]:
        """0-D tensors, float64 for a float64 `like` and float32 for any other: always data, whatever the values.

        A half-precision tensor times it is computed in float32 and rounded once, as with a Python number.
        """
        xm = _torch_xla("torch_xla.core.xla_model")
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        sent: list[Tensor] = xm.send_cpu_data_to_device(
            [torch.tensor(value, dtype=dtype) for value in values], like.device
        )
        return sent

    def number(self, value: Any) -> Any:
        """A Python number that is no constant of the graph: 0, 1 and -1 move by a float32's last bit.

        Not after `launch`, whose settings make every number data.
        """
        if os.environ.get("XLA_NO_SPECIAL_SCALARS") == "1" or isinstance(value, Tensor):
            return value
        return {0: _SMALLEST, 1: 1 + _LAST_BIT, -1: -1 - _LAST_BIT}.get(value, value)

    def mark_step(self) -> None:
        """Run what this replica has recorded since its last mark."""
        _torch_xla().sync()

    def host(self, tensor: Tensor) -> Tensor:
        """A copy in host memory; ends the present graph, so where a collective is in it every rank must come here."""
        if tensor.device.type != "xla":
            return super().host(tensor)
        alias = tensor.detach()  # before the mark: what is recorded after it would run outside a step marker
        self.mark_step()
        return alias.cpu()

    def barrier(self) -> None:
        """Wait on the host until every rank is here; without a graph where the replicas are threads of one process."""
        if _meeting is not None:
            _meeting.wait()
        elif self.world.size > 1:
            _torch_xla("torch_xla.core.xla_model").rendezvous("variable_batch_size")

    def exchange(self, message: bytes) -> list[bytes]:
        """Without a graph where the replicas are threads of one process."""
        if _meeting is not None:
            return _meeting.all_gather_bytes(self.world.rank, message)
        if self.world.size == 1:
            return [message]
        said: list[bytes] = _torch_xla("torch_xla.core.xla_model").rendezvous("variable_batch_size", message)
        return said

    def store(self) -> dist.Store:
        """In the memory that replicas share where they are threads of one process."""
        return super().store() if _store is None else _store


def launch(fn: Callable[..., object], args: Sequence[Any] = (), *, cores: int | None = None) -> None:
    """Call `fn(*args)` once on every core, and return when all calls have returned.

    On a TPU this is `torch_xla.launch`. On XLA:CPU, one fresh process runs `cores` threads, each a replica with its
    own device. An exception in any of its threads ends all of them at once, after its traceback; `SystemExit(code)`
    ends them and this program with that code (0 only ends its own call). SIGTERM, Ctrl-C and the death of this process
    reach the replicas as one SIGTERM to their process, which may handle it in a handler that `fn`'s module installs.

    Args:
        fn: a function at the top level of a module or script; its rank is `XlaBackend().world.rank`.
        args: what it is called with; pickled.
        cores: how many replicas on XLA:CPU, by default what `CPU_NUM_DEVICES` says, or 1. A TPU uses all its cores.

    Raises:
        ValueError: for a number of cores that is not >= 1, or any on a TPU.
        TypeError: when `fn` or `args` cannot be pickled.
        ModuleNotFoundError: when torch_xla is not installed.
        RuntimeError: when a call raised, or a signal ended the process of the replicas.
        SystemExit: when a call raised it, or SIGTERM ended the process of the replicas.
    """
    _require_torch_xla()
    kind = _device_kind()
    if kind == "CPU":
        chosen = int(os.getenv("CPU_NUM_DEVICES", "1")) if cores is None else cores
        cores = check_int(chosen, "cores", 1, remedy="leave cores out for CPU_NUM_DEVICES, or 1")
        run_child(_on_every_core, (fn, tuple(args)), _cpu_settings(cores))
        return
    if cores is not None:
        raise ValueError(
            f"launch uses all cores of a {kind}, got cores={cores}; leave cores out, or set PJRT_DEVICE=CPU"
        )
    with environment_with(_SETTINGS):
        run_by(_torch_xla().launch, functools.partial(_without_ordinal, fn), args)


def compiled_graphs() -> int:
    """How many graphs this process has compiled, all replicas together; ask while none is at work (`barrier`)."""
    return _torch_xla("torch_xla.debug.metrics").counter_value("UncachedCompile") or 0


def _torch_xla(module: str = "torch_xla") -> Any:
    """A module of torch_xla, imported when it is needed."""
    _require_torch_xla()
    return importlib.import_module(module)


def _require_torch_xla() -> None:
    if importlib.util.find_spec("torch_xla") is None:
        raise ModuleNotFoundError(
            "XLA devices need PyTorch/XLA, but torch_xla is not installed; pip install variable_batch_size[xla]",
            name="torch_xla",
        )


def _device_kind() -> str:
    """CPU, TPU, ...: as the environment says, else as torch_xla finds when it is imported."""
    if "PJRT_DEVICE" not in os.environ:
        _torch_xla()
    return os.environ.get("PJRT_DEVICE", "CPU").split("_")[0]


def _cpu_settings(cores: int) -> dict[str, str]:
    """The environment of a process with so many replicas: threads for all to stand in a collective at once."""
    return _CPU_SETTINGS | {
        "CPU_NUM_DEVICES": str(cores),
        "NPROC": str(max(16, 2 * cores)),
        "XLA_THREAD_POOL_SIZE": str(max(32, 4 * cores)),
    }


def _without_ordinal(fn: Callable[..., object], ordinal: int, *args: Any) -> None:
    fn(*args)


def _on_every_core(fn: Callable[..., object], args: Sequence[Any]) -> int:
    """In the child: make this process a host of replicas, and run `fn` on each; returns the exit code."""
    global _meeting, _store
    code = 0
    torch_xla, xm = _torch_xla(), _torch_xla("torch_xla.core.xla_model")
    devices = torch_xla.devices()
    xm.set_replication(devices[0], devices)
    _take_turns(torch_xla._XLAC)
    _meeting = meeting = Rendezvous(len(devices))
    _store = dist.HashStore()

    def replica(index: int) -> None:
        nonlocal code
        torch_xla.device(index)  # makes it this thread's default
        try:
            fn(*args)
        except SystemExit as end:
            if end.code == EXIT_CODE and signal_notice():  # all come here, after the same update
                code = EXIT_CODE
            elif end.code:
                raise
        meeting.leave()

    run_threads([functools.partial(replica, index) for index in range(len(devices))])
    return code


def _take_turns(xlac: Any) -> None:
    """Let the replicas of this process mark their steps one after the other.

    XLA:CPU's ranks meet in a collective by the number of the compiled module. Replicas that compile one graph at the
    same time get two modules and wait for each other for ever; one after the other, the second finds the first's.
    Nobody may wait for a device inside, and the original does when an earlier execution is pending: that may be in
    a collective which needs the replica that stands outside.
    """
    mark, turn = xlac._xla_step_marker, threading.Lock()

    def mark_in_turn(
        device: str = "", devices: Sequence[str] = (), wait: bool = False, reset_scope: bool = True
    ) -> None:
        own = xlac._xla_real_devices([device or xlac._xla_get_default_device()])
        xlac._xla_wait_device_ops(devices=own)
        with turn:
            mark(device, list(devices), wait=False, reset_scope=reset_scope)
        xlac._xla_wait_device_ops(devices=own)

    xlac._xla_step_marker = mark_in_turn
