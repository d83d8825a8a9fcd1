"""The course of a save, on every rank.

Every rank collects its state dicts, which also makes lazy devices compute pending tensors, waits for its previous
write, and finds the tensors that any rank could write. The ranks exchange what they have found, and compare it; then
each brings what it writes to the host, and rank 0 names the checkpoint. They write before the call returns on any rank
or, without `wait`, in a thread that uses only a copy. An error of that thread is raised on every rank, by the next
method that uses the folder.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from variable_batch_size._log import log, stacklevel_of_user
from variable_batch_size.backend import Backend
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.checkpoint import messages, rank_state, rng_states, shared_state
from variable_batch_size.checkpoint.background import Background
from variable_batch_size.checkpoint.best import Criterion
from variable_batch_size.checkpoint.contents import name_on
from variable_batch_size.checkpoint.folder import Folder, update_of
from variable_batch_size.checkpoint.parts import Parts
from variable_batch_size.checkpoint.rank_state import Compared, PerRank
from variable_batch_size.checkpoint.shards import Part, assign_writers, is_writer
from variable_batch_size.checkpoint.shared_state import Summary, digest
from variable_batch_size.checkpoint.values import Json, encode

COMPARED_EVERY = 10  # saves, from one that compares the contents of what ranks share to the next
_SAVE = "a save of the Checkpoint"
_KNOWN = ("epoch", "step", "samples", "trace", "dataset_size", "seed", "shuffle", "drop_last")  # of the sampler's state


@final
class Saver:
    """Saves the state of a training, together with the other ranks."""

    def __init__(
        self, backend: Backend, agreement: Agreement, parts: Parts, folder: Folder, keep: int, *, together: bool
    ) -> None:
        self._backend, self._agreement, self._parts, self._folder = backend, agreement, parts, folder
        self._keep, self._together = keep, together
        self._copies = Copies(backend)
        self._saves = 0
        self._pending: Background | None = None  # the write of this rank, in a thread
        self._per_rank = PerRank()  # what each rank has of its own
        self._told = False  # whether it was told that ranks differ by rounding
        self._unfinished: tuple[str, dict[str, Any]] | None = None  # what ranks write or have written, as reported
        self._tidies = False  # whether rank 0 has to delete what is not kept

    def save(self, updates: int, wait: bool, *, in_loop: bool, reported: dict[str, Any]) -> str:
        """Save the state, and return the name of the checkpoint; `in_loop`: what follows an epoch is to come.

        Raises:
            RuntimeError: on every rank, if the state cannot be saved on one of them, or the ranks differ in what they
                share.
        """
        world, collected = self._agreement.world, list[_Collected]()
        compares = world.size > 1 and self._saves % COMPARED_EVERY == 0

        def collect() -> str:
            failed: Exception | None = None
            try:
                self.wait()
            except Exception as error:  # raised after state_dict(), which may communicate with other ranks
                failed = error
            if not self._saves:
                self._parts.check_reload()
            collected.append(state := self._collect_state(in_loop, compares))
            if failed is not None:
                raise failed
            return json.dumps([state.summary, digest(state.compared), state.others, rng_states.get_rng_states()])

        messages = [json.loads(text) for text in self._run_on_all(_SAVE, collect)]
        (state,) = collected
        summaries = [Summary(*summary) for summary, *_ in messages]
        if not shared_state.are_equal(summaries):
            self._report_difference(state.shared)
        self._find_own_state(state, [message[1] for message in messages], anew=compares, updates=updates)
        ranks, number, to_write = self._choose_what_to_write(state, others=messages[0][2])
        copies = dict[str, Tensor]()

        def bring_and_begin() -> str:
            self._record_written()
            copies.update(self._bring_to_host(to_write, copy=not wait))
            if world.rank:
                return ""
            with named_errors(self._folder, updates):
                return self._folder.begin(updates, ranks)

        name = self._agreement.run_on_all(_SAVE, bring_and_begin)[0]
        self._saves += 1
        self._unfinished = name, reported
        if number is not None:
            random = [message[3] for message in messages]
            facts = self._facts_of_rank(state) if world.rank else self._facts(updates, state, reported, random)
            parts = {key: Part.on_rank(tensor) for key, tensor in to_write.items()}
            write = partial(self._write, updates, name, number, copies, parts, facts)
            if wait:
                self._run_on_all(_SAVE, write)
            else:
                self._pending = Background(write)
                self._pending.begin()
        elif wait:
            self._run_on_all(_SAVE, str)
        if wait:
            self._agreement.run_on_all(_SAVE, self._delete_old)
        return name

    def _bring_to_host(self, tensors: Mapping[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
        """Return what this rank has of tensors in host memory; `copy`: so that the training may change them."""
        local = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
        if copy:
            return self._copies.copy_to_host(local)
        return {name: self._backend.host(tensor) for name, tensor in local.items()}

    def mark_best(self, updates: int, reported: dict[str, Any], criterion: Criterion) -> str:
        """Mark the checkpoint of this update as the best one, if it is and there is one; rank 0 calls it.

        Returns:
            "" if the values are not better than those of every intact checkpoint, "marked", or "save" if the folder has
            no checkpoint of this update from which the training comes.

        Raises:
            OSError: if it cannot be written.
        """
        with named_errors(self._folder, updates):
            if not self._folder.is_better(reported, criterion):
                return ""
            current, names = self._folder.current, self._folder.names()
            if current not in names or update_of(current) != updates or not self._folder.is_intact(current):
                return "save"
            self._folder.mark_best(current, reported)
            self._folder.prune(self._keep)
            return "marked"

    # The outcome of a save. -------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether this rank has no write that is in progress or waits to be collected by `wait`."""
        return self._pending is None

    def finish_pending(self, call: str) -> None:
        """Wait for the writes of all ranks, if there are any, and raise an error of one of them on every rank."""
        if self._unfinished is not None:
            self._run_on_all(call, self.wait)
            self._agreement.run_on_all(call, self._delete_old)

    def wait(self) -> str:
        """Wait for the write of this rank, if there is one, and return "".

        Raises:
            Exception: the one that the write raised; it is raised once.
        """
        if self._pending is not None:
            error = self._pending.wait()  # an interrupt here leaves it pending
            self._pending = None
            if error is not None:
                raise error
        return ""

    def warn_of_error(self) -> None:
        """Wait for the write of this rank without other ranks, and warn of its error: another exception propagates."""
        try:
            self.wait()
        except Exception as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=4)  # at the user's close() or `with`

    def _run_on_all(self, call: str, work: Callable[[], str]) -> list[str]:
        """Return the results of `work` by rank; if one of the ranks raises, there is no save that could be finished."""
        try:
            return self._agreement.run_on_all(call, work)
        except BaseException as error:
            if isinstance(error, RuntimeError) or self.idle:  # else it is an interrupt, and the thread still writes
                self._unfinished = None
            raise

    def _record_written(self) -> None:
        """Record that all ranks have written the last save."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None and self._agreement.world.rank == 0:
            self._folder.mark_saved(*unfinished)
            self._tidies = True

    def _delete_old(self) -> str:
        """Delete what is not kept, on rank 0 after a save of all ranks; return ""."""
        self._record_written()
        if self._tidies:
            self._tidies = False
            self._folder.tidy(self._keep)
        return ""

    # What is saved, and by whom. --------------------------------------------------------------------------------------

    def _collect_state(self, in_loop: bool, compare: bool) -> _Collected:
        """Return the state of all parts as this rank has it; `compare`: with digests of what ranks share."""
        parts = self._parts.state_dicts(in_loop=in_loop)
        tensors = dict[str, Tensor]()
        state = {name: encode(part, name, tensors, {}) for name, part in parts.items()}
        self._backend.mark_step()  # all ranks compute what is pending, so that rank 0 does not do it alone
        sampler = parts["optimizer"]["vbs"]["sampler"]
        if self._agreement.world.size == 1:
            return _Collected(state, tensors, {}, 0, Summary("", {}), Compared({}, {}), sampler)
        whole = {name: tensor.nbytes for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
        if len(whole) < len(tensors) and not self._together:
            raise RuntimeError(
                f"every rank must write its part of a sharded model, but not all of them share the folder "
                f"{self._folder.storage.location}; choose a folder that all ranks share"
            )
        equal = self._parts.equal_on_ranks(tensors)
        shared = {
            name: tensor for name, tensor in tensors.items() if name in equal and tensor.device.type in ("cpu", "cuda")
        }
        others = sum(whole.values()) - sum(whole.get(name, 0) for name in shared)
        changing, changing_parts = self._parts.names_to_compare(tensors)
        compared = {
            name: self._backend.host(tensor) if tensor.device.type == "xla" else tensor
            for name, tensor in tensors.items()
            if name in whole and name not in equal and (compare or name in changing)
        }
        of_rank = Compared.of_state(
            compared, {name: part for name, part in state.items() if compare or name in changing_parts}
        )
        return _Collected(state, tensors, shared, others, Summary.of_tensors(shared, compare=compare), of_rank, sampler)

    def _find_own_state(self, state: _Collected, digests: list[str], *, anew: bool, updates: int) -> None:
        """Find what ranks have of their own: in buffers and parts at each save, in all that is not shared at some."""
        before = self._per_rank
        self._per_rank = PerRank() if anew else self._per_rank
        if len({*digests}) > 1:
            ranks = self._agreement.gather(_SAVE, json.dumps(state.compared))
            self._per_rank |= rank_state.find_differing([Compared(*json.loads(text)) for text in ranks])
        new = sorted((self._per_rank.tensors - before.tensors) | (self._per_rank.parts - before.parts))
        if new and self._agreement.world.rank == 0:
            size = sum(state.tensors[name].nbytes for name in self._per_rank.tensors & state.tensors.keys())
            if self._together:
                log(messages.saved_for_each_line(new, size), rank=0, update=updates)
            else:
                warnings.warn(messages.kept_of_first_warning(new), UserWarning, stacklevel=stacklevel_of_user())

    def _choose_what_to_write(self, state: _Collected, others: int) -> tuple[int, int | None, dict[str, Tensor]]:
        """Return how many ranks write, the number of this one among them, if it does, and what it writes.

        `others` are the bytes that only rank 0 can write.
        """
        rank, size = self._agreement.world.rank, self._agreement.world.size
        if not self._together:
            return 1, None if rank else 0, {} if rank else state.tensors
        whole = {name: tensor for name, tensor in state.tensors.items() if not isinstance(tensor, DTensor)}
        sharded = {name: tensor for name, tensor in state.tensors.items() if isinstance(tensor, DTensor)}
        ranks = assign_writers({name: whole[name].nbytes for name in whole if name in state.shared}, size, others)
        writers = [*range(size)] if sharded or any(self._per_rank) else sorted({0, *ranks.values()})
        to_write = {name: tensor for name, tensor in whole.items() if ranks.get(name, 0) == rank}
        to_write |= {name: tensor for name, tensor in sharded.items() if is_writer(name, tensor)}
        to_write |= {name_on(rank, name): whole[name] for name in sorted(self._per_rank.tensors & whole.keys())}
        return len(writers), writers.index(rank) if rank in writers else None, to_write

    def _facts(self, updates: int, state: _Collected, reported: dict[str, Any], random: list[str]) -> dict[str, Any]:
        """Return what the JSON of rank 0 has besides its file."""
        position = {"updates": updates, "world": len(random), "batch_size": self._parts.batch_size(updates - 1)}
        position |= {key: state.sampler[key] for key in _KNOWN} | {"reads_epoch": self._parts.reads_epoch}
        tensors = {name: describe(tensor) for name, tensor in state.tensors.items()}
        return {**versions(), **position, **reported, "state": state.json, "random": random, "tensors": tensors}

    def _facts_of_rank(self, state: _Collected) -> dict[str, Any]:
        """Return what the JSON of another rank has besides its file."""
        if not any(self._per_rank):
            return {}
        tensors = {name: describe(tensor) for name, tensor in state.tensors.items() if name in self._per_rank.tensors}
        return {"own": {"state": {name: state.json[name] for name in sorted(self._per_rank.parts)}, "tensors": tensors}}

    def _write(self, updates: int, name: str, *contents: Any) -> str:
        """Write what this rank has of a checkpoint, and return ""; the contents are those of `Folder.write`."""
        with named_errors(self._folder, updates):
            if self._tidies:  # here, because the training does not wait for this thread
                self._tidies = False
                self._folder.tidy(self._keep)
            self._folder.write(name, *contents)
        return ""

    def _report_difference(self, shared: Mapping[str, Tensor]) -> None:
        """Raise RuntimeError on every rank if ranks differ in what they share; warn once if it is by rounding."""
        texts = self._agreement.gather(_SAVE, shared_state.describe_as_text(shared))
        name, rank, rounding = shared_state.first_difference(texts)
        if not rounding:
            raise RuntimeError(
                f"ranks must hold the same parameters and states of optimizers, but "
                f"{self._parts.describe_tensor(name)} on rank {rank} is another one than on rank 0; write weights on "
                f"every rank alike, and begin with vbs.broadcast_parameters(model) or one seed"
            )
        if not self._told and self._agreement.world.rank == 0:
            message = messages.rounding_warning(self._parts.describe_tensor(name), rank)
            warnings.warn(message, UserWarning, stacklevel=stacklevel_of_user())
        self._told = True


@final
class _Collected(NamedTuple):
    """The state of a training, as a rank has it.

    Attributes:
        json: of each part.
        tensors: by name.
        shared: those that are equal on all ranks, or on those that have the same part.
        others: bytes of the tensors that this rank has whole and alone.
        summary: of the shared ones.
        compared: of the others.
        sampler: the state of the sampler.
    """

    json: dict[str, Json]
    tensors: dict[str, Tensor]
    shared: dict[str, Tensor]
    others: int
    summary: Summary
    compared: Compared
    sampler: Mapping[str, Any]


def describe(tensor: Tensor) -> dict[str, Json]:
    """Return what the JSON says of a tensor: dtype, shape and, if it is a permutation of contiguous memory, stride."""
    facts: dict[str, Json] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": [*tensor.shape]}
    if not isinstance(tensor, DTensor) and not tensor.is_contiguous():
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        if tensor.permute(order).is_contiguous():
            facts["stride"] = [*strides]
    return facts


def versions() -> dict[str, str]:
    """Return what writes a checkpoint."""
    return {"library": importlib.import_module("variable_batch_size").__version__, "torch": torch.__version__}


@contextmanager
def named_errors(folder: Folder, updates: int) -> Iterator[None]:
    """Name the checkpoint in an error of a disk or a store, and what to do."""
    try:
        yield
    except (ValueError, RuntimeError):  # of this package
        raise
    except Exception as error:  # which class it has depends on the store
        remedy = "free disk space" if folder.storage.on_disk else "restore the connection"  # and the next save succeeds
        raise OSError(
            f"Checkpoint update-{updates:08d} could not be written to {folder.storage.location} "
            f"({getattr(error, 'strerror', None) or error}); {remedy}, or copy the newest checkpoint to another folder "
            f"and go on there (earlier checkpoints are unchanged)"
        ) from error


@final
class Copies:
    """Copies of tensors in host memory, which is kept: allocating fresh pages takes longer than copying into them.

    A copy is valid until the next one is taken. A checkpoint is written from it while the training goes on.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers: dict[Hashable, list[Tensor]] = {}  # by layout

    def copy_to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of tensors in host memory of this object, complete on return."""
        reusable, self._buffers = self._buffers, {}
        copies, buffers, sources = dict[str, Tensor](), list[Tensor](), list[Tensor]()
        for name, tensor in tensors.items():
            if not _is_dense(tensor):
                host = self._backend.host(tensor)
                copies[name] = host.clone() if tensor.device.type == "cpu" else host
                continue
            layout = (tensor.is_cuda, tensor.dtype, tensor.shape, tensor.stride())
            fitting = reusable.get(layout)
            pinned = tensor.is_cuda  # so that copies from the device are asynchronous
            buffer = fitting.pop() if fitting else torch.empty_like(tensor, device="cpu", pin_memory=pinned)
            self._buffers.setdefault(layout, []).append(buffer)
            copies[name] = buffer
            buffers.append(buffer)
            sources.append(tensor)
        if sources:
            torch._foreach_copy_(buffers, sources, non_blocking=True)
        for device in {tensor.device for tensor in sources if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return copies


def _is_dense(tensor: Tensor) -> bool:
    """Return whether `copy_` can fill a strided buffer on the host from this tensor.

    `torch.empty_like(xla, device="cpu")` returns memory that others overwrite, without an error.
    """
    return (tensor.is_cpu or tensor.is_cuda) and not (tensor.is_conj() or tensor.is_neg())
