"""An update reads nothing from a device: on the device "meta", whose tensors have no values, each read raises.

Nor does it copy a number to the device such that the host waits, as `torch.as_tensor(0.5, device="cuda")` does.
"""

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import variable_batch_size as vbs
from helpers.gpu import VARYING, divided_updates, make, updates
from helpers.reference import OPTIMIZERS


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 1.0}, {"noise": "differenced"}], ids=lambda one: "".join(one)
)
def test_an_update_reads_nothing_from_the_device(kind, options):
    make(updates(kind, VARYING, "meta", **options), 10)


def test_denominators_are_not_read_from_the_device():
    make(divided_updates(VARYING, "meta"), 10)


class CopiesRaise(TorchFunctionMode):
    """Raises an error at each copy between the host and a device that makes the host wait."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name, source = getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(result, Tensor) and not (kwargs or {}).get("non_blocking"):
            if name == "copy_":
                source = args[1]
            is_number = name in ("tensor", "as_tensor") and not isinstance(source, Tensor)
            found = "cpu" if is_number else source.device.type if isinstance(source, Tensor) else result.device.type
            if name in ("tensor", "as_tensor", "to", "cpu", "cuda", "copy_") and found != result.device.type:
                raise AssertionError(f"{name} from {found} to {result.device.type}")
        return result


def test_a_copy_raises_in_this_mode():
    with CopiesRaise():
        torch.ones(3).to("meta", non_blocking=True)
        for copy in (
            lambda: torch.as_tensor(0.5, device="meta"),
            lambda: torch.ones(3).to("meta"),
            lambda: torch.ones(3, device="meta").copy_(torch.ones(3)),
        ):
            with pytest.raises(AssertionError, match="from cpu to meta"):
                copy()


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "options",
    [{}, {"max_grad_norm": 1.0, "grad_norm": True}, {"noise": "differenced"}],
    ids=lambda one: "".join(one),
)
def test_no_copy_of_a_number_makes_the_host_wait(kind, options):
    each = updates(kind, VARYING, "meta", logs=True, **options)
    make(each, 5)
    with CopiesRaise():
        make(each, 10)


def test_no_copy_of_a_denominator_makes_the_host_wait():
    each = divided_updates(VARYING, "meta")
    make(each, 5)
    with CopiesRaise():
        make(each, 10)


class Float64Raises(TorchDispatchMode):
    """Raises an error where an operation gives numbers of float64 on a device that is not the CPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float64 and result.device.type != "cpu":
            raise TypeError(f"{func} gives float64")
        return result


@pytest.mark.parametrize("options", [{}, {"noise": "differenced"}], ids=lambda one: "".join(one))
def test_a_device_without_float64_gets_none(monkeypatch, options):
    monkeypatch.setattr("variable_batch_size.optim.update.WITHOUT_FLOAT64", ("meta",))
    with Float64Raises():
        make(updates(vbs.AdaScaleOptimizer, VARYING, "meta", logs=True, grad_norm=True, **options), 6)
