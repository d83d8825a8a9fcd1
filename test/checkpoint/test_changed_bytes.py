"""Bytes of a checkpoint that have changed: it is refused, or what is loaded is what was saved."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

import variable_batch_size as vbs
from helpers.sharded import always_sharded, wide
from variable_batch_size.backend import Backend
from variable_batch_size.checkpoint.format import MANIFEST, encode
from variable_batch_size.testing import run_ranks

__all__ = ["always_sharded"]


def change(path: Path, rng: random.Random) -> str:
    """Change a file of a checkpoint, and return how."""
    contents = bytearray(path.read_bytes())
    place, other = rng.randrange(len(contents)), rng.randrange(len(contents))
    how = rng.choice(["flip", "cut", "insert", "drop", "swap", "zeros", "digit"])
    if how == "flip":
        contents[place] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del contents[place:]
    elif how == "insert":
        contents[place:place] = bytes([rng.randrange(256)])
    elif how == "drop":
        del contents[place : place + rng.randint(1, 100)]
    elif how == "swap":
        contents[place], contents[other] = contents[other], contents[place]
    elif how == "zeros":
        contents[place : place + 64] = bytes(len(contents[place : place + 64]))
    else:  # of a number, in text
        digits = [index for index, byte in enumerate(contents) if 48 <= byte <= 57]
        contents[rng.choice(digits)] = 48 + rng.randrange(10)
    path.write_bytes(contents)
    return f"{how} at {place} and {other} of {path.name}"


@pytest.mark.slow("reads many checkpoints")
def test_1000_mutations_never_load_anything_else(tmp_path: Path, always_sharded: None) -> None:
    def save(backend: Backend) -> None:
        run = wide(backend, width=40).run(2)
        with vbs.Checkpoint(tmp_path / "saved", model=run.model, optimizer=run.optimizer) as saves:
            saves.save()

    run_ranks(save, 2)
    (whole,) = (tmp_path / "saved").glob("update-*")
    expected = encode(vbs.read_checkpoint(whole))
    seed = 7
    print("seed", seed)
    rng, loaded = random.Random(seed), 0
    names = sorted(path.name for path in whole.iterdir())
    assert len(names) == 3
    for _ in range(1000):
        path = tmp_path / whole.name
        shutil.copytree(whole, path)
        how = change(path / rng.choice([*names, MANIFEST]), rng)
        try:
            found = encode(vbs.read_checkpoint(path))
        except ValueError:
            pass
        else:
            loaded += 1
            assert found.json == expected.json, how
            for name, tensor in expected.tensors.items():
                assert torch.equal(found.tensors[name], tensor), how
        shutil.rmtree(path)
    assert loaded < 200  # as when a digit is replaced by itself
