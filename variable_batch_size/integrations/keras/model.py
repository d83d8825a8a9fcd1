"""`VariableBatchModel`: a Keras model whose batches are updates of a trace."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from typing import Any, final

import keras
import torch
from torch.utils.data import DataLoader, IterableDataset

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.from_loader import check_samples, sampler_for
from variable_batch_size.integrations.keras.checkpoint import VariableBatchCheckpoint
from variable_batch_size.integrations.keras.data import loaders_of
from variable_batch_size.integrations.keras.internals import as_saved, begin_at, is_masked, rate_of
from variable_batch_size.integrations.keras.optimizer import KerasOptimizer
from variable_batch_size.integrations.loading import with_sampler
from variable_batch_size.integrations.schedules import warn_of_batches
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.integrations.supported import Setting, check
from variable_batch_size.optim.consistency import broadcast_parameters
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.updates import updates
from variable_batch_size.rules import RULES
from variable_batch_size.rules.selection import rules_for_groups

_SCALE_MORE = "linear-momentum", "sqrt-sde", "root-half-life"  # hyperparameters that Keras' optimizers keep as floats
_OPTIONS = "gradient_accumulation_steps", "loss_scale_factor"
_OTHERS = "LossScaleOptimizer", "MultiOptimizer", "NoneType"
_MEANS = "mean", "sum_over_batch_size"


def _flat(callbacks: Any) -> list[Any]:
    return list(keras.tree.flatten(callbacks or []))


SETTINGS = (
    Setting(
        "the rule",
        f"one that scales the learning rate only, unlike {', '.join(_SCALE_MORE)}",
        lambda model: rules_for_groups(model.settings.rule, 1)[0],
        lambda rule: not isinstance(rule, tuple(RULES[name] for name in _SCALE_MORE)),
        'pass "linear" or "root", for example',
    ),
    Setting(
        "the optimizer",
        f"one of keras.optimizers without {', '.join(_OPTIONS)}, and no {' or '.join(_OTHERS[:2])}",
        lambda model: [type(model.optimizer).__name__, *(one for one in _OPTIONS if getattr(model.optimizer, one, 0))],
        lambda found: len(found) == 1 and found[0] not in _OTHERS,
        'leave it out; use "mixed_bfloat16" instead of "mixed_float16"',
    ),
    Setting("jit_compile", "False", "jit_compile", (False,), "compile layers of your own"),
    Setting(
        "the reduction of a loss",
        "a mean over samples",
        lambda model: [getattr(loss, "reduction", _MEANS[0]) for loss in keras.tree.flatten(model.loss)],
        set(_MEANS).issuperset,
        f'pass reduction="{_MEANS[1]}"',
    ),
)


FIT = (
    Setting(
        "an argument of fit()",
        "none of class_weight, steps_per_epoch and BackupAndRestore",
        lambda given: (
            [name for name in ("class_weight", "steps_per_epoch") if given[name] is not None]
            + [type(one).__name__ for one in _flat(given["callbacks"]) if "BackupAndRestore" in type(one).__name__]
        ),
        lambda found: not found,
        "pass sample_weight, max_updates in sampler_options, or VariableBatchCheckpoint",
    ),
)


class VariableBatchModel(keras.Model):
    """A Keras model whose `fit` follows a trace of batch sizes.

    `VariableBatchModel(model, trace=...)` returns `model` itself, of a subclass of its class with the same name: its
    layers, weights, files and results stay as they are. A batch of Keras is then one update. `batch_size` of `fit` and
    of a DataLoader are the rows of a microbatch.

    Args:
        model: any `keras.Model` with the `train_step` of Keras, compiled or not.
        *settings: `trace`, `rule`, `ref_batchsize`, `sampler_options` and `optimizer_options`, in this order or by
            name: see `CustomSampler` and `CustomOptimizer`.

    Attributes:
        sampler: the sampler of the training; None before `fit`.
        custom_optimizer: the optimizer of the training, with its position; None before `fit`.

    Raises:
        TypeError: if it is no `keras.Model`, or has such a trace already.
        ValueError: if it has a `train_step` of its own, or is compiled with what is not supported.
    """

    def __new__(cls, model: Any, *settings: Any, **named: Any) -> Any:
        """Return the model, of another class."""
        if isinstance(model, VariableBatchModel) or not isinstance(model, keras.Model):
            remedy = "pass keras.Sequential(...), for example"
            raise type_error("model must be a keras.Model without a trace", model, remedy)
        if (kind := type(model)).train_step is not keras.Model.train_step:
            requirement = "the model must have the train_step of Keras, because each call of it would be an update"
            raise value_error(requirement, f"{kind.__name__}.train_step", "override compute_loss, or write the loop")
        Settings(*settings, **named)  # raises before the class changes
        model.__class__ = _subclass(kind)  # type: ignore[arg-type]
        return model

    def __init__(self, model: Any, *settings: Any, **named: Any) -> None:
        self.settings = Settings(*settings, **named)
        self.sampler: CustomSampler | None = None
        self.custom_optimizer: CustomOptimizer | None = None
        if self.compiled:
            check(SETTINGS, self, "keras")

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile as Keras does, and begin another training; raise ValueError for what is not supported."""
        super().compile(*args, **options)
        check(SETTINGS, self, "keras")
        self.sampler = self.custom_optimizer = None

    def fit(self, *args: Any, **options: Any) -> Any:
        """Train as Keras does, with a batch of the trace for each update; a second call trains further epochs.

        The arguments are those of Keras, but for `batch_size`, the rows of a microbatch. Data are arrays or tensors
        with one row a sample, or a DataLoader with a map-style dataset. Every rank evaluates all validation data.

        Raises:
            TypeError: if samples have no index, as in a generator.
            ValueError: if an argument contradicts the trace.
        """
        bound = inspect.signature(keras.Model.fit).bind(self, *args, **options)
        bound.apply_defaults()
        given: dict[str, Any] = bound.arguments
        check(FIT, given, "keras")
        x, y, sample_weight, rows = (given.pop(name) for name in ("x", "y", "sample_weight", "batch_size"))
        held_out = given.pop("validation_split") if given["validation_data"] is None else 0.0
        loader, after = loaders_of(x, y, sample_weight, rows or 32, given["shuffle"], held_out)
        if self.sampler is None:
            self.sampler = sampler_for(loader, self.settings)
        sampler = self.sampler
        check_samples(loader, sampler)
        source, own = _Source(with_sampler(loader, sampler), len(loader)), _flat(given["callbacks"])
        shown = {"add_history": True, "add_progbar": given["verbose"] != 0, "verbose": given["verbose"], "model": self}
        given["callbacks"] = _Callbacks(
            source, given["initial_epoch"], own, epochs=given["epochs"], steps=None, **shown
        )
        given["validation_data"] = given["validation_data"] or after
        given["validation_batch_size"] = given["validation_batch_size"] or rows
        data = DataLoader(source, batch_size=None, collate_fn=lambda update: update, generator=torch.Generator())
        try:
            return super().fit(
                data, **{name: given[name] for name in given.keys() - {"self", "shuffle"}}, shuffle=False
            )
        finally:
            begin_at(self, None)
            for one in own:
                if isinstance(one, VariableBatchCheckpoint):
                    one.close()

    def make_train_function(self, force: bool = False) -> None:
        """Let an update be one call of `train_step`."""
        self.train_function = lambda data: self.train_step(data[0])

    def train_step(self, data: Any) -> dict[str, Any]:
        """Make an update; the loss is that of all ranks so far in the epoch, other metrics are those of this one."""
        optimizer: Any = self.custom_optimizer
        if optimizer is None or not isinstance(data, list):
            raise RuntimeError("an update needs its microbatches, which only fit() reads; call fit()")
        optimizer.inner.read_learning_rate()
        size, training = optimizer.microbatch.batch_size, {"training": True}
        for microbatch in data:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(microbatch)
            part = optimizer.microbatch
            y_pred = self(x, **training) if "training" in inspect.signature(self.call).parameters else self(x)
            if is_masked(y_pred):
                raise value_error(
                    "the output of the model must have no mask", "one", "pass sample_weight instead of it"
                )
            more = training if "training" in inspect.signature(self.compute_loss).parameters else {}
            loss = self.compute_loss(x, y, y_pred, sample_weight, **more)
            loss.backward()
            optimizer.log(loss=loss)
            if part.samples:  # a replay counts on another rank
                rows = (x, y, y_pred, sample_weight)
                with torch.no_grad():
                    self.compute_metrics(*keras.tree.map_structure(partial(_distinct, part.rows // part.samples), rows))
            optimizer.step()
        for metric in self.metrics:
            if metric.name == "loss":  # the name that Keras' guides to train_step go by
                metric.update_state(optimizer.logged["loss"], sample_weight=size)
        return {**self.get_metrics_result(), **_logs(optimizer, size)}

    def __reduce__(self) -> Any:
        """Return what a copy is made from: a model of its own class, as Keras saves it, without the trace."""
        return as_saved(self, super().__reduce__())


@final
class _Source(IterableDataset[Any]):
    """The updates of an epoch; before the training one microbatch, from which Keras builds the model."""

    def __init__(self, loader: Any, batches: int) -> None:
        self.loader, self.batches = loader, batches
        self.updates: Any = None

    def __iter__(self) -> Iterator[Any]:
        if self.updates is not None:
            yield from map(list, self.updates)
        else:
            dataset, rows = self.loader.dataset, self.loader.batch_sampler.plan.minibatch_size
            reads = getattr(dataset, "__getitems__", lambda numbers: [dataset[number] for number in numbers])
            yield self.loader.collate_fn(reads([*range(min(rows, len(dataset)))]))


@final
class _Callbacks(keras.callbacks.CallbackList):
    """The callbacks of a `fit`, whose epochs have unequal lengths.

    Keras takes all of them to be as long as the first one, unless it does not know their length: then only
    `stop_training` ends them. So it is set after the callbacks of the last update of an epoch, and taken back before
    those of the end of the epoch.
    """

    def __init__(self, source: _Source, initial_epoch: int, callbacks: list[Any], **options: Any) -> None:
        self._source, self._initial, self._ends, self._trained = source, initial_epoch, False, options["model"]
        self._restored: list[torch.Tensor] = []  # restored, of the epoch that is resumed
        super().__init__(callbacks, **options)

    def on_train_begin(self, logs: Any = None) -> None:
        """Create the optimizer, let callbacks restore, and find the first epoch."""
        model, source, epochs = self._trained, self._source, self.params["epochs"]
        if model.custom_optimizer is None:
            inner = KerasOptimizer(model.optimizer, model.trainable_variables)
            model.custom_optimizer = model.settings.optimizer(inner, model.sampler, model=model)
        optimizer = model.custom_optimizer
        optimizer.discard_step()  # what an interrupted fit() has left
        broadcast_parameters(model)  # also in a second fit: a callback may set weights at the end of the first
        begun = optimizer.updates
        super().on_train_begin(logs)
        source.updates = updates(source.loader, optimizer)
        if (clock := model.sampler.clock).end_pending:  # restored after the callbacks of an epoch's end
            deque(source.updates, maxlen=0)
        restored = optimizer.updates > begun
        self._restored = [v.value.clone() for v in model.metrics_variables if restored and not clock.finished]
        offset = 0 if restored else optimizer.epoch - self._initial
        model.sampler.plan.check_trace(offset + epochs)
        warn_of_batches([rate_of(model.optimizer)], model.sampler.plan, source.batches)
        begin_at(model, epochs if optimizer.done else optimizer.epoch - offset or None)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Tell the callbacks how many updates the epoch has, and restore the metrics of one that is resumed."""
        model, clock = self._trained, self._trained.sampler.clock
        for variable, value in zip(model.metrics_variables, self._restored, strict=False):
            variable.assign(value)
        self._restored = []
        made = 0 if clock.finished else clock.step - clock.epoch.first_step
        self.set_params({**self.params, "steps": model.sampler.plan.epoch(model.custom_optimizer.epoch).updates - made})
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End the epoch after its last update, unless a callback ends the training there."""
        super().on_train_batch_end(batch, logs)
        model = self._trained
        if model.sampler.clock.finished:
            self._ends = not (model.stop_training or model.custom_optimizer.done)
            model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Let `stop_training` be what the user's callbacks have set."""
        if self._ends:
            self._trained.stop_training = self._ends = False
        super().on_epoch_end(epoch, logs)


def _logs(optimizer: CustomOptimizer, size: int) -> dict[str, Any]:
    logs = {"batch_size": size, "effective_learning_rate": optimizer.current_lr(), "samples": optimizer.samples}
    with suppress(RuntimeError):  # it is not measured
        logs["noise_scale"] = optimizer.noise().noise_scale
    return logs if optimizer.grad_norm is None else {**logs, "grad_norm": optimizer.grad_norm}


def _distinct(repeated: int, rows: Any) -> Any:
    return None if rows is None else rows[::repeated]


_set_class = object.__dict__["__class__"].__set__


@cache
def _subclass(kind: Any) -> type:
    """Return the class of a model with a trace, whose instances have `__class__` `kind`.

    Keras looks up there under which name it saves a model, also one within another, and of which class a clone is.
    """
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    own = {"__class__": property(lambda _: kind, _set_class), "from_config": kind.from_config}
    return type(kind.__name__, (VariableBatchModel, kind), {**same, **own})
