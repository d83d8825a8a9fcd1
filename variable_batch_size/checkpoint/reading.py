"""Read a checkpoint: what a rank has of it, each file at most once, verified, and without executing code from it.

Ranks that restore choose the first checkpoint together that is intact on all of them.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from variable_batch_size._validation import value_error
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.checkpoint import format, rng_states, tensor_file
from variable_batch_size.checkpoint.format import Json, VersionError
from variable_batch_size.checkpoint.manifest import (
    DAMAGE,
    extent_of,
    extents_of,
    facts_of,
    files_of,
    is_damage,
    opened,
    sealed_manifest,
)
from variable_batch_size.checkpoint.object_store import folder_at
from variable_batch_size.checkpoint.shards import Part, placed
from variable_batch_size.checkpoint.tensor_file import Extent, FileEntry

SAMPLER = "sampler"  # name of a part


@final
class DamagedError(ValueError):
    """A checkpoint is not intact; the message says why.

    Args:
        why: what is wrong.
        seal: checksum of its manifest; "" if that cannot be read.
    """

    def __init__(self, why: str, seal: str = "") -> None:
        super().__init__(why)
        self.seal = seal


def read_checkpoint(path: str | os.PathLike[str], *, best: bool = False) -> dict[str, Any]:
    """Return the contents of a checkpoint in host memory, whichever number of files it has.

    It reads each file once, verifies its checksum and executes no code from it. The state of the model is
    ``read_checkpoint("runs/a")["parts"]["model"]``.

    Args:
        path: the folder of the training, of which the newest intact checkpoint is read; or that of a checkpoint, such
            as `checkpoint.latest`.
        best: whether to read the best checkpoint of the training, by the criterion with which the newest of them was
            reported. One that is damaged is skipped with a RuntimeWarning.

    Returns:
        The state dicts by name under "parts", the host RNG states by rank under "rng", and what `checkpoint.json` says
        of the training, as `updates` and `library`, under "facts".

    Raises:
        ValueError: if there is no intact checkpoint, with what is wrong; or `best` is True and no value was reported.
    """
    folder = folder_at(path)
    if not folder.path.exists():
        raise value_error("path must be the folder of a checkpoint or of a training", path, "there is no such folder")
    within = folder.candidates(best=best)
    if best and not within:
        requirement = "best=True needs the folder of a training with a reported value"
        raise value_error(requirement, path, 'pass best="min:loss" to its Checkpoint, and call report(loss=...)')
    damaged: list[str] = []
    for candidate in within or [folder.path]:
        try:
            contents = read_verified(candidate)[0]
        except DamagedError as error:
            damaged.append(f"{candidate} ({error})")
            continue
        if damaged:
            message = f"Skipped damaged checkpoints: {', '.join(damaged)}; reading {candidate}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return contents
    requirement = "path must be the folder of an intact checkpoint, or of a training that has one"
    raise value_error(requirement, ", ".join(damaged), "pass another one")


def read_verified(path: Path, likes: Mapping[str, DTensor] | None = None) -> tuple[dict[str, Any], str]:
    """Return the contents of a checkpoint and its checksum.

    Args:
        path: its folder.
        likes: sharded tensors, by the names of those that are to be sharded likewise, or by what these begin with
            before the last "/". Only the parts that this rank has are read.

    Raises:
        VersionError: if it has a version of the format that this library does not know.
        DamagedError: if it is missing or damaged.
    """
    try:
        manifest = sealed_manifest(path)
    except VersionError as error:
        raise VersionError(f"Checkpoint {path} cannot be read: {error}; install a newer variable_batch_size") from None
    except DAMAGE as error:
        raise _damaged(error, path, "the manifest") from None
    try:
        found = {name: _Found.of(name, facts, likes or {}) for name, facts in manifest["tensors"].items()}
        wanted = _chunks(found)
        for file in files_of(manifest):
            if file.name in wanted:
                _read(path, file, extents_of(manifest, file), wanted[file.name], found)
        tensors = {name: tensor.whole() for name, tensor in found.items()}
        parts = {name: format.decode(part, tensors.__getitem__) for name, part in manifest["state"].items()}
        rng = [rng_states.as_text(tensor) for tensor in format.decode(manifest[format.RANDOM], tensors.__getitem__)]
    except DamagedError as error:
        error.seal = manifest["seal"]
        raise
    except (*DAMAGE, RuntimeError) as error:  # another program can have published any content with a valid checksum
        raise _damaged(error, path, "the manifest", manifest["seal"]) from None
    return {"parts": parts, "rng": rng, "facts": facts_of(manifest)}, manifest["seal"]


@final
class _Found:
    """A tensor, or the part of one that this rank has, while it is read.

    Args:
        facts: what the JSON says of it.
        like: how it is sharded; None if it is not.
    """

    def __init__(self, facts: Mapping[str, Json], like: DTensor | None) -> None:
        self.facts, self._like = facts, like
        self.part = Part.whole(facts["shape"]) if like is None else Part.of(like)
        self._tensor: Tensor | None = None
        self._missing = math.prod(self.part.shape)

    @staticmethod
    def of(name: str, facts: Mapping[str, Json], likes: Mapping[str, DTensor]) -> _Found:
        like = likes.get(name, likes.get(name.rpartition("/")[0]))
        return _Found(facts, like if like is not None and [*like.shape] == facts["shape"] else None)

    def place(self, tensor: Tensor, part: Part, common: Part) -> None:
        """Take what a chunk has of this part."""
        self._missing -= math.prod(common.shape)
        if part == self.part:
            self._tensor = tensor
            return
        if self._tensor is None:
            self._tensor = torch.empty(self.part.shape, dtype=tensor.dtype)
        self._tensor[common.slices(self.part)] = tensor[common.slices(part)]

    def whole(self) -> Tensor:
        """Return it.

        Raises:
            ValueError: if a part of it was in no file.
        """
        if self._missing:
            raise ValueError("a part of a tensor is in no file")
        if self._tensor is None:  # it has no elements
            self._tensor = torch.empty(self.part.shape, dtype=format.DTYPES[self.facts["dtype"]])
        return self._tensor if self._like is None else placed(self._tensor, self._like)


def _chunks(found: Mapping[str, _Found]) -> dict[str, list[tuple[Extent, str, Part, Part]]]:
    """Return what this rank needs of each file: where it has which part of which tensor, and what of it is needed."""
    wanted: dict[str, list[tuple[Extent, str, Part, Part]]] = {}
    for name, tensor in found.items():
        for chunk in tensor.facts["chunks"]:
            cut = "shape" in chunk
            part = Part(tuple(chunk["offset"]), tuple(chunk["shape"])) if cut else Part.whole(tensor.facts["shape"])
            if (common := part.overlap(tensor.part)) is not None:
                wanted.setdefault(chunk["file"], []).append((extent_of(chunk), name, part, common))
    return wanted


def _read(
    path: Path, entry: FileEntry, extents: Sequence[Extent], wanted: list[Any], found: Mapping[str, _Found]
) -> None:
    try:
        with opened(path / entry.name) as file:
            tensor_file.check(file, entry, extents)
            for extent, name, part, common in sorted(wanted):
                facts = found[name].facts
                facts = facts if [*part.shape] == facts["shape"] else {"dtype": facts["dtype"], "shape": part.shape}
                found[name].place(tensor_file.read(file, extent, facts), part, common)
    except OSError as error:
        raise _damaged(error, path, entry.name) from None
    except ValueError:
        raise DamagedError(f"checksum mismatch of {entry.name}") from None


def _damaged(error: Exception, path: Path, what: str, seal: str = "") -> Exception:
    """Return that a checkpoint is damaged; or the error itself, if the store cannot be reached."""
    if not is_damage(error, path):
        return error
    return DamagedError(f"{what} is {'missing' if isinstance(error, FileNotFoundError) else 'unreadable'}", seal)


# A checkpoint that a training restores. ------------------------------------------------------------------------------


@final
class StoredState(NamedTuple):
    """The contents of an intact checkpoint."""

    path: Path
    checksum: str  # of all files
    parts: dict[str, Any]  # state dicts by name
    rng_states: list[str]  # by rank
    batch_size: int = 0  # of the last update; 0: unknown
    reads_epoch: bool = True  # whether the loop had begun to read the epoch of the position

    @property
    def world(self) -> int:
        """Number of ranks that have saved it."""
        return len(self.rng_states)

    @staticmethod
    def read(path: Path, likes: Mapping[str, DTensor]) -> StoredState:
        """Return the contents of the checkpoint at `path`, with the parts of sharded tensors that this rank has.

        Args:
            path: its folder.
            likes: how tensors are sharded, by their names or the names that theirs begin with.

        Raises:
            DamagedError: if it is not intact.
        """
        state, checksum = read_verified(path, likes)
        known = {name: state["facts"][name] for name in ("batch_size", "reads_epoch") if name in state["facts"]}
        return StoredState(path, checksum, state["parts"], state["rng"], **known)

    def check_parts(self, names: Iterable[str], strict: bool) -> None:
        """Check that the checkpoint has exactly these parts, but for the sampler: the optimizer has its state, too.

        Unless `strict`, parts that are not in it begin anew, but for the model.

        Raises:
            ValueError: if a part is missing or was not passed.
        """
        saved, passed = {*self.parts} - {SAMPLER}, {*names} - {SAMPLER}
        if not strict:
            passed &= {"model", *saved}
        missing = [f"{name} is not in it" for name in sorted(passed - saved)]
        unknown = [f"{name} is in it and was not passed" for name in sorted(saved - passed)]
        if missing or unknown:
            raise ValueError(
                f"Checkpoint {self.path} has other parts than this training: {' and '.join(missing + unknown)}; pass "
                f"the parts that were saved, under the same names" + (", or strict=False" if not unknown else "")
            )

    def check_outside(self, optimizer: str, parameters: Mapping[int, Tensor]) -> None:
        """Check that an optimizer in the checkpoint had these parameters that no module among the parts has.

        Raises:
            ValueError: if it had others, or of other shapes.
        """
        saved = {number: tuple(one.shape) for number, one in self.parts[optimizer].get("outside", {}).items()}
        own = {number: tuple(one.shape) for number, one in parameters.items()}
        if saved != own:
            raise ValueError(
                f"Checkpoint {self.path} must have the parameters of the {optimizer} that no module among its parts "
                f"has, but it has those with the shapes {saved} by their numbers, and here they are {own}; pass the "
                f"modules that were passed when it was saved"
            )

    def check_model(self, state: dict[str, Any], warn: bool = True) -> None:
        """Check that the model in the checkpoint has the tensors of this state dict, in the same shapes.

        Args:
            state: state dict of the model that will be restored.
            warn: whether to warn of tensors with another dtype, to which torch converts them when it loads them.

        Raises:
            ValueError: if a tensor is missing or has another shape or name.
        """
        saved, own = _shapes(self.parts["model"]), _shapes(state)
        for name in {**own, **saved}:
            if saved.get(name) != own.get(name):
                raise ValueError(
                    f"Checkpoint {self.path} is of another model: the shape of {name} is {saved.get(name, 'missing')} "
                    f"in it and {own.get(name, 'missing')} here; create the model that was saved"
                )
        saved_dtypes, own_dtypes = _dtypes(self.parts["model"]), _dtypes(state)
        different = [name for name in own if saved_dtypes[name] != own_dtypes[name]]
        if different and warn:
            name, others = different[0], f" (and {len(different) - 1} others)" if len(different) > 1 else ""
            warnings.warn(
                f"Checkpoint {self.path} is converted to other dtypes: {name}{others} is {saved_dtypes[name]} in it "
                f"and {own_dtypes[name]} here, so that the training does not resume exactly; create the model with the "
                f"saved dtypes before the optimizer, for example by model.to({saved_dtypes[name]})",
                UserWarning,
                stacklevel=6,  # at restore()
            )


def read_first(
    paths: Iterable[Path], likes: Mapping[str, DTensor], agreement: Agreement, what: str
) -> tuple[StoredState | None, dict[str, str]]:
    """Return the first of these checkpoints that is intact on all ranks, and what is wrong with earlier ones, by name.

    Raises:
        RuntimeError: on every rank, if ranks read different checkpoints.
    """
    damaged = dict[str, str]()
    for path in paths:
        found = _read_same(path, likes, agreement, what)
        if isinstance(found, StoredState):
            return found, damaged
        damaged[path.name] = str(found)
    return None, damaged


def _read_same(path: Path, likes: Mapping[str, DTensor], agreement: Agreement, what: str) -> StoredState | DamagedError:
    read: list[StoredState | DamagedError] = []

    def seal() -> str:
        try:
            stored = StoredState.read(path, likes)
        except DamagedError as error:
            read.append(error)
            return f"{error.seal} {error}"
        read.append(stored)
        return f"{stored.checksum} "

    seals, reasons = zip(*(text.split(" ", 1) for text in agreement.run_on_all(what, seal)), strict=True)
    for rank, found in enumerate(seals):
        if found != seals[0]:
            raise RuntimeError(
                f"Checkpoint {path} on rank {rank} differs from the one on rank 0, or is damaged on one of them; pass "
                f"a folder that all ranks share"
            )
    reason = next(filter(None, reasons), "")  # a rank reads only what it has of sharded tensors
    return DamagedError(reason) if reason else read[0]


def _dtypes(state: dict[str, Any]) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in state.items() if isinstance(value, Tensor)}


def _shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
