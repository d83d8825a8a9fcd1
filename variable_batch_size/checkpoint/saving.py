"""The course of a save, on every rank.

Every rank collects its state dicts, which also makes lazy devices compute pending tensors, waits for its previous
write, and finds the tensors that any rank could write. The ranks exchange what they have found; then each brings what
it writes to the host while the others wait, and rank 0 creates the place. They write before the call returns on any
rank or, without `wait`, in a thread that uses only a copy. An error of that thread is raised on every rank, by the next
method that uses the folder.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from variable_batch_size.backend import Backend
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.checkpoint import format, rng_states
from variable_batch_size.checkpoint.format import Json
from variable_batch_size.checkpoint.manifest import versions
from variable_batch_size.checkpoint.parts import Parts
from variable_batch_size.checkpoint.publishing import Publisher, Save, Writer
from variable_batch_size.checkpoint.shards import Part, Replicas, is_writer

_SAVE = "a save of the Checkpoint"
_KNOWN = ("epoch", "step", "samples", "trace", "dataset_size", "seed", "shuffle", "drop_last")  # of the sampler's state


@final
class Saver:
    """Saves the state of a training, together with the other ranks.

    Args:
        backend: brings tensors to the host.
        agreement: exchanges the messages of the ranks.
        parts: what to save.
        writer: what rank 0 does in the folder.
        publisher: writes files.
        sharded: whether all ranks may write.
    """

    def __init__(
        self, backend: Backend, agreement: Agreement, parts: Parts, writer: Writer, publisher: Publisher, sharded: bool
    ) -> None:
        self._backend, self._agreement, self._parts = backend, agreement, parts
        self._writer, self._publisher, self._sharded = writer, publisher, sharded
        self._copies, self._number = Copies(backend), 0

    def save(self, updates: int, wait: bool, *, in_loop: bool, reported: dict[str, Any]) -> Path:
        """Save the state, and return the path at which it is, or is going to be, published.

        Args:
            updates: number of updates of the training.
            wait: whether to return only after it is published.
            in_loop: whether what the loop does at the end of an epoch is to come.
            reported: what the manifest holds of reported values.

        Raises:
            RuntimeError: on every rank, if the state cannot be saved on one of them.
        """
        world, collected, own = self._agreement.world, list[_State](), dict[str, Tensor]()

        def collect() -> str:
            collected.append(state := self._collect(in_loop))
            # After state_dict(), which may communicate: an error here would strand other ranks.
            self._publisher.wait()
            return f"{state.replicas.summary}\n{rng_states.get_rng_states()}"

        messages = [message.partition("\n") for message in self._agreement.run_on_all(_SAVE, collect)]
        (state,) = collected
        writers = state.replicas.writers([summary for summary, _, _ in messages])  # rank 0 is not among them
        texts = [] if world.rank else [text for _, _, text in messages]
        random = format.encode([rng_states.as_tensor(text) for text in texts], format.RANDOM)
        whole = {**state.whole, **random.tensors}
        parts = {name: Part.of(tensor) for name, tensor in state.sharded.items() if is_writer(name, tensor)}
        parts = {name: part for name, part in parts.items() if math.prod(part.shape)}

        def bring() -> str:
            own.update({name: tensor for name, tensor in whole.items() if writers.get(name, 0) == world.rank})
            own.update({name: state.sharded[name].to_local() for name in parts})
            to_host = self._backend.host
            own.update({name: to_host(tensor) for name, tensor in own.items()} if wait else self._copies.take(own))
            return "" if world.rank else self._writer.begin(updates).name

        path = self._writer.path / self._agreement.run_on_all(_SAVE, bring)[0]
        self._number += 1
        ranks = [*range(world.size)] if state.sharded else sorted({0, *writers.values()})
        described, facts = dict[str, Any](), dict[str, Any]()
        if not world.rank:
            described = {name: format.described(tensor) for name, tensor in (whole | state.sharded).items()}
            known = {"updates": updates, "world": world.size, "batch_size": self._parts.batch_size(updates - 1)}
            known |= {key: state.sampler[key] for key in _KNOWN} | {"reads_epoch": self._parts.reads_epoch}
            facts = {**versions(), **known, **reported, "state": state.json, format.RANDOM: random.json}
        save = Save(self._number, path, ranks, own, parts, described, facts)
        if wait:
            self._agreement.run_on_all(_SAVE, partial(self._publisher.write, save))
        else:
            self._publisher.start(save)
        return path

    def _collect(self, in_loop: bool) -> _State:
        parts = self._parts.state_dicts(in_loop=in_loop)
        encoded = {name: format.encode(part, name) for name, part in parts.items()}
        self._backend.mark_step()  # all ranks compute what is pending, so that rank 0 does not do it alone
        tensors = {name: tensor for one in encoded.values() for name, tensor in one.tensors.items()}
        sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        whole = {name: tensor for name, tensor in tensors.items() if name not in sharded}
        if sharded and not self._sharded and self._agreement.world.size > 1:
            raise RuntimeError(
                f"every rank must write its part of a sharded model, but not all of them share the folder "
                f"{self._writer.path}; choose a folder that all ranks share"
            )
        json = {name: one.json for name, one in encoded.items()}
        replicas = Replicas.find(whole, self._parts.equal_on_ranks(whole)) if self._sharded else Replicas({}, "")
        return _State(json, whole, sharded, replicas, parts["optimizer"]["vbs"]["sampler"])


@final
class _State(NamedTuple):
    """The state of a training, as a rank has it.

    Attributes:
        json: of each part.
        whole: the tensors that this rank has whole, by name.
        sharded: those of which it has a part.
        replicas: which of `whole` are equal on all ranks.
        sampler: the state of the sampler.
    """

    json: dict[str, Json]
    whole: dict[str, Tensor]
    sharded: dict[str, DTensor]
    replicas: Replicas
    sampler: Mapping[str, Any]


@final
class Copies:
    """Copies of tensors in host memory, which is kept: allocating fresh pages takes longer than copying into them.

    A copy is valid until the next one is taken. A checkpoint is written from it while the training goes on.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers: dict[Hashable, list[Tensor]] = {}  # by layout

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in host memory of its own, complete on return."""
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
    """Return whether `copy_` can fill a strided buffer on the host from this tensor."""
    return (tensor.is_cpu or tensor.is_cuda) and not (tensor.is_conj() or tensor.is_neg())
