"""An ordinary script of Keras around our models; its callbacks are the user's."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Subset

from helpers.keras_backend import keras
from helpers.trainings import EVALUATED, Trained, TrainerCase, note_rates
from helpers.yardstick import MICROBATCH, REF
from variable_batch_size.integrations.keras import VariableBatchCheckpoint, VariableBatchModel, VariableBatchModelMixin


@contextmanager
def float64() -> Iterator[None]:
    """Let Keras keep float64, which it does in no layer by default."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


class OfTorch(keras.layers.Layer):
    """A linear layer or an embedding of torch: Keras' own operations on torch round float64 to float32."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.own = [self.add_weight(shape=tuple(one.shape), initializer="zeros") for one in layer.parameters()]
        for variable, parameter in zip(self.own, layer.parameters(), strict=True):
            variable.assign(parameter.detach())
        self.function = nn.functional.linear if isinstance(layer, nn.Linear) else nn.functional.embedding
        self.built = True

    def call(self, x: Any) -> Any:
        return self.function(x, *(variable.value for variable in self.own))


def layers_of(case: TrainerCase) -> list[Any]:
    """The layers of the case's model, with its weights."""
    kinds: dict[Any, Any] = {
        nn.Tanh: lambda _: keras.layers.Activation("tanh"),
        nn.Dropout: lambda layer: keras.layers.Dropout(layer.p, seed=7),
    }
    return [kinds.get(type(layer), OfTorch)(layer) for layer in case.model()]  # type: ignore[operator]


class CaseModel(VariableBatchModelMixin, keras.Model):
    """A class of the user's own, with a loss of its own."""

    def __init__(self, case: TrainerCase, **options: Any) -> None:
        super().__init__(**options)
        self.case, self.parts = case, layers_of(case)

    def call(self, x: Any, training: bool = False) -> Any:
        for layer in self.parts:
            x = layer(x)
        return x

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        return self.case.loss(y_pred, y)


class Rates(keras.optimizers.schedules.LearningRateSchedule):
    """The schedule of a case."""

    def __init__(self, case: TrainerCase, initial: float) -> None:
        self.case, self.initial = case, initial

    def __call__(self, step: Any) -> float:
        return self.initial * self.case.rate(int(step))

    def get_config(self) -> dict[str, Any]:
        return {"case": str(self.case), "initial": self.initial}


def optimizer_of(case: TrainerCase) -> Any:
    initial = 0.01 if case.inner == "adamw" else 0.1
    rate = Rates(case, initial) if case.schedule else initial
    return keras.optimizers.AdamW(rate) if case.inner == "adamw" else keras.optimizers.SGD(rate, momentum=0.9)


class ByHand(Optimizer):
    """The Keras optimizer of a case for a model of torch: what it computes is no matter of the trace."""

    def __init__(self, case: TrainerCase, model: nn.Module) -> None:
        with float64():
            self.wrapped = optimizer_of(TrainerCase(case.inner))
            self.own = [keras.Variable(one.detach().clone(), dtype="float64") for one in model.parameters()]
        super().__init__(model.parameters(), {"lr": 0.01 if case.inner == "adamw" else 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        with float64():
            self.wrapped.learning_rate = group["lr"]
            self.wrapped.apply([one.grad for one in group["params"]], self.own)
        for parameter, variable in zip(group["params"], self.own, strict=True):
            parameter.copy_(variable.value)


class Notes(keras.callbacks.Callback):
    """Notes losses and rates."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.losses, self.rates = list[float](), note_rates(self.model.custom_optimizer.inner)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(float(self.model.custom_optimizer.logged["loss"]))


def model_of(case: TrainerCase) -> Any:
    """A compiled model: a class of the user's own, or a sequential one."""
    options: dict[str, Any] = {"trace": case.trace, "rule": case.rule, "ref_batchsize": REF}
    options["optimizer_options"] = {"max_grad_norm": case.clip}
    if case.counting:
        options["count"] = lambda y, _: case.count(y)
    if case.inner == "sgd":
        model: Any = CaseModel(case, **options)
        model.compile(optimizer_of(case))
    else:
        model = VariableBatchModel(keras.Sequential(layers_of(case)), **options)
        model.compile(optimizer_of(case), loss=lambda y, y_pred: case.loss(y_pred, y.long()))
    return model


class Keras:
    """The trainer, for the laws that all trainers keep."""

    def fit(
        self, case: TrainerCase, folder: Path, *, save_at: Collection[int] = (), resume: Path | None = None
    ) -> Trained:
        notes, options, saved = Notes(), dict[str, Any](), folder / "saved"
        callbacks: list[Any] = [notes]
        if case.patience:
            options["validation_data"] = DataLoader(Subset(case.dataset(), range(EVALUATED)), 50)
            callbacks.append(keras.callbacks.EarlyStopping("val_loss", patience=case.patience, mode="max"))
        if save_at or resume:
            callbacks.append(VariableBatchCheckpoint(resume or saved, every=1, keep=99))
        loader = DataLoader(case.dataset(), MICROBATCH, shuffle=True, num_workers=case.workers)
        with float64():
            model = model_of(case)
            history = model.fit(loader, epochs=case.epochs, verbose=0, callbacks=callbacks, **options).history
        if dist.is_initialized():
            dist.barrier()  # all have saved
        if not dist.is_initialized() or dist.get_rank() == 0:
            for update in save_at:
                (path,) = saved.glob(f"update-{update:08}*")
                shutil.copytree(path, folder / f"at-{update}" / path.name)
        optimizer = model.custom_optimizer
        assert int(model.optimizer.iterations) == optimizer.updates
        own = nn.ParameterList([variable.value for variable in model.trainable_variables])
        return Trained.of(own, optimizer, notes.losses, notes.rates, evaluations=history.get("val_loss", ()))
