"""The parts of a training whose states a checkpoint holds, by name."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import type_error, value_error
from variable_batch_size.backend.agreement import AbsentRankError
from variable_batch_size.checkpoint.checks import (
    check_model,
    check_outside,
    check_parts,
    hyperparameters,
    warn_of_hyperparameters,
)
from variable_batch_size.checkpoint.contents import Contents
from variable_batch_size.checkpoint.names import Names, with_numbers
from variable_batch_size.checkpoint.reload import check_reload, keeps_dtypes, restore_dtypes
from variable_batch_size.checkpoint.rng_states import RNGStates
from variable_batch_size.checkpoint.values import encode, identity
from variable_batch_size.optim.beside.lr_scheduler import ProgressScheduler, is_stepped_by_progress
from variable_batch_size.optim.beside.weight_average import WeightAverage
from variable_batch_size.optim.loops.arriving import check_stream_is_saved
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.tensors.parameters import list_parameters


@runtime_checkable
class Stateful(Protocol):
    """An object that can be a part of a checkpoint.

    With a method `begin_anew()`, it is told so where `restore(strict=False)` finds no state of it.
    """

    def state_dict(self) -> Any:
        """Return the state as tensors and plain Python values."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore a state that `state_dict()` returned."""


OPTIMIZERS = (CustomOptimizer, torch.optim.Optimizer)
PREVIOUS = "vbs/noise/earlier/gradients"  # of the gradient before the last one
_TYPES: dict[str, tuple[type, str]] = {
    "optimizer": (CustomOptimizer, "a vbs.CustomOptimizer"),
    "model": (torch.nn.Module, "a torch.nn.Module"),
}
_OTHER: tuple[type, str] = (Stateful, "an object with state_dict() and load_state_dict()")
_BEGUN = "begun"  # key of the hyperparameters before a schedule has changed them; none are known after the first update


@final
class Parts:
    """The optimizer, the model and further objects of one rank, whose states are saved and restored together.

    Args:
        model: the model.
        optimizer: the wrapper whose updates are counted.
        others: further parts by name.

    Raises:
        TypeError: if a part has another type, or no state_dict() or load_state_dict().
        ValueError: if a part is a scheduler that a `ProgressScheduler` steps, or its name is not allowed.
    """

    def __init__(self, model: torch.nn.Module, optimizer: CustomOptimizer, others: dict[str, Stateful]) -> None:
        """Check the parts, and keep the hyperparameters with which this script has created its optimizers."""
        self._by_name: dict[str, Stateful] = {"optimizer": optimizer, "model": model, **others}
        for name, part in self._by_name.items():
            if "/" in name:
                requirement = 'the name of a part must have no "/"'
                raise value_error(requirement, repr(name), "pass the part under another name")
            kind, description = _TYPES.get(name, _OTHER)
            if not isinstance(part, kind):
                raise type_error(f"{name} must be {description}", part, "pass one")
            inner = getattr(part, "inner", part)
            if hasattr(inner, "consolidate_state_dict"):  # ZeroRedundancyOptimizer: each rank has a part of its state
                requirement = f"{name} must have its state on each rank, or in parameters that are sharded"
                raise type_error(requirement, inner, "shard the model by fully_shard() in its place, or save by hand")
        self._names = Names(model)
        self._optimizer, self._restoring = optimizer, ""  # the location of the checkpoint that is being restored
        self._reloaded = set[object]()  # kinds of optimizers' states that `check_reload` has tried
        optimizers = {name: part for name, part in self._by_name.items() if isinstance(part, OPTIMIZERS)}
        # By optimizer: the hyperparameters with which this script has created it, and those with which the training has
        # begun, perhaps in an earlier process.
        self._script = {name: [] if optimizer.updates else hyperparameters(part) for name, part in optimizers.items()}
        self._begun = {**self._script}
        _check_scheduler(list(self._by_name.values()), optimizer)

    def state_dicts(self, *, in_loop: bool) -> dict[str, Any]:
        """Return the state dicts of all parts of a checkpoint, such as "model" and "optimizer", by name.

        Args:
            in_loop: whether the loop has yet to run its code for the end of the epoch, if the last update was the last
                one of an epoch; the states of the optimizers record it.

        Raises:
            RuntimeError: if a restore has begun to change the parts, and was interrupted.
        """
        try:
            states = self._states_of(self._by_name)
        except Exception:
            if not self._restoring:  # else of a part that was half loaded
                raise
        if self._restoring:
            raise RuntimeError(
                f"a save needs a state of one update, but the restore of {self._restoring} did not come to its end, so "
                f"that parts of it are missing; call restore() again, or end the training"
            )
        for name, part in self._by_name.items():
            if in_loop and isinstance(part, CustomOptimizer):  # a restored loop then ends the epoch first
                states[name]["vbs"]["sampler"]["end_pending"] = True
        return states

    def _states_of(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the states of these parts by name.

        The first error is raised after all: a state may need an exchange, in which other ranks would wait for this one.
        """
        states, errors = dict[str, dict[str, Any]](), list[Exception]()
        for name in names:
            try:
                states[name] = self._state_of(name)
            except AbsentRankError:  # nobody comes to the exchanges of later parts
                raise
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return states

    def equal_on_ranks(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Return the names of tensors that are equal on all ranks: parameters of the optimizers, and their states.

        Other parameters may differ, because only those of the optimizers are compared at the first update.

        Args:
            tensors: all tensors of the checkpoint, by name.
        """
        optimizers = {name: part for name, part in self._by_name.items() if isinstance(part, CustomOptimizer)}
        optimized = set[object]()
        for part in optimizers.values():
            optimized |= {identity(parameter) for parameter in list_parameters(part.param_groups)}
        prefixes = tuple(f"{name}/state/" for name in optimizers)
        return {name for name, tensor in tensors.items() if name.startswith(prefixes) or identity(tensor) in optimized}

    def names_to_compare(self, tensors: Mapping[str, Tensor]) -> tuple[set[str], set[str]]:
        """Return the names of the tensors, and of the parts, that each save has to compare between ranks.

        A loop can change them on one rank by mistake, such as a buffer or a scheduler. Optimizers and weight averages
        are not compared, because only updates change them, on all ranks alike. Neither are the parameters of the
        model: those that are trained change by updates, and those that are frozen may be large, and rarely change.

        Args:
            tensors: all tensors of the checkpoint, by name.
        """
        parts = self._by_name.items()
        changed_by_updates = {name for name, part in parts if isinstance(part, (CustomOptimizer, WeightAverage))}
        parameters = {identity(tensor) for tensor in self._names.model.parameters()}
        changing = set[str]()
        for key, tensor in tensors.items():
            part_name = key.split("/")[0]
            is_parameter = part_name == "model" and identity(tensor) in parameters
            if part_name not in changed_by_updates and not is_parameter:
                changing.add(key)
        return changing, self._by_name.keys() - changed_by_updates

    def check_storable(self, *, updated: bool) -> str:
        """Collect the states and drop them, so that what cannot be saved raises before there is anything to lose.

        It returns "", because `Agreement.run_on_all`, which calls it, exchanges texts.

        Args:
            updated: whether an update has been made. Before, DataLoaders are left out, because a loader with a
                `state_dict()` begins to iterate when it is asked for its state.

        Raises:
            TypeError: if a state holds a value that a checkpoint cannot hold, or an optimizer loads another state than
                it has saved.
            RuntimeError: if a stream with a state feeds the optimizer, and is no part.
        """
        check_stream_is_saved(self._optimizer, self._by_name.values())
        asked = [name for name, part in self._by_name.items() if updated or not isinstance(part, DataLoader)]
        for name, state in self._states_of(asked).items():
            encode(state, name, {}, {})
        self.check_reload()
        self._optimizer.backend.mark_step()
        return ""

    def check_reload(self) -> None:
        """Check that each optimizer loads the state that it has saved, and no other; see `reload.check_reload`.

        Raises:
            TypeError: if one does not, so that a restored training would continue with another state.
        """
        for part in self._by_name.values():
            if isinstance(part, OPTIMIZERS):
                check_reload(inner_of(part), self._reloaded)

    def sharded_tensors(self) -> dict[str, DTensor]:
        """Return the sharded tensors of this rank by the names that they, or their states, have in a checkpoint.

        A reader shards what it loads under such a name in the same way. The state of an optimizer may not exist yet:
        the parameter stands for it, as momentum and the like are sharded like the parameter.
        """
        tensors = dict[str, Any]()
        for name, part in self._by_name.items():
            if isinstance(part, torch.nn.Module):
                tensors |= {f"{name}/{key}": value for key, value in self._state_of(name).items()}
            elif isinstance(part, OPTIMIZERS):
                for number, (key, parameter) in enumerate(self._names.named_parameters(part)):
                    tensors |= {f"{name}/state/{key}": parameter, f"{name}/{PREVIOUS}/{number}": parameter}
        return {name: value for name, value in tensors.items() if isinstance(value, DTensor)}

    def describe_tensor(self, tensor: str) -> str:
        """Return words for the tensor with this name in a checkpoint, such as "weight of the model (Linear)".

        Args:
            tensor: the name: the name of a part, a "/", and the name within the part.
        """
        part_name, _, name_in_part = tensor.partition("/")
        part = self._by_name.get(part_name)
        return f"{name_in_part} of the {part_name}{f' ({type(part).__name__})' if part is not None else ''}"

    @property
    def reads_epoch(self) -> bool:
        """Whether the loop has begun to read samples of the epoch in which the sampler is."""
        return self._optimizer.sampler.training.reads_epoch

    def batch_size(self, step: int) -> int:
        """Return the number of samples of the update `step`, counted from 0; 0 if it is not known."""
        if self._optimizer.sampler.batches.arriving:  # their sizes are known only when they come
            return 0
        with suppress(ValueError, IndexError):  # the trace ends before this update
            return self._optimizer.sampler.plan.trace.batch_size(step) if step >= 0 else 0
        return 0

    def _state_of(self, name: str) -> Any:
        """Return the state dict of a part as a checkpoint has it: without functions, by the names of parameters.

        The state of an optimizer also has its first hyperparameters, and the values of its parameters that are in no
        module among the parts.
        """
        part = self._by_name[name]
        if name == "model":
            return self._names.model_state()
        if isinstance(part, torch.optim.lr_scheduler.LRScheduler):  # keeps the attributes that a loaded state lacks
            return {key: value for key, value in part.state_dict().items() if not isinstance(value, FunctionType)}
        if not isinstance(part, OPTIMIZERS):
            return part.state_dict()
        state = {**self._names.optimizer_state(part), _BEGUN: self._begun[name]}
        outside = self._parameters_outside(part)
        if outside:  # the state of no module has their values
            state["outside"] = outside
        return state

    def _parameters_outside(self, optimizer: Stateful) -> dict[int, Tensor]:
        """Return the parameters of an optimizer that no module of the checkpoint has, by their numbers.

        The checkpoint has to save them with the state of the optimizer.
        """
        modules = [part for part in self._by_name.values() if isinstance(part, torch.nn.Module)]
        in_modules = {id(parameter) for module in modules for parameter in module.parameters()}
        named = self._names.named_parameters(optimizer)  # those of the model have a text as name, others a number
        return {number: tensor for number, tensor in named if isinstance(number, int) and id(tensor) not in in_modules}

    def load(self, contents: Contents, location: str, strict: bool) -> str:
        """Restore all parts and the RNG states of this rank from a checkpoint; return "", as `check_storable` does.

        It checks the parts, the model and the groups before the first change. If the saved run had another number
        of ranks, no RNG state belongs to this rank, and none is restored.

        Args:
            contents: what this rank has read.
            location: path or URL of the checkpoint, for messages.
            strict: whether other samples are an error; see `Checkpoint.restore`.

        Raises:
            ValueError: if the checkpoint has other parts, another model or, if `strict`, other samples.
        """
        world, saved = self._optimizer.agreement.world, contents.parts
        check_parts(location, saved, self._by_name, strict=strict)
        check_model(location, saved["model"], self._names.model_state(), warn=world.rank == 0)
        saved_parts = {name: part for name, part in self._by_name.items() if name in saved}
        for name, part in saved_parts.items():
            if isinstance(part, OPTIMIZERS):
                self._names.check_groups(saved[name], part)
                check_outside(location, name, saved[name].get("outside", {}), self._parameters_outside(part))
        self._restoring = location  # until the end: a save in between would store half a state
        for name, part in saved_parts.items():  # the optimizer is first: it raises before it changes anything
            if isinstance(part, OPTIMIZERS):
                self._load_optimizer(name, part, saved, strict)
                self._begun[name] = saved[name].get(_BEGUN, [])
                if world.rank == 0:
                    warn_of_hyperparameters(location, name, self._begun[name], self._script[name])
            elif name == "model":
                self._names.load_model(saved[name])
            elif isinstance(part, type(self._optimizer.sampler)):
                part.load_state_dict(saved[name], strict)
            else:
                part.load_state_dict(saved[name])
        for name, part in self._by_name.items():
            begin_anew = getattr(part, "begin_anew", None)
            if name not in saved_parts and begin_anew is not None:
                begin_anew()
        if len(contents.rng) == world.size:
            rng_states, reads_epoch = RNGStates(contents.rng[world.rank]), contents.facts.get("reads_epoch", True)
            rng_states.set()  # before an epoch is read: the loader draws its seed from these states
            sampler = self._optimizer.sampler
            # If the saved run had not yet read any epoch, it drew the seed of its first one later, as this run does.
            if reads_epoch or self._optimizer.updates:
                position = sampler.training.restored_position if reads_epoch else None
                sampler.training.before_reading.wait_for(position, rng_states)
        self._optimizer.backend.mark_step()
        self._restoring = ""
        return ""

    def _load_optimizer(self, name: str, part: Any, saved: Mapping[str, Any], strict: bool) -> None:
        """Load the state of an optimizer, with its parameters that no module among the parts has.

        Args:
            name: name of the optimizer among the parts.
            part: the optimizer.
            saved: the states of all parts.
            strict: see `load`.
        """
        state, inner = with_numbers(saved[name]), inner_of(part)  # torch numbers parameters, a checkpoint names them
        if isinstance(part, CustomOptimizer):
            part.load_state_dict(state, strict)
        else:
            part.load_state_dict(state)
        for number, parameter in self._parameters_outside(part).items():
            parameter.detach().copy_(saved[name]["outside"][number])
        if keeps_dtypes(inner):  # but load_state_dict() casts floating-point states to the dtype of their parameter
            saved_parameters = {**saved["model"], **saved[name].get("outside", {})}
            named = self._names.named_parameters(part)
            restore_dtypes(inner, state, [saved_parameters.get(key, parameter).dtype for key, parameter in named])


def inner_of(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer of torch that a wrapper has, or the optimizer itself if it is not wrapped."""
    inner: torch.optim.Optimizer = getattr(optimizer, "inner", optimizer)
    return inner


def _check_scheduler(parts: Collection[object], optimizer: CustomOptimizer) -> None:
    """Warn if the learning rate has a scheduler, but no part is one.

    Raises:
        ValueError: if a part is the scheduler that a `ProgressScheduler` steps, and that is not a part.
    """
    if not any(isinstance(part, ProgressScheduler) for part in parts):
        for part in parts:
            if is_stepped_by_progress(part):
                raise value_error(
                    "the scheduler of a checkpoint must be the one whose step() the loop calls",
                    f"a {type(part).__name__} that a ProgressScheduler steps",
                    "pass the ProgressScheduler",
                )
    # Every scheduler of torch wraps the method step() of its optimizer, to warn if it is not called.
    scheduled = any(hasattr(wrapper.step, "_wrapped_by_lr_sched") for wrapper in (optimizer, optimizer.inner))
    if scheduled and not any(hasattr(part, "get_last_lr") for part in parts) and optimizer.agreement.world.rank == 0:
        warnings.warn(
            "The checkpoint has no scheduler, but one was created for the optimizer: a restored training would begin "
            "its schedule again; pass scheduler=",
            UserWarning,
            stacklevel=stacklevel_of_user(),
        )
