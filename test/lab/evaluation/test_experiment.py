"""An experiment is the product of what it is given; errors come before anything trains, and say what to do."""

from __future__ import annotations

import itertools
import json
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from helpers.evaluation_tasks import Tiny
from variable_batch_size import AdaptiveTrace, BatchTrace
from variable_batch_size.adaptive import NoiseScale, Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.evaluation import Experiment, ModelTime, UnderCapacity, load_task, run
from variable_batch_size.lab.evaluation.records import REFERENCE
from variable_batch_size.lab.evaluation.task import FUNCTIONS, TASKS
from variable_batch_size.lab.evaluation.timed_trace import TraceOptions
from variable_batch_size.lab.simulation import NoiseCurve

pytestmark = pytest.mark.filterwarnings("ignore:trace .*the batch size is")
TINY = "helpers.evaluation_tasks:Tiny"
MODEL = Throughput.simple(samples_per_second=10)


def test_cells_are_the_product_with_the_baseline_and_factor_1():
    traces, rules = ["0:4 10:16", "0:8 10:32"], ["linear", "power:0.75", "linear"]
    cells = Experiment([TINY], traces, rules, seeds=[3, 5], lr_factors=(0.5, 2, 2), baseline="root").cells()
    found = [(cell.trace, cell.rule, cell.lr_factor, cell.seed) for cell in cells]
    factors, seeds = (0.5, 1.0, 2.0), (3, 5)
    expected = [*itertools.product(traces, ["root", "linear", "power:0.75"], factors, seeds)]
    expected += itertools.product([REFERENCE], ["constant"], factors, seeds)
    assert sorted(found) == sorted(expected)
    assert {cell.lr for cell in cells} == {0.05, 0.025, 0.1}
    assert len({cell.key for cell in cells}) == len(cells)
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)  # so that what is not complete compares
    assert {cell.timed.trace.batch_size(9) for cell in cells if cell.trace == REFERENCE} == {8}


def test_without_a_reference_batch_size_there_is_no_reference():
    cells = Experiment(["helpers.evaluation_tasks:NoReference"], ["0:8 9:16"], ["constant"]).cells()
    assert [(cell.seed, cell.trace) for cell in cells] == [(seed, "0:8 9:16") for seed in range(5)]


def test_a_remark_is_of_the_line_that_asks_for_cells():
    experiment = Experiment([TINY], ["0:8 1000:32"], ["linear"], seeds=1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        experiment.cells()
    assert [Path(one.filename) for one in found] == [Path(__file__)]
    assert str(found[0].message) == (
        "trace 0:8 1000:32: the batch size is 8 throughout, so that rules are only learning rates here; its first "
        "change follows sample 8,000"
    )


def test_a_key_is_that_of_what_determines_the_training():
    def keys(**other):
        arguments = {"tasks": [TINY], "traces": ["0:8 10:32"], "rules": ["linear"], "seeds": 1}
        rule, *_ = (arguments | other)["rules"]
        cells = [cell for cell in Experiment(**arguments | other, baseline=rule).cells() if cell.trace != REFERENCE]
        return {cell.key for cell in cells if cell.lr_factor == cells[-1].lr_factor}

    here = keys()
    assert here == keys(tasks={TINY: {}}) == keys(samples=240, between=64, lr=0.05)
    assert here == keys(traces={"0:8 10:32": BatchTrace.parse("0:8 10:32")})
    assert here < keys(seeds=2)
    for other in (
        {"tasks": {TINY: {"shift": 1.0}}},
        {"traces": {"0:8 10:32": BatchTrace.parse("0:8 10:16")}},  # the same name, another trace
        {"rules": ["root"]},
        {"seeds": [7]},
        {"lr_factors": [2]},
        {"lr": 0.06},
        {"samples": 200},
        {"ref_batchsize": 16},
        {"minibatch_size": 8},
        {"between": 60},
        {"time": ModelTime(MODEL)},
    ):
        assert not here & keys(**other), other


def test_a_key_does_not_change_between_versions():
    cell = Experiment([TINY], ["8"], ["linear"], seeds=1).cells()[1]
    assert cell.key == "2d35b1ac0ff7d322"
    assert json.loads(json.dumps(cell.as_json())) == cell.as_json()


def test_traces_are_schedules_files_policies_objects_and_capacity_traces(tmp_path):
    BatchTrace.from_sizes([8, 16, 8]).to_csv(tmp_path / "sizes.csv")
    capacity = CapacityTrace([0, 2, 5], [1, 4, 2], end=1000)
    capacity.to_csv(tmp_path / "nodes.csv")
    traces = {
        "file": str(tmp_path / "sizes.csv"),
        "policy": "noise-scale:1",
        "constant": "constant:16",
        "noise": f"noise-scale:1@{tmp_path / 'nodes.csv'}",
        "adaptive": AdaptiveTrace(NoiseScale(), 8, (4, 32)),
        "object": UnderCapacity(capacity, "per-device:4", MODEL),
        "log": f"per-device:4@{tmp_path / 'nodes.csv'}",
    }
    noise = NoiseCurve([0], [0.0], [1.0])  # the least batch size is best
    options = TraceOptions("hold", (12, 32), under=UnderCapacity("", "", MODEL, noise=noise))
    cells = {cell.trace: cell for cell in Experiment([TINY], traces, ["linear"], seeds=1, options=options).cells()}
    timed_traces = {name: cell.timed for name, cell in cells.items()}
    assert timed_traces["file"].trace == BatchTrace.from_sizes([8, 16, 8], on_end="hold")
    assert isinstance(timed_traces["policy"].trace, AdaptiveTrace)
    assert timed_traces["policy"].trace.start == 12  # the reference, 8, within the bounds
    assert set(timed_traces["noise"].trace.runs[1]) == {12}
    assert timed_traces["constant"].trace.start is None  # its own batch size from the first update on
    assert timed_traces["adaptive"].trace == traces["adaptive"]
    assert timed_traces["object"].fingerprint == timed_traces["log"].fingerprint
    sizes = timed_traces["log"].trace
    assert isinstance(sizes, BatchTrace)
    assert set(np.unique(sizes.runs[1])) == {12, 16}


OWN = "helpers.evaluation_tasks:"


def under(seconds, policy):
    return UnderCapacity(CapacityTrace([0], [1], seconds), policy, MODEL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["letters"]}, "ValueError: a task must be mnist-cnn, char-gpt or .*, got 'letters'; pass one of"),
        ({"tasks": ["mnist_cnn"]}, "ValueError: .* got 'mnist_cnn'; pass mnist-cnn$"),
        ({"tasks": ["not where:Task"]}, "ValueError: .*; pass one of these$"),
        ({"tasks": ["nowhere:Task"]}, r"ValueError: .* or run it where nowhere\.py is"),
        ({"tasks": [OWN + "Tine"]}, "ValueError: .* no 'Tine' there; pass package.module"),
        ({"tasks": [OWN + "NoLoss"]}, "TypeError: .* must have model, dataset, .*; define loss, evaluate"),
        ({"tasks": [OWN + "NoReference"]}, "ValueError: .*rule linear: .*needs ref_batchsize, but it is None; pass"),
        ({"traces": ["0:8 5:97"]}, "ValueError: .*trace 0:8 5:97, rule constant: .*dataset's size of 96 .* of 97; use"),
        ({"rules": ["sqrt-sde"]}, "TypeError: .*rule sqrt-sde: .*got SGD; use the root rule"),
        ({"traces": ["no.csv"]}, "ValueError: trace no.csv .* got 'no.csv'; pass one of"),
        ({"traces": {"short": [8] * 10}}, 'ValueError: .*trace short, .*on_end="stop", "hold" or "cycle"'),
        ({"traces": ["per-device:4@a.json"]}, "ValueError: .*throughput, or --samples"),
        ({"traces": {"a": under(12, "constant:8")}}, "ValueError: .* 240 samples of the training, got 120 until second"
         " 12; train on fewer .* scaled by 2 or more, see vbs capacity convert --scale-time"),
        ({"traces": {"a": under(99, "noise-scale:1")}}, "ValueError: .*needs the gradient noise, got noise=None; pass"),
        ({"tasks": []}, "ValueError: tasks must have at least one item, got none"),
        ({"tasks": TINY}, "TypeError: tasks must be a sequence, got 'helpers"),
        ({"traces": {REFERENCE: "8"}}, "ValueError: a trace must have a name of its own, got 'the reference'; choose"),
        ({"rules": ["lineal"]}, "ValueError: rule must be one of constant, .*, got 'lineal'; pass one of"),
        ({"rules": ["power"]}, "ValueError: the rule power needs its exponent, got none; pass power:NUMBER"),
        ({"rules": ["power:x"]}, "ValueError: the rule power needs its exponent, got 'x'; pass power:NUMBER"),
        ({"baseline": "linear:2"}, "ValueError: the rule linear takes no number, got 'linear:2'; pass linear"),
    ],
)  # fmt: skip
def test_errors_come_before_anything_trains(change, message, tmp_path):
    arguments = {"tasks": [TINY], "traces": ["8"], "rules": ["linear"]}
    with pytest.raises((TypeError, ValueError)) as caught:
        run(Experiment(**arguments | change), tmp_path / "records", progress=False)
    assert re.match(message, f"{type(caught.value).__name__}: {caught.value}"), caught.value
    assert not list(tmp_path.iterdir())


def test_a_task_is_an_object_a_class_a_function_or_a_module(tmp_path, monkeypatch):
    text = "from helpers.evaluation_tasks import tiny\nmodel, dataset, loss = tiny.model, tiny.dataset, tiny.loss\n"
    text += "evaluate, optimizer, lr = tiny.evaluate, tiny.optimizer, 0.5\ndef make(): return tiny\n"
    (tmp_path / "task_of_a_user.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert load_task("task_of_a_user:make") is load_task("helpers.evaluation_tasks:tiny")
    module = load_task("task_of_a_user")
    assert module.lr == 0.5
    assert load_task(TINY, {"shift": 1.0}) is load_task(TINY, {"shift": 1.0}) is not load_task(TINY)
    with pytest.raises(TypeError, match="must be a class or a function to take arguments"):
        load_task("helpers.evaluation_tasks:tiny", {"shift": 1.0})
    (tmp_path / "broken_task_of_a_user.py").write_text("import a_library_that_is_missing\n")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_missing"):
        load_task("broken_task_of_a_user:Task")


def test_a_task_imports_what_lies_beside_it(tmp_path, monkeypatch):
    """When it is imported, and when one of its functions is called."""
    (tmp_path / "model_of_a_user.py").write_text("from helpers.evaluation_tasks import Tiny\n")
    (tmp_path / "later_of_a_user.py").write_text("import torch\ndef model(seed): return torch.nn.Linear(6, 1)\n")
    text = "from model_of_a_user import Tiny\nclass Own(Tiny):\n    def model(self, seed):\n"
    (tmp_path / "split_task_of_a_user.py").write_text(
        f"{text}        from later_of_a_user import model\n        return model(0)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    task = load_task("split_task_of_a_user:Own")
    assert sum(one.numel() for one in task.model(0).parameters()) == 7
    assert sys.path[-1] == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schedule": lambda samples: 1.0},
            r"schedule of the task .* the arguments \(samples, total\), got '\(samples\)'",
        ),
        ({"evaluate": lambda: {"loss": 1.0}}, r"evaluate of the task .* takes the arguments \(model\), got '\(\)'"),
        ({"optimizer": lambda model, *, lr: None}, r"optimizer of the task .* takes the arguments \(model, lr\)"),
        ({"model": lambda seed, width=3: None}, None),
    ],
)
def test_functions_of_a_task_take_the_arguments_that_they_get(change, message, tmp_path, monkeypatch):
    name = f"changed_{tmp_path.name}"
    module = ModuleType(name)
    module.task = SimpleNamespace(**{each: getattr(Tiny(), each) for each in FUNCTIONS} | change)
    monkeypatch.setitem(sys.modules, name, module)
    if message is None:
        assert load_task(f"{name}:task") is module.task
    else:
        with pytest.raises(TypeError, match=message):
            Experiment([f"{name}:task"], ["8"], ["linear"], samples=96, lr=0.1, ref_batchsize=8).cells()


def test_a_constant_trace_says_that_rules_are_learning_rates_there():
    def warnings_of(source):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Experiment([TINY], {"a": source}, ["root"], samples=240).cells()
        return [str(each.message).partition(", so")[0] for each in caught]

    said = ["trace a: the batch size is 8 throughout"]
    two = CapacityTrace([0, 25], [1, 2], 60)  # 10 samples a second: 240 of them end at second 24
    assert (
        warnings_of("8") == warnings_of("0:8 30:16") == warnings_of(UnderCapacity(two, "per-device:8", MODEL)) == said
    )
    assert not warnings_of("0:8 29:16")
    assert not warnings_of(UnderCapacity(CapacityTrace([0, 23], [1, 2], 60), "per-device:8", MODEL))


def test_a_task_without_its_arguments_says_which():
    with pytest.raises(
        TypeError, match=r"the task .*:KilledLater must be created with \(folder: .*got no arguments \(missing"
    ):
        load_task("helpers.evaluation_tasks:KilledLater")
    with pytest.raises(TypeError, match=r"must be created with \(shift.*got scale \(got an unexpected"):
        load_task(TINY, {"scale": 1.0})


def test_the_tasks_of_the_package_are_tasks():
    for name in TASKS:
        task = load_task(name)
        (cell, *_) = Experiment([name], [str(task.ref_batchsize)], ["linear"], seeds=1).cells()
        assert cell.samples == task.samples
        assert task.schedule(2**14, 2**17) > 0.9 > 0.1 + 1e-9 > task.schedule(2**17, 2**17)
        assert re.fullmatch("[0-9a-f]{16}", cell.key)
