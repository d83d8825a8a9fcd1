"""The backend of PyTorch/XLA: lazy tensors whose graphs compile once, on TPU cores or on several cores of a CPU.

This is the only module that imports torch_xla, and it does so on first use. A replica is a process, or a thread with a
device of its own. `launch` starts the replicas. On XLA:CPU it also makes several replicas safe: without the variables
of `_CPU_ENVIRONMENT` and the step marker of `_serialize_step_markers`, they deadlock in the first collective.
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
from variable_batch_size.backend.sent_numbers import SentNumbers
from variable_batch_size.preemption import EXIT_CODE, signal_notice
from variable_batch_size.world import World

# By default, the Python numbers 0, 1 and -1 are constants of a graph and all others are data. This makes all of them
# data, so that no graph is recompiled when a learning rate becomes 1.
_ENVIRONMENT = {"XLA_NO_SPECIAL_SCALARS": "1"}
# Without parameter aliasing no buffer is donated. Freeing a donated buffer that an execution still reads blocks, while
# the thread holds the lock of the step marker or the GIL, and the other replicas never reach their collective.
_CPU_ENVIRONMENT = _ENVIRONMENT | {"PJRT_DEVICE": "CPU", "XLA_ENABLE_PARAM_ALIASING": "0"}

_FLOAT32 = torch.finfo(torch.float32)
# What replaces the numbers that would be constants of a graph: for 0 the smallest normal float32, for 1 and -1 the next
# float32 away from 0.
_REPLACEMENTS = {0: _FLOAT32.tiny, 1: 1 + _FLOAT32.eps, -1: -1 - _FLOAT32.eps}

# Shared by the replicas of this process; set if `launch` started them on XLA:CPU.
_rendezvous: Rendezvous | None = None
_store: dist.Store | None = None


@final
class XlaBackend(Backend):
    """The replicas of PyTorch/XLA. The rank belongs to the current thread.

    Raises:
        ModuleNotFoundError: if torch_xla is not installed.
        RuntimeError: if several replicas run on XLA:CPU and `launch` did not start them; they would deadlock.
    """

    threads = True

    def __init__(self) -> None:
        """Find the rank of this thread; refuse replicas on XLA:CPU that `launch` did not start."""
        runtime = _import_torch_xla("torch_xla.runtime")
        super().__init__(World(runtime.global_ordinal(), runtime.world_size()), SentNumbers("xla", _send_numbers))
        self._on_cpu = runtime.device_type() == "CPU"
        if self._on_cpu and self.world.size > 1 and _rendezvous is None:
            raise RuntimeError(
                f"{self.world.size} replicas on XLA:CPU must be started together, but these were not and would "
                "deadlock in the first all-reduce; call variable_batch_size.backend.xla.launch(fn, args, "
                f"cores={self.world.size})"
            )

    # Collectives. -------------------------------------------------------------------------------------------------

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum the tensors over all ranks, in place, with one call that PyTorch/XLA lowers to one collective per dtype.

        XLA:CPU cannot sum bfloat16: such tensors are summed in float32 there.
        """
        if self.world.size == 1 or not tensors:
            return
        if _rendezvous is not None:
            _rendezvous.wait()  # XLA:CPU aborts the process if a rank waits alone in a collective for 15 s
        xm = _import_torch_xla("torch_xla.core.xla_model")
        sums = [t.float() if self._on_cpu and t.dtype == torch.bfloat16 else t for t in tensors]
        xm.all_reduce(xm.REDUCE_SUM, sums)
        for tensor, total in zip(tensors, sums, strict=True):
            if total is not tensor:
                tensor.copy_(total)

    def _gather_bytes(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, by rank; without a graph if the replicas are threads of one process."""
        if self.world.size == 1:
            return [message]
        if _store is not None:
            call_number = _store.add(f"messages/{self.world.rank}", 1)  # of this call, the same on all ranks
            keys = [f"message {call_number}/{rank}" for rank in range(self.world.size)]
            _store.set(keys[self.world.rank], message.decode())
            return [_store.get(key) for key in keys]
        messages: list[bytes] = _import_torch_xla("torch_xla.core.xla_model").rendezvous("variable_batch_size", message)
        return messages

    def barrier(self) -> None:
        """Wait on the host for all ranks; without a graph if the replicas are threads of one process."""
        if _rendezvous is not None:
            _rendezvous.wait()
        elif self.world.size > 1:
            _import_torch_xla("torch_xla.core.xla_model").rendezvous("variable_batch_size")

    def store(self) -> dist.Store:
        """Return a key-value store that all ranks share; in memory if the replicas are threads of one process."""
        return super().store() if _store is None else _store

    @property
    def rank_has_ended(self) -> bool:
        """Whether a replica has returned, if the replicas are threads of this process; otherwise False."""
        return _rendezvous is not None and _rendezvous.left

    # The device. --------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The XLA device of this thread."""
        device: torch.device = _import_torch_xla().device()
        return device

    def hyperparameter(self, value: Any) -> Any:
        """Return a hyperparameter that does not become a constant of the graph, which would then compile again.

        PyTorch/XLA makes constants of 0, 1 and -1 alone; they are replaced by neighboring numbers, see `_REPLACEMENTS`.
        """
        if os.environ.get("XLA_NO_SPECIAL_SCALARS") == "1" or isinstance(value, Tensor):
            return value  # with this variable, which `launch` sets, no number becomes a constant
        return _REPLACEMENTS.get(value, value)

    def mark_step(self) -> None:
        """Execute the operations that this replica has recorded since its last step marker."""
        _import_torch_xla().sync()

    def seed(self, seed: int) -> None:
        """Seed the generator of this rank's device."""
        _import_torch_xla("torch_xla.core.xla_model").set_rng_state(seed)

    def host(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in host memory, detached. Ends the current graph.

        If that graph contains a collective, every rank has to call this.
        """
        if tensor.device.type != "xla":
            return super().host(tensor)
        alias = tensor.detach()  # before the step marker: recorded after it, it would execute outside of one
        self.mark_step()
        return alias.cpu()


def launch(fn: Callable[..., object], args: Sequence[Any] = (), *, cores: int | None = None) -> None:
    """Call `fn(*args)` once on every core, and return when all calls have returned.

    On a TPU this is `torch_xla.launch`. On XLA:CPU one new process runs `cores` threads, each of which is a replica
    with a device of its own. An exception in any of its threads ends all of them immediately, after its traceback is
    printed. `SystemExit(code)` ends them and this program with that code; with code 0 it ends only its own call.
    SIGTERM, Ctrl-C and the death of this process all reach the process of the replicas as one SIGTERM, which a handler
    that the module of `fn` installs may handle.

    Args:
        fn: function at the top level of a module or script. In it, `XlaBackend().world.rank` is the rank.
        args: picklable positional arguments of `fn`.
        cores: number of replicas on XLA:CPU. Default: the environment variable `CPU_NUM_DEVICES`, or 1. On a TPU it
            must be omitted: all cores are used.

    Raises:
        ValueError: if `cores` is < 1, or is given on a TPU.
        TypeError: if `cores` is not an integer, or `fn` or `args` cannot be pickled.
        ModuleNotFoundError: if torch_xla is not installed.
        RuntimeError: if a call raised an exception, or a signal ended the process of the replicas.
        SystemExit: if a call raised it, or SIGTERM ended the process of the replicas.
    """
    _require_torch_xla()
    kind = _device_kind()
    if kind == "CPU":
        number = int(os.getenv("CPU_NUM_DEVICES", "1")) if cores is None else cores
        cores = check_int(number, "cores", 1, remedy="pass cores=1 or more, or omit it to use CPU_NUM_DEVICES")
        run_child(_run_replicas, (fn, tuple(args)), _cpu_environment(cores))
        return
    if cores is not None:
        raise ValueError(f"launch uses all cores of a {kind}, got cores={cores}; omit cores, or set PJRT_DEVICE=CPU")
    with environment_with(_ENVIRONMENT):
        run_by(_import_torch_xla().launch, functools.partial(_without_ordinal, fn), args)


def is_cpu(device: torch.device) -> bool:
    """Return whether an XLA device is a CPU."""
    return device.type == "xla" and _device_kind() == "CPU"


def compiled_graphs() -> int:
    """Return the number of graphs that this process has compiled, for all replicas together.

    Call it while no replica is working, between two calls of `barrier`: reading torch_xla's counters while threads
    register new ones can crash the process.
    """
    return _import_torch_xla("torch_xla.debug.metrics").counter_value("UncachedCompile") or 0


def _send_numbers(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return each number as a tensor on an XLA device, so that it is data of the graphs there, and no constant.

    Args:
        values: the numbers.
        dtype: of the tensors.
        device: the XLA device.
    """
    if not values:
        return []
    # A 0-D tensor of 0 or 1 that is moved by .to(device) would be a constant of the graph.
    sent: list[Tensor] = _import_torch_xla("torch_xla.core.xla_model").send_cpu_data_to_device(
        [torch.tensor(value, dtype=dtype) for value in values], device
    )
    return sent


def _import_torch_xla(module: str = "torch_xla") -> Any:
    """Return torch_xla or a module within it; raise ModuleNotFoundError if it is not installed."""
    _require_torch_xla()
    return importlib.import_module(module)


def _require_torch_xla() -> None:
    """Raise ModuleNotFoundError if torch_xla is not installed."""
    if importlib.util.find_spec("torch_xla") is None:
        raise ModuleNotFoundError(
            "XLA devices need PyTorch/XLA, but torch_xla is not installed; run: pip install 'variable_batch_size[xla]'",
            name="torch_xla",
        )


def _device_kind() -> str:
    """Return CPU, TPU or another kind: from PJRT_DEVICE, which torch_xla sets on import if it is unset."""
    if "PJRT_DEVICE" not in os.environ:
        _import_torch_xla()
    return os.environ.get("PJRT_DEVICE", "CPU").split("_")[0]


def _cpu_environment(cores: int) -> dict[str, str]:
    """Return the environment variables of a process with `cores` replicas.

    The thread pools are large enough for all replicas to wait in a collective at the same time.
    """
    return _CPU_ENVIRONMENT | {
        "CPU_NUM_DEVICES": str(cores),
        "NPROC": str(max(16, 2 * cores)),
        "XLA_THREAD_POOL_SIZE": str(max(32, 4 * cores)),
    }


def _without_ordinal(fn: Callable[..., object], ordinal: int, *args: Any) -> None:
    """Call `fn(*args)` without the number of the process, which torch_xla.launch passes before the arguments."""
    fn(*args)


def _run_replicas(fn: Callable[..., object], args: Sequence[Any]) -> int:
    """Call `fn(*args)` in one thread for each XLA device of this child process, and return the exit code.

    Args:
        fn: the function of the user, which trains.
        args: its arguments.
    """
    global _rendezvous, _store
    code = 0
    torch_xla, xm = _import_torch_xla(), _import_torch_xla("torch_xla.core.xla_model")
    devices = torch_xla.devices()
    xm.set_replication(devices[0], devices)
    _serialize_step_markers(torch_xla._XLAC)
    _rendezvous = rendezvous = Rendezvous(len(devices))
    _store = dist.HashStore()

    def replica(index: int) -> None:
        """Call the user's function in the thread of one replica, and tell the others when it has returned."""
        nonlocal code
        torch_xla.device(index)  # makes it the default device of this thread
        try:
            fn(*args)
        except SystemExit as exit_request:
            # After a signal every replica exits with this code, after the same update: none has to end the others.
            if exit_request.code == EXIT_CODE and signal_notice():
                code = EXIT_CODE
            elif exit_request.code:
                raise
        rendezvous.leave()

    run_threads([functools.partial(replica, index) for index in range(len(devices))])
    return code


def _serialize_step_markers(xlac: Any) -> None:
    """Replace the step marker of torch_xla by one that the replicas of this process execute one at a time.

    The rendezvous of a collective on XLA:CPU is keyed by the id of the compiled module. Replicas that compile the same
    graph concurrently get two modules and wait for each other forever. One at a time, the second replica finds the
    module of the first in the cache.

    No replica may wait for a device while it holds the lock: a pending execution may be in a collective that needs a
    replica which waits for the lock. The original marker waits if an earlier execution of its device is pending, so
    each replica waits for its own device before it takes the lock, and after it has released it.
    """
    mark_step, lock = xlac._xla_step_marker, threading.Lock()

    def serialized_mark_step(
        device: str = "", devices: Sequence[str] = (), wait: bool = False, reset_scope: bool = True
    ) -> None:
        """End and run the graph of one replica; the arguments are those of torch_xla's own step marker."""
        own_devices = xlac._xla_real_devices([device or xlac._xla_get_default_device()])
        xlac._xla_wait_device_ops(devices=own_devices)  # without `devices` it would wait for all of them: a deadlock
        with lock:
            mark_step(device, list(devices), wait=False, reset_scope=reset_scope)
        xlac._xla_wait_device_ops(devices=own_devices)

    xlac._xla_step_marker = serialized_mark_step
