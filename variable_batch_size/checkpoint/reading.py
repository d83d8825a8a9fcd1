"""Read a checkpoint: what a rank has of it, each file at most once, verified, and without executing code from it.

Ranks that restore choose the first checkpoint together that is intact on all of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from variable_batch_size._validation import value_error
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.checkpoint.folder import MANIFEST, Folder, VersionError, manifests
from variable_batch_size.checkpoint.rank_state import facts_of_tensors, name_on
from variable_batch_size.checkpoint.shards import Part, placed_like
from variable_batch_size.checkpoint.storage import DAMAGE
from variable_batch_size.checkpoint.stored import StoredState
from variable_batch_size.checkpoint.values import DTYPES, decode
from variable_batch_size.world import World

MANY = 100  # ranks: from here on rank 0 reads the small files for all, instead of each rank all of them
_STATES = ("state", "random", "tensors", "file", "seal", "name", "ranks")


@final
class DamagedError(ValueError):
    """A checkpoint is not intact; the message says why.

    Args:
        why: what is wrong.
        seal: checksum of its small files; "" if they cannot be read.
    """

    def __init__(self, why: str, seal: str = "") -> None:
        super().__init__(why)
        self.seal = seal


@final
class Contents(NamedTuple):
    """What a rank has read of a checkpoint.

    Attributes:
        parts: state dicts by name.
        rng: states of the hosts' random numbers, by rank.
        facts: what its JSON says of the training.
        seal: checksum of its small files.
        of_ranks: names of what each rank had of its own and is replaced by what rank 0 had.
    """

    parts: dict[str, Any]
    rng: list[str]
    facts: dict[str, Any]
    seal: str
    of_ranks: list[str]


def read_checkpoint(path: str | os.PathLike[str], *, best: bool = False) -> dict[str, Any]:
    """Return the contents of a checkpoint in host memory, whichever number of files it has.

    It reads each file once, verifies its checksum and executes no code from it. The state of the model is
    ``read_checkpoint("runs/a")["parts"]["model"]``.

    Args:
        path: the folder of the training, whose newest intact checkpoint is read; or that of a checkpoint, such
            as `checkpoint.latest`.
        best: whether to read the best checkpoint of the training, by the criterion with which the newest of them was
            reported. One that is damaged is skipped with a RuntimeWarning.

    Returns:
        The state dicts by name under "parts", the host RNG states by rank under "rng", and what the JSON of rank 0 says
        of the training, as `updates` and `library`, under "facts".

    Raises:
        ValueError: if there is no intact checkpoint, with what is wrong; or `best` is True and no value was reported.
    """
    folder = Folder(path)
    if not (inside := folder.storage.names()):
        raise value_error("path must be the folder of a checkpoint or of a training", path, "nothing is there")
    names = folder.candidates(best=best)
    if best and not names:
        requirement = "best=True needs the folder of a training with a reported value"
        raise value_error(requirement, path, 'pass best="min:loss" to its Checkpoint, and call report(loss=...)')
    is_checkpoint = not names and MANIFEST in inside
    if is_checkpoint:
        folder, names = folder_and_name(folder)
    damaged, tried = dict[str, str](), set[str]()
    while new := [name for name in names if name not in tried]:
        for name in new:
            tried.add(name)
            try:
                contents = read_verified(folder, name)
            except DamagedError as error:
                damaged[name] = f"{folder.storage.at(name)} ({error})"
                continue
            if damaged := {name: text for name, text in damaged.items() if name in folder.names()}:  # not deleted since
                message = (
                    f"Skipped damaged checkpoints: {', '.join(damaged.values())}; reading {folder.storage.at(name)}"
                )
                warnings.warn(message, RuntimeWarning, stacklevel=2)
            return {"parts": contents.parts, "rng": contents.rng, "facts": contents.facts}
        if not is_checkpoint:  # a training that goes on deletes earlier ones
            names = folder.candidates(best=best)
    requirement = "path must be the folder of an intact checkpoint, or of a training that has one"
    raise value_error(requirement, ", ".join(damaged.values()) or path, "pass another one")


def folder_and_name(folder: Folder) -> tuple[Folder, list[str]]:
    """Return the folder in which a checkpoint is, and its name there."""
    parent, _, name = folder.storage.location.rpartition("/")
    return Folder(parent or "/"), [name]


def facts_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the JSON of rank 0 says of the training, without the states and where they are."""
    return {name: value for name, value in manifest.items() if name not in _STATES}


def read_verified(
    folder: Folder,
    name: str,
    likes: Mapping[str, DTensor] | None = None,
    texts: list[str] | None = None,
    world: World | None = None,
    *,
    every: bool = False,
) -> Contents:
    """Return the contents of a checkpoint.

    Args:
        folder: in which it is.
        name: its name.
        likes: sharded tensors, by the names of those that are to be sharded likewise, or by what these begin with
            before a "/". Only the parts that this rank has are read.
        texts: its small files, if they were read before.
        world: the rank whose own state is read, if the checkpoint is of a world of this size; otherwise rank 0's.
        every: whether the tensors are verified that other ranks had of their own, too.

    Raises:
        VersionError: if it has a version of the format that this library does not know.
        DamagedError: if it is missing or damaged.
    """
    seal, what = "", "the JSON of a rank"
    try:
        ranks = manifests(folder.read_texts(name) if texts is None else texts, name)
        seal = hashlib.sha256("".join(manifest["seal"] for manifest in ranks).encode()).hexdigest()
        states = ranks[0]["state"]
        described = facts_of_tensors(ranks)
        name_here = dict[str, str]()
        owns = {rank: manifest["own"] for rank, manifest in enumerate(ranks) if "own" in manifest}
        resumes = world is not None and world.size == len(ranks[0]["random"])
        if resumes and world is not None and (own_state := owns.get(world.rank)):
            name_here = {key: name_on(world.rank, key) for key in own_state["tensors"]}
            states = {**states, **own_state["state"]}
        needed = {key for key in ranks[0]["tensors"] if key not in name_here} | {*name_here.values()}
        tensors = _Tensors({key: facts for key, facts in described.items() if every or key in needed}, likes or {})
        dtypes = {key: facts["dtype"] for key, facts in described.items()}
        for rank, file in enumerate(manifest["file"] for manifest in ranks):
            if file and (wanted := tensors.wanted(file["chunks"])):
                what = f"tensors-{rank}.safetensors"
                folder.read(name, rank, file, dtypes, wanted, tensors.add)
        what = "the JSON of a rank"
        whole = tensors.whole()
        parts = {key: decode(state, lambda name: whole[name_here.get(name, name)]) for key, state in states.items()}
        of_ranks = {key for own_state in owns.values() for kind in own_state.values() for key in kind if not resumes}
        random = [str(text) for text in ranks[0]["random"]]
        return Contents(parts, random, facts_of(ranks[0]), seal, sorted(of_ranks))
    except VersionError as error:
        raise VersionError(f"Checkpoint {folder.storage.at(name)} cannot be read: {error}") from None
    except DAMAGE as error:
        if not folder.storage.is_damage(error):
            raise
        if isinstance(error, FileNotFoundError):
            raise DamagedError(f"{what} is missing", seal) from None
        how = "checksum mismatch of {}" if isinstance(error, ValueError) else "{} is unreadable"
        raise DamagedError(how.format(what), seal) from None


def _like(name: str, likes: Mapping[str, DTensor]) -> DTensor | None:
    """Return the sharded tensor of a name, or of the longest part of it before a "/": a state may be nested."""
    while name and name not in likes:
        name = name.rpartition("/")[0]
    return likes.get(name)


@final
class _Tensors:
    """The tensors of a checkpoint, or the parts of them that this rank has, while they are read.

    Args:
        facts: what the JSON says of them, by name.
        likes: see `read_verified`.
    """

    def __init__(self, facts: Mapping[str, Any], likes: Mapping[str, DTensor]) -> None:
        self._facts, self._read = facts, dict[str, Tensor]()
        self._likes, self._parts = dict[str, DTensor](), dict[str, Part]()
        for name, described in facts.items():
            like = _like(name, likes)
            if like is not None and [*like.shape] == described["shape"]:
                self._likes[name] = like
            self._parts[name] = (
                Part.on_rank(like) if name in self._likes and like is not None else Part.whole(described["shape"])
            )
        self._missing = {name: math.prod(part.shape) for name, part in self._parts.items()}

    def wanted(self, chunks: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return the tensors of a file that this rank needs, wholly or in part."""
        parts = {name: Part(tuple(chunk["offset"]), tuple(chunk["shape"])) for name, chunk in chunks.items()}
        return [name for name, part in parts.items() if name in self._parts and part.overlap(self._parts[name])]

    def add(self, name: str, part: Part, tensor: Tensor) -> None:
        """Take a part of a tensor."""
        wanted = self._parts[name]
        common = part.overlap(wanted)
        if common is None:
            return
        self._missing[name] -= math.prod(common.shape)
        if part == wanted:
            self._read[name] = tensor
            return
        if name not in self._read:
            self._read[name] = torch.empty(wanted.shape, dtype=tensor.dtype)
        self._read[name][common.slices(wanted)] = tensor[common.slices(part)]

    def whole(self) -> dict[str, Tensor]:
        """Return the tensors, sharded where they are to be.

        Raises:
            ValueError: if a part of one is in no file.
        """
        if any(self._missing.values()):
            raise ValueError("a part of a tensor is in no file")
        tensors = dict[str, Tensor]()
        for name, facts in self._facts.items():
            tensor = self._read.get(name)
            if tensor is None:  # it has no elements
                tensor = torch.empty(self._parts[name].shape, dtype=DTYPES[facts["dtype"]])
            if name in self._likes:
                tensor = placed_like(tensor, self._likes[name])
            elif "stride" in facts:
                tensor = torch.empty_strided(facts["shape"], facts["stride"], dtype=tensor.dtype).copy_(tensor)
            tensors[name] = tensor
        return tensors


# Ranks that restore together. ----------------------------------------------------------------------------------------


def read_first(
    folder: Folder, names: Iterable[str], likes: Mapping[str, DTensor], agreement: Agreement, call: str
) -> tuple[str, StoredState | None, dict[str, str]]:
    """Return the first of these checkpoints that is intact on all ranks, and what is wrong with earlier ones, by name.

    Every rank calls it, in the `call` that an error names.

    Raises:
        RuntimeError: on every rank, if ranks read different checkpoints.
    """
    damaged = dict[str, str]()
    for name in names:
        outcome = _read_same(folder, name, likes, agreement, call)
        if isinstance(outcome, Contents):
            facts = {key: outcome.facts[key] for key in ("batch_size", "reads_epoch") if key in outcome.facts}
            stored = StoredState(folder.storage.at(name), outcome.parts, outcome.rng, outcome.of_ranks, **facts)
            return name, stored, damaged
        damaged[name] = str(outcome)
    return "", None, damaged


def _read_same(
    folder: Folder, name: str, likes: Mapping[str, DTensor], agreement: Agreement, call: str
) -> Contents | DamagedError:
    """Return what this rank has read of a checkpoint, or the damage that one rank has found in it."""
    read, texts = list[Contents | DamagedError](), None
    if agreement.world.size >= MANY:
        texts = json.loads(agreement.run_on_rank_0(call, lambda: _texts_as_json(folder, name)))

    def seal() -> str:
        try:
            contents = read_verified(folder, name, likes, texts, agreement.world)
        except DamagedError as error:
            read.append(error)
            return f"{error.seal} {error}"
        read.append(contents)
        return f"{contents.seal} "

    seals, reasons = zip(*(text.split(" ", 1) for text in agreement.run_on_all(call, seal)), strict=True)
    for rank, seal_of_rank in enumerate(seals):
        if seal_of_rank != seals[0]:
            raise RuntimeError(
                f"Checkpoint {folder.storage.at(name)} on rank {rank} differs from the one on rank 0, or is damaged on "
                f"one of them; pass a folder that all ranks share"
            )
    reason = next(filter(None, reasons), "")  # a rank reads only what it has of sharded tensors
    return DamagedError(reason) if reason else read[0]


def _texts_as_json(folder: Folder, name: str) -> str:
    """Return the small files of a checkpoint as JSON; no text if they are damaged, which each rank then finds."""
    try:
        return json.dumps(folder.read_texts(name))
    except DAMAGE as error:
        if not folder.storage.is_damage(error):
            raise
        return json.dumps([""])
