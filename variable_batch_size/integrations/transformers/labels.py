"""Means over all labels of an update: which labels count, and what the mean of one microbatch weighs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from variable_batch_size._validation import type_error
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


class Weights:
    """What each microbatch's mean over its labels weighs in the mean over all labels of an update.

    A microbatch's loss is computed with its own number of labels, so that it is its mean, whether the model divides by
    the number that it is given, or ignores that and takes the mean: many models of transformers do.

    Args:
        counts: labels of each microbatch of this rank, scalars.
        parts: these microbatches.
        total: labels of the update, on all ranks.
    """

    def __init__(self, counts: list[Tensor], parts: list[Microbatch], total: Tensor) -> None:
        self._counts, self._parts, self._total = counts, parts, total

    def items(self, number: int) -> Tensor:
        """Return the labels by which a microbatch's loss is divided, >= 1."""
        return self._counts[number].clamp(min=1)

    @contextmanager
    def scaled(self, trainer: Any, number: int) -> Iterator[None]:
        """Scale what `trainer.compute_loss` returns: the optimizer weighs a microbatch by samples / batch_size.

        Raises:
            TypeError: if nothing calls it.
        """
        part, count = self._parts[number], self._counts[number]
        factor = count / self._total * (part.batch_size / part.rows)
        compute_loss: Callable[..., Any] = trainer.compute_loss
        calls = []

        def scaled_loss(*args: Any, **kwargs: Any) -> Any:
            calls.append(True)
            result = compute_loss(*args, **kwargs)
            loss = result[0] if isinstance(result, tuple) else result
            loss = torch.where(count > 0, loss * factor, 0)  # the mean of no labels is nan
            return (loss, *result[1:]) if isinstance(result, tuple) else loss

        trainer.compute_loss = scaled_loss  # of this object: also that of a class above or below the mixin
        try:
            yield
        finally:
            del trainer.compute_loss
        if not calls:
            remedy = "call self.compute_loss() there, or set model.accepts_loss_kwargs = False for a mean over samples"
            raise type_error("training_step() must get the loss by compute_loss()", trainer, remedy)
