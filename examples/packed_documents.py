"""Train a small GPT on documents of any length, packed into rows without padding, in batches of tokens.

python examples/packed_documents.py
torchrun --nproc-per-node=2 examples/packed_documents.py
"""

import argparse
import os
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

import variable_batch_size as vbs

BYTES, WIDTH, HEADS, LONGEST = 256, 64, 4, 256


class Block(nn.Module):
    """Attention within documents, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the same shape as x, (tokens, WIDTH)."""
        q, k, v = self.qkv(self.before(x)).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)  # (HEADS, tokens, features)
        attended = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        return x + self.perceptron(self.between(x))


class PackedGPT(nn.Module):
    """A GPT of bytes for documents in a row, each of which sees itself only."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: Tensor, document: Tensor, position: Tensor) -> Tensor:
        """Return logits, (tokens, BYTES), of (tokens,) each."""
        order = torch.arange(len(tokens), device=tokens.device)
        mask = (document[:, None] == document) & (order[:, None] >= order)  # (tokens, tokens)
        x = self.tokens(tokens) + self.positions(position)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


def pack(documents: list[bytes]) -> dict[str, Tensor]:
    """Return documents in a row: inputs, labels, and for each token its document and its position there."""
    texts = [torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in documents]
    lengths = torch.tensor([len(text) - 1 for text in texts])
    return {
        "tokens": torch.cat([text[:-1] for text in texts]),
        "labels": torch.cat([text[1:] for text in texts]),
        "document": torch.arange(len(texts)).repeat_interleave(lengths),
        "position": torch.cat([torch.arange(length) for length in lengths]),
    }


def predicted(documents: list[bytes]) -> list[int]:
    """Return how many tokens of each document are predicted, which is what it counts."""
    return [len(text) - 1 for text in documents]


def paragraphs(number: int | None = None) -> list[bytes]:
    """Return paragraphs of Python's documentation, all or the first ones."""
    text = "\n\n".join(topics.values()).encode()
    return [part[:LONGEST] for part in text.split(b"\n\n") if len(part) > 1][:number]


def loss_of(model: nn.Module, packed: dict[str, Tensor]) -> Tensor:
    """Return the mean over tokens."""
    labels = packed.pop("labels")
    return cross_entropy(model(**packed), labels)


def main() -> None:
    """Train for an epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="0:4k 100k:8k", help="tokens so far: tokens of an update")
    parser.add_argument("--documents", type=int, help="at most so many")
    parser.add_argument("--max-tokens", type=int, default=2048, help="tokens of a microbatch")
    flags = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = PackedGPT()
    vbs.broadcast_parameters(model)
    documents = paragraphs(flags.documents)
    sampler = vbs.CustomSampler(
        documents,
        trace=vbs.BatchTrace.parse(flags.schedule, unit="samples"),  # a sample is a token here
        lengths=predicted(documents),
        max_tokens=flags.max_tokens,
    )
    loader = DataLoader(documents, batch_sampler=sampler, collate_fn=pack)
    inner = torch.optim.AdamW(model.parameters(), lr=0.002)
    optimizer = vbs.RootRuleOptimizer(inner, sampler, ref_batchsize=4000)
    for _ in vbs.remaining_epochs(sampler, optimizer, until=1):
        for update in vbs.updates(loader, optimizer):
            for packed in update:
                loss = loss_of(model, packed)
                optimizer.backward(loss)
                optimizer.log(loss=loss)
                optimizer.step()
            if sampler.world.rank == 0 and optimizer.updates % 10 == 0:
                loss, lr = float(optimizer.logged["loss"]), optimizer.current_lr()
                made = f"update {optimizer.updates}, {optimizer.samples} tokens"
                print(f"{made}: loss {loss:.3f}, lr {lr:.4f}", flush=True)


if __name__ == "__main__":
    main()
