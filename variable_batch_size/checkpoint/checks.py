"""Whether a checkpoint is of this training: its parts, its model, the parameters of its optimizers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from variable_batch_size._log import stacklevel_of_user

SAMPLER = "sampler"  # name of a part
_COMPARED = "lr", "weight_decay", "momentum", "betas"


class HyperparametersWarning(UserWarning):
    """The script has created an optimizer with other hyperparameters than the script that saved."""


def check_parts(location: str, saved: Iterable[str], passed: Iterable[str], *, strict: bool) -> None:
    """Check that a checkpoint has the parts that were passed, apart from the sampler, whose state the optimizer has.

    Each part in the checkpoint must be passed. If `strict`, each passed part must be in the checkpoint; otherwise only
    the model must.

    Raises:
        ValueError: if a part is missing or was not passed.
    """
    in_checkpoint, required = {*saved} - {SAMPLER}, {*passed} - {SAMPLER}
    if not strict:
        required &= {"model", *in_checkpoint}
    missing = [f"{name} is not in it" for name in sorted(required - in_checkpoint)]
    unknown = [f"{name} is in it and was not passed" for name in sorted(in_checkpoint - required)]
    if missing or unknown:
        raise ValueError(
            f"Checkpoint {location} has other parts than this training: {' and '.join(missing + unknown)}; pass the "
            f"parts that were saved, under the same names{'' if unknown else ', or strict=False'}"
        )


def check_outside(location: str, optimizer: str, saved: Mapping[int, Tensor], here: Mapping[int, Tensor]) -> None:
    """Check the shapes of the parameters of an optimizer that no module among the parts of a checkpoint has.

    Args:
        location: path or URL of the checkpoint, for the error.
        optimizer: the name of the optimizer, for the error.
        saved: these parameters in the checkpoint, by their numbers in the optimizer.
        here: these parameters in this run.

    Raises:
        ValueError: if numbers or shapes differ.
    """
    if _shapes(saved) != _shapes(here):
        raise ValueError(
            f"Checkpoint {location} has parameters of the {optimizer} that no module among its parts names, with the "
            f"shapes {_shapes(saved)}, but here they are {_shapes(here)}; pass the same modules as for saving"
        )


def check_model(location: str, saved: Mapping[str, Any], here: Mapping[str, Any], *, warn: bool) -> None:
    """Check that the model of a checkpoint has the names and shapes of this run's model.

    Args:
        location: path or URL of the checkpoint, for messages.
        saved: the state dict of the model in the checkpoint.
        here: the state dict of the model of this run.
        warn: whether to warn of tensors with another dtype.

    Raises:
        ValueError: if a tensor is missing or has another shape or name.
    """
    shapes, shapes_here = _shapes(saved), _shapes(here)
    for name in {**shapes_here, **shapes}:
        if shapes.get(name) != shapes_here.get(name):
            raise ValueError(
                f"Checkpoint {location} is of another model: the shape of {name} is {shapes.get(name, 'missing')} in "
                f"it and {shapes_here.get(name, 'missing')} here; create the model that was saved"
            )
    other_dtypes = [name for name in shapes_here if saved[name].dtype != here[name].dtype]
    if other_dtypes and warn:
        name, others = other_dtypes[0], f" (and {len(other_dtypes) - 1} others)" if len(other_dtypes) > 1 else ""
        was, now = saved[name].dtype, here[name].dtype
        warnings.warn(
            f"Checkpoint {location} is converted to other dtypes, {name}{others} from {was} to {now}, so that the "
            f"training does not resume exactly; call model.to({was}) before the optimizer is created",
            UserWarning,
            stacklevel=stacklevel_of_user(),
        )


def _shapes(state: Mapping[Any, Any]) -> dict[Any, tuple[int, ...]]:
    """Return the shapes of the tensors in a state, by name; other entries are left out."""
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """Return the learning rate, weight decay and momentum of each group of an optimizer, as plain numbers."""
    return [{name: _plain(group[name]) for name in _COMPARED if name in group} for group in optimizer.param_groups]


def warn_of_hyperparameters(
    location: str, optimizer: str, saved: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]]
) -> None:
    """Warn if this script has created its optimizer with other hyperparameters than the script that saved.

    A restore sets the values of the checkpoint, so that an edit of the script would have no effect.

    Args:
        location: path or URL of the checkpoint, for the warning.
        optimizer: the name of the optimizer, for the warning.
        saved: the hyperparameters of each group when the saving script had created its `Checkpoint`.
        here: the same of this script, before a schedule changes them.
    """
    differences = [
        f"{name} of group {number} was {group[name]} and is {group_here[name]}"
        for number, (group, group_here) in enumerate(zip(saved, here, strict=False))
        for name in group.keys() & group_here.keys()
        if _differ(group[name], group_here[name])
    ]
    if differences:
        shown, more = "; ".join(sorted(differences)[:2]), ", and more" * (len(differences) > 2)
        warnings.warn(
            f"The hyperparameters of {location.rpartition('/')[2]} count, not the script's: {shown}{more}. To change "
            f"them, set {optimizer}.param_groups after restore()",
            HyperparametersWarning,
            stacklevel=stacklevel_of_user(),
        )


def _differ(first: Any, second: Any) -> bool:
    """Return whether two values of a hyperparameter differ by more than rounding to float32, as in a tensor."""
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):  # such as betas
        return any(map(_differ, first, second))
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return not math.isclose(first, second, rel_tol=1e-6)
    return bool(first != second)


def _plain(value: Any) -> Any:
    """Return a hyperparameter with numbers in the place of tensors, and lists in the place of tuples."""
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    return value.item() if isinstance(value, Tensor) else value
