"""Throughput.from_csv: the time of an update from the scalars.csv of a training."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

import variable_batch_size as vbs
from helpers.reference import training
from variable_batch_size.adaptive import Throughput
from variable_batch_size.adaptive.scalars import updates_in

MODEL = Throughput(accum_base=0.02, accum_row=0.001, net_base=0.2, net_device=0.01, overlap=2.5)
WORLDS, BATCHES, MICROBATCH = (1, 2, 3, 4, 8), (64, 256, 1024, 1100), 64
TAGS = ("world_size", "global_batch_size", "num_microbatches", "updates_per_second", "samples_per_second")


def row(world, batch, seconds, samples=None):
    microbatches = max(-(-batch // MICROBATCH), min(batch, world))
    return [world, batch, microbatches, 1 / seconds, (batch if samples is None else samples) / seconds]


def seconds_of(world, batch):
    """The seconds that the model gives to what `from_csv` knows of an update."""
    microbatches = row(world, batch, 1.0)[2]
    rows, rounds = math.ceil(batch / microbatches), math.ceil(microbatches / world)
    return float(MODEL.of_rounds(rounds * rows, rows, rounds, world))


def write(path, rows, encoding="utf-8"):
    table = pd.DataFrame(rows, columns=[f"vbs/{tag}" for tag in TAGS])
    table.to_csv(path, index_label="update", encoding=encoding)
    return path


def test_a_real_training(tmp_path):
    with vbs.Tracker(tmp_path, progress=False) as tracker:
        training(sizes=[10] * 28 + [25] * 32, tracker=tracker, log_steps=5).run(60)
    path = tmp_path / "scalars.csv"
    found = updates_in(path)
    assert found[:, :3].tolist() == [[1, 4, 3], [1, 4, 7]]  # microbatches of at most 4 rows
    table = pd.read_csv(path)
    sizes = [table.loc[:4, "vbs/updates_per_second"], table.loc[6:, "vbs/updates_per_second"]]  # row 5 has both sizes
    assert found[:, 3] == pytest.approx([np.median(1 / rates) for rates in sizes])
    model = Throughput.from_csv(path)
    assert model == Throughput.fit(found)
    assert (model.accum_base, model.net_base) == (0, 0)
    assert model.seconds(25, 1, 4) > model.seconds(10, 1, 4) > 0


def test_the_first_row_with_log_steps_1_has_no_rate(tmp_path):
    with vbs.Tracker(tmp_path, progress=False) as tracker:
        training(sizes=[10] * 4, tracker=tracker, log_steps=1).run(4)
    assert np.isnan(pd.read_csv(tmp_path / "scalars.csv")["vbs/updates_per_second"][0])
    assert updates_in(tmp_path / "scalars.csv").shape == (1, 4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_outliers_and_mixed_rows_do_not_matter(seed, encoding, tmp_path):
    """Four of nine rows of a kind have an evaluation; rows without a rate, and of two batch sizes, are left out."""
    rng = np.random.default_rng(seed)
    rows = []
    for world in WORLDS:
        for batch in BATCHES:
            seconds = seconds_of(world, batch)
            rows += [row(world, batch, seconds) for _ in range(5)]
            rows += [row(world, batch, seconds * factor) for factor in rng.uniform(1, 50, 4)]
            rows += [row(world, batch, 1e-3, samples=batch * rng.uniform(1.2, 4)) for _ in range(20)]
            rows += [[world, batch, rows[-1][2], math.nan, math.nan]]
    rng.shuffle(rows)
    found = Throughput.from_csv(write(tmp_path / "scalars.csv", rows, encoding=encoding))
    for name in ("accum_base", "accum_row", "net_base", "net_device", "overlap"):
        assert getattr(found, name) == pytest.approx(getattr(MODEL, name), rel=1e-3)


def test_what_a_row_says_of_the_update(tmp_path):
    rows = [row(3, 1100, 2.0), row(3, 1100, 4.0), row(3, 1100, 6.0), row(1, 64, 1.0)]
    path = write(tmp_path / "scalars.csv", rows)
    assert updates_in(path).tolist() == [[1, 64, 1, 1], [3, 62, 6, 4]]  # 18 microbatches of 61 or 62 rows
    assert updates_in(path, minibatch_size=64).tolist() == [[1, 64, 1, 1], [3, 64, 6, 4]]
    assert Throughput.from_csv(path, 64) == Throughput.fit([[1, 64, 1, 1], [3, 64, 6, 4]])
    with path.open("a") as file:
        file.write("9,3,1100,18")  # of a process that was killed
    assert len(updates_in(path)) == 2
