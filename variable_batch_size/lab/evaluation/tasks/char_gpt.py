"""The task `char-gpt`, and its GPT over bytes, which examples/language_model has, too."""

from __future__ import annotations

import math
import platform
import sysconfig
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils.data import TensorDataset

VOCABULARY = 256  # a token is a byte
LENGTH = 64  # tokens of a block
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
    max_grad_norm: ClassVar[float] = 1.0
    version: ClassVar[str] = f"Python {platform.python_version()}"

    def __init__(self, width: int = 128, layers: int = 5) -> None:
        self.width, self.layers = width, layers

    def model(self, seed: int) -> nn.Module:
        """Return the model with the weights of a seed."""
        torch.manual_seed(seed)
        return GPT(width=self.width, layers=self.layers)

    def dataset(self) -> TensorDataset:
        """Return the blocks of tokens to train on, int64 (65,) each."""
        return self._blocks[0]

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        """Return the mean cross-entropy over the tokens of a batch of blocks, (rows, 65)."""
        return loss_of(model, *batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return loss and accuracy on the tokens of the validation data."""
        loss, correct = 0.0, 0
        (blocks,) = self._blocks[1].tensors
        for rows in torch.split(blocks, ROWS):
            tokens, next_tokens = rows[:, :-1], rows[:, 1:]
            loss += float(loss_of(model, rows)) * len(rows)
            correct += int((model(tokens).argmax(-1) == next_tokens).sum())
        return {"loss": loss / len(blocks), "accuracy": correct / blocks[:, 1:].numel()}

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return AdamW, with weight decay of the matrices only."""
        groups = parameter_groups(model)
        return AdamW(groups, lr=lr, betas=(0.9, 0.95))

    def schedule(self, samples: int, total: int) -> float:
        """Return the factor on the learning rate after `samples` of `total` samples: a warm-up, then a cosine."""
        return warmup_cosine(total // self.ref_batchsize)(samples // self.ref_batchsize)

    @cached_property
    def _blocks(self) -> tuple[TensorDataset, TensorDataset]:
        """The blocks for training and for validation, read once."""
        training, validation = standard_library(TRAINING, VALIDATION)
        return TensorDataset(training), TensorDataset(validation)


def standard_library(training: int, validation: int) -> tuple[Tensor, Tensor]:
    """Return blocks of the modules of Python's standard library, int64 (n, 65), to train and to validate with.

    Every eighth module, in the order of their names, is for validation. The blocks are taken at equal distances.
    """
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    training_paths = [path for number, path in enumerate(paths) if number % 8]
    return _blocks_of(training_paths, training), _blocks_of(paths[::8], validation)


def _blocks_of(paths: list[Path], number: int) -> Tensor:
    """Cut files into blocks of 64 bytes, and return `number` of them at equal distances, int64 (number, 65).

    Each block also has the byte that follows it, which is the target of its last token.
    """
    text = bytearray(b"".join(path.read_bytes() for path in paths))
    all_blocks = torch.frombuffer(text, dtype=torch.uint8).unfold(0, LENGTH + 1, LENGTH)
    return all_blocks[torch.arange(number) * (len(all_blocks) // number)].long()


class Layer(nn.Module):
    """A layer of a transformer: causal attention and a feed-forward network, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        """Create the layer for embeddings of size `width`, with attention of so many `heads`."""
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = (nn.Linear(width, 4 * width), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, of the shape of its input, (rows, tokens, width)."""
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (rows, heads, tokens, width / heads) each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        sum_: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return sum_


class GPT(nn.Module):
    """A small GPT: from tokens it computes the logits of the token that follows each of them."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        """Create the model; the weights of matrices are normal with standard deviation 0.02."""
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, (rows, tokens, 256), of up to 64 tokens a row, (rows, tokens)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.layers(x)))
        return logits


def loss_of(model: nn.Module, blocks: Tensor) -> Tensor:
    """Return the mean cross-entropy of a language model over the tokens of some blocks, int64 (rows, tokens + 1).

    All blocks have the same length, so it is also the mean over the blocks.
    """
    logits = model(blocks[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    """Return two parameter groups for an optimizer: matrices with weight decay, biases and norms without."""
    with_decay = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    without_decay = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return [{"params": with_decay, "weight_decay": 0.1}, {"params": without_decay, "weight_decay": 0.0}]


def warmup_cosine(total: int) -> Callable[[int], float]:
    """Return the learning-rate schedule of `total` updates: number of an update -> factor.

    It rises linearly over a tenth of the updates to 1, and falls to 0.1 along a cosine.
    """
    warmup = total // 10

    def factor(update: int) -> float:
        """Return the factor on the learning rate of an update, counted from 0."""
        if update < warmup:
            return (update + 1) / (warmup + 1)
        share = min(1.0, (update - warmup) / (total - warmup))
        return 0.55 + 0.45 * math.cos(math.pi * share)

    return factor
