"""Decide whether the gradient noise is measured, and check that it can be used with the inner optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import final

from torch import Tensor
from torch.optim import ASGD, Adafactor, Optimizer, Rprop

from variable_batch_size._validation import value_error
from variable_batch_size.backend import Backend
from variable_batch_size.optim.accumulation import is_narrow
from variable_batch_size.optim.gradient_noise import GradientNoise
from variable_batch_size.optim.noise_estimate import HORIZON
from variable_batch_size.optim.options import Estimator
from variable_batch_size.optim.user_line import stacklevel_of_user
from variable_batch_size.rules import ConstantTimescale, Rule
from variable_batch_size.rules.base import needs_noise

_NOT_PROPORTIONAL_TO_LR = (ASGD, Adafactor, Rprop)  # optimizers whose parameter update is not

_UNMEASURED = 50  # updates without any estimate of the noise, after which the user is warned


@final
class UnmeasuredWarning:
    """Warns once if the first updates give no estimate of the noise."""

    def __init__(self) -> None:
        self._updates = 0  # without an estimate so far; negative after the warning, or after an estimate

    def after_update(self, noise: GradientNoise) -> None:
        """Count an update."""
        if self._updates < 0:
            return
        self._updates = -1 if noise.measured else self._updates + 1
        if self._updates == _UNMEASURED:
            self._updates = -1
            warnings.warn(
                f"The gradient noise could not be estimated in the first {_UNMEASURED} updates, because each had a "
                f"single microbatch, and until there is an estimate the gain is at most 1; pass a smaller "
                f'minibatch_size to the sampler, or noise="differenced" to the optimizer',
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )


def create_gradient_noise(
    inner: Optimizer,
    rules: Sequence[Rule],
    ref_batchsize: int | None,
    estimator: Estimator | None,
    backend: Backend,
) -> GradientNoise | None:
    """Return None if the noise is not measured.

    Raises:
        TypeError: if the factor on lr would stay on the device and cannot be used there.
        ValueError: if there is no ref_batchsize, or parameters are on several devices.
    """
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    if estimator is None and not any(map(needs_noise, rules)):
        return None
    if ref_batchsize is None:
        raise value_error(
            f"measuring the noise needs ref_batchsize, because averages extend over {HORIZON} updates of that size",
            "none",
            "pass the batch size at which the learning rate was tuned",
        )
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        raise value_error(
            "measuring the noise needs all parameters on one device", " and ".join(devices), "move them to one"
        )
    on_device = parameters[0].device.type != "cpu"
    if on_device:
        _check_deferred_lr(inner, parameters, rules)
    return GradientNoise(backend, on_device=on_device, differenced=estimator == "differenced")


def _check_deferred_lr(inner: Optimizer, parameters: Sequence[Tensor], rules: Sequence[Rule]) -> None:
    """Check that a factor on lr can stay on the device, see `DeferredLrFactor`."""
    device = parameters[0].device.type
    if isinstance(inner, _NOT_PROPORTIONAL_TO_LR):
        raise TypeError(
            f"on {device} a learning rate that depends on the noise needs an optimizer whose change is "
            f"proportional to it, but that of {type(inner).__name__} is not; use another inner optimizer"
        )
    if small := {str(p.dtype) for p in parameters if is_narrow(p)}:
        raise TypeError(
            f"on {device} a learning rate that depends on the noise needs parameters of at least 32 bits, because "
            f"it multiplies their change after the step, but some are {' and '.join(sorted(small))}; keep the "
            f"parameters in float32, and use torch.autocast"
        )
    for rule in rules:
        if isinstance(rule, ConstantTimescale) and rule.needs_noise:
            raise TypeError(
                f"on {device} the weight decay must not depend on the noise, which the host does not read there, "
                f"but {rule} makes it depend on it; use the rule without ConstantTimescale"
            )
