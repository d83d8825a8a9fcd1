"""The contents of a checkpoint that a training restores, and whether they are of this training."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

SAMPLER = "sampler"  # name of a part


@final
class StoredState(NamedTuple):
    """The contents of an intact checkpoint."""

    path: str
    parts: dict[str, Any]  # state dicts by name
    rng_states: list[str]  # by rank
    of_ranks: Sequence[str] = ()  # what each rank had of its own, replaced by what rank 0 had
    batch_size: int = 0  # of the last update; 0: unknown
    reads_epoch: bool = True  # whether the loop had begun to read the epoch of the position

    @property
    def world(self) -> int:
        """Number of ranks that have saved it."""
        return len(self.rng_states)

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
        saved = {
            number: tuple(parameter.shape) for number, parameter in self.parts[optimizer].get("outside", {}).items()
        }
        here = {number: tuple(parameter.shape) for number, parameter in parameters.items()}
        if saved != here:
            raise ValueError(
                f"Checkpoint {self.path} must have the parameters of the {optimizer} that no module among its parts "
                f"has, but it has those with the shapes {saved} by their numbers, and here they are {here}; pass the "
                f"modules that were passed when it was saved"
            )

    def check_model(self, state: dict[str, Any], warn: bool = True) -> None:
        """Check that the model in the checkpoint has the tensors of this state dict, in the same shapes.

        Raises:
            ValueError: if a tensor is missing or has another shape or name.
        """
        saved, here = _shapes(self.parts["model"]), _shapes(state)
        for name in {**here, **saved}:
            if saved.get(name) != here.get(name):
                raise ValueError(
                    f"Checkpoint {self.path} is of another model: the shape of {name} is {saved.get(name, 'missing')} "
                    f"in it and {here.get(name, 'missing')} here; create the model that was saved"
                )
        saved_dtypes, dtypes_here = _dtypes(self.parts["model"]), _dtypes(state)
        different = [name for name in here if saved_dtypes[name] != dtypes_here[name]]
        if different and warn:
            name = different[0]
            others = f" (and {len(different) - 1} others)" if len(different) > 1 else ""
            warnings.warn(
                f"Checkpoint {self.path} is converted to other dtypes: {name}{others} is {saved_dtypes[name]} in it "
                f"and {dtypes_here[name]} here, so that the training does not resume exactly; create the model with "
                f"the saved dtypes before the optimizer, for example by model.to({saved_dtypes[name]})",
                UserWarning,
                stacklevel=6,  # at restore()
            )


def _dtypes(state: dict[str, Any]) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in state.items() if isinstance(value, Tensor)}


def _shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
