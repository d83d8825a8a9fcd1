"""A small GPT, its data, and what else the two training scripts share."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

VOCABULARY = 256  # a token is a byte
LENGTH = 64  # tokens of a block


class Blocks(Dataset[Tensor]):
    """Text in blocks of equal length, each with the byte that follows it."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // LENGTH

    def __getitem__(self, block: int) -> Tensor:  # (LENGTH + 1,)
        begin = block * LENGTH
        return self.text[begin : begin + LENGTH + 1].long()


def load(path: str | None) -> tuple[Blocks, Blocks]:
    """Return the blocks of a file to train on, and those to validate with.

    Without a file they are 1024 and 128 blocks of Python's documentation, which
    every Python has in its standard library.
    """
    if path is None:
        text = "".join(topics.values()).encode()[:73_800]
    else:
        text = Path(path).read_bytes()
    end = len(text) * 8 // 9
    return Blocks(text[:end]), Blocks(text[end:])


class Layer(nn.Module):
    """Causal attention and a feed-forward network, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:  # (rows, tokens, width)
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (rows, heads, tokens, ...) each
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Tokens -> the logits of the token that follows each of them."""

    def __init__(
        self, width: int = 64, layers: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(
            *(Layer(width, heads) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (rows, up to LENGTH)
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.layers(x)))


def loss_of(model: nn.Module, blocks: Tensor) -> Tensor:
    """Return the mean loss over the tokens of some blocks.

    All blocks have the same length, so it is also the mean over the blocks.
    """
    logits = model(blocks[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    """Return two groups: matrices decay; biases and norms do not."""
    decays = [
        parameter for parameter in model.parameters() if parameter.ndim == 2
    ]
    others = [
        parameter for parameter in model.parameters() if parameter.ndim < 2
    ]
    return [
        {"params": decays, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]


def warmup_cosine(total: int) -> Callable[[int], float]:
    """Return a factor on lr for each update: warm-up, then cosine to 0.1."""
    warmup = total // 10

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / (warmup + 1)
        done = min(1.0, (update - warmup) / (total - warmup))
        return 0.55 + 0.45 * math.cos(math.pi * done)

    return factor


def choose_device() -> torch.device:
    """Return the GPU of this process if each has one, otherwise the CPU."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.device_count() < processes:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def parser(description: str | None, folder: str) -> argparse.ArgumentParser:
    """Return a parser of the flags that both scripts have."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--text", help="file to train on; by default Python's documentation")
    add("--epochs", type=int, default=2)
    add(
        "--batch", type=int, default=32, help="batch size for which lr is tuned"
    )
    add("--microbatch", type=int, default=16, help="blocks per backward")
    add("--lr", type=float, default=0.003)
    add("--float32", action="store_true", help="no autocast to bfloat16")
    add("--folder", default=folder, help="folder of the checkpoints")
    add("--seed", type=int, default=0)
    return parser
