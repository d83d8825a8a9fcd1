"""From records with known effects to tables: the effects are found, and nothing is dropped in silence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import evaluations
from helpers.evaluations import BEST_LR, EFFECTS, ROWS, records
from variable_batch_size.lab.evaluation import Analysis, Record, read_records

TARGET = {"simulated": ("loss", 0.51)}


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return Analysis(records(seeds=6, noise=0.002), targets=TARGET)


def fact(analysis: Analysis, trace: str, rule: str) -> dict[Any, float]:
    return analysis.facts("simulated", trace).loc[rule].to_dict()


@pytest.mark.parametrize("trace", BEST_LR)
@pytest.mark.parametrize("rule", EFFECTS)
def test_the_effects_are_found(analysis: Analysis, trace: str, rule: str) -> None:
    row = fact(analysis, trace, rule)
    loss = evaluations.final_loss(rule, trace, 1.0)
    assert row["value"] == pytest.approx(loss, abs=0.04)
    assert row["value_n"] == 6
    assert row["untuned"] == row["value"]
    assert row["regret"] == pytest.approx(evaluations.regret(rule, trace), abs=0.008)
    assert (row["factor"], row["edge"]) == (1, False)
    if rule != "constant":
        assert row["difference"] == pytest.approx(EFFECTS[rule], abs=0.008)
        assert row["difference_high"] - row["difference_low"] < 0.02  # what seeds have in common cancels
        assert row["value_high"] - row["value_low"] > 0.02


def test_most_intervals_contain_the_truth(analysis: Analysis) -> None:
    """How many do is tested with the statistics; here, that they are those of the right rule and trace."""
    facts = {(trace, rule): fact(analysis, trace, rule) for trace in BEST_LR for rule in EFFECTS}
    losses = {(trace, rule): evaluations.final_loss(rule, trace, 1.0) for trace, rule in facts}
    inside = [row["value_low"] <= losses[cell] <= row["value_high"] for cell, row in facts.items()]
    assert sum(inside) >= len(inside) - 2


def test_an_accuracy_is_better_if_it_is_higher() -> None:
    analysis = Analysis(records(seeds=6, noise=0.002), metric="accuracy")
    assert fact(analysis, "64", "adascale")["regret"] == 0
    assert fact(analysis, "64", "constant")["regret"] == pytest.approx(0.05 / 2.6, abs=0.004)
    assert fact(analysis, "64", "adascale")["difference"] == pytest.approx(0.05 / 2.6, abs=0.004)


@pytest.mark.slow("analyses evaluations")
def test_seeds_that_diverged_are_counted() -> None:
    found = records(seeds=8, divergence={"linear": 0.5, "constant": 0.2})
    for trace in BEST_LR:
        row = fact(Analysis(found), trace, "linear")
        cells = [one for one in found if (one.cell["trace"], one.cell["rule"]) == (trace, "linear")]
        diverged = sum(one.status == "diverged" for one in cells)
        assert row["failed"] == diverged / 8
        assert row["value_n"] == 8 - diverged
        assert row["difference_n"] <= row["value_n"]
        ways = Analysis(found).grid("simulated", trace).index  # what diverged is not the best that was tried
        assert (("linear", 1.0) in ways) == (diverged == 0)
        assert len([rule for rule, _ in ways if rule == "constant"]) < 5


def test_a_rule_that_always_diverges_has_no_value() -> None:
    row = fact(Analysis(records(divergence={"linear": 1.0}), targets=TARGET), "64", "linear")
    assert (row["failed"], row["failed_high"], row["value_n"], row["reached"]) == (1, 1, 0, 0)
    assert np.isnan([row["value"], row["difference"], row["regret"], row["target_samples"]]).all()


def test_trainings_that_miss_the_target_make_a_lower_bound(analysis: Analysis) -> None:
    for trace in BEST_LR:
        for rule in EFFECTS:
            row = fact(analysis, trace, rule)
            cells = [one for one in analysis.records if (one.cell["trace"], one.cell["rule"]) == (trace, rule)]
            cells = [one for one in cells if one.cell["lr_factor"] == 1.0]
            hits = [next((i for i, loss in enumerate(one.curve["loss"]) if loss <= 0.51), None) for one in cells]
            assert (row["reached"], row["target_n"]) == (sum(hit is not None for hit in hits), 6)
            used = [one.curve["samples"][-1 if hit is None else hit] for one, hit in zip(cells, hits, strict=True)]
            if row["reached"]:
                assert row["target_samples"] == pytest.approx(np.mean(used))
            assert np.isfinite(row["target_samples_low"]) == (row["reached"] == 6)
            assert np.isnan(row["target_cost"])
    assert {fact(analysis, "64", rule)["reached"] for rule in EFFECTS} >= {0, 6}


def test_the_tidy_table_has_every_value() -> None:
    found = records(divergence={"linear": 0.5})
    tidy = Analysis(found).tidy
    assert len(tidy) == sum(len(one.curve["samples"]) for one in found)
    assert set(tidy["key"]) == {one.key for one in found}
    one = next(one for one in found if one.status == "diverged")
    rows = tidy[tidy["key"] == one.key]
    assert rows["loss"].isna().tolist() == [False] * (len(rows) - 1) + [True]
    assert rows["effective_lr"].tolist()[1:] == one.curve["lr"][1:]
    assert (rows["lr"] == one.cell["lr"]).all()
    assert rows["cost"].isna().all()


def test_half_of_an_evaluation_is_analysed_too() -> None:
    """Whatever was not trained yet: no seed in common, no constant rule, one seed."""
    found = records()
    rng = np.random.default_rng(0)
    for number in (1, 2, 5, 20, 50):
        part = [found[place] for place in rng.permutation(len(found))[:number]]
        assert len(Analysis(part, targets=TARGET).summary) <= number
    others = [one for one in found if one.cell["rule"] != "constant"]
    row = fact(Analysis(others), "64", "root")
    assert np.isnan(row["difference"])
    assert row["regret"] > 0


def test_only_trainings_of_the_same_kind_are_compared() -> None:
    short, arguments = records(samples=500), records(task_arguments={"width": 8})
    analysis = Analysis([*records(), *short])
    assert analysis.tasks == ["simulated (samples 20000)", "simulated (samples 500)"]
    both = Analysis([*records(), *arguments])
    assert both.tasks == ['simulated (arguments {"width": 8})', "simulated (arguments {})"]
    versions = Analysis([*records(task_version=""), *records(task_version="2")])
    assert versions.tasks == ['simulated (version "")', "simulated (version 2)"]
    assert (both.summary["value_n"] == 3).all()
    by_rule = [
        one if one.cell["rule"] == "root" else replace(one, cell={**one.cell, "trace_fingerprint": "b"})
        for one in records(trace_fingerprint="a")
    ]  # of a file that has changed between two commands
    assert Analysis(by_rule).tasks == ["simulated (batch sizes a)", "simulated (batch sizes b)"]
    places = [replace(one, cell={**one.cell, "between": len(one.cell["rule"])}) for one in records()]
    assert Analysis(places).tasks == ["simulated"]


def test_each_trace_has_its_own_learning_rate_of_the_reference() -> None:
    found = [*records({"constant": 0.0, "root": 0.1}, ["64"]), *records(traces=["spot"], lrs=(2.0,), grid=(2.0,))]
    analysis = Analysis(found)
    assert analysis.own.groupby("trace")["lr_factor"].unique().map(list).to_dict() == {"64": [1.0], "spot": [2.0]}
    assert fact(analysis, "spot", "root")["value_n"] == 3


def test_a_seed_that_has_only_begun_does_not_hide_the_tuning() -> None:
    """Of the last seed only the learning rate of the reference was trained."""
    found = [one for one in records(traces=["spot"], seeds=4) if one.cell["seed"] < 3 or one.cell["lr_factor"] == 1]
    done = [one for one in found if one.cell["seed"] < 3]
    row, other = (fact(Analysis(some), "spot", "root") for some in (found, done))
    assert (row["regret"], row["value_n"]) == (other["regret"], 4)


@pytest.mark.nightly("analyses many random experiments")
def test_rules_in_bold_are_seldom_wrong() -> None:
    """Rules that do the same, of which all but one diverged: one in twenty evaluations has one in bold."""
    names = ("constant", "linear", "root", "adascale", "surge", "legw:4", "sqrt-sde", "adamscale")
    wrong, divergence = 0, dict.fromkeys(names[1:], 0.2)
    for seed in range(30):
        found = records(dict.fromkeys(names, 0.0), ["64"], seeds=5, grid=(1.0,), seed=seed, divergence=divergence)
        wrong += bool(Analysis(found).summary["difference_decided"].any())
    assert wrong <= 5


@pytest.mark.slow("analyses evaluations")
def test_pairs_are_of_the_same_seed() -> None:
    found = [one for one in records(seeds=4) if one.cell["rule"] != "root" or one.cell["seed"] in (1, 3)]
    assert fact(Analysis(found), "64", "root")["difference_n"] == 2
    assert fact(Analysis(found), "64", "linear")["difference_n"] == 4
    apart = [one for one in found if one.cell["rule"] == "root" or one.cell["seed"] in (0, 2)]
    assert fact(Analysis(apart), "64", "root")["difference_n"] == 0


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="at least one record, got none; run it first"):
        Analysis([])
    with pytest.raises(ValueError, match='metric must be "loss" or "accuracy", got \'bleu\'; choose one that'):
        Analysis(records(), metric="bleu")
    with pytest.raises(ValueError, match=r"target of the task simulated must be of .*, got 'bleu'; correct it"):
        Analysis(records(), targets={"simulated": ("bleu", 0.5)})


def with_energy(found: list[Record]) -> list[Record]:
    return [replace(one, curve=one.curve | {"energy": one.curve["loss"]}) for one in found]


def test_a_metric_whose_name_does_not_tell_needs_a_mode() -> None:
    found = with_energy(records(seeds=6, noise=0.002))
    with pytest.raises(ValueError, match=r"the name of the metric energy must tell .*; say so by mode="):
        Analysis(found, metric="energy")
    with pytest.raises(ValueError, match='mode must be "min" or "max", got \'less\''):
        Analysis(found, metric="energy", mode="less")  # type: ignore[arg-type]
    less, more = (Analysis(found, metric="energy", mode=mode) for mode in ("min", "max"))
    assert fact(less, "64", "adascale")["regret"] == pytest.approx(fact(Analysis(found), "64", "adascale")["regret"])
    assert fact(more, "64", "adascale")["regret"] > 0.04


def test_records_are_read_back(tmp_path: Path) -> None:
    found = records(divergence={"linear": 0.5})
    evaluations.write(tmp_path, found)
    read = read_records(tmp_path)
    assert read == sorted(found, key=lambda one: one.key)
    assert all(isinstance(one, Record) for one in read)
    assert max(len(one.curve["loss"]) for one in read) == ROWS


@pytest.mark.parametrize("rules", [["root", "linear"], ["constant", "root"]])
def test_two_learning_rates_that_are_equally_near_are_not_put_together(rules: list[str]) -> None:
    found = records(dict.fromkeys(rules, 0.0), ["64"], lrs=(0.5, 2.0), grid=(0.5, 2.0), seeds=3)
    analysis = Analysis(found)
    assert set(analysis.untuned["lr_factor"]) == {0.5}
    assert analysis.own.groupby("rule")["lr_factor"].nunique().tolist() == [1, 1]
    assert fact(analysis, "64", "root")["value_n"] == 3
