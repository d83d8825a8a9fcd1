"""The contents of a checkpoint that is going to be restored, and whether they fit this training."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from variable_batch_size.checkpoint.reading import read_verified

_COMPILED = "_orig_mod."  # what torch.compile inserts into the names of a module


@final
class StoredState(NamedTuple):
    """The contents of an intact checkpoint."""

    path: Path
    checksum: str  # of all files
    parts: dict[str, Any]  # state dicts by name
    rng_states: list[str]  # by rank

    @staticmethod
    def read(path: Path) -> StoredState:
        """Return the contents of the checkpoint at `path`.

        Raises:
            DamagedError: if it is not intact.
        """
        state, checksum = read_verified(path)
        return StoredState(path, checksum, state["parts"], state["rng"])

    def check_parts(self, names: Iterable[str]) -> None:
        """Check that the checkpoint has exactly these parts.

        Raises:
            ValueError: if a part is missing or was not passed.
        """
        saved, passed = set(self.parts), set(names)
        missing = [f"{name} is not in it" for name in sorted(passed - saved)]
        unknown = [f"{name} is in it and was not passed" for name in sorted(saved - passed)]
        if missing or unknown:
            raise ValueError(
                f"Checkpoint {self.path} has other parts than this training: {' and '.join(missing + unknown)}; pass "
                f"the parts that were saved, under the same names"
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
        self._check_compiled(saved, own)
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

    def _check_compiled(self, saved: dict[str, tuple[int, ...]], own: dict[str, tuple[int, ...]]) -> None:
        if saved == own or _uncompiled(saved) != _uncompiled(own):
            return
        where, remedy = "here", "pass the model itself, not what torch.compile returned"
        if any(_COMPILED in name for name in saved):
            where, remedy = "in it", "pass the compiled model, as when it was saved"
        raise ValueError(
            f"Checkpoint {self.path} has the tensors of this model under other names, because torch.compile has added "
            f"{_COMPILED!r} to them {where}; {remedy}"
        )


def _uncompiled(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name.replace(_COMPILED, ""): shape for name, shape in shapes.items()}


def _dtypes(state: dict[str, Any]) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in state.items() if isinstance(value, Tensor)}


def _shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
