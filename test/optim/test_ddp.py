"""DistributedDataParallel sums: the updates of plain sums and of one process, and errors where it cannot."""

from __future__ import annotations

from typing import Any

import pytest

import variable_batch_size as vbs
from helpers.ddp_jobs import ODD, SAME, alone, run_scenarios
from helpers.ddp_mistakes import ERRORS, discards, groups, run_mistakes
from helpers.mishaps import assert_discarded
from helpers.processes import run_job
from helpers.reference import assert_equal, twin

FORWARD = (
    r"must sum in the last .*, but no forward of it came after the step\(\) .*; call it \(not its \.module\), then o"
)
CARRIED = r"with a DistributedDataParallel each loss must carry its weight, .*; call optimizer\.backward\(loss\) in the"
MESSAGES = {
    "bare_forward": FORWARD,
    "bare_forward_with_a_hook": FORWARD,
    "all_forwards_before_the_backwards": FORWARD,
    "all_forwards_before_the_backwards_with_a_hook": FORWARD,
    "no_backward_of_a_replay": CARRIED,
    "graph_of_the_gradients": r"^create_graph=True needs .*, but .* sums them in backward\(\); omit it, or train",
    "frozen_when_wrapped": r"must sum all gradients, but it leaves out that of parameter 0, of shape \(4, 3\), which",
    "parameter_outside": r"must have all parameters of the optimizer, but parameter 4, of shape \(1,\), is not in it",
    "plain_backward": CARRIED,
    "several_microbatches_in_half_precision": r"with at least 32 bits, but some .* have fewer; keep them in float32",
    "static_graph": r"with static_graph=True must sum in each backward\(\), but .*; create it without static_graph",
    "scale_unknown_in_backward": r"was scaled in the loop, .*; call optimizer\.backward\(loss, scaler=scaler\) and",
    "an_optimizer_that_is_not_named": rf"{CARRIED} place of .*, with others= if several optimizers update",
    "optimizers_of_other_reductions": r"have the same reduction, got sum at Micro.*; pass one sampler to them",
    "wrapper_that_the_optimizer_does_not_know": r"only backward\(\) may change .*; pass a DistributedDataParallel to",
    "wrapper_that_the_optimizer_does_not_know_and_backward": r"summed over the ranks by step\(\) alone, but within .*",
    "other_ranks": r"over the ranks that share a batch, but it has ranks \[\d\] and the optimizer \[0, .*; pass",
    "unused_parameters": r"for all its parameters .*, but it got only some; create it with find_unused_para",
    "gan_with_zero_grad": r"but zero_grad\(\) would drop them on this one; call model\.module for another optimi",
    "gan_without_zero_grad": r"but zero_grad\(\) would drop them on this one; call model\.module for another optimi",
    "second_backward": r"in the last backward\(\) of a step, but there is another one; add the losses",
    "zero_grad_before_the_last_microbatch": r"only optimizer\.backward\(\) may change gradients between",
    "clipped_in_the_loop": r"only optimizer\.backward\(\) may change gradients between .*, clip with max_grad_norm=",
    "earlier_optimizer_of_the_same_parameters": r"another optimizer, or the loop, has switched its reduction; train a",
    "not_a_model": r"model must be a torch\.nn\.Module, got 'bare' \(str\); pass the model whose",
}


WORLDS = [2, pytest.param(3, marks=pytest.mark.slow("starts another world"))]


@pytest.fixture(scope="module", params=WORLDS, ids="world {}".format)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_job("gloo", run_scenarios, ranks=request.param)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return alone()


@pytest.mark.parametrize("name", [one.__name__ for one in SAME])
def test_the_updates_are_those_of_one_process(name: str, ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for rank in ranks:
        own = rank["plain gan"] if name == "gan" else expected[name]  # a microbatch of a GAN sees earlier updates
        assert rank[name].keys() == own.keys()
        for case, weights in rank[name].items():
            assert_equal(weights, own[case])
            assert_equal(weights, ranks[0][name][case], 0)


def test_a_replay_leaves_statistics_and_random_numbers_as_they_were(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert rank["replayed"] == 8 * [number == 0]


@pytest.mark.slow("starts processes")
@pytest.mark.torch
@pytest.mark.parametrize(
    ("where", "who", "size"),
    [
        ("forward", "all ranks", 2),
        ("backward", "one rank", 3),
        *(
            pytest.param(*case, marks=pytest.mark.nightly("starts processes"))
            for case in [
                ("forward", "one rank", 3),
                ("backward", "all ranks", 3),
                ("between", "all ranks", 3),
                ("between", "one rank", 2),
            ]
        ),
    ],
)
def test_after_an_exception_all_ranks_go_on_or_end(where: str, who: str, size: int) -> None:
    assert_discarded(run_job("gloo", discards, where, who, ranks=size), who, ODD)


@pytest.mark.slow("starts processes")
def test_ranks_outside_a_group_agree_on_everything_but_the_batch() -> None:
    expected = twin(vbs.LinearRuleOptimizer, ODD, dataset_size=400)
    for trained, messages in run_job("gloo", groups, ranks=4):
        for weights in trained:
            assert_equal(weights, expected)
        for message in messages:
            assert "same lr of parameter group 0, but it is 0.02 on rank 0 and 0.04 on rank 3" in message
        assert len(messages) == 2


def test_each_error_is_tested() -> None:
    assert [one.__name__.lstrip("_") for one in ERRORS] == list(MESSAGES)


@pytest.fixture(scope="module", params=WORLDS, ids="world {}".format)
def mistakes(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_job("gloo", run_mistakes, ranks=request.param)


@pytest.mark.parametrize("mistake", MESSAGES)
def test_a_mistake_raises_on_every_rank(mistakes: list[dict[str, str]], mistake: str) -> None:
    for found in mistakes:
        with pytest.raises(RuntimeError, match=MESSAGES[mistake]):
            raise RuntimeError(found.get(mistake, "no error"))
