"""Means over all labels of an update: which labels count, and what the mean of one microbatch weighs.

Who divides, so that the update is the mean over its labels or samples, and each factor comes once:

| who divides, or clips | by what | here |
|---|---|---|
| the model, `compute_loss_func` | `num_items_in_batch`, or its own labels | it gets its own number: both are its mean |
| `Trainer.compute_loss` | times the processes | off: no `average_tokens_across_devices` in `training_step` |
| `Trainer.training_step` | accumulation steps, without `num_items_in_batch` | 1: a batch is an update |
| `accelerator.backward` | its accumulation steps | `Share.scaled`, then `optimizer.backward` |
| DistributedDataParallel, FSDP2 | the world | the optimizer weighs by samples, and they sum |
| `accelerator.clip_grad_norm_` | the norm | nothing: `max_grad_norm` of the optimizer clips the sum |
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from variable_batch_size.integrations.transformers.update_loader import Update
from variable_batch_size.microbatching import Microbatch


def predicts_next_label(model: Any) -> bool:
    """Return whether a model's class is one of language models without a `loss_type`, or a class below it.

    Trainer goes by `loss_type`, which GPT-2, for example, does not have. The loss leaves out the first label of a row.
    """
    if getattr(model, "loss_type", None) in LOSS_MAPPING or getattr(
        getattr(model, "config", None), "is_encoder_decoder", False
    ):
        return False
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(kind.__name__ in causal for kind in type(model).__mro__)


def refuses_count(model: Any) -> bool:
    """Return whether a model's class does not take the number of labels, as those of images and text."""
    return getattr(type(model), "accepts_loss_kwargs", None) is False and "accepts_loss_kwargs" not in vars(model)


@final
class Share(NamedTuple):
    """What the loss of a microbatch, a mean over its labels or its rows, weighs.

    Attributes:
        items: number of labels that the model is told, 0-D and >= 1; None for a mean over rows.
        factor: factor on the loss before `backward()`; the optimizer weighs it by samples / batch_size.
        weight: weight of the loss in that of the update.
    """

    items: Tensor | None
    factor: Tensor | float
    weight: Tensor | float

    @classmethod
    def of(cls, update: Update, number: int, part: Microbatch) -> Share:
        """Return that of microbatch `number` of an update."""
        weight = part.samples / part.batch_size
        if update.counts is None:
            return cls(None, 1.0, weight)
        count = update.counts[number]
        factor = count / update.total * (part.batch_size / part.rows)
        return cls(count.clamp(min=1), factor, factor * weight)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss for `backward()`; 0 for the mean of no labels, which is not a number."""
        return loss if self.items is None else torch.where(torch.as_tensor(self.factor > 0), loss * self.factor, 0)
