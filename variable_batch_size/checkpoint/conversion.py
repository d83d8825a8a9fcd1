"""A checkpoint as one file of plain states for torch or of weights for safetensors, and the other way round."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE
from typing import Any

import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from variable_batch_size._extras import import_extra
from variable_batch_size._files import replacing_file
from variable_batch_size._validation import type_error, value_error
from variable_batch_size.checkpoint.checks import SAMPLER
from variable_batch_size.checkpoint.folder import Folder
from variable_batch_size.checkpoint.names import with_numbers
from variable_batch_size.checkpoint.reading import read_checkpoint, read_newest
from variable_batch_size.checkpoint.saving import describe, versions
from variable_batch_size.checkpoint.shards import Part
from variable_batch_size.checkpoint.values import encode


def to_torch(checkpoint: str | os.PathLike[str], file: Path, *, best: bool = False) -> None:
    """Write the states of a checkpoint by `torch.save`, which `torch.load(file, weights_only=True)` reads.

    The file has a dict with the state dicts by name, such as "model" and "optimizer"; what this library adds to them,
    and the position of the sampler, is left out.

    Args:
        checkpoint, best: see `read_checkpoint`.
        file: created, or replaced.

    Raises:
        ValueError: if there is no intact checkpoint.
    """
    _check_place(file)
    parts = read_checkpoint(checkpoint, best=best)["parts"]
    states = {name: _as_of_torch(state) for name, state in parts.items() if name != SAMPLER}
    with _replaced(file) as path, path.open("wb") as stream:
        torch.save(states, stream)


def to_safetensors(checkpoint: str | os.PathLike[str], file: Path, *, best: bool = False) -> None:
    """Write the weights and buffers of the model, whole and by its own names, as a file of safetensors.

    Args:
        checkpoint, best: see `read_checkpoint`.
        file: created, or replaced.

    Raises:
        ModuleNotFoundError: if safetensors is not installed.
        ValueError: if there is no intact checkpoint, or the state of the model holds more than dense tensors.
    """
    import_extra("safetensors", "safetensors")
    from safetensors.torch import save_file

    _check_place(file)
    tensors, seen = dict[str, torch.Tensor](), set[int]()
    for name, value in read_newest(checkpoint, best=best, only="model").parts["model"].items():
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            requirement = "a model in a file of safetensors must have only dense tensors in its state"
            raise value_error(requirement, f"{type(value).__name__} at {name}", "use vbs checkpoint to-torch")
        is_tied = id(value) in seen  # written once more: a model loads each of its names, and save_file shares nothing
        seen.add(id(value))
        tensors[name] = value.clone() if is_tied else value.contiguous()
    with _replaced(file) as path:
        save_file(tensors, path, metadata={"format": "pt"})


def _check_place(file: Path) -> None:
    """Raise ValueError unless a file can be written at this path, before a large checkpoint is read for it."""
    if not file.parent.is_dir():
        raise value_error("FILE must be in a folder that there is", file, "create the folder")
    if file.exists() and not file.is_file():
        raise value_error("FILE must be a file", f"{file}, which is a directory or a device", "pass another path")


@contextmanager
def _replaced(file: Path) -> Iterator[Path]:
    """Yield a path at which to write a new file; at the end of the block it takes the place of `file` at once.

    A reader finds the earlier file or the new one, which is flushed to the disk, with the mode that `open()` gives.

    Raises:
        OSError: if it cannot be written; the earlier file is unchanged.
    """
    try:
        with replacing_file(file) as path:
            path.touch()  # so that it has the mode which open() gives to new files
            mode = (file if file.exists() else path).stat().st_mode
            yield path
            path.chmod(S_IMODE(mode))
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    except Exception as error:  # its class depends on the library that writes
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise OSError(
            f"{file} could not be written ({reason}); free disk space, or pass another path (an earlier file is "
            f"unchanged)"
        ) from error


def from_torch(file: Path, folder: str | os.PathLike[str]) -> str:
    """Write a checkpoint of update 0, from which a training begins by `restore(strict=False)`; return its location.

    Args:
        file: what `torch.save` has written: a dict of state dicts by name; "model" is one and "optimizer" may
            be another one, with the state of torch's optimizer.
        folder: of the training that begins, without checkpoints.

    Raises:
        TypeError, ValueError: if the file has something else, or the folder has checkpoints.
    """
    try:
        states = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, LookupError, EOFError, RuntimeError, ValueError) as error:
        requirement = "the file must be one that torch.load(file, weights_only=True) reads"
        remedy = "write state dicts of tensors and plain values, not modules, by torch.save()"
        raise value_error(requirement, f"{file} ({type(error).__name__})", remedy) from error
    _check_state_dicts(states)
    if all(name.startswith("module.") for name in states["model"]):  # of a DistributedDataParallel
        consume_prefix_in_state_dict_if_present(states["model"], "module.")
    checkpoints = Folder(folder)
    tensors = dict[str, torch.Tensor]()
    checkpoints.lock()
    try:
        if checkpoints.names():
            raise value_error("the folder must have no checkpoints", folder, "choose another one")
        encoded = {name: encode(state, name, tensors, {}) for name, state in states.items() if name != SAMPLER}
        position = {"updates": 0, "world": 1, "epoch": 0, "step": 0, "samples": 0, "random": []}
        contents = {"state": encoded, "tensors": {name: describe(tensor) for name, tensor in tensors.items()}}
        checkpoint = checkpoints.begin(0, ranks=1)
        tensor_parts = {name: Part.whole(tensor.shape) for name, tensor in tensors.items()}
        checkpoints.write(checkpoint, 0, tensors, tensor_parts, {**versions(), **position, **contents})
    finally:
        checkpoints.writer.release()
    return checkpoints.storage.at(checkpoint)


def _check_state_dicts(states: Any) -> None:
    """Raise TypeError or ValueError unless these are state dicts by name, with that of a model."""
    requirement = 'the file must have a dict of state dicts, with "model" and perhaps "optimizer"'
    remedy = 'write it by torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)'
    if not isinstance(states, Mapping):
        raise type_error(requirement, states, remedy)
    if non_dicts := [name for name, state in states.items() if not isinstance(state, Mapping)]:
        kinds = ", ".join(f"{name!r}, of type {type(states[name]).__name__}" for name in non_dicts)
        raise TypeError(f"{requirement}, got {kinds}; {remedy}")
    if "model" not in states:
        raise value_error(requirement, ", ".join(map(repr, states)) or "an empty one", remedy)
    for name in (*states, *states["model"]):
        if not isinstance(name, str) or (name in states and "/" in name):
            raise value_error("names of states and tensors must be texts, without / for states", repr(name), remedy)


def _as_of_torch(state: Any) -> Any:
    """Return the state of an optimizer with the keys and numbers that torch gives it; any other state unchanged."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        return state
    return {key: value for key, value in with_numbers(state).items() if key in ("state", "param_groups")}
