"""`VariableBatchModel`: a Keras model whose batches are updates of a trace."""

from __future__ import annotations

import inspect
from collections import deque
from functools import cache
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import keras
import torch

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.facts import facts_of
from variable_batch_size.integrations.from_loader import check_samples, order_of, sampler_for
from variable_batch_size.integrations.keras.checkpoint import VariableBatchCheckpoint
from variable_batch_size.integrations.keras.data import first_microbatch, loaders_of, map_arrays
from variable_batch_size.integrations.keras.internals import build, is_masked, rate_of
from variable_batch_size.integrations.keras.optimizer import KerasOptimizer
from variable_batch_size.integrations.loading import with_sampler
from variable_batch_size.integrations.schedules import warn_of_batches
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.integrations.supported import Setting, check
from variable_batch_size.optim.consistency import broadcast_parameters
from variable_batch_size.optim.handed import Update
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.updates import updates

_OPTIONS = "gradient_accumulation_steps", "loss_scale_factor"
_OTHERS = "LossScaleOptimizer", "MultiOptimizer", "NoneType"
_MEANS = "mean", "sum_over_batch_size"
COMPILED = (
    Setting(
        "the optimizer",
        f"one of keras.optimizers without {', '.join(_OPTIONS)}, and no {' or '.join(_OTHERS[:2])}",
        lambda model: [type(model.optimizer).__name__, *(one for one in _OPTIONS if getattr(model.optimizer, one, 0))],
        lambda found: len(found) == 1 and found[0] not in _OTHERS,
        'leave it out; use "mixed_bfloat16" instead of "mixed_float16"',
    ),
    Setting("jit_compile", "False", "jit_compile", (False,), "compile layers of your own"),
    Setting("steps_per_execution", "1", "steps_per_execution", (1,), "leave it out"),
    Setting(
        "the reduction of a loss",
        "a mean over samples",
        lambda model: [getattr(loss, "reduction", _MEANS[0]) for loss in keras.tree.flatten(model.loss)],
        set(_MEANS).issuperset,
        f'pass reduction="{_MEANS[1]}"',
    ),
)
NOT_FOR_FIT = "class_weight", "steps_per_epoch", "BackupAndRestore"
FIT = (
    Setting(
        "an argument of fit()",
        f"none of {', '.join(NOT_FOR_FIT)}",
        lambda given: [name for name in NOT_FOR_FIT if given.get(name) is not None],
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
        model: any `keras.Model` with the `fit`, `make_train_function` and `train_step` of Keras, compiled or not.
        *settings: `trace`, `rule`, `ref_batchsize`, `sampler_options` and `optimizer_options`, in this order or by
            name: see `CustomSampler` and `CustomOptimizer`.

    Attributes:
        sampler: the sampler of the training; None before `fit`.
        custom_optimizer: the optimizer of the training, with its position; None before `fit`.

    Raises:
        TypeError: if it is no `keras.Model`, or has such a trace already.
        ValueError: if it has one of these methods of its own, or is compiled with what is not supported.
    """

    def __new__(cls, model: Any, *settings: Any, **named: Any) -> Any:
        """Return the model, of another class."""
        if isinstance(model, VariableBatchModel) or not isinstance(model, keras.Model):
            remedy = "pass keras.Sequential(...), for example"
            raise type_error("model must be a keras.Model without a trace", model, remedy)
        kind = type(model)
        for name in "fit", "make_train_function", "train_step":
            if name in vars(model) or getattr(kind, name) is not getattr(keras.Model, name):
                requirement = f"the model must have the {name} of Keras, because a batch of it would be an update"
                raise value_error(requirement, f"{kind.__name__}.{name}", "override compute_loss, or write the loop")
        Settings(*settings, **named)  # raises before the class changes
        model.__class__ = _subclass(kind)  # type: ignore[arg-type]
        return model

    def __init__(self, model: Any, *settings: Any, **named: Any) -> None:
        self.settings = Settings(*settings, **named)
        self.sampler: CustomSampler | None = None
        self.custom_optimizer: CustomOptimizer | None = None
        if self.compiled:
            check(COMPILED, self, "keras")

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile as Keras does, and begin another training; raise ValueError for what is not supported."""
        super().compile(*args, **options)
        check(COMPILED, self, "keras")
        self.sampler = self.custom_optimizer = None

    def fit(self, *args: Any, **options: Any) -> Any:
        """Train as Keras does, with a batch of the trace for each update; a second call trains further epochs.

        The arguments are those of Keras, but for `batch_size`, the rows of a microbatch. Data are arrays or tensors
        with one row a sample, or a DataLoader with a map-style dataset. Every rank evaluates all validation data.

        Raises:
            TypeError: if samples have no index, as in a generator.
            ValueError: if the model is not compiled, an argument contradicts the trace, or a later call would continue
                with other microbatches, another optimizer or other trainable weights.
        """
        if not self.compiled:
            raise ValueError("You must call `compile()` before calling `fit()`.")
        bound = inspect.signature(keras.Model.fit).bind(self, *args, **options)
        bound.apply_defaults()
        given, own = SimpleNamespace(**bound.arguments), keras.tree.flatten(bound.arguments["callbacks"] or [])
        check(FIT, {**bound.arguments, **{type(one).__name__: one for one in own}}, "keras")
        begun: Any = self.sampler if self.custom_optimizer is not None and self.custom_optimizer.updates else None
        rows = given.batch_size or (32 if begun is None else begun.plan.minibatch_size)
        held_out = 0.0 if given.validation_data is not None else given.validation_split
        loader, after = loaders_of((given.x, given.y, given.sample_weight), rows, given.shuffle, held_out)
        if begun is not None:
            self._check_continues(loader)
        else:
            self.sampler = sampler_for(loader, self.settings)
            build(self, first_microbatch(loader, self.sampler.plan.minibatch_size))
            inner = KerasOptimizer(self.optimizer, self.trainable_variables)
            self.custom_optimizer = self.settings.optimizer(inner, self.sampler, model=self)
        shown = {"add_history": True, "add_progbar": given.verbose != 0, "verbose": given.verbose}
        callbacks = keras.callbacks.CallbackList(own, **shown, model=self, epochs=given.epochs, steps=None)
        given.validation_data = given.validation_data if after is None else after
        try:
            self._train(loader, callbacks, given)
        finally:
            for one in own:
                if isinstance(one, VariableBatchCheckpoint):
                    one.close()
        return self.history

    def _check_continues(self, loader: Any) -> None:
        """Check that a later `fit` has the microbatches, the optimizer and the weights of the first."""
        sampler: Any = self.sampler
        optimizer: Any = self.custom_optimizer
        check_samples(loader, sampler)
        plan, order = sampler.plan, order_of(loader)
        first = {"batch_size": plan.minibatch_size, "shuffle": sampler.shuffle, "drop_last": plan.drop_last}
        remedy = "call compile() to begin another one"
        if order != first:
            raise value_error(f"a training continues with {first}", order, f"pass these, or {remedy}")
        if not optimizer.inner.applies(self.optimizer, self.trainable_variables):
            raise value_error("a training continues with its optimizer and trainable weights", "others", remedy)

    def _train(self, loader: Any, callbacks: Any, given: Any) -> None:
        """Make the updates of the epochs, and call the callbacks, in the order of Keras."""
        optimizer: Any = self.custom_optimizer
        sampler, plan = optimizer.sampler, optimizer.sampler.plan
        optimizer.discard_step()  # what an interrupted fit() has left
        broadcast_parameters(self)  # also in a second fit: a callback may set weights at the end of the first
        self.stop_training, begun, logs = False, optimizer.updates, {}
        offset = given.initial_epoch - optimizer.epoch - sampler.end_pending
        self.epoch_offset = torch.tensor(offset)  # a restore sets it
        self.reset_metrics()

        def left() -> int:
            epoch = plan.epoch(optimizer.epoch)
            return epoch.end_step - max(epoch.first_step, optimizer.updates)

        callbacks.set_params({**callbacks.params, "steps": left()})
        callbacks.on_train_begin()
        reads = updates(with_sampler(loader, sampler), optimizer)
        if sampler.end_pending:  # restored after the callbacks of an epoch's end
            deque(reads, maxlen=0)
        restored = optimizer.updates > begun
        offset = int(self.epoch_offset)
        plan.check_trace(given.epochs - offset)
        warn_of_batches([rate_of(self.optimizer)], plan, len(loader))
        # Within an epoch, whose metrics are restored.
        resumes = restored and not sampler.batches.ends_epoch(sampler.position)
        for epoch in range(optimizer.epoch + offset, given.epochs):
            if optimizer.done:
                break
            if not resumes:
                self.reset_metrics()
            resumes = False
            callbacks.set_params({**callbacks.params, "steps": left()})
            callbacks.on_epoch_begin(epoch)
            self.train()
            for number, update in enumerate(reads):
                callbacks.on_train_batch_begin(number)
                logs = self.train_step(update)
                callbacks.on_train_batch_end(number, logs)
                if self.stop_training:
                    break
            self.eval()
            often = given.validation_freq
            due = (epoch + 1) % often == 0 if isinstance(often, int) else epoch + 1 in often
            if due and given.validation_data is not None:
                x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(given.validation_data)
                how = {"sample_weight": sample_weight, "steps": given.validation_steps, "callbacks": callbacks}
                size = given.validation_batch_size or given.batch_size
                found = self.evaluate(x, y, size, **how, return_dict=True)
                logs = {**logs, **{f"val_{name}": value for name, value in found.items()}}
            callbacks.on_epoch_end(epoch, logs)
            if self.stop_training:
                break
        self.optimizer.finalize_variable_values(self.trainable_weights)
        callbacks.on_train_end(logs)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Make an update; the loss is that of all ranks so far in the epoch, other metrics are those of this one."""
        optimizer: Any = self.custom_optimizer
        if optimizer is None or not isinstance(data, Update):
            raise RuntimeError("an update needs its microbatches, which only fit() reads; call fit()")
        self.zero_grad()  # of a backward in a callback
        optimizer.inner.read_learning_rate()
        size, found = optimizer.microbatch.batch_size, {}
        calls, losses = _training(self.call), _training(self.compute_loss)
        for microbatch in data:
            part = optimizer.microbatch
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(microbatch)
            y_pred = self(x, **calls)
            if is_masked(y_pred):
                requirement = "the output of the model must have no mask"
                raise value_error(requirement, "one", "pass sample_weight instead of it")
            loss = self.compute_loss(x, y, y_pred, sample_weight, **losses)
            optimizer.backward(loss)
            optimizer.log(loss=loss)
            if part.samples:  # a replay counts on another rank
                distinct = itemgetter(slice(None, None, part.rows // part.samples))
                *rows, weight = map_arrays(distinct, (x, y, y_pred, sample_weight))
                with torch.no_grad():
                    found = self.compute_metrics(*rows, sample_weight=weight)
            optimizer.step()
        for metric in self.metrics:
            if metric.name == "loss":  # the name that Keras' guides to train_step go by
                metric.update_state(optimizer.logged["loss"], sample_weight=size)
        facts = {"batch_size": size, "effective_learning_rate": optimizer.current_lr(), **facts_of(optimizer)}
        return {**found, **self.get_metrics_result(), **facts}


def _training(function: Any) -> dict[str, Any]:
    return {"training": True} if "training" in inspect.signature(function).parameters else {}


_set_class = object.__dict__["__class__"].__set__


@cache
def _subclass(kind: Any) -> type:
    """Return the class of a model with a trace, whose instances have `__class__` `kind`.

    Keras looks up there under which name it saves a model, also one within another, and of which class a clone is.
    """
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    own = {"__class__": property(lambda _: kind, _set_class), "from_config": kind.from_config}
    return type(kind.__name__, (VariableBatchModel, kind), {**same, **own})
