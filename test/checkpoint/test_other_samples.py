"""Checkpoints of a training with other samples: refused, unless the trace differs only in its future."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.checkpoints import checkpoint
from helpers.reference import SIZES, assert_equal, training


def test_a_longer_trace_goes_on(tmp_path: Path) -> None:
    run = training(sizes=SIZES[:5], dataset_size=73, sampling={"on_end": "error"}).run(5)
    with checkpoint(tmp_path, run) as saves:
        saves.save()
    longer = training(dataset_size=73, sampling={"on_end": "error"})
    told = pytest.warns(UserWarning, match=r"^The batch trace differs from that of the saved run after update 5")
    with checkpoint(tmp_path, longer) as saves, told:
        assert saves.restore()
    assert longer.optimizer.updates == 5
    assert_equal(longer.weights(), run.weights(), 0)


def test_other_samples_are_refused_unless_strict_is_false(tmp_path: Path) -> None:
    run = training().run(3)
    with checkpoint(tmp_path, run) as saves:
        saves.save()
    other = training(sizes=(20, 8, 1, 33), sampling={"seed": 1})
    before = other.weights()
    with checkpoint(tmp_path, other) as saves:
        with pytest.raises(
            RuntimeError,
            match=r"but seed was 0 and is 1, the first 3 batch sizes of the trace are not the same; .* strict=False",
        ):
            saves.restore()
        assert other.optimizer.updates == 0
        assert_equal(other.weights(), before, 0)
        assert saves.restore(strict=False)
    assert other.optimizer.updates == 3
    assert_equal(other.weights(), run.weights(), 0)
