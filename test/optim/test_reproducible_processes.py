"""One hash of the weights: in processes, with dropout and augmentation, after kills in changing worlds; on XLA."""

import random
import sys
from pathlib import Path

import pytest

import variable_batch_size as vbs
from helpers.commands import run
from helpers.pages import ROOT

SCRIPT = str(Path(__file__).parents[1] / "helpers" / "reproducible_training.py")
PATH = {"PYTHONPATH": f"{ROOT}:{ROOT / 'test'}", "OMP_NUM_THREADS": "1"}


def train(folder, rule, world, updates, killed_after=0, workers=0):
    """Train in a world, and return what rank 0 has said of the weights; "" if it was killed."""
    launcher = ["torchrun", "--standalone", f"--nproc-per-node={world}"] if world > 1 else [sys.executable]
    arguments = map(str, (folder, rule, updates, killed_after, workers))
    done = run(*launcher, SCRIPT, *arguments, **PATH)
    assert bool(done.returncode) == bool(killed_after), done.stderr
    (told,) = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("hash ")] or [[]]
    if told:
        weights, loss, path = told
        assert vbs.weights_hash(vbs.read_checkpoint(path)["parts"]["model"]) == weights
        return f"{weights} {loss}"
    return ""


@pytest.mark.slow("trains in processes")
def test_a_run_that_was_killed_in_other_worlds_ends_with_the_hash_of_one(tmp_path):
    whole = train(tmp_path / "whole", "adascale", 1, 30)
    assert not train(tmp_path / "killed", "adascale", 3, 30, killed_after=11)
    assert not train(tmp_path / "killed", "adascale", 1, 30, killed_after=19, workers=2)
    assert train(tmp_path / "killed", "adascale", 2, 30) == whole


@pytest.mark.nightly("trains in processes, twenty times")
@pytest.mark.parametrize("rule", ["adascale", "adamscale"])
def test_ten_kills_in_worlds_of_one_to_five(rule, tmp_path):
    rng = random.Random(61)
    hashes = {train(tmp_path / f"world-{world}", rule, world, 200, workers=world % 2) for world in (1, 2, 3, 4, 5)}
    for kill in range(10):
        train(tmp_path / "killed", rule, rng.randint(1, 5), 200, killed_after=17 * (kill + 1), workers=kill % 2)
    hashes.add(train(tmp_path / "killed", rule, 2, 200))
    assert len(hashes) == 1
