"""The settings that are supported, of a Trainer, its callbacks and its module; what is not is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch import callbacks as lc
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.modules.batchnorm import _BatchNorm

from variable_batch_size.integrations.supported import Setting

_NONE: Final = ("none",)
_PRECISIONS: Final = "Precision", "DoublePrecision", "HalfPrecision", "MixedPrecision"
_SUBSET: Final = "pass `max_steps`, or a `torch.utils.data.Subset`"
_TRACE: Final = "let the trace have the larger batch sizes"


def _callback(kind: type) -> Callable[[Any], str]:
    return lambda trainer: next((kind.__name__ for callback in trainer.callbacks if isinstance(callback, kind)), "none")


def _hook(name: str) -> Callable[[Any], str]:
    """Return a function of a Trainer that says which class of its module and its data overrides a hook, or "none"."""

    def overriding_class(trainer: Any) -> str:
        """Return the class that overrides the hook, in words, or "none"."""
        owners = (trainer.lightning_module, LightningModule), (trainer.datamodule, LightningDataModule)
        having = [owner for owner, kind in owners if hasattr(kind, name) and owner]
        overriding = [type(owner).__name__ for owner in having if is_overridden(name, owner)]
        return f"that of {overriding[0]}" if overriding else "none"

    return overriding_class


def _averaging(trainer: Any) -> str:
    """Return the callback that averages weights, if the model has batch normalization, whose statistics it breaks."""
    # Private, and what Lightning asks for: also of several ranks, and of sizes that the first batch tells.
    normalizes = any(isinstance(part, _BatchNorm) for part in trainer.lightning_module.modules())
    return _callback(lc.StochasticWeightAveraging)(trainer) if normalizes else "none"


# fmt: off
_ROWS: Final[tuple[tuple[str, str, Callable[[Any], Any], tuple[Any, ...], str], ...]] = (
    ("`accelerator`", "a CPU or CUDA", lambda t: type(t.accelerator).__name__, ("CPUAccelerator", "CUDAAccelerator"),
     'pass `"cpu"` or `"gpu"`'),
    ("`precision`", "`32`, `64`, `bf16` or `16`, true or mixed", lambda t: type(t.precision_plugin).__name__,
     _PRECISIONS, 'pass `"bf16-mixed"`, for example'),
    ("`accumulate_grad_batches`", "1", lambda t: t.accumulate_grad_batches, (1,), _TRACE),
    ("`gradient_clip_algorithm`", '`"norm"`, of the whole update',
     lambda t: getattr(t.gradient_clip_algorithm, "value", "norm"), ("norm",), "leave it out"),
    ("`overfit_batches`", "0", lambda t: t.overfit_batches, (0,), _SUBSET),
    ("`limit_train_batches`", "1.0", lambda t: "1.0" if t.fast_dev_run else str(t.limit_train_batches), ("1.0",),
     _SUBSET),
    ("`val_check_interval`", "1.0, a number of updates or a time",
     lambda t: t.val_check_interval if isinstance(t.val_check_interval, float) else 1.0, (1.0,),
     "pass a number of updates, because epochs have unequal ones"),
    ("`GradientAccumulationScheduler`", "left out", _callback(lc.GradientAccumulationScheduler), _NONE, _TRACE),
    ("`BatchSizeFinder`", "left out", _callback(lc.BatchSizeFinder), _NONE, "pass the rows that fit as `batch_size`"),
    ("`StochasticWeightAveraging`", "of a model without batch normalization", _averaging, _NONE,
     "use `WeightAveraging`"),
    ("`configure_gradient_clipping`", "left out", _hook("configure_gradient_clipping"), _NONE,
     "pass `gradient_clip_val`"),
    ("`on_before_batch_transfer`", "left out", _hook("on_before_batch_transfer"), _NONE,
     "use `collate_fn`, or `on_after_batch_transfer`, which gets a microbatch"),
    ("`dataloader_iter` of `training_step`", "left out",
     lambda t: is_param_in_hook_signature(t.lightning_module.training_step, "dataloader_iter", explicit=True),
     (False,), "define `training_step(self, batch, batch_idx)`"),
)
# fmt: on
SETTINGS: Final = tuple(
    Setting(name, supported, value, allowed.__contains__, remedy) for name, supported, value, allowed, remedy in _ROWS
)
