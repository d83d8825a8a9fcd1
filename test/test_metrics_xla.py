"""Means over a whole dataset on several XLA cores of this CPU: exact, lazy, and one graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

from helpers.xla_evaluation import evaluate  # noqa: E402
from variable_batch_size.backend.xla import launch  # noqa: E402


@pytest.mark.nightly("launches another world")
def test_an_evaluation_is_exact_and_add_compiles_and_reads_nothing(tmp_path: Path) -> None:
    launch(evaluate, (tmp_path, 8, 61, 44), cores=2)  # partial batches of 1 and 4 samples, and replays
    expected = [pytest.approx({"value": (n - 1) / 2, "double": n - 1, "samples": n}, rel=1e-6) for n in (61, 44)]
    for rank in range(2):
        found, batches, compiled = torch.load(tmp_path / f"means{rank}.pt")
        assert found == 2 * expected
        assert batches == dict.fromkeys(batches, 0)
        assert compiled == 0
