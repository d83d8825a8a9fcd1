"""FSDP2, HSDP and tensor parallelism: the updates of one process without sharding, and errors where they cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.mishaps import assert_discarded
from helpers.processes import run_job
from helpers.reference import assert_equal, training
from helpers.sharded_jobs import LAYOUTS, ODD, SAME, Layout, alone, context_parallel, parts, run_scenarios
from helpers.sharded_mistakes import ERRORS, discards, one_is_slow, replicas_differ, run_mistakes

MESSAGES = {
    "plain_backward": r"sharded each loss must carry its weight, .*; call optimizer\.backward\(loss\) in the",
    "narrow_sums": r"with at least 32 bits, but FSDP2 adds them in torch\.bfloat16; keep the",
    "accumulated_noise": r"but sharded_accumulation=False adds them up before they are seen; omit it",
    "second_moment": r"^a rule of Adam's second moment needs whole tensors, but .*; choose another rule",
    "two_backwards_with_noise": r"needs one backward\(\) for each microbatch of a sharded model, but there is another",
    "not_passed": r"must know the model, but there is none; pass it as model=, the root module if",
    "parameter_before_sharding": r"but parameter 0, of shape \(4, 3\), is not sharded by it; call fully_shard",
    "root_not_sharded": r"must be the root of what is sharded, but fully_shard\(\) was applied to parts of it",
    "other_meshes": r"must be sharded over the same mesh, but there are 2: .*; pass the same mesh to each",
    "other_world": r"deals for rank 0 of 1 and the optimizer's DistributedBackend is rank \d of 2; pass num_replicas",
    "first_fsdp": r"not in FullyShardedDataParallel, got .*; shard it with torch\.distributed\.fsdp\.fully_shard\(\)",
    "deepspeed": r"not in DeepSpeedEngine, got .*; shard it with torch\.distributed\.fsdp\.fully_shard\(\)",
    "broadcast": r"needs whole tensors, but the model is sharded .*; begin with the same seed on every rank, or load",
    "scale_unknown": r"was scaled in the loop, .*; call optimizer\.backward\(loss, scaler=scaler\) and",
    "zero_grad": r"has summed over the ranks cannot be dropped, .* discard_step\(\) on all ranks",
    "clipping": r"only optimizer\.backward\(\) may change gradients between two .* changed that of parameter 0",
    "clipping_after_step": r"only optimizer\.backward\(\) may change gradients between two .* changed that of",
    "other_parts": r"but rank 0 is in the first forward of 0 in a sharded model and rank 1 in the first forward of 1",
}


SLOW, TORCH = pytest.mark.slow("starts processes"), pytest.mark.torch
MARKS = {str(Layout(shards=2)): [], str(Layout(shards=2, tensors=2)): [SLOW, TORCH]}
PARAMETERS = [
    pytest.param(one, id=str(one), marks=MARKS.get(str(one), [pytest.mark.nightly("starts processes")]))
    for one in LAYOUTS
]


@pytest.fixture(scope="module", params=PARAMETERS)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    layout: Layout = request.param
    return run_job("gloo", run_scenarios, layout, ranks=layout.size)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return alone()


@pytest.mark.parametrize("name", [one.__name__ for one in SAME])
def test_the_updates_are_those_of_one_process(name: str, ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for rank in ranks:
        assert rank[name].keys() == expected[name].keys()
        for case, weights in rank[name].items():
            assert_equal(weights, expected[name][case])


@SLOW
@TORCH
def test_ranks_that_compute_parts_of_the_same_samples_need_counts() -> None:
    expected = training(sizes=ODD, reduction="sum")
    assert parts(expected, 0, 1) == ""
    for without, error, weights in run_job("gloo", context_parallel, ranks=4):
        assert "as in context parallelism, a step needs counts, but there is none; pass reduction" in without
        assert error == ""
        assert_equal(weights, expected.weights())


def test_each_error_is_tested() -> None:
    assert [one.__name__.lstrip("_") for one in ERRORS] == list(MESSAGES)


@pytest.fixture(scope="module")
def mistakes() -> list[dict[str, str]]:
    return run_job("gloo", run_mistakes, ranks=2)


@pytest.mark.parametrize("mistake", MESSAGES)
def test_a_mistake_raises_on_every_rank(mistakes: list[dict[str, str]], mistake: str) -> None:
    for found in mistakes:
        with pytest.raises(RuntimeError, match=MESSAGES[mistake]):
            raise RuntimeError(found.get(mistake, "no error"))


@SLOW
@TORCH
def test_replicas_that_differ_are_told_from_shards() -> None:
    for message in run_job("gloo", replicas_differ, ranks=4):
        assert "the same part of sharded parameters must have the same values, but ranks 0 and 2 differ;" in message


@pytest.mark.slow("starts processes")
def test_a_rank_may_come_later_to_a_forward() -> None:
    """Others that wait there for it, and it within its own update, do not take one another for lost."""
    for weights in run_job("gloo", one_is_slow, ranks=3):
        assert_equal(weights, training(sizes=ODD).run(3).weights())


@SLOW
@TORCH
@pytest.mark.parametrize(
    ("where", "who", "layout", "options"),
    [
        ("forward", "all ranks", Layout(shards=2), {}),
        ("backward", "one rank", Layout(shards=2), {}),
        ("between", "one rank", Layout(2, 2), {"noise": "microbatches"}),
        *(
            pytest.param(*case, marks=pytest.mark.nightly("starts processes"))
            for case in [
                ("between", "all ranks", Layout(shards=3), {"sharded_accumulation": False}),
                ("forward", "one rank", Layout(shards=3), {"sharded_accumulation": False}),
                ("backward", "all ranks", Layout(2, 2), {"noise": "microbatches"}),
                ("forward", "one rank", Layout(shards=2, tensors=2), {}),
                ("backward", "one rank", Layout(shards=2, tensors=2), {}),
            ]
        ),
    ],
    ids=str,
)
def test_after_an_exception_all_ranks_go_on_or_end(
    where: str, who: str, layout: Layout, options: dict[str, Any]
) -> None:
    assert_discarded(run_job("gloo", discards, layout, where, who, options, ranks=layout.size), who, ODD)
