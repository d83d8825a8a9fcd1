"""Everything private of transformers and trl that the integration needs; each with the promise that needs it.

A test of test_transformers_internals.py breaks for each name that is gone or does something else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from variable_batch_size.integrations.from_loader import shuffles
from variable_batch_size.integrations.transformers.labels import predicts_next_label, refuses_count
from variable_batch_size.integrations.transformers.update_loader import Update, counted
from variable_batch_size.microbatching import Microbatch

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

POSITION = "variable_batch.pt"  # beside the states of FSDP2: the position in the training, and the noise


class TrainerInternals(Base):
    """Private methods and attributes of Trainer."""

    optimizer: Any
    variable_optimizer: Any
    model_accepts_loss_kwargs: bool
    _loss_shifts_labels: bool
    _parts: Sequence[Microbatch]

    def count_labels_right(self) -> bool:
        """Let Trainer leave out the first label of a row for language models without a `loss_type`, as GPT-2.

        Return whether labels count although the class of the model does not take their number.
        """
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
        self._loss_shifts_labels = self._loss_shifts_labels or predicts_next_label(model)
        return self._loss_shifts_labels and refuses_count(model)

    @property
    def rows_of_microbatch(self) -> int:
        """The microbatch: `per_device_train_batch_size` times the GPUs of this process, at most 1."""
        return self._train_batch_size

    def on_device(self, microbatch: Any) -> Any:
        """Return a microbatch on the device, as `training_step` does it."""
        return self._prepare_inputs(microbatch)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Resume in the right epoch: Trainer takes all of them to be equally long.

        Our loader begins after the last update by itself, so that no batches are to be skipped.
        """
        super()._init_training_state(*args, **kwargs)
        return int(self.state.epoch), 0

    def _track_num_input_tokens(self, inputs: Update) -> None:
        """Count the tokens of each microbatch, those of repeated rows and replays once."""
        if self.args.include_num_input_tokens_seen == "no":
            return
        for microbatch, part in zip(inputs, self._parts, strict=True):
            own = {name: counted(microbatch[name], part) for name in microbatch if _is_of_tokens(microbatch[name])}
            super()._track_num_input_tokens(own)

    # States. With FSDP2, torch's functions get the inner optimizer, which they may step; the position is a file.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the position with the optimizer."""
        with self._inner_optimizer() as sharded:
            super()._save_optimizer_and_scheduler(output_dir)
        if sharded:
            position = self.variable_optimizer.state_dict()["vbs"]  # on every rank
            if self.args.should_save:
                torch.save(position, Path(output_dir) / POSITION)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore the position with the optimizer, and say what to do with a checkpoint of another training."""
        optimizer = self.variable_optimizer
        try:
            if checkpoint is not None and self._sharded and (path := Path(checkpoint) / POSITION).is_file():
                position = torch.load(path, weights_only=True)
                optimizer.load_state_dict({**optimizer.inner.state_dict(), "vbs": position})
            with self._inner_optimizer():
                super()._load_optimizer_and_scheduler(checkpoint)
        except ValueError as error:
            reason = str(error).rpartition("; ")[0] or str(error)
            remedy = f"resume from a checkpoint of this training, or begin a new one with the model of {checkpoint}"
            raise ValueError(f"{reason}; {remedy}") from error

    @property
    def _sharded(self) -> bool:
        return isinstance(self.model, FSDPModule)

    @contextmanager
    def _inner_optimizer(self) -> Iterator[bool]:
        """Let Trainer see the inner optimizer within a block if the model is sharded; yield whether it is."""
        if not (sharded := self._sharded):
            yield sharded
            return
        wrapped, self.optimizer.optimizer = self.optimizer.optimizer, self.variable_optimizer.inner
        try:
            yield sharded
        finally:
            self.optimizer.optimizer = wrapped


def logged_by_loss(trainer: Any) -> dict[str, Any]:
    """Return a copy of what `compute_loss` of a trainer of trl adds to its logs."""
    names = "_metrics", "_total_train_tokens"
    return {name: copy.deepcopy(vars(trainer)[name]) for name in names if name in vars(trainer)}


def order_of(loader: DataLoader[Any]) -> dict[str, bool]:
    """Return whether a trainer's own loader shuffles, and drops the last batch.

    Raises:
        TypeError: if it does not deal each sample once an epoch, in order or shuffled.
    """
    batches: Any = loader.batch_sampler
    batches = getattr(batches, "batch_sampler", batches)  # below accelerate's, which deals batches to the ranks
    sampler = batches.sampler if type(batches).__name__ == "BatchSampler" else batches  # torch's or torchdata's
    try:
        return {"shuffle": shuffles(sampler), "drop_last": batches.drop_last}
    except TypeError as error:
        raise TypeError(
            f"{error}; if it is that of _get_train_sampler of a class of yours, leave it out; a Trainer that repeats "
            f"samples, such as trl's GRPOTrainer, cannot be used"
        ) from None


def _is_of_tokens(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
