"""A model's weights as sixty-four characters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from variable_batch_size.checkpoint.names import unwrapped


def weights_hash(model: Module | Mapping[str, Any]) -> str:
    """Return the SHA-256 of the tensors of a model, in hexadecimal: two models with one hash are equal to the last bit.

    It is that of the names, in their order, each with dtype, shape and bytes, which does not depend on the device.

    Args:
        model: a model that this process has whole, compiled or in a DistributedDataParallel, too; or its state dict, as
            that of `vbs.read_checkpoint`.

    >>> model = torch.nn.Linear(2, 1)
    >>> weights_hash(model) == weights_hash(model.state_dict())
    True
    """
    state: Mapping[str, Any] = model if isinstance(model, Mapping) else unwrapped(model).state_dict()
    total = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        if isinstance(tensor, Tensor):
            total.update(f"{name} {tensor.dtype} {[*tensor.shape]}\n".encode())
            plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            total.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
