"""Each rule at its own learning rate: chosen on seeds that do not judge, and what a report says of the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.evaluations import records
from variable_batch_size.lab.evaluation import Analysis, Experiment, Record, run
from variable_batch_size.lab.evaluation.recommendation import reference_of
from variable_batch_size.lab.evaluation.report import render
from variable_batch_size.lab.evaluation.statistics import detectable
from variable_batch_size.lab.evaluation.tuning import (
    REFERENCE,
    TUNING,
    best_factor,
    best_of,
    chosen_factors,
    nearest_to_one,
)
from variable_batch_size.lab.evaluation.wording import power

TINY = "helpers.evaluation_tasks:Tiny"
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
RULES = {"constant": 0.0, "root": 0.02, "linear": 0.05}


def tuned(judging: int = 4, **more: object) -> list[Record]:
    """Two tuning seeds at all factors, and seeds that judge at the best one, 2, and at 1."""
    found = records(RULES, ["spot"], FACTORS, seeds=2 + judging, **more)  # type: ignore[arg-type]
    moved = []
    for record in found:
        seed, factor = record.cell["seed"], record.cell["lr_factor"]
        if seed < 2:
            moved.append(replace(record, cell={**record.cell, "seed": TUNING + seed}))
        elif factor in (1.0, 2.0):
            moved.append(record)
    return moved


def test_the_best_has_the_least_median() -> None:
    assert best_of({"a": [0.1, float("inf")], "b": [0.5, 0.7], "c": [0.6, 0.5]}) == "c"
    assert best_of({"a": [0.1, float("inf"), 0.2], "b": [0.5, 0.7, 0.5]}) == "a"
    assert best_of({"a": [1.0], "b": [1.0]}) == "a"
    assert best_of({"a": [float("inf")]}) == "a"
    assert (nearest_to_one([4.0, 0.5, 2.0]), nearest_to_one([3.0])) == (0.5, 3.0)


def test_of_factors_that_are_equal_the_nearest_to_one_is_chosen() -> None:
    """For trainings and for the report alike: what is judged is what was trained."""
    failed = {4.0: [float("inf")], 0.25: [float("inf")], 2.0: [float("inf")]}
    assert best_factor(failed) == 2.0
    none = [replace(record, status="diverged") for record in tuned()]
    assert set(chosen_factors(none).values()) == {1.0}
    assert Analysis(none).own["lr_factor"].unique().tolist() == [1.0]


def test_an_experiment_judges_with_other_seeds_at_the_factors_that_were_chosen(tmp_path: Path) -> None:
    experiment = Experiment(
        [TINY], ["0:8 10:32"], ["constant", "linear"], seeds=2, lr_factors=(0.25, 1, 4), tuning_seeds=2
    )
    tuning = experiment.cells()
    assert {cell.seed for cell in tuning} == {TUNING, TUNING + 1}
    assert len(tuning) == 2 * 3 * 3  # seeds, factors, and two rules with the reference
    found = run(experiment, tmp_path, progress=False)
    assert [record.key for record in found[: len(tuning)]] == [cell.key for cell in tuning]
    chosen = chosen_factors(found)
    assert chosen.keys() == {
        (TINY, "0:8 10:32", "constant"),
        (TINY, "0:8 10:32", "linear"),
        (TINY, REFERENCE, "constant"),
    }
    judged = [record.cell for record in found[len(tuning) :]]
    expected = {(*kind, seed, factor) for kind, own in chosen.items() for seed in (0, 1) for factor in (own, 1.0)}
    assert {(c["task"], c["trace"], c["rule"], c["seed"], c["lr_factor"]) for c in judged} == expected
    analysis = Analysis(found)
    assert (analysis.own["seed"] < TUNING).all()
    for row in analysis.own.to_dict("records"):
        assert row["lr_factor"] == chosen[row["task_name"], row["trace"], row["rule"]]
    assert run(experiment, tmp_path, progress=False) == found


def test_rules_are_judged_at_their_own_factor_by_seeds_that_did_not_choose_it() -> None:
    analysis = Analysis(tuned(noise=1e-3))
    facts = analysis.facts("simulated", "spot")
    assert facts["factor"].eq(2).all()
    assert facts["value_n"].eq(4).all()
    assert facts["value"].to_dict() == pytest.approx({rule: 0.5 + effect for rule, effect in RULES.items()}, abs=0.05)
    assert facts["untuned"].sub(facts["value"]).to_dict() == pytest.approx(dict.fromkeys(RULES, 0.03), abs=5e-3)
    assert facts["regret"].to_dict() == pytest.approx({rule: 0.03 + RULES[rule] for rule in RULES}, abs=5e-3)
    assert not analysis.is_optimistic("simulated", "spot")
    page = render(analysis)
    assert "constant at 2x was better than linear at 2x and root at 2x" in page
    assert "With 4 seeds and 3 comparisons, a difference is claimed in 80 % of cases if it is " in page
    assert "by other\nseeds" in page
    assert page.count('class="chosen"') == 3


def test_the_seeds_that_judge_choose_where_there_are_no_others() -> None:
    analysis = Analysis(records(RULES, ["spot"], FACTORS, seeds=4, noise=1e-3))
    assert analysis.facts("simulated", "spot")["factor"].eq(2).all()
    assert analysis.is_optimistic("simulated", "spot")
    assert "these numbers are optimistic by the choice" in render(analysis)


def test_what_is_not_judged_yet_is_shown_by_the_tuning_seeds() -> None:
    analysis = Analysis(tuned(judging=0))
    assert analysis.facts("simulated", "spot")["value_n"].eq(2).all()
    assert "optimistic" in render(analysis)


@pytest.mark.slow("analyses evaluations")
@pytest.mark.parametrize(
    ("trace", "lrs", "seeds", "said"),
    [
        ("64", (0.5, 1.0, 2.0), 4, "The reference is tuned, as far as was tried: at its batch size of 64 and learning"),
        ("64", (1.0,), 4, "Whether the reference is tuned is not known: "),
        ("64", (0.25, 0.5), 4, "The reference is tuned, as far as was tried: "),
        ("64", (4.0, 8.0, 2.0), 4, "The reference is tuned, as far as was tried: "),
        (
            "spot",
            (1.0, 2.0),
            4,
            "The reference is not tuned: at its batch size of 64 and learning rate of 0.1, loss is",
        ),
        ("spot", (1.0, 2.0), 2, "The reference is tuned within noise: "),
    ],
)
def test_a_reference_that_is_not_tuned_is_said(trace: str, lrs: tuple[float, ...], seeds: int, said: str) -> None:
    found = records({"constant": 0.0}, [trace], lrs, seeds=seeds, noise=0.004, grid=())
    found = [replace(record, cell={**record.cell, "trace": REFERENCE}) for record in found]
    assert reference_of(Analysis(found), "simulated").startswith(said)
    others = records(RULES, ["0:64 40:256"])
    assert reference_of(Analysis(others), "simulated").startswith("The reference was not trained")
    assert said in render(Analysis([*found, *others]))


def test_a_reference_that_failed_or_lacks_seeds_is_not_called_tuned_by_them() -> None:
    found = records({"constant": 0.0}, ["64"], (0.5, 1.0, 2.0), seeds=3, noise=0.004, grid=())
    found = [replace(record, cell={**record.cell, "trace": REFERENCE}) for record in found]
    failed = [replace(record, status="diverged") for record in found]
    assert reference_of(Analysis(failed), "simulated").startswith("The reference failed with all seeds: ")
    some = [record for record in found if record.cell["seed"] < 2 or record.cell["lr_factor"] == 1]
    assert reference_of(Analysis(some), "simulated").endswith("had a lower median loss with 2 seeds.")


def test_no_regret_is_below_that_of_the_best_that_was_judged() -> None:
    """The tuning seeds prefer another rule than those that judge."""
    found = records(RULES, ["spot"], FACTORS, seeds=6, noise=1e-3)
    moved = []
    for record in found:
        cell = dict(record.cell)
        if cell["seed"] < 2:
            curve = dict(record.curve)
            if cell["rule"] == "root":
                curve["loss"] = [*(curve["loss"] or ())[:-1], 0.1]
            moved.append(replace(record, cell={**cell, "seed": TUNING + cell["seed"]}, curve=curve))
        elif cell["lr_factor"] in (1.0, 2.0):
            moved.append(record)
    regrets = Analysis(moved).facts("simulated", "spot")["regret"]
    assert (regrets >= 0).all()
    assert regrets["root"] > 0


def test_failures_leave_half_of_the_level_to_differences() -> None:
    assert power(5, 30, failed=True).split("if it is ")[1] == power(5, 60).split("if it is ")[1]
    found = records(RULES, ["spot"], seeds=4, grid=())
    failed = [replace(found[0], status="diverged"), *found[1:]]
    without, with_ = (1 - Analysis(some).together for some in (found, failed))
    assert with_ == pytest.approx(without / 2)


def test_a_factor_that_was_chosen_and_is_worse_is_not_called_better() -> None:
    """The tuning seeds chose 2, and those that judge are far worse there."""
    found = records({"constant": 0.0}, ["spot"], (1.0, 2.0), seeds=6, noise=1e-3, grid=())
    moved = []
    for record in found:
        seed, factor = record.cell["seed"], record.cell["lr_factor"]
        curve = dict(record.curve)
        if seed >= 2 and factor == 2:
            curve["loss"] = [*(curve["loss"] or ())[:-1], 0.9]
        seed += TUNING * (seed < 2)
        moved.append(replace(record, cell={**record.cell, "trace": REFERENCE, "seed": seed}, curve=curve))
    said = reference_of(Analysis(moved), "simulated")
    assert said.startswith("The reference is tuned, as far as was tried: ")
    assert said.endswith("2 times it was chosen, and judged to be worse.")


def test_the_detectable_difference_is_seen_so_often() -> None:
    from scipy import stats

    for n, comparisons in (3, 4), (5, 12), (10, 1):
        critical = stats.t.isf(0.025 / comparisons, n - 1)
        found = detectable(n, comparisons)
        draws = stats.norm.rvs(found, 1, (40_000, n), random_state=1)
        seen = (draws.mean(1) / draws.std(1, ddof=1) * n**0.5 > critical).mean()
        assert seen == pytest.approx(0.8, abs=0.01)


def test_tuning_needs_several_factors_and_other_seeds() -> None:
    with pytest.raises(ValueError, match=r"tuning_seeds need several lr_factors.*; pass lr_factors=\[0.5, 1, 2\]"):
        Experiment([TINY], ["8"], ["linear"], tuning_seeds=2)
    with pytest.raises(ValueError, match="each of seeds must be an integer >= 0 and <= 999, got 1000"):
        Experiment([TINY], ["8"], ["linear"], seeds=[TUNING]).cells()
