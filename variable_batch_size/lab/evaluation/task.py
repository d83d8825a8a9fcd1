"""What is trained: a task is five functions, and the defaults of its trainings."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Protocol, final, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from variable_batch_size._validation import MAX_INT, check_int, check_positive, type_error, value_error

_ROOM = "variable_batch_size.lab.evaluation.tasks"
TASKS: Final[Mapping[str, str]] = {"mnist-cnn": f"{_ROOM}.mnist_cnn:MnistCnn", "char-gpt": f"{_ROOM}.char_gpt:CharGpt"}
FUNCTIONS = {
    "model": ("seed",),
    "dataset": (),
    "loss": ("model", "batch"),
    "evaluate": ("model",),
    "optimizer": ("model", "lr"),
}
LEAST: Final[Mapping[str, int]] = {"samples": 1, "ref_batchsize": 1, "minibatch_size": 1, "between": 1, "warmup": 0}
"""The least values of the whole numbers that a task, or an experiment, may say."""


@runtime_checkable
class Task(Protocol):
    """What is trained: an object, or a module, with these five functions.

    It can also have these attributes, which are the defaults of its runs:

    - `ref_batchsize`: batch size at which the learning rate was tuned, in samples;
    - `lr`: that learning rate; `samples`: number of samples of a run;
    - `minibatch_size`: maximum number of rows of a microbatch (32);
    - `between`: samples between two evaluations (a sixteenth of `samples`);
    - `max_grad_norm`: norm to which gradients are clipped (not clipped);
    - `schedule(samples, total)`: factor on the learning rate after so many of the `total` samples of a run, read once
      in `ref_batchsize` samples (1);
    - `warmup`: samples over which the learning rate rises to this factor, as `linear` needs it (0);
    - `version`: text that names its code and data. Runs with a different version are repeated.

    A process uses one object for several runs, one after the other.
    """

    def model(self, seed: int) -> nn.Module:
        """Return a model with the weights of a seed, on the device on which it is to train."""
        ...

    def dataset(self) -> Dataset[Any]:
        """Return the map-style dataset to train on, the same for every training."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over the rows of a batch, as torch's `default_collate` makes it of the samples."""
        ...

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Return the "loss", and other metrics, of data that is not trained on. The model is in `eval()` mode."""
        ...

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return the optimizer to wrap."""
        ...


@final
@dataclass(frozen=True)
class Defaults:
    """The optional attributes of a task, checked; see `Task`."""

    ref_batchsize: int | None = None
    lr: float | None = None
    samples: int | None = None
    minibatch_size: int = 32
    between: int | None = None
    max_grad_norm: float | None = None
    schedule: Callable[[int, int], float] | None = None
    warmup: int = 0
    version: str = ""

    @classmethod
    def read(cls, task: Task, name: str) -> Defaults:
        """Return the optional attributes of a task, such as `lr` and `samples`, after checks.

        Args:
            task: the task.
            name: its name, for errors.
        """
        values: dict[str, Any] = {}
        for attribute in cls.__dataclass_fields__:
            value = getattr(task, attribute, None)
            label = f"{attribute} of the task {name}"
            if value is None:
                continue
            if attribute in ("lr", "max_grad_norm"):
                value = check_positive(value, label, "pass one, or leave it out")
            elif attribute == "schedule":
                _check_takes(value, ("samples", "total"), label)
            elif attribute in LEAST:
                value = check_int(value, label, LEAST[attribute], MAX_INT)
            values[attribute] = value
        return cls(**values)


def _check_takes(function: Any, arguments: tuple[str, ...], name: str) -> None:
    """Raise TypeError if a function cannot be called with these positional arguments. Errors call it `name`."""
    requirement = f"{name} must be a function that takes the arguments ({', '.join(arguments)})"
    if not callable(function):
        raise type_error(requirement, function, "define it")
    try:
        signature = inspect.signature(function)
        signature.bind(*arguments)
    except TypeError:
        raise type_error(requirement, str(signature), "change its parameters") from None


def load_task(name: str, arguments: Mapping[str, Any] | None = None, data_dir: str | None = None) -> Task:
    """Load a task by its name: an object that has a model, a dataset, a loss and an optimizer to train with.

    >>> load_task("mnist-cnn").ref_batchsize
    32

    Args:
        name: one of those that come with the package; or a task of your own: "package.module:name", where the name
            refers to an object, or a class or a function that returns one; or "package.module", a module with the five
            functions. A module that is not installed is searched in the working directory, which is then the last one
            of `sys.path`, so that modules which a task imports are also found there.
        arguments: for the class or the function, as values of JSON.
        data_dir: folder of its files, which a class or a function gets if it has an argument of this name.

    Raises:
        TypeError: if what the name stands for is not a `Task`.
        ValueError: if there is no such task.
        ModuleNotFoundError: if a module that the task imports is missing.
        RuntimeError: if it raises another error.
    """
    if not isinstance(name, str):
        raise type_error("a task must be named by a string", name, 'pass "package.module:name"')
    try:
        arguments_json = json.dumps(dict(arguments or {}), sort_keys=True, allow_nan=False)  # hashable, for the cache
    except (TypeError, ValueError):
        requirement = f"the arguments of the task {name} must be values of JSON"
        raise type_error(requirement, arguments, "pass numbers, strings, lists and mappings of these") from None
    return _load(name, arguments_json, data_dir)


@lru_cache(maxsize=8)
def _load(name: str, arguments_json: str, data_dir: str | None) -> Task:
    """Load and check a task, see `load_task`; the same arguments return the same object, with its dataset."""
    task = _find_object(name)
    arguments = json.loads(arguments_json)
    if callable(task):
        task = _create(task, name, arguments, data_dir)
    elif arguments:
        requirement = f"the task {name} must be a class or a function to take arguments"
        raise type_error(requirement, task, "leave the arguments out")
    missing = [function for function in FUNCTIONS if not callable(getattr(task, function, None))]
    if missing:
        requirement = f"the task {name} must have {', '.join(FUNCTIONS)}"
        raise type_error(requirement, task, f"define {', '.join(missing)}")
    for function, parameters in FUNCTIONS.items():
        _check_takes(getattr(task, function), parameters, f"{function} of the task {name}")
    return task  # type: ignore[no-any-return]


def _create(make: Callable[..., Any], name: str, arguments: dict[str, Any], data_dir: str | None) -> Any:
    """Create a task: call its class or function.

    Args:
        make: the class or the function.
        name: the name of the task, for errors.
        arguments: what it is called with.
        data_dir: folder of its files, which it also gets if it has an argument of this name; None: not passed.
    """
    signature = inspect.signature(make)
    if data_dir is not None and "data_dir" in signature.parameters:
        arguments = {"data_dir": data_dir} | arguments
    try:
        signature.bind(**arguments)
    except TypeError as error:
        requirement = f"the task {name} must be created with {signature}"
        found = f"{', '.join(arguments) or 'no arguments'} ({error})"
        raise TypeError(f"{requirement}, got {found}; give the others defaults, or pass them from Python") from None
    try:
        return make(**arguments)
    except (TypeError, ValueError, OSError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise RuntimeError(f"the task {name} cannot be created: {type(error).__name__}: {error}") from error


_datasets: dict[int, tuple[Task, Dataset[Any]]] = {}  # by the id of the task, which is kept


def dataset_of(task: Task) -> Dataset[Any]:
    """Return the dataset of a task. It is created once in a process, because that may take long."""
    if id(task) not in _datasets:
        _datasets[id(task)] = task, task.dataset()
    return _datasets[id(task)][1]


def _find_object(name: str) -> Any:
    """Import the object, the class or the module that the name of a task stands for, such as "package.module:name"."""
    place, _, attribute = TASKS.get(name, name).partition(":")
    module = _import(place, name)
    try:
        return getattr(module, attribute) if attribute else module
    except AttributeError:
        remedy = "pass package.module:name with a name that the module defines"
        raise value_error(f"the task {name} must be in {module.__file__}", f"no {attribute!r} there", remedy) from None


def _import(place: str, name: str) -> ModuleType:
    """Import the module of a task, from the working directory if it is not installed, as `python -m` does.

    Args:
        place: the module, "package.module".
        name: the name of the task, for error messages.
    """
    if not all(part.isidentifier() for part in place.split(".")):
        raise _unknown_task(name, "pass one of these")
    try:
        first = place.partition(".")[0]
        if first not in sys.modules and importlib.util.find_spec(first) is None:
            sys.path.append("")  # for good: functions of the task may import more when they are called
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise _unknown_task(name, f"pass one of these, or run it where {place.replace('.', '/')}.py is") from None
        if not str(error).startswith("No module named"):  # an error of this package, which says what to install
            raise
        found = f"the task {name} imports {error.name}, which is neither installed nor in {Path.cwd()}"
        raise ModuleNotFoundError(f"{found}; install it, or run this where it is", name=error.name) from error
    except Exception as error:
        raise RuntimeError(f"the task {name} cannot be imported: {type(error).__name__}: {error}") from error


def _unknown_task(name: str, remedy: str) -> ValueError:
    """Return the error for a name that is not a task. It proposes a similar name or, if there is none, the remedy."""
    close = get_close_matches(name, TASKS, 1, 0.8)
    requirement = f"a task must be {', '.join(TASKS)} or package.module:name"
    return value_error(requirement, f"{name!r:.60}", f"pass {close[0]}" if close else remedy)
