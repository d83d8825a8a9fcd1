"""The training of a Keras model: its sampler, its optimizer, and the epoch that `fit` is in."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from variable_batch_size._validation import value_error
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.from_loader import order_of
from variable_batch_size.integrations.keras.backend import keras
from variable_batch_size.integrations.keras.checkpoint import VariableBatchCheckpoint, explaining_mismatch
from variable_batch_size.integrations.keras.data import Arrays, first_rows
from variable_batch_size.integrations.keras.metrics import EpochMetrics, check_decisions, logs_of_rank_0, seeds_of
from variable_batch_size.integrations.keras.optimizer import KerasOptimizer
from variable_batch_size.integrations.loading import with_sampler
from variable_batch_size.integrations.settings import Settings, check_indexed
from variable_batch_size.optim.consistency import broadcast_parameters, check_same
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.updates import Update, Updates, updates


@final
class Training:
    """What `fit` trains by, from the first call after `compile` on.

    Keras takes all epochs to be as long as the first one, unless it does not know their length: then only
    `stop_training` ends them. So it is set after the callbacks of the last update of an epoch, and taken back before
    those of the end of the epoch, see `Callbacks`.

    Attributes:
        settings: what the user has passed.
        model: the model.
        sampler: the sampler; None before `fit`.
        optimizer: the optimizer; None before `fit`.
        metrics: the metrics of the epoch under way, for a checkpoint.
        forward: computes the outputs and the loss of a microbatch, compiled if the user asks for it.
        state: saves and restores the position with the weights of the model.
        interrupted: whether the last `fit` ended by an exception.
    """

    def __init__(self, settings: Settings, model: Any) -> None:
        self.settings, self.model = settings, model
        self.metrics = EpochMetrics(model)
        self.sampler: CustomSampler | None = None
        self.optimizer: CustomOptimizer | None = None
        self.forward: Any = None
        self.state = PositionInWeights(self)
        self._inner: KerasOptimizer | None = None
        self._begun: dict[str, int] = {}  # what the sampler was created with
        self.interrupted = False
        self._offset = 0  # epochs that were trained before Keras' epoch 0
        self._counted = self._end = 0  # where this `fit` began, and where it ends if no callback ends it before
        self._reading: Iterator[Update[Any]] | None = None  # the updates of the epoch under way
        self._updates: Updates[Any] | None = None
        self._loader: Any = None
        self._ends_epoch = False  # whether `stop_training` was set by `after_callbacks`
        self._asks = False  # whether ranks ask each other for `stop_training` after each update
        self._restorable = self._restored = self._resumed = False

    def clear(self) -> None:
        """Begin anew, for another compiled optimizer."""
        self.sampler = self.optimizer = None
        self.interrupted = self._resumed = False
        self._offset = self._end = 0

    def loader(self, loader: Any) -> Any:
        """Return a loader whose items are updates, for Keras, over the microbatches of a user's loader.

        Raises:
            TypeError: if the loader has a sampler that chooses among the samples.
            ValueError: if the training has begun with other samples or another microbatch.
        """
        check_indexed(loader.dataset)
        order = order_of(loader)
        if isinstance(loader.dataset, Arrays):
            del order["drop_last"]  # fit() has no such argument, so that sampler_options may
        found = {"samples": len(loader.dataset), **order}
        if self.sampler is None:
            self._begun = found
            self.sampler = self.settings.sampler(loader.dataset, minibatch_size=order.pop("batch_size"), **order)
        if found != self._begun:
            raise value_error(
                f"a training continues with the same data, {self._begun}", found, "call compile() to begin another one"
            )
        self._loader = with_sampler(loader, self.sampler)
        return DataLoader(_Source(self), batch_size=None, collate_fn=_same, generator=torch.Generator())

    def start(self) -> None:
        """Create the optimizer, or continue with it; the model is built."""
        assert self.sampler is not None
        if self.optimizer is None:
            if any(isinstance(layer, keras.layers.BatchNormalization) for layer in _layers(self.model)):
                self.sampler._feed.attach(spread=False)  # its result depends on how a step is split
            self._inner = KerasOptimizer(self.model.optimizer, self.model.trainable_variables)
            self.optimizer = self.settings.optimizer(self._inner, self.sampler)
        elif self.optimizer.inside_step:  # the last fit() was interrupted
            self.optimizer.discard_step()
        broadcast_parameters(self.model)  # also in a second fit: a callback may set weights at the end of the first
        self._counted = min(self.optimizer.epoch, self._end)
        self._updates = updates(self._loader, self.optimizer)
        self._restorable, self._restored = True, False

    def first_epoch(self, initial_epoch: int, epochs: int) -> int:
        """Return the number by which Keras calls the epoch that comes first, after the callbacks have restored.

        A second `fit` trains further epochs. After a restore, epochs are counted as if each `fit` had trained all of
        its own: what the checkpoint has of them is not trained again.

        Raises:
            RuntimeError: if the training has ended before.
            ValueError: if the trace ends before the training does.
        """
        optimizer = self._optimizer
        self._restorable = False
        self._resumed = self._resumed or self._restored
        if optimizer.done and not self._resumed:
            raise RuntimeError(
                f"fit() needs updates that are left, but the training has ended after {optimizer.updates} updates; "
                f"pass a longer trace, or larger max_updates or max_samples, and call compile()"
            )
        if not (self._restored and self.interrupted):  # else it is the `fit` that was interrupted
            self._offset = max(0, self._counted - initial_epoch)
        self._end, self.interrupted = self._offset + epochs, True
        clock = self._sampler.clock
        if self._restored and clock.finished:
            self.metrics.drop()
            if not optimizer.done and optimizer.epoch == clock.epoch.number:
                self._set_epoch(optimizer.epoch + 1)  # what ends an epoch came before the save, see checkpoint.py
        if optimizer.done:
            return epochs
        if not self._restored:
            self._sampler.plan.check_trace(self._end)
        return max(initial_epoch, optimizer.epoch - self._offset)

    def begin_epoch(self, epoch: int) -> int:
        """Begin or continue an epoch of Keras, and return how many updates are left of it, by what is known now."""
        self._set_epoch(max(epoch + self._offset, self._optimizer.epoch))
        clock = self._sampler.clock
        assert self._updates is not None
        self.metrics.restore(self._sampler.world.rank)
        self._reading = iter(self._updates)
        return clock.epoch.end_step - clock.step

    def read_learning_rate(self) -> float:
        """Take the learning rate of the next update from Keras."""
        assert self._inner is not None
        self._inner.read_learning_rate()
        return float(self._inner.param_groups[0]["lr"])

    @property
    def epoch_is_whole(self) -> bool:
        """Whether its last update is made, and no callback has ended it before."""
        return self._sampler.clock.finished

    def logs_of_all(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Return the logs of the end of an epoch, the same on all ranks."""
        return logs_of_rank_0(logs, self._optimizer)

    def check_decisions(self) -> None:
        """Check that callbacks have decided alike on all ranks.

        Raises:
            RuntimeError: on every rank, if not.
        """
        check_decisions(self.model, self._optimizer, self.read_learning_rate())

    def check_ranks(self, **facts: int) -> None:
        """Check that all ranks have called `fit` alike.

        Raises:
            RuntimeError: on every rank, if not.
        """
        check_same("fit()", {name.replace("_", " "): n for name, n in facts.items()}, self._optimizer.agreement)

    def ask_after_updates(self, stoppable: bool) -> None:
        """Note whether a callback on any rank may end the training after an update: only then the ranks ask."""
        self._asks = self._optimizer.agreement.any_rank("fit()", stoppable)

    def agree_to_stop(self) -> None:
        """Let all ranks end the training after this update if a callback on any of them does."""
        if self._asks:
            stops = bool(self.model.stop_training)
            self.model.stop_training = self._optimizer.agreement.any_rank("the callbacks of an update", stops)

    def after_update(self) -> bool:
        """Return whether the update was the last one of its epoch, which ends then."""
        optimizer = self._optimizer
        if not optimizer.sampler.clock.finished:
            return False
        assert self._reading is not None
        next(self._reading, None)  # lets the loader end
        self._reading = None
        return True

    def after_callbacks(self) -> None:
        """Let Keras end the epoch after its last update."""
        if self._sampler.clock.finished:
            self._ends_epoch = not (self.model.stop_training or self._optimizer.done)
            self.model.stop_training = True

    def end_epoch(self) -> None:
        """Let Keras go on after an epoch that `after_callbacks` has ended."""
        if self._ends_epoch:
            self.model.stop_training = self._ends_epoch = False

    def end(self) -> None:
        """Leave `fit`, also after an exception."""
        self._reading, self._ends_epoch, self._restorable = None, False, False

    def read(self) -> Iterator[Any]:
        """Yield the updates of an epoch; before the first one a microbatch, from which Keras builds the model."""
        if self._reading is None:
            yield first_rows(self._loader, self._sampler.plan.minibatch_size)
        else:
            yield from map(list, self._reading)

    def load(self, state: dict[str, Any]) -> bool:
        """Move to a saved position and return True, if a callback restores before the first epoch of a `fit`."""
        if not self._restorable:
            return False
        optimizer = self._optimizer
        with explaining_mismatch():
            optimizer.load_state_dict({**optimizer.inner.state_dict(), "vbs": state["vbs"]})
        self.metrics.load_state_dict(state["metrics"])
        self._restored = True
        return True

    def restored(self) -> None:
        """Note that a callback has moved the optimizer to a saved position."""
        self._restored = True

    @property
    def was_trained_before(self) -> bool:
        """Whether the process has restored where this `fit` ends, and not a position in a later `fit`."""
        clock = self._sampler.clock
        between = clock.finished or clock.step == clock.epoch.first_step
        return self._resumed and (self._optimizer.done or (between and self._optimizer.epoch == self._end))

    def _set_epoch(self, epoch: int) -> None:
        before = self._optimizer.updates
        self._sampler.set_epoch(epoch)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"set_epoch\(", UserWarning)  # which the user has not called
            self._optimizer.set_epoch(epoch)
        if skipped := self._sampler.clock.step - before:
            warnings.warn(
                f"fit(initial_epoch=...) skips {skipped} updates: epoch {epoch} begins with update {before + skipped} "
                f"of the trace; pass initial_epoch=0 to begin the trace",
                UserWarning,
                stacklevel=2,
            )

    @property
    def _optimizer(self) -> CustomOptimizer:
        assert self.optimizer is not None
        return self.optimizer

    @property
    def _sampler(self) -> CustomSampler:
        assert self.sampler is not None
        return self.sampler


@final
class Callbacks(keras.callbacks.CallbackList):
    """The callbacks of a `fit`, which tell the training where it is, and hear how long an epoch is."""

    def __init__(self, training: Training, callbacks: list[Any], initial_epoch: int, **options: Any) -> None:
        self._training, self._initial_epoch = training, initial_epoch
        super().__init__(callbacks, **options)

    def on_train_begin(self, logs: Any = None) -> None:
        """Create the optimizer, let callbacks restore, and find the first epoch."""
        training = self._training
        training.start()
        training.check_ranks(
            epochs=self.params["epochs"],
            initial_epoch=self._initial_epoch,
            number_of_VariableBatchCheckpoints=sum(isinstance(one, VariableBatchCheckpoint) for one in self.callbacks),
        )
        training.ask_after_updates(any(map(_hears_updates, self.callbacks)))
        super().on_train_begin(logs)
        epochs = self.params["epochs"]
        first = training.first_epoch(self._initial_epoch, epochs)
        if training.was_trained_before and self._initial_epoch < epochs:
            warnings.warn(
                "fit() has nothing to train: the restored checkpoint has all its epochs; pass more epochs, or another "
                "folder to begin another training",
                UserWarning,
                stacklevel=2,
            )
        # "Can be set by callbacks in on_train_begin", says Keras' Trainer; BackupAndRestore does so.
        self.model._initial_epoch = first or None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Tell the callbacks how many updates the epoch has."""
        self.set_params({**self.params, "steps": self._training.begin_epoch(epoch)})
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End the epoch after its last update, unless a callback ends the training there."""
        super().on_train_batch_end(batch, logs)
        self._training.agree_to_stop()
        self._training.after_callbacks()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Let `stop_training` be what the user's callbacks have set, and let them decide alike on all ranks."""
        training = self._training
        training.end_epoch()
        if training.epoch_is_whole:
            super().on_epoch_end(epoch, training.logs_of_all(logs))
            training.check_decisions()
        else:  # a callback has ended it, perhaps on this rank only
            super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Note that `fit` has ended without an exception."""
        super().on_train_end(logs)
        self._training.interrupted = False


class _Source(IterableDataset[Any]):
    """The updates of an epoch as a dataset without a length."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def __iter__(self) -> Iterator[Any]:
        return self._training.read()


class PositionInWeights(keras.layers.Layer):
    """The position in the training among the weights that `save_weights` writes, and so `BackupAndRestore`.

    Keras finds it as an attribute of the model; a plain model that loads the file ignores it. The seeds of the layers
    go along, which Keras does not write.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(name="variable_batch_size")
        self._training = training

    def save_own_variables(self, store: Any) -> None:
        """Write position, metrics and seeds."""
        training = self._training
        if training.optimizer is None or training.optimizer.inside_step:
            return
        seeds = [variable.value.detach().clone() for variable in seeds_of(training.model)]
        state = {"vbs": training.optimizer.state_dict()["vbs"], "metrics": training.metrics.of_this_rank()}
        file = io.BytesIO()
        torch.save({**state, "seeds": seeds}, file)
        store["position"] = np.frombuffer(file.getvalue(), dtype=np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Restore them if `fit` begins."""
        training = self._training
        if "position" not in store.keys():  # noqa: SIM118 (a store of Keras, not a dict)
            return
        state = torch.load(io.BytesIO(np.asarray(store["position"]).tobytes()), weights_only=True)
        if training.load(state):
            for variable, seed in zip(seeds_of(training.model), state["seeds"], strict=True):
                variable.assign(seed.to(variable.value.device))


def _layers(model: Any) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, keras.layers.Layer):
            yield module


def _hears_updates(callback: Any) -> bool:
    """Return whether a callback is the user's own, and is called after each update."""
    if isinstance(callback, VariableBatchCheckpoint) or type(callback).__module__.partition(".")[0] == "keras":
        return isinstance(callback, keras.callbacks.LambdaCallback)
    names = "on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"
    return any(getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name) for name in names)


def _same(update: Any) -> Any:
    return update
