"""Models of Keras whose batches are updates of a trace: a mixin for classes, and a model around others."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import keras
import torch
from torch.utils.data import DataLoader

from variable_batch_size._validation import type_error, value_error
from variable_batch_size.integrations.facts import optimizer_facts
from variable_batch_size.integrations.keras.checkpoint import VariableBatchCheckpoint
from variable_batch_size.integrations.keras.data import Epochs, map_arrays, pop_loader
from variable_batch_size.integrations.keras.optimizer import KerasOptimizer
from variable_batch_size.integrations.loading import read_rows, sampler_for, with_sampler
from variable_batch_size.integrations.loss_check import LossCheck
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.integrations.supported import Setting, check_settings
from variable_batch_size.optim.checks.consistency import broadcast_parameters
from variable_batch_size.optim.loops.yielded_update import Update
from variable_batch_size.testing.schedules import check_schedule

if TYPE_CHECKING:
    from keras import Model as Base
else:
    Base = object  # Keras replaces the bases of classes whose models are functional

_OPTIONS = "gradient_accumulation_steps", "loss_scale_factor"
SETTINGS = (
    Setting(
        "the optimizer",
        f"one of keras.optimizers without {' or '.join(_OPTIONS)}, and no LossScaleOptimizer or MultiOptimizer",
        lambda fit: [type(fit["optimizer"]).__name__, *(n for n in _OPTIONS if getattr(fit["optimizer"], n, None))],
        lambda found: len(found) == 1 and found[0] not in {"LossScaleOptimizer", "MultiOptimizer"},
        'leave it out; use "mixed_bfloat16" instead of "mixed_float16"',
    ),
    Setting("jit_compile", "False", lambda fit: fit["self"].jit_compile, (False,), "compile layers of your own"),
    Setting("steps_per_epoch", "None", itemgetter("steps_per_epoch"), (None,), "pass max_updates in sampler_options"),
    Setting(
        "class_weight", "None", itemgetter("class_weight"), (None,), "pass the weight of each row as sample_weight"
    ),
    Setting("BackupAndRestore", "left out", itemgetter("backups"), ([],), "pass VariableBatchCheckpoint"),
)  # of a call of `fit`
_METHODS = "compute_loss", "compute_metrics", "fit", "make_train_function", "test_step", "train_step", "compile"
_REMEDY = "return a mean over rows, or pass count= with what it is a mean over, such as tokens"


class VariableBatchModelMixin(Base):
    """Makes the `fit` of a subclass follow a trace of batch sizes: `class Mine(VariableBatchModelMixin, keras.Model)`.

    A batch of Keras is one update, and `batch_size` of `fit`, or of a DataLoader, are the rows of a microbatch. A later
    `fit` goes on with the trace and the microbatches of the first, and begins anew with another optimizer.

    Args:
        args, options: arguments of the class that it is mixed into, and `trace`, `rule`, `ref_batchsize`,
            `sampler_options` and `optimizer_options`: see `CustomSampler` and `CustomOptimizer`. `fit` needs a trace.
            `check_loss=False` switches off the check of the loss in updates 0, 1, 10, 100 and 1,000.
        count: given `y` and `sample_weight` of a microbatch, returns what its loss is a mean over, 0-D, such as its
            number of tokens: an update is then the mean over all of them. Default: its rows.

    Attributes:
        custom_optimizer: the optimizer, with the position in the training and its `sampler`; None before `fit`.

    Raises:
        TypeError: in `fit`, if samples have no index, as in a generator.
        ValueError: in `fit`, if there is no trace, or a setting is not supported.
    """

    def __init__(self, *args: Any, count: Callable[[Any, Any], Any] | None = None, **options: Any) -> None:
        """Take the settings of this library out of the arguments, and pass the others to the model's class."""
        settings = Settings.taken_from(options) if "trace" in options else None
        super().__init__(*args, **options)
        self.count, self.settings = count, settings
        self.custom_optimizer: Any = None
        self._loss_check: Any = None

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile as Keras does; with the same optimizer the training goes on, and another loss is checked anew."""
        super().compile(*args, **options)
        self._loss_check = None

    def fit(self, *args: Any, **options: Any) -> Any:
        """Train as Keras does, with a batch of the trace for each update."""
        if not self.compiled:
            return super().fit(*args, **options)  # which raises
        bound = inspect.signature(keras.Model.fit).bind(self, *args, **options)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        callbacks = keras.tree.flatten(arguments["callbacks"] or [])
        settings = self._check_fit(arguments, callbacks)
        del arguments["self"]
        self._loader = loader = pop_loader(arguments)
        optimizer = self._current_optimizer(loader, settings)
        epochs = Epochs(with_sampler(loader, optimizer.sampler), optimizer)  # of updates, each a batch for Keras
        batches: Any = DataLoader(epochs, None, generator=torch.Generator())  # it draws, but not from torch's
        offset = arguments["initial_epoch"] - epochs.next_epoch()  # of Keras' numbers of epochs to those of the trace
        with ExitStack() as stack:
            for callback in callbacks:
                if isinstance(callback, VariableBatchCheckpoint):
                    stack.enter_context(callback.restored(self))
            optimizer.sampler.plan.check_trace(arguments["epochs"] - offset)
            check_schedule(self.optimizer._learning_rate, optimizer.sampler, len(loader))
            # Again, because a callback may have restored a later epoch.
            arguments["initial_epoch"] = arguments["epochs"] if optimizer.done else offset + epochs.next_epoch()
            callback_list = self._callbacks_with_steps(callbacks, arguments, epochs)
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Your input ran out of data")  # at the end of an epoch
            return super().fit(batches, **{**arguments, "shuffle": False, "callbacks": callback_list})

    def _check_fit(self, arguments: dict[str, Any], callbacks: list[Any]) -> Settings:
        """Return the settings of the training, after checks.

        Args:
            arguments: the arguments of `fit`.
            callbacks: its callbacks.

        Raises:
            ValueError: if `fit` cannot train with them, or with the model.
        """
        backups = [callback for callback in callbacks if isinstance(callback, keras.callbacks.BackupAndRestore)]
        check_settings(SETTINGS, {**arguments, "optimizer": self.optimizer, "backups": backups}, "Keras")
        if self.settings is None:
            remedy = 'pass trace="0:128 10:256"; a loaded model has none: create one, and load its weights'
            raise value_error("a model must get a trace", f"{type(self).__name__} without one", remedy)
        steps = type(self).train_step, super().train_step.__func__
        if steps != (VariableBatchModelMixin.train_step, keras.Model.train_step):
            requirement = "the class of a model must have the train_step of Keras"
            raise value_error(requirement, f"{type(self).__name__} with its own", "override compute_loss instead")
        return self.settings

    def _callbacks_with_steps(self, callbacks: list[Any], arguments: dict[str, Any], epochs: Epochs) -> Any:
        """Return Keras' list of the callbacks, one of which tells the others how many updates each epoch has left.

        Keras would tell its progress bar one number for all epochs, but they differ with the batch sizes.
        """
        verbose = arguments["verbose"]
        params = {"verbose": verbose, "epochs": arguments["epochs"], "add_progbar": verbose != 0}
        # Called when an epoch begins, before the other callbacks.
        tell = keras.callbacks.LambdaCallback(lambda *_: listed.set_params({**listed.params, "steps": epochs.steps}))
        listed: Any = keras.callbacks.CallbackList([tell, *callbacks], True, model=self, steps=epochs.steps, **params)
        return listed

    def _current_optimizer(self, loader: Any, settings: Settings) -> Any:
        """Return the optimizer with which `fit` continues its training, or a new one for a new training.

        A training is new if it has made no update, or the model was compiled with another Keras optimizer.
        """
        optimizer = self.custom_optimizer
        sampler = sampler_for(loader, settings)
        is_new = optimizer is None or not optimizer.updates or optimizer.inner.wrapped is not self.optimizer
        if is_new or self._loss_check is None:
            first_indices = [*range(min(len(loader.dataset), loader.batch_sampler.batch_size))]
            batch = loader.collate_fn(read_rows(loader.dataset, first_indices))
            # Private: it creates all variables without a forward, which might draw numbers.
            self._symbolic_build(data_batch=batch)
            self._loss_check = LossCheck(settings.check_loss, first=0 if is_new else optimizer.updates)
        if is_new:
            inner = KerasOptimizer(self.optimizer, self.trainable_variables)
            reduction = {} if self.count is None else {"reduction": "sum"}
            optimizer = self.custom_optimizer = settings.wrap_optimizer(inner, sampler, model=self, **reduction)
        optimizer.discard_step()  # what an interrupted fit() has left
        broadcast_parameters(self)  # also in a second fit: a callback may set weights at the end of the first
        return optimizer

    def train_step(self, data: Any) -> dict[str, Any]:
        """Make an update of its microbatches, and return the metrics of the epoch: the loss is over all ranks."""
        optimizer = self.custom_optimizer
        if not isinstance(data, Update):
            raise RuntimeError("an update needs its microbatches, which only fit() reads; call fit()")
        self.zero_grad()  # of a backward in a callback
        optimizer.param_groups[0]["lr"] = float(self.optimizer.learning_rate)
        size = optimizer.microbatch.batch_size
        metrics = {}
        if self._loss_check.takes(optimizer):
            self._check_loss()
        for batch in data:
            microbatch = optimizer.microbatch
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
            count = None if self.count is None else self.count(y, sample_weight)
            # With a count the optimizer takes sums, and a mean over nothing may be nan.
            total = loss if count is None else torch.where(count > 0, loss * count, 0)
            optimizer.backward(total)
            optimizer.log(loss=total)
            if microbatch.samples:  # otherwise it repeats samples whose metrics are counted elsewhere
                repeats = microbatch.rows // microbatch.samples  # of each sample, in rows that follow each other
                distinct = itemgetter(slice(None, None, repeats))
                *rows, weight = map_arrays(distinct, (x, y, y_pred, sample_weight))
                with torch.no_grad():
                    metrics = self.compute_metrics(*rows, sample_weight=weight)
            optimizer.step(count=count)
        return {**metrics, **self._end_update(size)}

    def _end_update(self, size: int) -> dict[str, Any]:
        """Add the loss of an update to the mean of the epoch, and return what Keras logs, such as metrics.

        Args:
            size: samples of the update, over all ranks.
        """
        optimizer = self.custom_optimizer
        for metric in self.metrics:
            if metric.name == "loss":  # the name that Keras' guides to train_step go by
                metric.update_state(optimizer.logged["loss"], sample_weight=size)
        self.stop_training |= optimizer.done
        facts = {"batch_size": size, "effective_learning_rate": optimizer.current_lr(), **optimizer_facts(optimizer)}
        return {**self.get_metrics_result(), **facts}

    def _check_loss(self) -> None:
        """Warn if the loss is no mean over rows, or over what `count` says: its gradients would be scaled wrongly."""

        def loss_of(_: Any, batch: Any, counted: float) -> Any:
            """Return the loss of a batch, times its count if the model has one."""
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
            loss = self.compute_loss(x, y, self(x, training=False), sample_weight)
            return loss if self.count is None else loss * self.count(y, sample_weight)

        options: Any = {"reduction": self.custom_optimizer.reduction, "remedy": _REMEDY}
        variables = [(variable, variable.value) for variable in self.variables]
        with keras.StatelessScope(variables, collect_losses=True):  # so that metrics and seeds stay as they are
            self._loss_check(self.custom_optimizer, self._loader, self, loss_of, **options)


class VariableBatchModel(VariableBatchModelMixin, keras.Model):
    """A model whose `fit` follows a trace of batch sizes, around a functional or sequential one, which it trains.

    Its files are those of `inner`, compiled, which is what they are loaded as: without a trace.

    Args:
        inner: a `keras.Sequential`, or a model that was made of inputs and outputs, not compiled yet.
        **options: `trace`, `rule` and the others of `VariableBatchModelMixin`.

    Raises:
        TypeError: if `inner` is no such model, or compiled.
    """

    def __init__(self, inner: Any, **options: Any) -> None:
        """Check that the model within leaves to Keras what this class changes."""
        if not isinstance(inner, keras.Model) or inner.compiled:
            remedy = "load_model(path, compile=False) loads one so; call compile() of what is returned"
            raise type_error("inner must be a keras.Model, not compiled", inner, remedy)
        overridden = [name for name in _METHODS if getattr(type(inner), name) is not getattr(keras.Model, name)]
        if overridden:
            remedy = "write class Mine(VariableBatchModelMixin, keras.Model)"
            raise type_error(f"inner must have the {overridden[0]} of keras.Model", inner, remedy)
        super().__init__(name=inner.name, dtype=inner.dtype_policy, **options)
        self.inner = inner
        if hasattr(inner, "output_names"):
            self.output_names = inner.output_names  # by which losses and metrics are given
        for name in "save", "save_weights", "load_weights":  # so that files hold the model within
            setattr(self, name, getattr(inner, name))

    def call(self, x: Any, training: bool | None = None) -> Any:
        """Return the outputs of the model within, which knows `training` from Keras."""
        return self.inner(x)

    def compile(self, optimizer: Any = "rmsprop", *args: Any, **options: Any) -> None:
        """Compile as Keras does, also the model within, which is saved."""
        super().compile(optimizer, *args, **options)
        self.inner.compile(self.optimizer, *args, **options)
