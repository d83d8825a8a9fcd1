"""Bytes of a checkpoint that have changed: it is refused, or what is loaded is what was saved."""

from __future__ import annotations

import json
import random
import shutil
import warnings

import pytest
import torch

import variable_batch_size as vbs
from helpers.sharded import always_sharded, wide
from variable_batch_size.checkpoint.values import encode
from variable_batch_size.testing import run_ranks

__all__ = ["always_sharded"]


def change(path, rng):
    """Change a file of a checkpoint, and return how."""
    contents = bytearray(path.read_bytes())
    place, other = rng.randrange(len(contents)), rng.randrange(len(contents))
    how = rng.choice(["flip", "cut", "insert", "drop", "swap", "zeros", "digit", "remove"])
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
    elif how == "digit":  # of a number, in text
        digits = [index for index, byte in enumerate(contents) if 48 <= byte <= 57]
        contents[rng.choice(digits)] = 48 + rng.randrange(10)
    path.unlink()
    if how != "remove":
        path.write_bytes(contents)
    return f"{how} at {place} and {other} of {path.name}"


def flat(contents):
    """Return what is equal for contents that are equal to the last bit."""
    tensors = dict[str, torch.Tensor]()
    state = encode(contents, "", tensors, {})
    return json.dumps(state), {name: one.view(-1).view(torch.uint8).tolist() for name, one in tensors.items()}


@pytest.mark.slow("reads many checkpoints")
def test_500_mutations_never_load_anything_else(tmp_path, always_sharded):
    """The newest of two checkpoints, each of two ranks, is read whole, or the one before it is."""

    def save(backend):
        run = wide(backend, width=20)
        with vbs.Checkpoint(tmp_path / "saved", model=run.model, optimizer=run.optimizer) as saves:
            for _ in range(2):
                run.run(1)
                saves.save()

    run_ranks(save, 2)
    older, newer = sorted((tmp_path / "saved").glob("update-*"))
    before, expected = flat(vbs.read_checkpoint(older)), flat(vbs.read_checkpoint(newer))
    files = sorted(path.name for path in newer.iterdir())
    assert files == ["rank-0.json", "rank-1.json", "tensors-0.safetensors", "tensors-1.safetensors"]
    seed = 7
    print("seed", seed)
    rng, loaded = random.Random(seed), 0
    for _ in range(500):
        shutil.copytree(tmp_path / "saved", tmp_path / "work")
        how = change(tmp_path / "work" / newer.name / rng.choice([*files, "rank-0.json"]), rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of the damage
            found = flat(vbs.read_checkpoint(tmp_path / "work"))
        loaded += found == expected
        assert found in (before, expected), how
        shutil.rmtree(tmp_path / "work")
    assert loaded < 100  # as when a digit is replaced by itself
