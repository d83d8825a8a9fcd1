"""A report claims what it sees, and of equal rules seldom anything; a training that learned nothing has failed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.evaluations import START, records
from variable_batch_size._validation import FloatArray
from variable_batch_size.lab.evaluation import Analysis, Record, recommend
from variable_batch_size.lab.evaluation.claims import FAILED, Claim, claims_of


def seen(*groups: dict[str, FloatArray]) -> list[tuple[str, str, str]]:
    found = claims_of(dict(enumerate(groups)))
    return [(claim.better, claim.worse, claim.by) for claims in found.values() for claim in claims]


def drawn(seeds: int = 5, seed: int = 0, **means: float) -> dict[str, FloatArray]:
    rng = np.random.default_rng(seed)
    return {name: mean + rng.standard_normal(seeds) for name, mean in means.items()}


def some_fail(values: FloatArray, number: int) -> FloatArray:
    return np.where(np.arange(len(values)) < number, FAILED, values)


def test_a_large_difference_is_claimed() -> None:
    assert seen(drawn(a=0, b=100)) == [("a", "b", "means")]
    assert seen(drawn(a=0, b=0)) == []


def test_five_failures_of_five_are_claimed_and_two_are_not() -> None:
    for number, claimed in (5, True), (4, False), (2, False):
        rules = drawn(a=0, b=0, c=0, d=0)
        rules["a"] = some_fail(rules["a"], number)
        expected = [(other, "a", "failures") for other in "bcd"] if claimed else []
        assert sorted(seen(rules)) == expected
        assert sorted(seen(rules, drawn(seed=1, b=0, c=0, d=0))) == expected


def test_a_pair_with_a_failure_is_compared_by_ranks() -> None:
    """By the mean a failure would hide every difference."""
    rules = drawn(10, a=0, b=20)
    for number in 1, 3:
        assert seen(rules | {"b": some_fail(rules["b"], number)}) == [("a", "b", "ranks")]
    assert seen(rules | {"a": some_fail(rules["a"], 3)}) == []


def test_equal_values_are_no_difference() -> None:
    same = np.arange(5.0)
    assert seen({"a": same, "b": same}) == []
    assert seen({"a": same, "b": same + 1}) == [("a", "b", "means")]


def test_differences_that_are_equal_by_rounding_are_no_proof() -> None:
    """Accuracies are counts: two seeds may well differ by as many test samples."""
    assert seen({"a": -np.array([0.80, 0.82]), "b": -np.array([0.81, 0.83])}) == []
    same = np.array([0.51, 0.53, 0.52, 0.55, 0.5])
    assert seen({"a": same, "b": same + 1e-9}) == []
    assert seen({"a": same, "b": same + 0.1}) == [("a", "b", "means")]


@pytest.mark.parametrize(("step", "noise", "seeds"), [(0.01, 0.02, 2), (0.01, 0.01, 3), (0.001, 0.005, 2), (0, 1, 2)])
def test_few_seeds_of_a_metric_in_steps_seldom_claim_anything(step: float, noise: float, seeds: int) -> None:
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(300):
        values = 0.8 + noise * rng.standard_normal((2, 4, seeds))
        rounded = step * np.round(values / step) if step else values
        wrong += bool(seen(*({f"rule {number}": one for number, one in enumerate(trace)} for trace in rounded)))
    assert wrong <= 15 + 3 * 3.8  # 5 % and three standard deviations


def test_seeds_that_one_rule_lacks_do_not_count() -> None:
    rules = drawn(6, a=0, b=100)
    assert seen(rules | {"b": np.where(np.arange(6) < 3, rules["b"], np.nan)}) == [("a", "b", "means")]
    assert seen(rules | {"b": np.where(np.arange(6) < 1, rules["b"], np.nan)}) == []


def test_holms_method_by_hand() -> None:
    """Of three pairs the least p must be below 0.05 / 3, the next one below 0.05 / 2; a group more makes it harder."""
    rules = drawn(a=0, b=3.2, c=6.2)
    p = {(claim.better, claim.worse): claim.p for claim in claims_of({0: rules}, level=1.0)[0]}
    assert len(p) == 3
    ordered = sorted(p, key=lambda pair: p[pair])
    for level in (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3):
        found = [(claim.better, claim.worse) for claim in claims_of({0: rules}, level)[0]]
        rejected = 0
        while rejected < 3 and p[ordered[rejected]] <= level / (3 - rejected):
            rejected += 1
        assert sorted(found) == sorted(ordered[:rejected])


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.sampled_from([0.0, 0.3, 0.8]), st.floats(0.1, 10))
def test_names_places_and_units_do_not_matter(seed: int, seeds: int, failing: float, unit: float) -> None:
    rng = np.random.default_rng(seed)
    rules = {name: rng.standard_normal(seeds) + 4 * rng.random() for name in "abc"}
    rules = {name: np.where(rng.random(seeds) < failing, FAILED, own) for name, own in rules.items()}
    expected = sorted(seen(rules))
    order = rng.permutation(seeds)
    again = {name: unit * rules[name][order] + 7 for name in reversed(rules)}
    assert sorted(seen(again)) == expected


@pytest.mark.nightly("judges many random reports")
@pytest.mark.parametrize("failing", [0.0, 0.1])
def test_few_reports_of_equal_rules_claim_anything(failing: float) -> None:
    """5 % of 400 are 20, with a standard deviation of 4.4."""
    rng, count = np.random.default_rng(5), 0
    for _ in range(400):
        values = rng.standard_normal((2, 4, 5))
        values[rng.random(values.shape) < failing] = FAILED
        count += bool(seen(*({str(rule): own for rule, own in enumerate(group)} for group in values)))
    assert count <= 33


# Trainings that learned nothing. -----------------------------------------------------------------------------------


def at_chance(record: Record, loss: float = START) -> Record:
    return replace(record, curve=record.curve | {"loss": [*(record.curve["loss"] or ())[:-1], loss]})


def test_a_training_that_learned_nothing_failed() -> None:
    """It is not judged by its mean, and does not hide the difference between others."""
    rules = {"constant": 0.0, "linear": 0.0, "root": -0.3}
    for loss, failed in (START, 2), (0.96 * START, 2), (0.94 * START, 0):
        found = records(rules, ["64"], seeds=6, noise=0.01, grid=(1.0,))
        found = [
            at_chance(one, loss) if (one.cell["rule"], one.cell["seed"] < 2) == ("linear", True) else one
            for one in found
        ]
        analysis = Analysis(found)
        row = analysis.facts("simulated", "64").loc["linear"]
        assert (row["failed"] * 6, row["value_n"]) == (failed, 6 - failed)
        (said,) = recommend(analysis)
        assert said.rule == "root"
        assert Claim("root", "constant", "means", pytest.approx(0, abs=0.01)) in analysis.claims["simulated", "64"]
        assert ("linear (2 of 6 failed)" in said.row["left out"]) is (failed > 0)


def test_the_margin_is_that_of_the_task() -> None:
    found = [replace(one, environment={**one.environment, "margin of the task": 0.9}) for one in records(seeds=1)]
    assert Analysis(found).summary["failed"].all()
