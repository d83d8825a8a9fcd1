"""The data of a small GPT, and what else the two training scripts share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset

from variable_batch_size.lab.evaluation.tasks.char_gpt import (
    GPT,
    LENGTH,
    loss_of,
    parameter_groups,
    warmup_cosine,
)

__all__ = [
    "GPT",
    "Blocks",
    "choose_device",
    "load",
    "loss_of",
    "parameter_groups",
    "parser",
    "warmup_cosine",
]


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
