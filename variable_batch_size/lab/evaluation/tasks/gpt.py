"""A small GPT over bytes: that of the task `char-gpt` and of examples/language_model."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # a token is a byte
LENGTH = 64  # tokens of a block


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

    def forward(self, x: Tensor) -> Tensor:
        """Return the values of the next layer, (rows, tokens, width) as those of this one."""
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (rows, heads, tokens, ...) each
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        sum_: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return sum_


class GPT(nn.Module):
    """Tokens -> the logits of the token that follows each of them."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
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
    """Return the mean loss over the tokens of some blocks.

    All blocks have the same length, so it is also the mean over the blocks.
    """
    logits = model(blocks[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    """Return two groups: matrices decay; biases and norms do not."""
    decays = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
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
