"""A loss that compares all rows of a batch, as a contrastive one: exact for any cut and any world, in two passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.backend import Backend
from variable_batch_size.backend.generators import HostStates, kept_states, seed_host
from variable_batch_size.data.batches import Batch
from variable_batch_size.data.dataset.seeded import seed_of
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.loops.yielded_update import Update
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.tensors.buffers import KeptBuffers
from variable_batch_size.optim.tensors.hooks import bare
from variable_batch_size.optim.tensors.parameters import versions_of

Embeddings: TypeAlias = "Tensor | Sequence[Tensor] | Mapping[str, Tensor]"


def whole_batch(
    optimizer: CustomOptimizer,
    update: Update[Any],
    *,
    encode: Callable[[Any], Embeddings],
    loss: Callable[..., Tensor],
    targets: Callable[[Any], Mapping[str, Tensor]] | None = None,
    scaler: GradScaler | None = None,
    others: Sequence[CustomOptimizer] = (),
) -> Tensor:
    """Make an update of a loss L that compares all B rows of its batch; it calls every `backward()` and `step()`.

    Pass 1 computes the embeddings z of each microbatch without gradients, and the ranks gather them. Each rank computes
    L(z) and dL/dz over all rows, in the order of the plan, which is the same on any number of ranks. Pass 2 computes
    the embeddings again, with the random numbers of pass 1, and accumulates over the microbatches j

        G = sum_j (dz_j / dw)^T dL/dz_j + dL/dw,

    the gradient of L over the batch as a whole; the last term is for parameters which the loss itself has, such as
    a temperature. In memory are the B embeddings, their gradient, and what one microbatch takes.

    Source: Gao et al. 2021, arXiv 2101.06983, for one device and a fixed batch.

    Args:
        optimizer: of any rule that does not compare microbatches. Buffers that forward writes, as of batch
            normalization, are written once if it has `model=`.
        update: as `vbs.updates(loader, optimizer)` yields it; the microbatches of this rank are in memory together.
        encode: function of a microbatch, which returns tensors with a row for each of its rows, (rows, ...): one, a
            tuple, or a dict.
        loss: function of the embeddings of the batch, (B, ...) each, in at least float32: a tuple is passed by
            position, a dict by name. It returns a tensor with one element, and computes the same on each rank.
        targets: function of a microbatch, which returns what the loss needs besides, as labels, by name, (rows, ...)
            each: it gets them of the batch, (B, ...), by name.
        scaler: scales what goes back through `encode`; see `CustomOptimizer.backward`.
        others: other optimizers of the sampler, if the loss also depends on their parameters.

    Returns:
        The loss, 0-D and detached; `optimizer.logged["loss"]` is the same.

    Raises:
        TypeError: if `encode` or `targets` returns anything else.
        ValueError: if the rows of a microbatch and of its embeddings differ, or the optimizer, or its sampler, cannot
            have such a loss.
        RuntimeError: if the update was read before.
    """
    optimizers = optimizer, *others
    for checked in optimizers:
        _check_suits(checked)
    read = list(update)  # this rank's microbatches
    batch, backend = optimizer.batch, optimizer.backend
    if batch.totals is not None:
        raise value_error("whole_batch() needs updates without counts", "counts=", "omit it, and divide in the loss")
    if len(read) != len(batch.microbatches):
        raise RuntimeError(
            f"whole_batch() needs all microbatches of an update, but {len(batch.microbatches) - len(read)} of "
            f"{len(batch.microbatches)} were read before; pass the update as vbs.updates() yields it"
        )
    parts = [_Part(loaded, microbatch, optimizer) for loaded, microbatch in zip(read, batch.microbatches, strict=True)]
    versions = [_versions(part.loaded) for part in parts]  # to see whether the rows are changed in place
    with torch.no_grad():  # pass 1
        embedded = [part.encode_first(encode) for part in parts]
        labels = [_Columns.of({} if targets is None else targets(part.loaded), "targets", part) for part in parts]
    random_states_after = None if backend.threads else HostStates.present()
    if versions != [_versions(part.loaded) for part in parts]:
        raise RuntimeError(
            "encode() and targets() must leave the rows of a microbatch as they are, because they are encoded twice, "
            "but changed them in place; write x = x / 255, for example, and not x.div_(255)"
        )
    for part in reversed(parts):  # the first one has saved the buffers as they were before the update
        part.undo()
    torch.clear_autocast_cache()  # autocast has stored weights that pass 1 has cast, which have no graph
    # Of each microbatch, for its rows: their indices in the batch. "Columns" are tensors with an element for each row.
    places = [_places(part.microbatch, batch).to(embedded[0].tensors[0].device) for part in parts]
    columns = [[*embeddings.tensors, *label.tensors] for embeddings, label in zip(embedded, labels, strict=True)]
    gathered = _gather(columns, places, batch, backend)
    num_embeddings = len(embedded[0].tensors)
    whole, whole_labels = gathered[:num_embeddings], gathered[num_embeddings:]
    seed = seed_of("microbatch", optimizer.updates, -1)  # -1: the loss draws the same on all ranks, unlike microbatches
    with nullcontext() if backend.threads else kept_states():
        if not backend.threads:
            seed_host(seed)
        backend.seed(seed)
        value = _evaluate(loss, *embedded[0].named(whole), labels[0].named(whole_labels)[1])
        gradients, parameters_of_loss = _differentiate(value, whole, optimizers, scaler)
    # (B + 1, ...): a row that does not count has place B, whose gradient is 0.
    padded = [None if column is None else torch.cat([column, torch.zeros_like(column[:1])]) for column in gradients]
    gradients_of_parts = [
        [None if column is None else column.index_select(0, place) for column in padded] for place in places
    ]
    value = value.detach()
    backend.mark_step()  # before the gradients go: autograd's thread may still hold them, as results of the graph
    del columns, gathered, whole, whole_labels, gradients, padded, embedded  # pass 2 needs the memory
    sums = optimizer.reduction == "sum"
    for part, gradients_of_part in zip(parts, gradients_of_parts, strict=True):  # pass 2
        loss_of_part = part.encode_again(encode, gradients_of_part, parameters_of_loss, sums=sums)
        optimizer.backward(loss_of_part, scaler=scaler, others=others)
        optimizer.log(loss=value * part.microbatch.rows if sums else value)
        for stepped in optimizers:
            if scaler is None:
                stepped.step()
            else:
                scaler.step(stepped)
        if scaler is not None:
            scaler.update()
    if random_states_after is not None:  # pass 2 has gone back to the random numbers of pass 1
        random_states_after.restore()
    return value


def _check_suits(optimizer: object) -> None:
    """Raise TypeError or ValueError unless the updates of an optimizer can have a loss of the whole batch."""
    if not isinstance(optimizer, CustomOptimizer):
        raise type_error("optimizer must be a vbs.CustomOptimizer", optimizer, "pass the wrapper, then the update")
    batches, wanted = optimizer.sampler.batches, "whole_batch() needs"
    if batches.arriving or batches.packs:
        found = "lengths=" if batches.packs else "batches that arrive"
        raise value_error(f"{wanted} batches of rows that a plan deals", found, "pass a CustomSampler without lengths=")
    if batches.reproducible:
        requirement = f"{wanted} all microbatches before the first forward pass"
        raise value_error(requirement, "reproducible=True, which seeds one after the other", "omit it")
    if optimizer.backend.elastic:
        raise value_error(f"{wanted} ranks that stay", "an elastic backend", "restart from checkpoints instead")
    if optimizer._updater.stages.any("compares_microbatches"):
        requirement = f"{wanted} a rule that does not compare microbatches, whose gradients are none of a mean here"
        raise value_error(requirement, ", ".join(map(repr, optimizer.rules)), "choose another rule, and omit noise=")


@final
class _Columns(NamedTuple):
    """What a function has returned for the rows of a microbatch: tensors, (rows, ...) each, and their names if any."""

    tensors: list[Tensor]
    names: list[str] | None

    @classmethod
    def of(cls, returned: object, what: str, part: _Part) -> _Columns:
        """Check what a function, "encode" or "targets", has `returned` for the rows of a microbatch, and return it."""
        requirement = f"{what} must return tensors with a row for each of the {part.microbatch.rows} of its microbatch"
        names = [*returned] if isinstance(returned, Mapping) else None
        values: Any = returned
        if isinstance(returned, Mapping):
            values = [*returned.values()]
        elif isinstance(returned, Tensor):
            values = [returned]
        if what == "targets" and names is None:
            raise type_error("targets must return a dict of tensors", returned, "name them as the loss does")
        if not isinstance(values, (list, tuple)) or not all(isinstance(value, Tensor) for value in values):
            raise type_error(requirement, returned, "return a tensor, a tuple or a dict of these")
        for value in values:
            if value.ndim == 0 or len(value) != part.microbatch.rows:
                raise value_error(requirement, f"one of shape {tuple(value.shape)}", "return one row for each")
        return cls([*values], names)

    def detached(self) -> _Columns:
        """Return the tensors without their graphs."""
        return _Columns([tensor.detach() for tensor in self.tensors], self.names)

    def named(self, columns: Sequence[Tensor]) -> tuple[Sequence[Tensor], Mapping[str, Tensor]]:
        """Return tensors of the whole batch as arguments of the loss: by position, or by name.

        They have names if the user's function has returned a dict for a microbatch.
        """
        if self.names is None:
            return columns, {}
        return (), dict(zip(self.names, columns, strict=True))


@final
class _Part:
    """A microbatch in the two passes: `loaded` is what the loader has yielded, `microbatch` its plan."""

    def __init__(self, loaded: Any, microbatch: Microbatch, optimizer: CustomOptimizer) -> None:
        self.loaded, self.microbatch, self._backend = loaded, microbatch, optimizer.backend
        self._module = bare(optimizer._abilities.module)
        self._seed = seed_of("microbatch", optimizer.updates, microbatch.number)
        self._buffers: KeptBuffers | None = None
        self._states: HostStates | None = None  # ranks that are threads share the generators

    def encode_first(self, encode: Callable[[Any], Embeddings]) -> _Columns:
        """Return the embeddings of pass 1 without their graph, and store what pass 2 needs to compute the same ones.

        A replay, a microbatch that is computed again with weight 0, leaves buffers and random numbers as they were.
        """
        if self._module is not None:
            self._buffers = KeptBuffers(self._module)
        if not self._backend.threads:
            self._states = HostStates.present()
        self._backend.seed(self._seed)  # the generator of a device, if it is none of those in `HostStates`
        columns = _Columns.of(encode(self.loaded), "encode", self).detached()  # encode may enable gradients
        if self._buffers is not None:
            self._buffers.drop_unwritten()
        if not (self.microbatch.samples or self._backend.static_graph):  # a replay
            self.undo()
            if self._states is not None:
                self._states.restore()
        self._backend.mark_step()
        return columns

    def undo(self) -> None:
        """Restore the model's buffers, which pass 1 of two has written, because pass 2 writes them again."""
        if self._buffers is not None:
            self._buffers.restore()

    def encode_again(
        self,
        encode: Callable[[Any], Embeddings],
        gradients: Sequence[Tensor | None],
        of_loss: Sequence[tuple[Tensor, Tensor]],
        *,
        sums: bool,
    ) -> Tensor:
        """Return a loss whose `backward()` brings this microbatch's part of the gradient of the update.

        Args:
            encode: as for `whole_batch`.
            gradients: the gradient of L by the rows of each column, (rows, ...); None for a column without one.
            of_loss: the parameters of the loss itself, with their gradients, of which each microbatch brings n_j / B.
            sums: whether `backward()` takes a loss for the sum over the rows of a microbatch, and not for the mean.
        """
        if self._states is not None:
            self._states.restore()
        self._backend.seed(self._seed)
        columns = _Columns.of(encode(self.loaded), "encode", self).tensors
        terms = [
            (column.to(gradient.dtype) * gradient).sum()
            for column, gradient in zip(columns, gradients, strict=True)
            if gradient is not None and column.requires_grad
        ]
        if not (terms or of_loss):
            raise ValueError(
                "encode must return tensors that depend on what is trained, but none of them requires a gradient; "
                "compute them with gradients enabled"
            )
        # The gradient of sum(z * dL/dz) is (dz / dw)^T dL/dz, if dL/dz is a constant.
        samples, rows_if_sum = self.microbatch.samples, self.microbatch.rows if sums else 1
        products = [(parameter * gradient).sum() * rows_if_sum for parameter, gradient in of_loss]
        if terms:
            # `optimizer.backward` multiplies a mean by n_j / B; the gradients of the rows are parts of a sum already.
            factor = rows_if_sum * self.microbatch.batch_size / samples if samples else 0.0
            products.append(torch.stack(terms).sum() * self._backend.scalar(factor, terms[0], "whole batch"))
        return torch.stack(products).sum()


def _versions(loaded: Any) -> list[int]:
    """Return the version of each tensor of a microbatch, which counts how often it was changed in place."""
    return versions_of([leaf for leaf in tree_leaves(loaded) if isinstance(leaf, Tensor)])


def _places(microbatch: Microbatch, batch: Batch) -> Tensor:
    """Return the index in the batch of each row of a microbatch, (rows,).

    Rows repeat samples if a microbatch has fewer samples than rows. A repeated row, or one of a microbatch without
    samples, does not count: it gets the index B, after the last sample.
    """
    samples, rows = microbatch.samples, microbatch.rows
    sample = np.arange(rows) * samples // rows  # (rows,): the sample in each row, as `Deal.positions` repeats them
    is_repeated = np.diff(sample, prepend=-1) == 0  # (rows,). -1 differs from the first sample, which is 0
    counts = ~is_repeated & (samples > 0)
    return torch.from_numpy(np.where(counts, microbatch.start - batch.start + sample, batch.batch_size))


def _gather(
    parts: Sequence[Sequence[Tensor]], places: Sequence[Tensor], batch: Batch, backend: Backend
) -> list[Tensor]:
    """Gather the rows of all ranks, and return the tensors of the whole batch, (B, ...) each.

    Floats are in at least float32. Each rank writes its rows into zeros, and the ranks sum the results.

    Args:
        parts: for each microbatch of this rank, its tensors, (rows, ...) each.
        places: for each microbatch, the indices of its rows in the batch, (rows,). A row that does not count has index
            B, and is written into an additional row, which is cut off.
        batch: the update.
        backend: how the ranks communicate.
    """
    indices, sums = torch.cat([*places]), []
    for column_of_parts in zip(*parts, strict=True):  # the same tensor of each microbatch
        rows = torch.cat([*column_of_parts]).to(indices.device)
        sent = rows.to(torch.uint8) if rows.dtype == torch.bool else rows  # bools cannot be summed
        sums.append(sent.new_zeros((batch.batch_size + 1, *rows.shape[1:])).index_copy_(0, indices, sent))
    backend.mark_step()  # graphs so far may differ between ranks, but that of the sum must not
    backend.all_reduce_sum(sums)  # each row comes from one rank
    backend.mark_step()
    gathered = []
    for column_of_parts, column in zip(zip(*parts, strict=True), sums, strict=True):
        dtype = column_of_parts[0].dtype
        wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
        gathered.append(column[: batch.batch_size].to(wide))
    return gathered


def _evaluate(
    loss: Callable[..., Tensor],
    by_position: Sequence[Tensor],
    by_name: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
) -> Tensor:
    """Return the user's loss of the batch, 0-D, with its graph, by which embeddings can be differentiated."""
    for embeddings in (*by_position, *by_name.values()):
        embeddings.requires_grad_(embeddings.is_floating_point())
    with torch.set_grad_enabled(True):
        value = loss(*by_position, **by_name, **labels)
    requirement, remedy = "loss must return a tensor with one element", "return the mean over the batch"
    if not isinstance(value, Tensor):
        raise type_error(requirement, value, remedy)
    if value.numel() != 1:
        raise value_error(requirement, f"one of shape {tuple(value.shape)}", remedy)
    if not value.requires_grad:
        raise ValueError(
            "loss must depend on the embeddings of the batch, but what it returned has no gradient; compute it from "
            "its arguments, by functions of torch"
        )
    return value.reshape(())


def _differentiate(
    value: Tensor, whole: Sequence[Tensor], optimizers: Iterable[CustomOptimizer], scaler: GradScaler | None
) -> tuple[list[Tensor | None], list[tuple[Tensor, Tensor]]]:
    """Return the gradients of the loss by the tensors in `whole`, None for integers, and by parameters of the loss.

    The latter are pairs of a parameter, such as a temperature, and its gradient. Gradients are computed at the scale of
    a `GradScaler`, and divided by it.
    """
    parameters = [
        parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    ]
    trained = [tensor for tensor in parameters if tensor.requires_grad and not isinstance(tensor, DTensor)]
    floats = [column for column in whole if column.requires_grad]
    scaled = value if scaler is None else scaler.scale(value)
    scale = None if scaler is None else scaler.scale(torch.ones_like(value))
    unscaled = [
        gradient if gradient is None or scale is None else gradient / scale.to(gradient.device)
        for gradient in torch.autograd.grad(scaled, [*floats, *trained], allow_unused=True)
    ]
    remaining = iter(unscaled)  # first of the float columns, then of the parameters
    gradients = [next(remaining) if column.requires_grad else None for column in whole]
    pairs = zip(trained, remaining, strict=True)
    return gradients, [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
