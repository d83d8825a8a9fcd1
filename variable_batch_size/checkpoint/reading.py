"""Read the state of a training from a checkpoint: each file at most once, verified, without executing code from it.

Ranks that restore choose the first checkpoint together that is intact on all of them.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import value_error
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.checkpoint.contents import (
    MANIFEST,
    Contents,
    DamagedError,
    describe_tensors,
    facts_of,
    name_on,
    read_manifests,
    read_texts,
    seal_of,
    stream_tensors,
)
from variable_batch_size.checkpoint.folder import Folder, is_name
from variable_batch_size.checkpoint.shards import Part, placed_like
from variable_batch_size.checkpoint.storage import DAMAGE, Storage
from variable_batch_size.checkpoint.tensor_file import DTYPES
from variable_batch_size.checkpoint.values import decode
from variable_batch_size.world import World

MANY_RANKS = 100  # in a world of this size or more, rank 0 reads the small files and sends them to all ranks


def read_contents(
    storage: Storage,
    name: str,
    likes: Mapping[str, DTensor] | None = None,
    *,
    texts: list[str] | None = None,
    world: World | None = None,
    only: str = "",
) -> Contents:
    """Return the contents of a checkpoint.

    Args:
        storage: the folder in which it is.
        name: its name.
        likes: sharded tensors, by name in the checkpoint: a tensor with this name, or with one that continues it after
            a "/", is returned sharded in the same way. Only the parts that this rank has are read.
        texts: what `read_texts` returned, if it was called before.
        world: this rank. If the checkpoint was saved in a world of the same size, this rank gets its own version of
            what differed between ranks; otherwise it gets rank 0's.
        only: the part that is wanted. Default: all.

    Raises:
        VersionError: if it has a version of the format that this library does not know.
        DamagedError: if it is missing or damaged.
    """
    manifests = read_manifests(storage, name, texts)  # the JSON of each rank
    first, seal = manifests[0], seal_of(manifests)
    try:
        states = {key: state for key, state in first["state"].items() if only in ("", key)}
        # What differed between ranks: the states and tensors that each rank has saved for itself, by rank.
        own_by_rank = {rank: manifest["own"] for rank, manifest in enumerate(manifests) if "own" in manifest}
        same_size = world is not None and world.size == len(first["random"])
        own_names = dict[str, str]()  # of the tensors of which each rank has its own: names in the files of this rank
        if same_size and world is not None and (own := own_by_rank.get(world.rank)):
            own_names = {key: name_on(world.rank, key) for key in own["tensors"]}
            states |= own["state"]
        described, wanted = describe_tensors(manifests), dict[str, _Wanted]()
        for key in {**first["tensors"], **own_names}:
            if only in ("", key.partition("/")[0]):
                key_in_files = own_names.get(key, key)
                wanted[key_in_files] = _Wanted(described[key_in_files], _like(key_in_files, likes or {}))

        def wants(key: str, part: Part) -> object:
            return key in wanted and part.overlap(wanted[key].part)

        for key, part, tensor in stream_tensors(storage, name, manifests, wants):
            wanted[key].add(part, tensor)
        tensors = {key: tensor.whole() for key, tensor in wanted.items()}
        parts = {key: decode(state, lambda key: tensors[own_names.get(key, key)]) for key, state in states.items()}
        replaced = set[str]()  # by what rank 0 had
        if not same_size:
            for own in own_by_rank.values():
                replaced |= {*own["state"], *own["tensors"]}
        rng_states = [str(text) for text in first["random"]]
        return Contents(parts, rng_states, facts_of(first), seal, sorted(replaced))
    except DamagedError:
        raise
    except DAMAGE as error:  # wrong contents with a valid checksum, as another program can have written them
        if not storage.is_damage(error):
            raise
        raise DamagedError("checksum mismatch of the JSON of a rank", seal) from None


def _like(name: str, likes: Mapping[str, DTensor]) -> DTensor | None:
    """Return the tensor in `likes` like which a tensor of a checkpoint is to be sharded; None: it is read whole.

    It is the one under the tensor's name, or under the longest prefix of it before a "/": the state of an optimizer has
    names such as "optimizer/state/weight/exp_avg", and is sharded like the parameter under "optimizer/state/weight".
    """
    while name and name not in likes:
        name = name.rpartition("/")[0]
    return likes.get(name)


@final
class _Wanted:
    """A tensor that is assembled from the files that have parts of it: the whole tensor, or the part of this rank.

    Args:
        facts: its dtype, shape and stride, as the JSON of the checkpoint has them.
        like: the sharded tensor in whose place it is loaded; only the part on this rank is read. One of another shape
            is ignored: the tensor is read whole, and the load raises an error that names both shapes.

    Attributes:
        part: the part of the tensor that is read.
    """

    def __init__(self, facts: Mapping[str, Any], like: DTensor | None) -> None:
        """Begin with nothing read: which part of the whole tensor is wanted follows from `like`."""
        self._facts = facts
        self._like = like if like is not None and [*like.shape] == facts["shape"] else None
        self.part = Part.whole(facts["shape"]) if self._like is None else Part.on_rank(self._like)
        self._missing_elements = math.prod(self.part.shape)
        self._assembled: Tensor | None = None

    def add(self, part: Part, tensor: Tensor) -> None:
        """Copy what this rank wants of a tensor from a part of it that was read from a file.

        Args:
            part: which part of the whole tensor was read from a file.
            tensor: its values.
        """
        if (common := part.overlap(self.part)) is None:
            return
        self._missing_elements -= math.prod(common.shape)
        if part == self.part:
            self._assembled = tensor
            return
        if self._assembled is None:
            self._assembled = torch.empty(self.part.shape, dtype=tensor.dtype)
        self._assembled[common.slices(self.part)] = tensor[common.slices(part)]

    def whole(self) -> Tensor:
        """Return the assembled tensor: a DTensor if `like` is one of its shape, otherwise with the saved strides.

        Raises:
            ValueError: if a part of it is in no file.
        """
        if self._missing_elements:
            raise ValueError("a part of a tensor is in no file")
        tensor = self._assembled
        if tensor is None:  # it has no elements
            tensor = torch.empty(self.part.shape, dtype=DTYPES[self._facts["dtype"]])
        if self._like is not None:
            return placed_like(tensor, self._like)
        if "stride" in self._facts:
            strided = torch.empty_strided(self._facts["shape"], self._facts["stride"], dtype=tensor.dtype)
            return strided.copy_(tensor)
        return tensor


# In one process. -----------------------------------------------------------------------------------------------------


def read_checkpoint(path: str | os.PathLike[str], *, best: bool = False) -> dict[str, Any]:
    """Return the contents of a checkpoint in host memory, whichever number of files it has.

    It reads each file once, verifies its checksum and executes no code from it. The state of the model is
    ``read_checkpoint("runs/a")["parts"]["model"]``.

    Args:
        path: folder of the training, to read its newest intact checkpoint; or folder of a checkpoint, such as
            `checkpoint.latest`.
        best: whether to read the best checkpoint of the training, by the criterion with which the newest of them was
            reported. One that is damaged is skipped with a RuntimeWarning.

    Returns:
        The state dicts by name under "parts", the host RNG states by rank under "rng", and what the JSON of rank 0 says
        of the training, as `updates` and `library`, under "facts".

    Raises:
        ValueError: if there is no intact checkpoint, with what is wrong; or `best` is True and no value was reported.
    """
    contents = read_newest(path, best=best)
    return {"parts": contents.parts, "rng": contents.rng, "facts": contents.facts}


def read_newest(path: str | os.PathLike[str], *, best: bool = False, only: str = "") -> Contents:
    """Return what `read_checkpoint` returns, as `Contents`; `only`: name of the one part that is read, "": all.

    It tries one checkpoint after the other until one is intact, and warns of the damaged ones.
    """
    folder, names, is_checkpoint = open_folder(path, best=best)
    if best and (is_checkpoint or not names):
        requirement = "best=True needs the folder of a run with a reported value"
        raise value_error(requirement, path, 'pass best="min:loss" to its Checkpoint, and call report(loss=...)')
    damaged = {} if is_checkpoint else folder.lost(best=best)
    while names := [name for name in names if name not in damaged]:
        try:
            contents = read_contents(folder.storage, names[0], only=only)
        except DamagedError as error:  # perhaps because a training has saved meanwhile, and deleted what was listed
            damaged[names[0]] = str(error)
            names = [] if is_checkpoint else folder.candidates(best=best)
            continue
        # Without those that the training has deleted meanwhile, as it should: they were not damaged.
        still_listed = {*folder.names(), *folder.lost(best=best)} if damaged else {}
        skipped = [f"{folder.storage.at(name)} ({why})" for name, why in damaged.items() if name in still_listed]
        if skipped:
            message = f"Skipped damaged checkpoints: {', '.join(skipped)}; reading {folder.storage.at(names[0])}"
            warnings.warn(message, RuntimeWarning, stacklevel=stacklevel_of_user())
        return contents
    reasons = ", ".join(f"{folder.storage.at(name)} ({why})" for name, why in damaged.items())
    requirement = "path must be the folder of an intact checkpoint, or of a run that has one"
    raise value_error(requirement, reasons or path, "pass another one")


def open_folder(path: str | os.PathLike[str], *, best: bool = False) -> tuple[Folder, list[str], bool]:
    """Return a folder, the names of its checkpoints in the order of `candidates`, and whether the path is a checkpoint.

    If it is a checkpoint, the folder is its parent, and its name is the only one.

    Raises:
        ValueError: if nothing is there.
    """
    folder = Folder(path)
    names_inside = folder.storage.names()
    if not names_inside:
        raise value_error("path must be the folder of a checkpoint or of a run", path, "nothing is there")
    names = folder.candidates(best=best)
    parent, _, name = folder.storage.location.rpartition("/")
    is_checkpoint = not names and (MANIFEST in names_inside or is_name(name))
    if not is_checkpoint:
        return folder, names, False
    return Folder(parent or "/"), [name], True


# Ranks that restore together. ----------------------------------------------------------------------------------------


def read_first(
    folder: Folder, names: Iterable[str], likes: Mapping[str, DTensor], agreement: Agreement, call: str
) -> tuple[str, Contents | None, dict[str, str]]:
    """Return the first of these checkpoints that is intact on all ranks, and what is wrong with earlier ones, by name.

    Without an intact one, the name is "" and the contents are None. Every rank calls it, in the `call` that an error
    names.

    Raises:
        RuntimeError: on every rank, if ranks read different checkpoints.
    """
    damaged = dict[str, str]()
    for name in names:
        contents, damage = _read_together(folder, name, likes, agreement, call)
        if not damage:
            return name, contents, damaged
        damaged[name] = damage
    return "", None, damaged


def _read_together(
    folder: Folder, name: str, likes: Mapping[str, DTensor], agreement: Agreement, call: str
) -> tuple[Contents | None, str]:
    """Return what this rank has read of a checkpoint, and the damage that one of the ranks has found, "" if none.

    The damage is the same on all ranks, so that all of them then use the checkpoint, or none does.
    """
    small_files: list[str] | None = None
    if agreement.world.size >= MANY_RANKS:
        small_files = json.loads(agreement.run_on_rank_0(call, lambda: _texts_as_json(folder, name)))
    contents: Contents | None = None

    def read() -> str:
        """Read the checkpoint on this rank, and return a line of text by which the ranks compare what they have read.

        The line is the checksum of `rank-0.json`, which tells checkpoints apart, a space, and what is damaged, if
        anything is.
        """
        nonlocal contents
        try:
            contents = read_contents(folder.storage, name, likes, texts=small_files, world=agreement.world)
        except DamagedError as error:
            return f"{error.seal} {error}"
        return f"{contents.seal} "

    damage = _common_damage(folder.storage.at(name), agreement.run_on_all(call, read))
    return contents, damage


def _common_damage(location: str, answers: Sequence[str]) -> str:
    """Return the damage that the first rank with any has found; "" if all ranks have read the same checkpoint.

    Args:
        location: path or URL of the checkpoint.
        answers: what `read` in `_read_together` returned on each rank.

    Raises:
        RuntimeError: if ranks have read different checkpoints.
    """
    seals, damages = zip(*(text.split(" ", 1) for text in answers), strict=True)  # checksums and damages, by rank
    for rank, seal in enumerate(seals):
        if seal != seals[0]:
            raise RuntimeError(
                f"Checkpoint {location} on rank {rank} differs from the one on rank 0, or is damaged on one of them; "
                f"pass a folder that all ranks share"
            )
    return next(filter(None, damages), "")  # not all ranks need to find it: each reads its parts of sharded tensors


def _texts_as_json(folder: Folder, name: str) -> str:
    """Return the JSON files of a checkpoint as one JSON list of texts, which rank 0 sends to all ranks.

    If one is damaged, it is [""], so that each rank finds the damage.
    """
    try:
        return json.dumps(read_texts(folder.storage, name))
    except DamagedError:
        return json.dumps([""])
