"""The parts of a training whose states a checkpoint holds, by name."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from variable_batch_size._validation import type_error
from variable_batch_size.checkpoint.rng_states import RNGStates
from variable_batch_size.checkpoint.scheduler_check import check_scheduler
from variable_batch_size.checkpoint.snapshot import check_storable, map_tensors
from variable_batch_size.checkpoint.stateful import Stateful
from variable_batch_size.checkpoint.stored_state import StoredState
from variable_batch_size.optim.optimizer import CustomOptimizer

_TYPES: dict[str, tuple[type, str]] = {
    "optimizer": (CustomOptimizer, "a vbs.CustomOptimizer"),
    "model": (torch.nn.Module, "a torch.nn.Module"),
}
_OTHER: tuple[type, str] = (Stateful, "an object with state_dict() and load_state_dict()")


@final
class Parts:
    """The optimizer, the model and further objects of one rank, whose states are saved and restored together.

    Args:
        model: the model.
        optimizer: the wrapper whose updates are counted.
        others: further parts by name.

    Raises:
        TypeError: if a part has another type, or no state_dict() or load_state_dict().
        ValueError: if a part is a scheduler that a `ProgressScheduler` steps.
    """

    def __init__(self, model: torch.nn.Module, optimizer: CustomOptimizer, others: dict[str, Stateful]) -> None:
        self._by_name: dict[str, Stateful] = {"optimizer": optimizer, "model": model, **others}
        for name, part in self._by_name.items():
            kind, description = _TYPES.get(name, _OTHER)
            if not isinstance(part, kind):
                raise type_error(f"{name} must be {description}", part, "pass one")
        self._model, self._optimizer = model, optimizer
        check_scheduler(list(self._by_name.values()), optimizer)

    def state_dicts(self, *, in_loop: bool) -> dict[str, Any]:
        """Return the states by name.

        Args:
            in_loop: whether the states of optimizers are to note, at the end of an epoch, that what the loop does there
                is to come.
        """
        states = {name: part.state_dict() for name, part in self._by_name.items()}
        for name, part in self._by_name.items():
            if in_loop and isinstance(part, CustomOptimizer):
                states[name]["vbs"]["end_pending"] = True
        return states

    def equal_tensors(self, states: dict[str, Any]) -> list[Tensor]:
        """Return the tensors that are equal on all ranks: what optimizers update, and what they keep for it.

        Other parameters may differ, because the first update compares those of the optimizers only.

        Args:
            states: what `state_dicts` has returned.
        """
        equal = list[Tensor]()

        def take(tensor: Tensor, _: str) -> Tensor:
            equal.append(tensor)
            return tensor

        for name, part in self._by_name.items():
            if isinstance(part, CustomOptimizer):
                equal += [parameter for group in part.param_groups for parameter in group["params"]]
                map_tensors({f"{name}['state']": states[name].get("state")}, take)
        return equal

    def check_storable(self, *, updated: bool) -> None:
        """Collect the states and drop them, so that what cannot be saved raises before there is anything to lose.

        A loader begins to iterate when it is asked for its state; before the first update it is left out.

        Args:
            updated: whether an update has been made.

        Raises:
            TypeError: if a state holds a value that a checkpoint cannot hold.
        """
        parts = self._by_name.items()
        asked = {name: part for name, part in parts if updated or not isinstance(part, DataLoader)}
        check_storable({name: part.state_dict() for name, part in asked.items()})

    def load(self, stored: StoredState, strict: bool) -> None:
        """Restore all parts and the RNG states of this rank.

        Raises:
            ValueError: if the checkpoint has other parts, another model or, if `strict`, other samples.
        """
        world = self._optimizer.backend.world
        stored.check_parts(self._by_name)
        stored.check_model(self._model.state_dict(), warn=world.rank == 0)
        for name, part in self._by_name.items():  # the optimizer is first: it raises before it changes anything
            if isinstance(part, (CustomOptimizer, type(self._optimizer.sampler))):
                part.load_state_dict(stored.parts[name], strict)
            else:
                part.load_state_dict(stored.parts[name])
        if len(stored.rng_states) == world.size:
            states = RNGStates(stored.rng_states[world.rank])
            states.set()  # at the end of an epoch: the loader draws its seed of the next one from these states
            self._optimizer.sampler.set_before_reading(states)  # within one: the loader has drawn a seed by then
