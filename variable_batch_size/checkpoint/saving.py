"""Save a checkpoint: collect, compare, copy, write, seal.

`Saver.save` is the way of a save on every rank, from top to bottom. Without `wait` a thread writes a copy while the
training goes on; its error is raised on every rank, by the next method that uses the folder.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from variable_batch_size._log import log, stacklevel_of_user
from variable_batch_size.backend import Backend
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.checkpoint import compare
from variable_batch_size.checkpoint.best import Criterion
from variable_batch_size.checkpoint.contents import name_on
from variable_batch_size.checkpoint.folder import Folder, update_of
from variable_batch_size.checkpoint.parts import Parts
from variable_batch_size.checkpoint.rng_states import get_rng_states
from variable_batch_size.checkpoint.shards import Part, assign_writers, is_writer
from variable_batch_size.checkpoint.values import Json, encode
from variable_batch_size.checkpoint.write_thread import WriteThread

COMPARED_EVERY = 10  # saves, from one that compares the contents of what ranks share to the next
_SAVE = "a save of the Checkpoint"
# Entries of the sampler's state that the JSON has at its top level, too.
_POSITION = ("epoch", "step", "samples", "trace", "dataset_size", "seed", "shuffle", "drop_last")


@final
class Saver:
    """Saves the state of a training, together with the other ranks.

    Args:
        backend, agreement: of the optimizer.
        parts: the model, the optimizer and further objects, whose states are saved.
        folder: where the checkpoints are written.
        keep: number of checkpoints to keep.
        together: whether all ranks write, because they share the folder; otherwise rank 0 writes alone.

    Attributes:
        thread: the thread that writes the saves that do not `wait`.
    """

    def __init__(
        self, backend: Backend, agreement: Agreement, parts: Parts, folder: Folder, keep: int, *, together: bool
    ) -> None:
        """Begin without a save under way."""
        self._backend, self._agreement, self._parts, self._folder = backend, agreement, parts, folder
        self._keep, self._together = keep, together
        self._copies, self.thread = Copies(backend), WriteThread()
        self._saves = 0
        self._per_rank = compare.PerRank()  # what has differed between ranks since the last full comparison
        self._warned_of_rounding = False
        self._begun = False  # whether a save has begun, on every rank, that they may not all have finished
        # The name of the last save and the values reported with it, until all ranks know that it was written.
        self._unfinished: tuple[str, dict[str, Any]] | None = None

    def save(self, updates: int, wait: bool, *, in_loop: bool, reported: dict[str, Any]) -> str:
        """Save the state, and return the name of the checkpoint.

        Every rank calls it. All ranks first compare what they hold, so that none writes before all can write.

        Args:
            updates: number of updates that were made.
            wait: whether to return only when all ranks have written.
            in_loop: see `Parts.state_dicts`.
            reported: entries of the JSON for values that `report()` got; empty if there are none.

        Raises:
            RuntimeError: on every rank, if the state cannot be saved on one of them, or the ranks differ in what they
                share.
        """
        in_full = self._agreement.world.size > 1 and self._saves % COMPARED_EVERY == 0
        self._begun, self._saves = True, self._saves + 1  # now, so that an interrupt leaves them equal on all ranks
        try:
            return self._save(updates, wait, in_loop=in_loop, in_full=in_full, reported=reported)
        except RuntimeError:
            self._saves = 0  # compare all the next time
            raise

    def _save(self, updates: int, wait: bool, *, in_loop: bool, in_full: bool, reported: dict[str, Any]) -> str:
        """Save the state; see `save`. `in_full`: whether all contents are compared, see `_collect`."""
        # Collect: every rank does, which also makes lazy devices compute pending tensors.
        world, collected = self._agreement.world, list[_Collected]()

        def collect() -> str:
            """Collect the state of this rank, and return what the ranks compare of it, as text."""
            failed: Exception | None = None
            try:
                self.thread.wait()  # for the previous save
            except Exception as error:  # raised after state_dict(), which may communicate with other ranks
                failed = error
            state = self._collect(in_loop, in_full)
            collected.append(state)
            if failed is not None:
                raise failed
            return json.dumps([compare.summarize(state.described, state.own), state.rank_0_bytes, get_rng_states()])

        answers = [json.loads(text) for text in self._run_on_all(_SAVE, collect)]
        (state,) = collected
        deletes_old = self._mark_saved()  # the previous save: no rank had an error of its thread

        # Compare, and so find what each rank writes.
        self._compare(state, [summary for summary, *_ in answers], in_full=in_full, updates=updates)
        _, rank_0_bytes, _ = answers[0]
        num_writers, writer_number, to_write = self._choose_what_to_write(state, rank_0_bytes)
        tensor_parts, copies = {key: Part.on_rank(tensor) for key, tensor in to_write.items()}, dict[str, Tensor]()

        # Copy: what the thread writes does not change with the training.
        def copy_and_begin() -> str:
            """Copy to host memory what this rank writes, and on rank 0 return the name of the new checkpoint."""
            local = {
                key: tensor.to_local() if isinstance(tensor, DTensor) else tensor for key, tensor in to_write.items()
            }
            if wait:
                copies.update({key: self._backend.host(tensor) for key, tensor in local.items()})
            else:
                copies.update(self._copies.copy_to_host(local))
            with self._named_errors(updates):
                return "" if world.rank else self._folder.begin(updates, num_writers)

        name = self._agreement.run_on_all(_SAVE, copy_and_begin)[0]
        rng_states = [rng for *_, rng in answers]  # of the host of each rank
        if world.rank:
            entries = self._json_of_other_rank(state)
        else:
            entries = self._json_of_rank_0(updates, state, reported, rng_states)

        # Write: the JSON comes last, and with it the checkpoint is complete.
        def write() -> str:
            """Write the files of this rank, if it has any; on rank 0 delete older checkpoints before."""
            if writer_number is not None:
                with self._named_errors(updates):
                    if deletes_old:  # in this function, because the training does not wait for the thread
                        self._folder.tidy(self._keep)
                    self._folder.write(name, writer_number, copies, tensor_parts, entries)
            return ""

        if wait:
            self._run_on_all(_SAVE, write)
        elif writer_number is not None:
            self.thread.submit(write)
        self._unfinished = name, reported
        if wait:
            self._agreement.run_on_all(_SAVE, self._tidy)
            self._begun = False
        return name

    def finish_pending(self, call: str, *, asks: bool = True) -> None:
        """Wait for the writes of all ranks, if there are any, and raise an error of one of them on every rank.

        An interrupt may have ended a save of some ranks only. So they `ask` one another whether they all have finished,
        except in a call that a single rank may make.
        """
        if asks or self._begun:
            self._run_on_all(call, self.thread.wait)
            self._agreement.run_on_all(call, self._tidy)
            self._begun = False

    def finish_alone(self) -> None:
        """Wait for the write of this rank, after an exception that other ranks may not have; an error is a warning."""
        self.thread.warn()
        self._unfinished, self._begun = None, False

    def _run_on_all(self, call: str, work: Callable[[], str]) -> list[str]:
        """Call `work` on all ranks, and return its results by rank; an error on one rank is raised on all.

        After an error the save under way may be incomplete, and is not recorded as written.

        Args:
            call: name of the method of the user's call, for errors.
            work: function that returns a text.
        """
        try:
            return self._agreement.run_on_all(call, work)
        except RuntimeError:
            self._unfinished = None
            raise

    def _mark_saved(self) -> bool:
        """Record that all ranks have written the last save; return whether this rank has to delete old checkpoints.

        Only rank 0 has to, once for each save: before all ranks have written, an older checkpoint may still be needed.
        """
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is None or self._agreement.world.rank:
            return False
        self._folder.mark_saved(*unfinished)
        return True

    def _tidy(self) -> str:
        """Delete the checkpoints that are not kept, after all ranks have written the last save; return ""."""
        if self._mark_saved():
            self._folder.tidy(self._keep)
        return ""

    def mark_best(self, updates: int, reported: dict[str, Any], criterion: Criterion) -> str:
        """Mark the checkpoint of this update as the best one, if its values are the best; rank 0 calls it.

        Args:
            updates: number of updates that were made.
            reported: entries of the JSON for the reported values.
            criterion: what makes a checkpoint better.

        Returns:
            "" if another intact checkpoint has values that are as good, "marked", or "save" if the values are the best,
            but this training has no intact checkpoint of this update, so that one has to be saved.

        Raises:
            OSError: if it cannot be written.
        """
        with self._named_errors(updates):
            if not self._folder.is_better(reported, criterion):
                return ""
            current, names = self._folder.current, self._folder.names()
            if current not in names or update_of(current) != updates or not self._folder.is_intact(current):
                return "save"
            self._folder.mark_best(current, reported)
            self._folder.tidy(self._keep)
            return "marked"

    # The state of this rank, and what ranks share. --------------------------------------------------------------------

    def _collect(self, in_loop: bool, in_full: bool) -> _Collected:
        """Return the state of all parts as this rank has it, with digests (hashes) to compare with other ranks.

        Args:
            in_loop: see `Parts.state_dicts`.
            in_full: whether to compute digests of all contents, and not only of what `Parts.names_to_compare` names.
        """
        parts = self._parts.state_dicts(in_loop=in_loop)
        tensors = dict[str, Tensor]()
        state = {name: encode(part, name, tensors, {}) for name, part in parts.items()}
        self._parts.check_reload()
        self._backend.mark_step()  # all ranks compute what is pending, so that rank 0 does not do it alone
        sampler = parts["optimizer"]["vbs"]["sampler"]
        if self._agreement.world.size == 1:  # nothing to compare
            return _Collected(state, tensors, set(), 0, {}, compare.Own({}, {}), sampler)
        whole = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
        if len(whole) < len(tensors) and not self._together:
            raise RuntimeError(
                f"every rank must write its part of a sharded model, but not all of them share the folder "
                f"{self._folder.storage.location}; choose a folder that all ranks share"
            )
        # What must be equal on all ranks, and what may differ, so that each rank perhaps has to save its own.
        must_be_equal = self._parts.equal_on_ranks(tensors)
        comparable = {name: tensor for name, tensor in tensors.items() if tensor.device.type != "xla"}
        shared = {name: tensor for name, tensor in comparable.items() if name in must_be_equal}
        rank_0_bytes = sum(tensor.nbytes for name, tensor in whole.items() if name not in shared)
        changing, changing_parts = self._parts.names_to_compare(tensors)
        own_tensors = dict[str, Tensor]()
        for name, tensor in whole.items():
            if name not in must_be_equal and (in_full or name in changing):
                own_tensors[name] = self._backend.host(tensor) if tensor.device.type == "xla" else tensor
        own_parts = {name: part for name, part in state.items() if in_full or name in changing_parts}
        own = compare.Own.of_state(own_tensors, own_parts)
        described = compare.describe_shared(shared, contents=in_full)
        return _Collected(state, tensors, {*shared}, rank_0_bytes, described, own, sampler)

    def _compare(self, state: _Collected, summaries: list[dict[str, str]], *, in_full: bool, updates: int) -> None:
        """Check that ranks hold the same in what they share, and find the tensors and parts that differ between them.

        Those that may differ are noted in `_per_rank`: from now on each rank saves its own version of them.

        Args:
            state: what this rank has.
            summaries: what `compare.summarize` returned on each rank.
            in_full: whether the summaries have digests of all contents.
            updates: number of updates that were made, for a line of the log.

        Raises:
            RuntimeError: on every rank, if they differ in what they share by more than rounding.
        """
        differing, rank_0 = compare.differing_keys(summaries), self._agreement.world.rank == 0
        if differing - {compare.OWN}:  # what is under `OWN` may differ, all else may not
            text = json.dumps(compare.add_sketches(state.described, state.tensors))
            descriptions = [json.loads(answer) for answer in self._agreement.gather(_SAVE, text)]  # by rank
            name, rank, only_by_rounding = compare.first_difference(descriptions)
            where = f"{self._parts.describe_tensor(name)} on rank {rank}"
            if not only_by_rounding:
                raise RuntimeError(
                    f"ranks must hold the same parameters and states of optimizers, but {where} is another one than on "
                    f"rank 0; write weights on every rank alike, and begin with vbs.broadcast_parameters(model) or one "
                    f"seed"
                )
            if not self._warned_of_rounding and rank_0:
                warnings.warn(
                    f"ranks should hold the same parameters and states of optimizers, but {where} differs by rounding "
                    f"from rank 0, as on devices of different kinds; the value of one rank is saved",
                    UserWarning,
                    stacklevel=stacklevel_of_user(),
                )
            self._warned_of_rounding = True
        before = self._per_rank
        self._per_rank = compare.PerRank() if in_full else before  # else what is not compared now may still differ
        if compare.OWN in differing:
            answers = self._agreement.gather(_SAVE, json.dumps(state.own))
            self._per_rank |= compare.find_own([compare.Own(*json.loads(text)) for text in answers])
        newly_found = sorted((self._per_rank.tensors - before.tensors) | (self._per_rank.parts - before.parts))
        if newly_found and rank_0:
            names = few_of(newly_found)
            if self._together:
                size = sum(state.tensors[name].nbytes for name in self._per_rank.tensors & state.tensors.keys())
                line = f"Saved for each rank, because they differ: {names} ({size:,} bytes a rank)."
                log(line, rank=0, update=updates)
            else:
                warnings.warn(
                    f"ranks differ in {names}, and only rank 0 saves its own, because not all of them share the "
                    f"folder; choose a folder that all share, or call vbs.broadcast_parameters(model) before saving",
                    UserWarning,
                    stacklevel=stacklevel_of_user(),
                )

    def _choose_what_to_write(self, state: _Collected, rank_0_bytes: int) -> tuple[int, int | None, dict[str, Tensor]]:
        """Return how many ranks write, the number of this one among them, and the tensors that it writes.

        The number is None if this rank writes nothing. What is equal on all ranks is spread over them; a rank writes
        its shard of a sharded tensor, and its own version of a tensor that differs between ranks.

        Args:
            state: what this rank has.
            rank_0_bytes: bytes of the tensors that only rank 0 can write, on rank 0.
        """
        rank, size = self._agreement.world.rank, self._agreement.world.size
        if not self._together:
            return (1, 0, state.tensors) if rank == 0 else (1, None, {})
        whole = {name: tensor for name, tensor in state.tensors.items() if not isinstance(tensor, DTensor)}
        sharded = {name: tensor for name, tensor in state.tensors.items() if isinstance(tensor, DTensor)}
        sizes = {name: tensor.nbytes for name, tensor in whole.items() if name in state.shared}
        writer_of = assign_writers(sizes, size, rank_0_bytes)
        writers = [*range(size)] if sharded or any(self._per_rank) else sorted({0, *writer_of.values()})
        to_write = {name: tensor for name, tensor in whole.items() if writer_of.get(name, 0) == rank}
        to_write |= {name: tensor for name, tensor in sharded.items() if is_writer(name, tensor)}
        to_write |= {name_on(rank, name): whole[name] for name in sorted(self._per_rank.tensors & whole.keys())}
        return len(writers), writers.index(rank) if rank in writers else None, to_write

    # What the JSON says. ----------------------------------------------------------------------------------------------

    def _json_of_rank_0(
        self, updates: int, state: _Collected, reported: dict[str, Any], rng_states: list[str]
    ) -> dict[str, Any]:
        """Return the entries of the JSON of rank 0, without the description of its file.

        Args:
            updates: number of updates that were made.
            state: what this rank has.
            reported: entries for values that `report()` got.
            rng_states: states of the host RNGs of each rank, as texts.
        """
        batch_size = self._parts.batch_size(updates - 1)  # of the last update, as they count from 0
        position = {"updates": updates, "world": len(rng_states), "batch_size": batch_size}
        position |= {key: state.sampler[key] for key in _POSITION} | {"reads_epoch": self._parts.reads_epoch}
        tensors = {name: describe(tensor) for name, tensor in state.tensors.items()}
        return {**versions(), **position, **reported, "state": state.json, "random": rng_states, "tensors": tensors}

    def _json_of_other_rank(self, state: _Collected) -> dict[str, Any]:
        """Return the entries of the JSON of a rank other than 0, without the description of its file.

        They hold only what differs between ranks; all else is in the JSON of rank 0.
        """
        if not any(self._per_rank):  # a named tuple of two sets: both are empty
            return {}
        tensors = {name: describe(tensor) for name, tensor in state.tensors.items() if name in self._per_rank.tensors}
        return {"own": {"state": {name: state.json[name] for name in sorted(self._per_rank.parts)}, "tensors": tensors}}

    @contextmanager
    def _named_errors(self, updates: int) -> Iterator[None]:
        """Turn errors of a disk or a store within a block into an OSError that names the checkpoint and a remedy.

        Args:
            updates: number of updates that were made, which is in the name of the checkpoint.
        """
        try:
            yield
        except (ValueError, RuntimeError):  # raised by this package, with its own message
            raise
        except Exception as error:  # its class depends on the store
            storage, writer = self._folder.storage, self._folder.writer
            if writer.number and not writer.writes:
                writer.check()  # raises: another process has taken over the folder, which is the cause
            remedy = "free disk space" if storage.on_disk else "restore the connection"  # and the next save succeeds
            raise OSError(
                f"Checkpoint update-{updates:08d} could not be written to {storage.location} "
                f"({getattr(error, 'strerror', None) or error}); {remedy}, or copy the newest checkpoint to another "
                f"folder and continue there (earlier checkpoints are unchanged)"
            ) from error


@final
class _Collected(NamedTuple):
    """The state of a training, as a rank has it.

    Attributes:
        json: the JSON of each part, by its name.
        tensors: all tensors by name.
        shared: names of the tensors that must be equal on all ranks or, if sharded, on ranks that have the same part.
        rank_0_bytes: bytes of the tensors that are neither shared nor sharded, which only rank 0 can write.
        described: what is compared of the shared tensors.
        own: digests of what may differ between ranks.
        sampler: the state of the sampler.
    """

    json: dict[str, Json]
    tensors: dict[str, Tensor]
    shared: set[str]
    rank_0_bytes: int
    described: dict[str, compare.Described]
    own: compare.Own
    sampler: Mapping[str, Any]


def describe(tensor: Tensor) -> dict[str, Json]:
    """Return what the JSON says of a tensor: dtype and shape; also the stride if its dimensions lie permuted in memory.

    An example is the memory format channels_last. Other strides, as of a slice, are not kept: the tensor is read as a
    contiguous one.
    """
    entries: dict[str, Json] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": [*tensor.shape]}
    if not isinstance(tensor, DTensor) and not tensor.is_contiguous():
        strides = tensor.stride()
        from_outer_to_inner = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        if tensor.permute(from_outer_to_inner).is_contiguous():
            entries["stride"] = [*strides]
    return entries


def versions() -> dict[str, str]:
    """Return the versions of this library and of torch, which a checkpoint records."""
    return {"library": importlib.import_module("variable_batch_size").__version__, "torch": torch.__version__}


def few_of(names: list[str]) -> str:
    """Return the first three names, and the number of the others, in words."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")


@final
class Copies:
    """Copies of tensors in host memory, reused by later copies: allocating pages takes longer than copying into them.

    A copy is valid until the next one is taken. A checkpoint is written from it while the training goes on.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers = dict[str, Tensor]()

    def copy_to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of tensors in host memory, complete on return; they overwrite those of the previous call.

        The memory of a tensor that no longer has the same name, dtype, shape and stride is released.
        """
        earlier, self._buffers = self._buffers, {}
        copies = dict[str, Tensor]()
        for name, tensor in tensors.items():
            # torch.empty_like(xla, device="cpu") returns memory that others overwrite, without an error.
            if not (tensor.is_cpu or tensor.is_cuda) or tensor.is_conj() or tensor.is_neg():
                host = self._backend.host(tensor)
                copies[name] = host.clone() if tensor.is_cpu else host  # host() may return memory of a CPU's tensor
                continue
            buffer = earlier.get(name)
            if buffer is None or _layout(buffer) != _layout(tensor):
                # Copies from a GPU into pinned memory are asynchronous.
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copies[name] = self._buffers[name] = buffer
        if self._buffers:
            sources = [tensors[name] for name in self._buffers]
            torch._foreach_copy_([*self._buffers.values()], sources, non_blocking=True)
            for device in {tensor.device for tensor in sources if tensor.is_cuda}:
                torch.cuda.synchronize(device)
        return copies


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return dtype, shape and strides, which must be equal for a tensor to be copied into the memory of another."""
    return tensor.dtype, tensor.shape, tensor.stride()
