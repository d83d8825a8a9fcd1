"""Trainings that are compared at equal progress, time or cost: where they end, and what their schedule reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.evaluation_tasks import without_times
from variable_batch_size.adaptive import Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.evaluation import Experiment, ModelTime, UnderCapacity, judge, read, run
from variable_batch_size.lab.evaluation.cell import Cell
from variable_batch_size.lab.evaluation.courses import Course
from variable_batch_size.lab.evaluation.end import MOST, End
from variable_batch_size.lab.evaluation.experiment import check
from variable_batch_size.lab.evaluation.record import Record, status_of
from variable_batch_size.lab.evaluation.simulated_time import RunTime
from variable_batch_size.lab.evaluation.training import record_of
from variable_batch_size.lab.evaluation.tuning import REFERENCE
from variable_batch_size.lab.simulation import Overheads

TINY = "helpers.evaluation_tasks:Tiny"
MODEL = Throughput.simple(samples_per_second=10)


def experiment(**other: Any) -> Experiment:
    arguments: dict[str, Any] = {"tasks": [TINY], "traces": ["0:8 10:32"], "rules": ["linear"], "seeds": 1}
    return Experiment(**arguments | other)


def one(**other: Any) -> Cell:
    return next(cell for cell in experiment(**other).cells() if cell.trace != REFERENCE)


def by_label(records: list[Record]) -> dict[tuple[str, str], Record]:
    return {(record.cell["trace"], record.cell["rule"]): record for record in records}


@pytest.mark.parametrize("rule", ["constant", "linear", "root", "adascale"])
@pytest.mark.parametrize("end", ["progress", "progress:7.5", "seconds:20", "cost:0.25"])
def test_a_training_ends_with_the_first_update_that_reaches_its_end(end: str, rule: str) -> None:
    time = ModelTime(MODEL, devices=2, price=60.0)
    cell = one(rules=[rule], ends=[end], time=time, between=1)
    record = record_of(cell, None)
    by, amount = End.of(cell.end).by, End.of(cell.end).amount
    assert amount is not None
    before, last = record.curve[by][-2:]  # type: ignore[index]
    assert before < amount <= last
    assert status_of(record) != "diverged"


def test_equal_progress_is_that_of_the_samples_at_the_reference_batch_size(tmp_path: Path) -> None:
    records = by_label(run(experiment(ends=["samples", "progress"]), tmp_path, progress=False))
    size, samples = 8, records[REFERENCE, "constant"].cell["samples"]
    reference = records[REFERENCE, "constant"]
    assert reference.cell["ref_batchsize"] == size
    other = records["0:8 10:32, equal progress", "linear"]
    assert other.cell["end"] == f"progress:{samples / size!r}"
    assert reference.curve["progress"][-1] >= samples / size  # type: ignore[index]
    same = records["0:8 10:32", "linear"]  # of a rule whose progress is its samples
    last, whole = same.curve["samples"][-1], other.curve["samples"][-1]  # type: ignore[index]
    assert last == 240 <= whole < last + 32  # max_samples shortens the last batch


def test_the_samples_as_the_end_leave_the_name_of_a_training_as_it_was() -> None:
    cell = experiment().cells()[0]
    assert "end" not in cell.as_json()
    assert dataclasses.replace(cell, end="progress:3.0").key != cell.key


@pytest.mark.parametrize("end", ["progress:20", "seconds:20", "cost:0.4"])
def test_a_schedule_ends_with_the_end(end: str) -> None:
    time = ModelTime(MODEL, price=60.0)
    curve = record_of(one(rules=["constant"], ends=[end], time=time, between=1), None).curve
    by, amount = End.of(end).by, End.of(end).amount
    shares = np.asarray(curve[by]) / amount
    assert shares[-2] < 1 <= shares[-1]
    assert len(shares) > 10
    np.testing.assert_allclose(curve["lr"][1:], 0.05 * (1 - 0.9 * shares[:-1]), atol=0.9 * 0.05 / 240)  # type: ignore[index]


def test_a_training_that_does_not_reach_its_end_has_failed(tmp_path: Path) -> None:
    chosen = experiment(traces=["0:8 4:32"], samples=64, rules=["constant", "linear"], seeds=3, ends=["progress:60"])
    records = run(chosen, tmp_path, progress=False)
    found = by_label(records)
    record = found["0:8 4:32, progress 60", "constant"]  # which makes one unit of progress in 32 samples
    assert record.status == "finished"
    assert record.curve["samples"][-1] == MOST * 64  # type: ignore[index]
    assert status_of(record) == "short"
    assert status_of(found["0:8 4:32, progress 60", "linear"]) == "finished"
    (judgement,) = judge(read(tmp_path))
    (trace,) = (one for one in judgement.traces if one.name == "0:8 4:32, progress 60")
    assert [(row.rule, row.failed) for row in trace.rows] == [("constant", 3), ("linear", 0)]


def test_ends_with_other_numbers_are_other_comparisons() -> None:
    cells = experiment(ends=["seconds:10", "seconds:20"], time=ModelTime(MODEL)).cells()
    assert [cell.end for cell in cells] == ["seconds:10.0", "seconds:20.0", "samples"]
    assert len({cell.key for cell in cells}) == len({cell.trace for cell in cells}) == 3


def test_a_training_that_was_killed_behind_its_last_update_makes_no_further_one(tmp_path: Path) -> None:
    cell = one(ends=["seconds:20"], time=ModelTime(MODEL), between=1)
    whole = record_of(cell, tmp_path / "checkpoints", save_every=1)
    again = record_of(cell, tmp_path / "checkpoints", save_every=1)
    assert without_times([again]) == without_times([whole])


def test_the_time_under_a_capacity_trace_ends_a_training(tmp_path: Path) -> None:
    log = CapacityTrace([0, 20, 40], [1, 2, 1], end=100)
    trace = UnderCapacity(log, "per-device:8", MODEL, price=3600.0)
    ends = ["seconds:60", "cost:80"]
    records = by_label(run(experiment(traces={"log": trace}, ends=ends), tmp_path, progress=False))
    time, cost = records["log, 60 seconds", "linear"], records["log, cost 80", "linear"]
    assert 60 <= time.curve["seconds"][-1] < 62  # type: ignore[index]
    assert 80 <= cost.curve["cost"][-1] < 83  # type: ignore[index]
    assert 60 - 1 <= cost.curve["seconds"][-1] < 63  # type: ignore[index]


@pytest.mark.slow("trains")
@pytest.mark.filterwarnings("ignore:.*the batch size is 24 for")
@pytest.mark.parametrize("by", ["seconds", "cost"])
@pytest.mark.parametrize("policy", ["constant:8", "per-device:8"])
def test_an_end_in_time_counts_nothing_that_happens_after_it(policy: str, by: str) -> None:
    log = CapacityTrace([0, 50, 56, 110, 115, 160], [3, 2, 3, 1, 4, 2], end=400)
    overheads, model = Overheads(restart=3, save_every=40, save=1), Throughput.simple(samples_per_second=1)
    trace = UnderCapacity(log, policy, model, overheads=overheads, price=3600.0)

    def course(end: str = "samples", samples: int = 400) -> Course:
        return one(traces={"log": trace}, samples=samples, ends=[end], rules=["constant"]).course

    def times(of: Course) -> list[float]:
        assert isinstance(of.time, RunTime)
        return [of.time.after(0.0, update, 8, 8) for update in range(1, int(of.time.updates[-1]) + 1)]

    made = [course(samples=samples) for samples in range(8, 401, 8)]
    ends = np.array([times(of)[-1] for of in made])
    assert (np.diff(ends) >= 0).all()
    *_, last = times(made[np.diff(ends).argmax()])  # before a crash
    assert last not in times(made[-1])
    for share in np.linspace(0.1, 1, 40):
        seconds = share * ends[-1]
        amount = seconds if by == "seconds" else made[-1].time.cost(seconds)  # type: ignore[union-attr]
        own, same = course(f"{by}:{amount}"), made[ends.searchsorted(seconds * (1 - 1e-9))]
        np.testing.assert_allclose(times(own), times(same))
        assert repr(own.trace.runs) == repr(same.trace.runs)  # type: ignore[union-attr]


def test_a_training_goes_on_after_updates_that_a_crash_before_its_end_took_back() -> None:
    log = CapacityTrace([0, 20], [2, 1], end=200)
    trace = UnderCapacity(log, "constant:8", MODEL, overheads=Overheads(restart=3))
    cell = one(traces={"log": trace}, rules=["constant"], ends=["seconds:21"], between=1)
    curve = record_of(cell, None).curve
    seconds, updates = np.asarray(curve["seconds"]), np.asarray(curve["updates"])
    assert seconds[1] > 21
    assert updates[-1] == 43  # 42 of them have ended by second 20
    shares = seconds / seconds[-1]
    np.testing.assert_allclose(curve["lr"][2:], 0.05 * (1 - 0.9 * shares[1:-1]), atol=0.9 * 0.05 / 240)  # type: ignore[index]


@pytest.mark.parametrize("end", ["seconds:101", "seconds:100.05", "cost:1000"])
def test_an_end_that_a_log_does_not_reach_is_refused(end: str) -> None:
    log = CapacityTrace([0, 20, 40], [1, 2, 1], end=100.1)
    trace = UnderCapacity(log, "per-device:8", MODEL, price=3600.0)
    with pytest.raises(ValueError, match=f"the updates under the capacity trace must reach the end {end}"):
        experiment(traces={"log": trace}, ends=[end]).cells()


def test_a_trace_that_ends_before_ends_a_training(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("step,batch_size\n" + "".join(f"{step},8\n" for step in range(30)))
    chosen = experiment(traces=[str(path)], ends=["progress:20", "progress:50"])
    found = {record.cell.get("end"): record for record in run(chosen, tmp_path, progress=False)}
    assert found["progress:20.0"].curve["updates"][-1] == 20  # type: ignore[index]
    assert status_of(found["progress:20.0"]) == "finished"
    assert found["progress:50.0"].curve["updates"][-1] == 30  # type: ignore[index]
    assert status_of(found["progress:50.0"]) == "short"


def test_what_a_schedule_needs_is_checked_for_each_end() -> None:
    task = "helpers.evaluation_tasks:NoReference"
    cells = experiment(tasks=[task], rules=["constant"], ends=["progress:20", "samples"]).cells()
    check(cells)  # without a schedule
    scheduled = {"tasks": ["helpers.evaluation_tasks:ScheduledWithoutReference"], "rules": ["constant"]}
    check(experiment(**scheduled, ends=["progress:20"]).cells())
    with pytest.raises(ValueError, match=r"the schedule of the task .* needs a ref_batchsize"):
        check(experiment(**scheduled, ends=["progress:20", "samples"]).cells())


@pytest.mark.parametrize("seconds", [1, 7])
def test_rounding_adds_no_update(seconds: int) -> None:
    cell = one(traces=["1"], rules=["constant"], ends=[f"seconds:{seconds}"], time=ModelTime(MODEL))
    assert record_of(cell, None).curve["updates"][-1] == 10 * seconds  # type: ignore[index]


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("epochs", 'an end must be "samples", "progress"'),
        ("seconds", "an end must be"),
        ("samples:3", "an end must be"),
        ("cost:much", "the number of the end cost must be one"),
        ("progress:0", "the number of the end progress must be"),
    ],
)
def test_an_end_that_is_none_is_refused(end: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experiment(ends=[end])


def test_an_end_in_time_or_cost_needs_them() -> None:
    with pytest.raises(ValueError, match="needs the time of an update"):
        experiment(ends=["seconds:20"]).cells()
    with pytest.raises(ValueError, match="needs a price"):
        experiment(ends=["cost:20"], time=ModelTime(MODEL)).cells()
    with pytest.raises(TypeError, match='an end must be "samples", "progress"'):
        experiment(ends=[10])
    with pytest.raises(ValueError, match='the end "progress" needs a ref_batchsize'):
        End("progress").resolved(64, None)


def test_the_texts_of_ends_stand_for_them() -> None:
    for text in ["samples", "progress", "progress:7.5", "seconds:20.0", "cost:0.25"]:
        assert str(End.of(text)) == text
