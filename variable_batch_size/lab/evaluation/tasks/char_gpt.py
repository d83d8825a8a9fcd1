"""The task `char-gpt`."""

from __future__ import annotations

import platform
import sysconfig
from functools import cached_property
from pathlib import Path
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import TensorDataset

from variable_batch_size.lab.evaluation.tasks.gpt import GPT, LENGTH, loss_of, parameter_groups, warmup_cosine

TRAINING, VALIDATION = 2**15, 128  # blocks
ROWS = 64  # of a batch of the evaluation


@final
class CharGpt:
    """A GPT of a million parameters on the modules of Python's standard library, whose bytes are the tokens.

    AdamW with betas (0.9, 0.95), a warm-up over a tenth of the training, then a cosine, and gradients clipped to 1. A
    sample is a block of 64 bytes. The texts are those of the Python that trains: other versions train on other texts.

    Args:
        width: size of the embedding.
        layers: number of layers.
    """

    ref_batchsize: ClassVar[int] = 16
    minibatch_size: ClassVar[int] = 8
    lr: ClassVar[float] = 2**-9
    samples: ClassVar[int] = 2**13
    between: ClassVar[int] = 2**9
    target: ClassVar[tuple[str, float]] = ("loss", 2.2)
    max_grad_norm: ClassVar[float] = 1.0
    version: ClassVar[str] = f"Python {platform.python_version()}"

    def __init__(self, width: int = 128, layers: int = 5) -> None:
        self.width, self.layers = width, layers

    def model(self, seed: int) -> nn.Module:
        """Return the model with the weights of a seed."""
        torch.manual_seed(seed)
        return GPT(width=self.width, layers=self.layers)

    def dataset(self) -> TensorDataset:
        """Return the blocks to train on."""
        return self._blocks[0]

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        """Return the mean loss over the tokens of some blocks, which is also the mean over the blocks."""
        return loss_of(model, *batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return loss and accuracy on the tokens of the validation data."""
        loss, correct, (blocks,) = 0.0, 0, self._blocks[1].tensors
        for rows in torch.split(blocks, ROWS):
            loss += float(loss_of(model, rows)) * len(rows)
            correct += int((model(rows[:, :-1]).argmax(-1) == rows[:, 1:]).sum())
        return {"loss": loss / len(blocks), "accuracy": correct / blocks[:, 1:].numel()}

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return the optimizer."""
        groups = parameter_groups(model)
        return AdamW(groups, lr=lr, betas=(0.9, 0.95))

    def schedule(self, samples: int, total: int) -> float:
        """Return the factor on the learning rate after so many of `total` samples."""
        return warmup_cosine(total // self.ref_batchsize)(samples // self.ref_batchsize)

    @cached_property
    def _blocks(self) -> tuple[TensorDataset, TensorDataset]:
        training, validation = standard_library(TRAINING, VALIDATION)
        return TensorDataset(training), TensorDataset(validation)


def standard_library(training: int, validation: int) -> tuple[Tensor, Tensor]:
    """Return blocks of the modules of Python's standard library, int64 (n, 65), to train and to validate with.

    Every eighth module, in the order of their names, is for validation. The blocks are taken at equal distances.
    """
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    others = [path for number, path in enumerate(paths) if number % 8]
    return _blocks_of(others, training), _blocks_of(paths[::8], validation)


def _blocks_of(paths: list[Path], number: int) -> Tensor:
    """Return blocks of bytes, each with the one that follows it, int64 (number, 65)."""
    text = bytearray(b"".join(path.read_bytes() for path in paths))
    every = torch.frombuffer(text, dtype=torch.uint8).unfold(0, LENGTH + 1, LENGTH)
    return every[torch.arange(number) * (len(every) // number)].long()
