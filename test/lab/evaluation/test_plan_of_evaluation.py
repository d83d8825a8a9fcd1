"""The plan of a folder: every cell that was asked for, and as few commands as ask for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from variable_batch_size.lab.evaluation.plan import Plan, extend_plan

KEYS = st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True)


@given(st.lists(st.tuples(st.sampled_from(["", "first", "second", "third"]), KEYS), max_size=8))
def test_no_cell_is_lost_that_a_command_still_asks_for(calls: list[tuple[str, list[str]]]) -> None:
    plan = Plan({})
    last: dict[str, set[str]] = {}
    for command, keys in calls:
        plan = plan.extended(keys, command)
        last[command] = set(keys) | (last.get("", set()) if not command else set())
        assert set(keys) <= plan.keys <= set().union(*last.values())
        assert plan.extended(keys, command).keys == plan.keys
    if len(set(last)) == len(calls):  # no command was repeated with other cells
        assert plan.keys == set().union(*last.values())


def test_a_command_that_asks_for_more_takes_the_place_of_others() -> None:
    plan = Plan({}).extended(["a", "b"], "vbs evaluate").extended(["a", "b", "c"], "vbs evaluate --jobs 2")
    assert plan.command == "vbs evaluate --jobs 2"
    assert plan.extended(["a"], "vbs evaluate less") == plan
    assert plan.extended(["d"]).extended(["e"]).command == "vbs evaluate --jobs 2"
    assert plan.extended(["d"]).extended(["e"]).keys == set("abcde")


def test_a_command_that_chooses_learning_rates_asks_for_more_until_it_judges(tmp_path: Path) -> None:
    extend_plan(tmp_path, ["a", "b"], "one", tuning=True)
    assert Plan.read(tmp_path) == Plan({"one": ["a", "b"]}, ["one"])
    more = Plan.read(tmp_path).extended(["c"], "two")
    assert more.tuning == ["one"]
    less = more.extended(["a"], "less", tuning=True)
    assert (less.commands, less.tuning) == (more.commands, ["one", "less"])
    assert less.extended(["a", "c"], "less") == more
    assert less.extended(["a", "b", "c", "d"], "three") == Plan({"three": ["a", "b", "c", "d"]}, ["less"])
    extend_plan(tmp_path, ["a", "b", "c"], "one")
    assert Plan.read(tmp_path) == Plan({"one": ["a", "b", "c"]})


def test_the_file_changes_only_if_the_plan_does(tmp_path: Path) -> None:
    assert Plan.read(tmp_path / "missing") == Plan.read(tmp_path) == Plan({})
    extend_plan(tmp_path, ["a", "b"], "one")
    before = (tmp_path / "plan.json").stat()
    extend_plan(tmp_path, ["a", "b"], "one")
    assert (tmp_path / "plan.json").stat().st_ino == before.st_ino
    extend_plan(tmp_path, ["c"], "two")
    assert Plan.read(tmp_path).commands == {"one": ["a", "b"], "two": ["c"]}
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "nul", '{"format": 1}', '{"format": 1, "commands": ["a"]}', '{"format": 2}']
)
def test_another_file_is_not_a_plan(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json must be a plan of format 1, got .*; delete it, no training is"):
        extend_plan(tmp_path, ["a"])
    assert (tmp_path / "plan.json").read_text() == text
