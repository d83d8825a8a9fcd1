"""Keras 3 on the torch backend: `compile` and `fit` as ever, with a batch size that changes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from variable_batch_size._validation import check_int, type_error, value_error
from variable_batch_size.data.sampler import CustomSampler, TraceLike
from variable_batch_size.integrations.keras.backend import keras
from variable_batch_size.integrations.keras.checkpoint import VariableBatchCheckpoint
from variable_batch_size.integrations.keras.data import loader_of, split
from variable_batch_size.integrations.keras.metrics import by_samples, logs_of, merge_metrics, set_seeds, update_loss
from variable_batch_size.integrations.keras.optimizer import check_optimizer
from variable_batch_size.integrations.keras.training import Callbacks, Training
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.rules import RULES, Rule
from variable_batch_size.rules.base import check_reference
from variable_batch_size.rules.selection import rules_for_groups
from variable_batch_size.trace.batch_trace import BatchTrace

if TYPE_CHECKING:

    class Base(keras.Model):
        """A Keras model, to which the methods belong in the subclass that is made of the model's class."""
else:
    Base = object


class VariableBatchModel(Base):
    """A Keras model whose `fit` follows a trace of batch sizes.

    `VariableBatchModel(model, trace=...)` returns `model` itself, of a subclass of its class with the same name: its
    layers, weights, files and results stay as they are. A batch of Keras is then one update. `batch_size` of `fit` and
    of a DataLoader are the rows of a microbatch.

    Args:
        model: any `keras.Model` with the `train_step` of Keras, compiled or not.
        trace: the trace of the global batch size, see `CustomSampler`.
        rule: the learning-rate rule, see `CustomOptimizer`.
        ref_batchsize: batch size, in samples, at which the hyperparameters were tuned.
        sampler_options: further arguments of the `CustomSampler`.
        optimizer_options: further arguments of the `CustomOptimizer`.

    Raises:
        TypeError: if it is no `keras.Model`, or has such a trace already.
        ValueError: if it has a `train_step` of its own, or is compiled with what `compile` refuses; or if the trace
            cannot be read, or the rule needs a `ref_batchsize` or scales more than the learning rate.
    """

    def __new__(cls, model: Any, *args: Any, **options: Any) -> Any:
        """Return the model, of another class."""
        if isinstance(model, VariableBatchModel) or not isinstance(model, keras.Model):
            raise type_error(
                "model must be a keras.Model without a trace", model, "pass keras.Sequential(...), for example"
            )
        if type(model).train_step is not keras.Model.train_step:
            raise value_error(
                "the model must have the train_step of Keras, because each call of it would be an update",
                f"{type(model).__name__}.train_step",
                "override compute_loss instead, or write the loop",
            )
        inspect.signature(cls.__init__).bind(model, model, *args, **options)  # raises before the class changes
        kind: Any = type(model)
        model.__class__ = _subclass(kind)
        return model

    def __init__(
        self,
        model: Any,
        trace: TraceLike,
        rule: Rule | str | Sequence[Rule | str] = "constant",
        ref_batchsize: int | None = None,
        sampler_options: Mapping[str, Any] | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            settings = Settings(trace, rule, ref_batchsize, sampler_options or {}, optimizer_options or {})
            check_rule(rule, ref_batchsize)
            if isinstance(trace, (str, os.PathLike)):
                BatchTrace.of(trace)  # raises here, and not only in `fit`
            self._variable_batch = Training(settings, self)
            if self.compiled:
                self._check_compiled()
        except Exception:
            _set_class(self, type(self).__mro__[2])  # so that the line can be corrected and run again
            raise

    @property
    def sampler(self) -> CustomSampler | None:
        """The sampler of the training; None before `fit`."""
        return self._variable_batch.sampler

    @property
    def custom_optimizer(self) -> CustomOptimizer | None:
        """The optimizer of the training, with its position and the measured noise; None before `fit`."""
        return self._variable_batch.optimizer

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile as Keras does, and begin another training.

        Raises:
            ValueError: if the loss is no mean over the samples, or the optimizer accumulates or scales gradients.
        """
        super().compile(*args, **options)
        self._variable_batch.clear()
        self._check_compiled()

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Any = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_batch_size: int | None = None,
        **options: Any,
    ) -> Any:
        """Train as Keras does, with a batch of the trace for each update.

        Args:
            x: arrays, or tensors, with one row a sample; or a DataLoader with a map-style dataset.
            y: targets.
            batch_size: rows of a microbatch, 32 by default. Not with a DataLoader, which has its own.
            epochs: number of the last epoch; a second call trains further ones.
            verbose: as in Keras, as are all others.
            callbacks: a list of callbacks, whose batches are updates.
            validation_split: part of the arrays for the validation.
            validation_data: data for it; every rank evaluates all of them.
            shuffle: whether the sampler shuffles arrays; a DataLoader has its own.
            class_weight: weight of each class.
            sample_weight: weight of each sample.
            initial_epoch: number of the first epoch.
            steps_per_epoch: refused: an epoch uses each sample once.
            validation_batch_size: as in Keras.
            **options: further arguments of Keras.

        Raises:
            TypeError: if samples have no index, as in a generator.
            ValueError: if an argument contradicts the trace.
        """
        training = self._variable_batch
        if steps_per_epoch is not None:
            remedy = 'pass sampler_options={"max_updates": ...} to end the training earlier'
            raise value_error("an epoch uses each sample once, without steps_per_epoch", steps_per_epoch, remedy)
        if shuffle not in (True, False):
            raise value_error("shuffle must be True or False", repr(shuffle), "pass one of them")
        if isinstance(callbacks, keras.callbacks.CallbackList):
            raise type_error("callbacks must be a list", callbacks, "pass its callbacks")
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split(x, y, sample_weight, validation_split)
        rows = 32 if batch_size is None else check_int(batch_size, "batch_size", 1)
        loader = loader_of(x, y, sample_weight, class_weight, rows, shuffle=bool(shuffle))
        own = sorted(keras.tree.flatten(callbacks or []), key=lambda one: isinstance(one, VariableBatchCheckpoint))
        shown: dict[str, Any] = {"add_history": True, "add_progbar": verbose != 0, "verbose": verbose}
        try:
            return super().fit(
                training.loader(loader),
                epochs=epochs,
                verbose=verbose,
                callbacks=Callbacks(training, own, initial_epoch, **shown, epochs=epochs, steps=None, model=self),
                validation_data=validation_data,
                shuffle=False,
                initial_epoch=initial_epoch,
                validation_batch_size=validation_batch_size or batch_size,
                **options,
            )
        finally:
            training.end()
            self._initial_epoch = None
            for one in own:
                if isinstance(one, VariableBatchCheckpoint):
                    one.close()

    def make_train_function(self, force: bool = False) -> None:
        """Compile forward and loss of a microbatch if `jit_compile` is set, and not the update."""
        super().make_train_function(force)
        forward = self._forward
        self._variable_batch.forward = torch.compile(forward) if self.jit_compile else forward
        self.train_function = lambda data: self.train_step(data[0])

    def train_step(self, data: Any) -> dict[str, Any]:
        """Make an update of this rank's microbatches, and return the metrics so far.

        The loss is the mean over all samples of the epoch so far, on all ranks; the other metrics are those of this
        rank until the epoch ends.
        """
        training, optimizer = self._variable_batch, self.custom_optimizer
        if optimizer is None or not isinstance(data, list):
            raise RuntimeError(
                "an update needs its microbatches, which only fit() reads; call fit() instead of train_on_batch()"
            )
        training.read_learning_rate()
        set_seeds(self, optimizer)
        size = optimizer.microbatch.batch_size
        for microbatch in data:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(microbatch)
            part = optimizer.microbatch
            with by_samples(self, part):
                y_pred, loss = training.forward(x, y, sample_weight)
            loss.backward()
            optimizer.log(loss=loss)
            if part.samples:  # a replay counts on another rank
                repeated = part.rows // part.samples
                rows = [_distinct(value, repeated) for value in (x, y, y_pred, sample_weight)]
                with torch.no_grad():
                    self.compute_metrics(*rows)
            optimizer.step()
        update_loss(self, optimizer, size)
        if training.after_update():
            merge_metrics(self, optimizer)
        return {**self.get_metrics_result(), **logs_of(optimizer, size)}

    def train_on_batch(self, *args: Any, **options: Any) -> Any:
        """Raise RuntimeError: a batch of the trace is not one of the caller's."""
        raise RuntimeError(
            "the trace determines the batches, but train_on_batch() was called with one; call fit(), or "
            "train_on_batch() of a model without a trace"
        )

    def save_weights(self, *args: Any, **options: Any) -> Any:
        """Save the weights as Keras does, and the position in the training with them."""
        with self._position_among_weights():
            return super().save_weights(*args, **options)

    def load_weights(self, *args: Any, **options: Any) -> Any:
        """Load weights as Keras does, and the position if `fit` begins."""
        with self._position_among_weights():
            return super().load_weights(*args, **options)

    def __reduce__(self) -> Any:
        """Return what a copy is made from: a model of its own class, as Keras saves it, without the trace."""
        return self.__class__._unpickle_model, super().__reduce__()[1]  # by the name of a class that pickle can import

    @contextmanager
    def _position_among_weights(self) -> Iterator[None]:
        self.__dict__["variable_batch_size"] = self._variable_batch.state  # where Keras looks for what has weights
        try:
            yield
        finally:
            del self.__dict__["variable_batch_size"]

    def _forward(self, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Tensor]:
        training = {"training": True}
        y_pred = self(x, **training) if _has_training(self.call) else self(x)
        for output in keras.tree.flatten(y_pred):
            if getattr(output, "_keras_mask", None) is not None:  # set by Keras; there is no public access
                raise RuntimeError(
                    "the loss must be a mean over samples, but the output of the model has a mask, over whose entries "
                    "Keras takes the mean of each microbatch; pass sample_weight instead of the mask"
                )
        more = training if _has_training(self.compute_loss) else {}
        return y_pred, self.compute_loss(x, y, y_pred, sample_weight, **more)

    def _check_compiled(self) -> None:
        check_optimizer(self.optimizer)
        if self.steps_per_execution != 1:
            raise value_error("steps_per_execution must be 1", self.steps_per_execution, "leave it out")
        for loss in keras.tree.flatten(self.loss):
            check_mean(loss)


def check_mean(loss: Any) -> None:
    """Check that a loss is a mean over samples, as far as its attributes tell.

    Raises:
        ValueError: if it is not.
    """
    if isinstance(loss, str) and loss.lower() not in ("crossentropy", "ce"):  # names that Keras resolves by the targets
        loss = keras.losses.get(loss)
    reduction, remedy = getattr(loss, "reduction", "mean"), None
    if reduction not in ("mean", "sum_over_batch_size"):
        found, remedy = f"reduction={reduction!r}", 'pass reduction="sum_over_batch_size"'
    if getattr(loss, "ignore_class", None) is not None:  # a mean over the entries that each microbatch counts
        found, remedy = f"ignore_class={loss.ignore_class}", "pass sample_weight, 0 where the class is ignored"
    ratios = keras.losses.Dice, keras.losses.Tversky  # of sums over all rows
    if (isinstance(loss, ratios) and loss.axis is None) or loss in (keras.losses.dice, keras.losses.tversky):
        found, remedy = (
            "axis=None",
            "pass keras.losses.Dice or Tversky with the axes of a sample, such as axis=(1, 2, 3)",
        )
    if isinstance(loss, keras.losses.Circle) or loss is keras.losses.circle:
        found, remedy = "pairs of the samples of a microbatch", "pass a loss of single samples"
    if remedy is not None:
        name = getattr(loss, "name", getattr(loss, "__name__", loss))
        raise value_error("a loss must be a mean over the samples", f"{found} of {name}", remedy)


def check_rule(rule: Rule | str | Sequence[Rule | str], ref_batchsize: int | None) -> None:
    """Check that a rule can be used with an optimizer of Keras, which has one group.

    Raises:
        TypeError: if it is no rule.
        ValueError: if it has no such name, lacks `ref_batchsize`, or scales more than the learning rate.
    """
    (made,) = rules_for_groups(rule, 1)
    check_reference(made, ref_batchsize)
    if refused := [name for name in _SCALE_MORE if isinstance(made, RULES[name])]:
        raise value_error(
            "with Keras the rule must scale the learning rate only", refused[0], 'pass "linear" or "root", for example'
        )


_SCALE_MORE = ("linear-momentum", "sqrt-sde", "root-half-life")  # hyperparameters that Keras' optimizers keep as floats


_set_class = object.__dict__["__class__"].__set__


@cache
def _subclass(kind: Any) -> type:
    """Return the class of a model with a trace, whose instances have `__class__` `kind`.

    Keras looks up there under which name it saves a model, also one within another, and of which class a clone is.
    """
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    own = {"__class__": property(lambda _: kind, _set_class), "from_config": kind.from_config}
    return type(kind.__name__, (VariableBatchModel, kind), {**same, **own})


def _has_training(function: Any) -> bool:
    return "training" in inspect.signature(function).parameters


def _distinct(value: Any, repeated: int) -> Any:
    """Return the rows of a microbatch without their repetitions."""
    if value is None or repeated == 1:
        return value
    return keras.tree.map_structure(lambda rows: rows[::repeated], value)
