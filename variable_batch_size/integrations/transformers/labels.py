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
    """Return a function that takes a microbatch and returns over how many labels its loss is a mean, 0-D.

    The function returns None if the loss is a mean over rows, not over labels.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "get_base_model"):  # of peft
        model = model.get_base_model()
    is_language_model = predicts_next_label(model)
    trainer_counts_labels = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    # The classes of many language models with images have accepts_loss_kwargs = False, because their forward() does not
    # take the number of labels. Their loss is a mean over labels all the same. On an instance, the user has set it.
    is_set_by_user = "accepts_loss_kwargs" in vars(model)
    takes_no_number = getattr(type(model), "accepts_loss_kwargs", None) is False and not is_set_by_user
    if trainer_counts_labels or (is_language_model and takes_no_number):
        return partial(count_labels, shifted=is_language_model)
    return lambda _: None


def predicts_next_label(model: Any) -> bool:
    """Return whether each position predicts the next label, so that no position predicts the first label of a row.

    Trainer decides by the model's `loss_type`. If it has none, as GPT-2, its class or a base class of it decides.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None))
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return loss is ForCausalLMLoss if loss is not None else any(kind.__name__ in causal for kind in type(model).__mro__)


def count_labels(microbatch: Any, *, shifted: bool) -> Tensor | None:
    """Return how many labels of a microbatch count in the loss, 0-D; a label of -100 does not.

    Args:
        microbatch: the microbatch, a dict of tensors.
        shifted: whether no position predicts the first label of each row, as in a language model.

    Returns:
        None if it has no labels, or others than a tensor, as for object detection.
    """
    try:
        if "shift_labels" in microbatch:  # shifted already
            labels = microbatch["shift_labels"]
        else:
            labels = microbatch["labels"][..., int(shifted) :]
        return labels.ne(-100).sum()  # type: ignore[no-any-return]
    except (AttributeError, KeyError, TypeError):
        return None
