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
    """Return a function of a microbatch that returns the number of labels over which its loss is a mean, 0-D.

    It returns None if the loss is a mean over rows. Labels are counted where Trainer counts them, and for all language
    models, also for those whose class says that it does not take the number of labels, as many with images do.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "get_base_model"):  # of peft
        model = model.get_base_model()
    shifted = predicts_next_label(model)
    refuses = getattr(type(model), "accepts_loss_kwargs", None) is False and "accepts_loss_kwargs" not in vars(model)
    if trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None or (shifted and refuses):
        return partial(count_labels, shifted=shifted)
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
    """Return how many labels of a microbatch are not ignored, 0-D.

    None if it has no labels, or others than a tensor, as for object detection. `shifted`: whether the first label of
    each row is predicted by no position.
    """
    try:
        if "shift_labels" in microbatch:  # shifted already
            labels = microbatch["shift_labels"]
        else:
            labels = microbatch["labels"][..., int(shifted) :]
        return labels.ne(-100).sum()  # type: ignore[no-any-return]
    except (AttributeError, KeyError, TypeError):
        return None
