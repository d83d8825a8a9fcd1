"""Which labels of a microbatch count, so that an update is the mean over all of its labels.

Each microbatch is told the number of its own, so that its loss is their mean whether it divides by that number or not;
`training_step` weighs these means.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def label_counter(trainer: Any) -> Callable[[Any], Tensor | None]:
    """Return a function of a microbatch that returns how many of its labels count, 0-D; None for a mean over rows.

    They count where Trainer counts them, and for all language models, also those whose class, as that of many with
    images, does not take the number of labels.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
    shifted = predicts_next_label(model)
    refuses = getattr(type(model), "accepts_loss_kwargs", None) is False and "accepts_loss_kwargs" not in vars(model)
    if trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None or (shifted and refuses):
        return partial(count_labels, shifted=shifted)
    return lambda _: None


def predicts_next_label(model: Any) -> bool:
    """Return whether nothing predicts the first label of a row.

    Trainer goes by `loss_type`, which GPT-2, for example, does not have: there the class, or one above it, decides.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None))
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return loss is ForCausalLMLoss if loss is not None else any(kind.__name__ in causal for kind in type(model).__mro__)


def count_labels(microbatch: Any, *, shifted: bool) -> Tensor | None:
    """Return how many labels count in a microbatch, 0-D; None if it has no labels, or those of object detection."""
    try:
        is_shifted = "shift_labels" in microbatch
        labels = microbatch["shift_labels"] if is_shifted else microbatch["labels"][..., int(shifted) :]
        return labels.ne(-100).sum()  # type: ignore[no-any-return]
    except (AttributeError, KeyError, TypeError):
        return None
