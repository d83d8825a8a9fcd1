"""Trainings in real gloo processes.

A world of 2 processes runs every scenario, and after it a world of 3, if its tests are selected. The tests read the
results of each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import variable_batch_size as vbs
from helpers.distributed_jobs import CASES, DTYPES, WORLDS, run_scenarios
from helpers.models import Everything, Experts, everything
from helpers.processes import run_job
from helpers.reference import SIZES, assert_equal, filled, training, twin

SLOW = (pytest.mark.slow("starts another world"), pytest.mark.torch)
SIZES_OF_WORLDS = [WORLDS[0], pytest.param(WORLDS[1], marks=SLOW)]
EIGHT = pytest.param(8, marks=pytest.mark.nightly("starts eight processes"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gloo")


@pytest.fixture(scope="module")
def run_world(folder: Path) -> Callable[[int], list[dict[str, Any]]]:
    """Return the results of every rank of a world of this size, which runs once, after the one that it resumes."""

    @cache
    def run(size: int) -> list[dict[str, Any]]:
        if size != WORLDS[0]:
            run(WORLDS[0])
        return run_job("gloo", run_scenarios, folder, ranks=size, folder=folder)

    return run


@pytest.fixture(params=SIZES_OF_WORLDS, ids="world {}".format)
def ranks(request: pytest.FixtureRequest, run_world: Callable[[int], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return run_world(request.param)


@pytest.mark.parametrize("ranks", [*SIZES_OF_WORLDS, EIGHT], indirect=True, ids="world {}".format)
def test_gains_equal_those_of_one_process_and_take_one_collective(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found, messages = rank["gains"]
        for dtype, tolerance, gains_found in zip((torch.float64, torch.float32), (1e-12, 1e-4), found, strict=True):
            run = training(vbs.AdaScaleOptimizer, dtype=dtype).run(1)
            assert gains_found == pytest.approx([run.run(1).optimizer.lr_factor() for _ in SIZES[1:]], rel=tolerance)
        assert messages == (len(SIZES) - 1) * [{torch.float64: 1}] + (len(SIZES) - 1) * [{torch.float32: 1}]


def test_updates_equal_those_of_one_big_batch(ranks: list[dict[str, Any]]) -> None:
    for i, case in enumerate(CASES):
        split: dict[str, Any] = {"minibatch_size": case.minibatch_size, "fixed_shape": case.fixed_shape}
        expected = twin(
            case.kind, case.sizes, dataset_size=case.dataset_size, dtype=case.dtype, seed=case.seed, **split
        )
        for rank in ranks:
            assert_equal(rank["exact_batches"][i], expected, 1e-5 if case.dtype == torch.float32 else 1e-12)
            assert_equal(rank["exact_batches"][i], ranks[0]["exact_batches"][i], 0)


def test_the_sampler_and_the_optimizer_detect_the_world(ranks: list[dict[str, Any]]) -> None:
    for i, rank in enumerate(ranks):
        world, weights = rank["detected_world"]
        assert world == vbs.backend.World(i, len(ranks))
        assert_equal(weights, ranks[0]["detected_world"][1], 0)


@pytest.mark.parametrize(("config", "kind"), [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu")])
def test_ranks_communicate_on_a_device_of_the_process_group(
    config: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert vbs.backend.DistributedBackend().device.type == kind


def test_an_evaluation_detects_the_world(ranks: list[dict[str, Any]]) -> None:
    assert [rank["evaluation"] for rank in ranks] == len(ranks) * [2 * [{"value": 4.5, "samples": 10}]]


def test_all_ranks_share_a_store(ranks: list[dict[str, Any]]) -> None:
    assert [rank["stores"] for rank in ranks] == [2 * [b"value of the last rank"]] * len(ranks)


def test_no_process_prints_a_warning(ranks: list[dict[str, Any]], folder: Path) -> None:
    """Torch's own threads would, on standard error, if a tensor that they free still had another reference."""
    for rank in range(len(ranks)):
        assert "Warning" not in (folder / f"stderr{rank}").read_text()


def test_an_update_takes_one_collective_per_dtype(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for part in (rank["collectives"][1:4], rank["collectives"][5:]):
            assert part == [dict.fromkeys(DTYPES, 1)] * 3


def test_half_precision_updates_equal_those_of_one_big_batch(ranks: list[dict[str, Any]]) -> None:
    tolerances = dict(zip(DTYPES, (1e-5, 1e-12, 3e-2, 4e-3), strict=True))
    for dtype, tolerance in tolerances.items():
        for rank in ranks:
            assert_equal(rank["half_precision"][dtype], twin(vbs.RootRuleOptimizer, SIZES, dtype=dtype), tolerance)
            assert_equal(rank["half_precision"][dtype], ranks[0]["half_precision"][dtype], 0)


def test_a_parameter_that_only_some_ranks_use_is_updated_as_in_one_process(ranks: list[dict[str, Any]]) -> None:
    alone = training(model=filled(Experts())).run(len(SIZES)).weights()
    for rank in ranks:
        assert_equal(rank["experts"], alone)


def test_broadcast_parameters_copies_rank_0_to_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank["broadcast"], everything(Everything(0)), rtol=0, atol=0)


def test_a_rule_with_an_address_in_its_repr_equals_itself_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [rank["rule_with_an_address_in_its_repr"] for rank in ranks] == [2] * len(ranks)


def test_an_overflow_on_one_rank_skips_the_update_on_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        updates, weights = rank["overflow_on_rank_1"]
        assert updates == 3
        assert_equal(weights, twin(vbs.RootRuleOptimizer, SIZES[:4], dataset_size=61, skipped={0}))


def test_a_subgroup_trains_alone(ranks: list[dict[str, Any]]) -> None:
    for i, rank in enumerate(ranks[-2:]):
        world, weights = rank["subgroup"]
        assert world == vbs.backend.World(i, 2)
        assert_equal(weights, twin(vbs.LinearRuleOptimizer, SIZES))


@pytest.mark.slow("starts another world")
@pytest.mark.torch
def test_resumes_in_another_world(run_world: Callable[[int], list[dict[str, Any]]]) -> None:
    for rank in run_world(WORLDS[1]):
        assert_equal(rank["resume_in_another_world"], twin(vbs.LinearRuleOptimizer, SIZES))


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("weights", r"same parameters, but it is \d+ on rank 0 and \d+ on rank 1; call vbs\.broadcast_parameters"),
        ("seed", r"same seed, but it is 0 on rank 0 and 1 on rank 1; pass the same value on every rank"),
        ("rule", r"same rule, but it is"),
        ("wrapped", r"but something else has changed them; pass a DistributedDataParallel to the optimizer as model=,"),
        ("wrapped, with views", r"something else has changed them; pass a DistributedDataParallel to .* as model=,"),
        ("wrapped, optimizer.backward", r"as a DistributedDataParallel does; pass it to the optimizer as model=,"),
        ("wrapped, optimizer.backward, with views", r"as a DistributedDataParallel does; pass it to .* as model=,"),
        ("world", r"deals for rank 0 of 1 and the optimizer's DistributedBackend is rank \d of \d; pass num_replicas"),
    ],
)
def test_a_mistake_raises_on_every_rank(ranks: list[dict[str, Any]], mistake: str, text: str) -> None:
    for rank in ranks:
        with pytest.raises(RuntimeError, match=text):
            raise RuntimeError(rank["error_messages"].get(mistake, "no error"))
