"""A training is that of a plain loop, has the simulated time, and ends where it should; divergence is a result."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from helpers.evaluation_tasks import Tiny
from variable_batch_size import AdaptiveTrace
from variable_batch_size.adaptive import Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.evaluation import Experiment, ModelTime, UnderCapacity
from variable_batch_size.lab.evaluation.curve import Curve
from variable_batch_size.lab.evaluation.end import MOST, End
from variable_batch_size.lab.evaluation.experiment import check_cells
from variable_batch_size.lab.evaluation.records import REFERENCE
from variable_batch_size.lab.evaluation.training import train
from variable_batch_size.lab.simulation import Overheads

pytestmark = pytest.mark.filterwarnings("ignore:trace .*the batch size is")
TINY, HERE = "helpers.evaluation_tasks:Tiny", f"{__name__}:"
MODEL = Throughput.simple(samples_per_second=10)


def one(**other):
    """Return the first cell of an experiment with a task."""
    arguments = {"tasks": [TINY], "traces": ["8"], "rules": ["constant"], "seeds": 1} | other
    return next(cell for cell in Experiment(**arguments).cells() if cell.rule == arguments["rules"][0])


# What is trained. ----------------------------------------------------------------------------------------------------


def test_the_curve_is_that_of_a_plain_loop():
    """With the reference batch size, a training is that of plain PyTorch on the samples of the sampler."""
    line = train(one(seeds=[4]))
    curve = line["curve"]
    assert curve["samples"] == [0, 64, 128, 192, 240]
    assert curve["updates"] == curve["progress"] == [0, 8, 16, 24, 30]
    assert curve["batch_size"] == curve["batch_least"] == curve["batch_most"] == [None, 8, 8, 8, 8]
    rates = [0.05 * (1 - 0.9 * (8 * update) / 240) for update in range(30)]
    assert curve["lr"][1:] == pytest.approx([sum(rates[a:b]) / (b - a) for a, b in pairwise(curve["updates"])])
    task = Tiny()
    assert curve["loss"][0] == line["untrained"] == task.evaluate(task.model(4).eval())["loss"]
    assert curve["loss"][-1] < curve["loss"][0]
    assert (curve["seconds"], curve["cost"], line["status"]) == (None, None, "finished")
    assert line["environment"]["optimizer"].startswith("SGD(momentum=0.9, ")


@pytest.mark.parametrize("task", [TINY, HERE + "Unscheduled"])
def test_a_warmup_raises_the_learning_rate_to_that_of_the_schedule(task):
    """By samples, whatever the batch size; a task may have it as an attribute, and without a schedule."""
    warmed = one(tasks=[task], warmup=80, seeds=[4])
    curve, plain = train(warmed)["curve"], train(one(tasks=[task], seeds=[4]))["curve"]
    factors = [min(1.0, (8 + 8 * update) / 80) for update in range(30)]
    falls = task == TINY
    rates = [0.05 * (1 - 0.9 * falls * (8 * update) / 240) * factor for update, factor in enumerate(factors)]
    assert curve["lr"][1:] == pytest.approx([sum(rates[a:b]) / (b - a) for a, b in pairwise(curve["updates"])])
    assert curve["lr"][3:] == plain["lr"][3:]
    assert warmed.as_json()["warmup"] == 80
    assert "warmup" not in one(seeds=[4]).as_json()  # the keys of earlier trainings stay
    of_task = one(tasks=[HERE + "Warmed"], seeds=[4])
    assert (of_task.warmup, one(tasks=[HERE + "Warmed"], warmup=0).warmup) == (80, 0)


class Unscheduled(Tiny):
    """Its learning rate is constant."""

    schedule = None


class Warmed(Tiny):
    """Its learning rate rises over a third of the training."""

    warmup = 80


def test_time_and_cost_are_those_of_the_simulation():
    time = ModelTime(MODEL, devices=2, price=1.0)
    curve = train(one(time=time))["curve"]
    assert curve["seconds"] == pytest.approx([0, 3.2, 6.4, 9.6, 12.0])  # 20 samples a second
    assert curve["cost"] == pytest.approx([2 * seconds / 3600 for seconds in curve["seconds"]])
    capacity = CapacityTrace([0, 3.05, 7], [1, 4, 2], end=1000, prices=[2.0, 2.0, 2.0])
    nodes = train(one(traces={"nodes": UnderCapacity(capacity, "per-device:4", MODEL)}))["curve"]
    # 4 samples in 0.4 s on each node: 8 updates of 4, 15 of 16 and so on, with 96 samples an epoch
    clock, samples, ends, left = 0.0, 0, [(0, 0.0)], 96
    while samples < 240:
        devices = int(capacity.at(clock))
        size = min(left, 240 - samples, 4 * devices)
        clock += MODEL.seconds(min(left, 4 * devices), devices, 4)  # it shortens updates at the end of an epoch only
        samples, left = samples + size, left - size or 96
        ends.append((samples, clock))
    assert list(zip(nodes["samples"], nodes["seconds"], strict=True)) == pytest.approx(
        [pytest.approx(ends[update]) for update in nodes["updates"]]
    )
    assert nodes["cost"][-1] == pytest.approx((3.05 * 1 + 3.95 * 4 + (clock - 7) * 2) * 2 / 3600)


class Differentiates(Tiny):
    """Its evaluation leaves gradients, as one of the sensitivity to the inputs does."""

    def evaluate(self, model):
        with torch.enable_grad():
            model(self.inputs[:8]).sum().backward()
        return super().evaluate(model)


def test_gradients_of_an_evaluation_change_no_training():
    plain, other = (train(one(tasks=[task], between=16)) for task in (TINY, HERE + "Differentiates"))
    assert plain["curve"]["loss"] == other["curve"]["loss"]


# Where it ends. ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["constant", "adascale"])
@pytest.mark.parametrize("end", ["progress", "progress:7.5", "seconds:20", "cost:0.25"])
def test_a_training_ends_with_the_first_update_that_reaches_its_end(end, rule):
    cell = one(traces=["0:8 10:32"], rules=[rule], ends=[end], time=ModelTime(MODEL, 2, 60.0), between=1)
    line, amount = train(cell), End.parse(cell.end).amount
    before, last = line["curve"][End.parse(cell.end).by][-2:]
    assert amount is not None
    assert before < amount <= last
    assert line["status"] == "finished"


@pytest.mark.parametrize("end", ["progress:20", "seconds:20", "cost:0.4"])
def test_a_schedule_ends_with_the_end(end):
    curve = train(one(traces=["0:8 10:32"], ends=[end], time=ModelTime(MODEL, price=60.0), between=1))["curve"]
    shares = np.asarray(curve[End.parse(end).by]) / End.parse(end).amount
    assert shares[-2] < 1 <= shares[-1]
    assert len(shares) > 10
    np.testing.assert_allclose(curve["lr"][1:], 0.05 * (1 - 0.9 * shares[:-1]), atol=0.9 * 0.05 / 240)


@pytest.mark.parametrize("seconds", [1, 7])
def test_rounding_adds_no_update(seconds):
    cell = one(traces=["1"], ends=[f"seconds:{seconds}"], time=ModelTime(MODEL))
    assert train(cell)["curve"]["updates"][-1] == 10 * seconds


def test_equal_progress_is_that_of_the_samples_at_the_reference_batch_size():
    cell = one(traces=["0:8 10:32"], rules=["linear"], ends=["progress"])
    assert (cell.trace, cell.end) == ("0:8 10:32, equal progress", "progress:30.0")
    assert 240 <= train(cell)["curve"]["samples"][-1] < 240 + 32  # of a rule whose progress is its samples


def test_a_training_ends_at_the_latest_after_8_times_the_samples_or_with_its_trace(tmp_path):
    line = train(one(traces=["0:8 4:32"], samples=64, ends=["progress:60"]))
    assert line["curve"]["samples"][-1] == MOST * 64  # it makes one unit of progress in 32 samples
    assert line["curve"]["progress"][-1] < 60
    path = tmp_path / "trace.csv"
    path.write_text("step,batch_size\n" + "".join(f"{step},{8 + step % 2}\n" for step in range(30)))
    for end, updates in (("progress:20", 20), ("progress:50", 30)):
        assert train(one(traces=[str(path)], ends=[end]))["curve"]["updates"][-1] == updates


def test_the_time_under_a_capacity_trace_ends_a_training():
    log = CapacityTrace([0, 20, 40], [1, 2, 1], end=100.1)
    trace = UnderCapacity(log, "per-device:8", MODEL, price=3600.0, overheads=Overheads(restart=1, save_every=5))
    time, cost = (train(one(traces={"log": trace}, ends=[end]))["curve"] for end in ("seconds:60", "cost:80"))
    assert 60 <= time["seconds"][-1] < 62
    assert 80 <= cost["cost"][-1] < 83
    for end in ("seconds:101", "cost:1000"):
        with pytest.raises(ValueError, match=f"the updates under the capacity trace must reach the end {end}"):
            one(traces={"log": trace}, ends=[end])


def test_a_training_that_was_killed_behind_its_last_update_makes_no_further_one(tmp_path):
    cell = one(ends=["seconds:20"], time=ModelTime(MODEL), between=1)
    first, second = (train(cell, tmp_path / "checkpoints", save_every=1) for _ in range(2))
    assert first["curve"] == second["curve"]


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("epochs", 'an end must be "samples", "progress"'),
        ("seconds", "an end must be"),
        ("samples:3", "an end must be"),
        ("cost:much", "the number of the end cost must be > 0, got 'much'"),
        ("progress:0", "the number of the end progress must be > 0"),
        ("seconds:20", "needs the time of an update"),
    ],
)
def test_an_end_that_is_none_is_refused(end, message):
    with pytest.raises(ValueError, match=message):
        one(ends=[end])


def test_a_cost_is_known_of_a_log_that_begins_without_machines():
    capacity = CapacityTrace([0, 4000], [0, 4], end=8000)
    source = UnderCapacity(capacity, "per-device:4", MODEL, price=1.0)
    assert train(one(traces={"nodes": source}, ends=["cost:0.01"]))["curve"]["cost"][-1] >= 0.01


def test_an_end_needs_what_it_goes_by():
    with pytest.raises(ValueError, match="needs a price"):
        one(ends=["cost:20"], time=ModelTime(MODEL))
    with pytest.raises(TypeError, match='an end must be "samples", "progress"'):
        one(ends=[10])
    with pytest.raises(ValueError, match='the end "progress" needs a ref_batchsize'):
        End("progress").with_amount(64, None)
    scheduled = ["helpers.evaluation_tasks:ScheduledWithoutReference"]
    check_cells([one(tasks=scheduled, ends=["progress:20"])])
    with pytest.raises(ValueError, match=r"the schedule of the task .* needs a ref_batchsize"):
        check_cells([one(tasks=scheduled)])


def test_the_texts_of_ends_stand_for_them():
    for text in ["samples", "progress", "progress:7.5", "seconds:20.0", "cost:0.25"]:
        assert str(End.parse(text)) == text
    assert "end" not in one().as_json()
    ends = ["seconds:10", "seconds:20"]
    cells = Experiment([TINY], ["8"], ["constant"], seeds=1, ends=ends, time=ModelTime(MODEL)).cells()
    assert [cell.trace for cell in cells] == ["8, 10 seconds", "8, 20 seconds", *[REFERENCE] * 3]


# Divergence. ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e3, 1e30])
@pytest.mark.parametrize("rule", ["linear", "adascale"])
def test_divergence_is_a_result(rule, factor):
    line = train(one(rules=[rule], lr=0.05 * factor))
    assert line["status"] == "diverged"
    assert line["curve"]["samples"][-1] < 240
    assert all(value is None or math.isfinite(value) for column in line["curve"].values() for value in column or ())


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [([5.0, 50.0], False), ([5.0, 50.1], True), ([5.0, math.nan], True), ([5.0, math.inf], True), ([-5.0, 900], False)],
)
def test_a_loss_diverges_above_ten_times_that_of_the_untrained_model(losses, diverged):
    by_evaluation, by_update = Curve(None, 4), Curve(None, 4)
    by_evaluation.add_evaluation(0, 0, 0, {"loss": losses[0]})
    by_evaluation.add_microbatch(losses[0], 4)
    by_evaluation.add_update(1, 0.1)
    by_evaluation.add_evaluation(1, 4, 1, {"loss": losses[1]})
    by_update.add_evaluation(0, 0, 0, {"loss": losses[0]})
    for number, loss in enumerate(losses):
        if by_update.add_microbatch(loss, 4):
            by_update.add_update(number, 0.1)
            assert (by_update.last > by_update.limit) == (diverged and number == 1)
            by_update.add_evaluation(number, 4, number, {"loss": losses[0]})
    assert by_evaluation.diverged == by_update.diverged == diverged


class Trained(Tiny):
    """Its training loss is another one."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def loss(self, model, batch):
        return self.other(super().loss(model, batch))


class Evaluated(Tiny):
    """Its evaluation says more, of the loss."""

    def __init__(self, more):
        super().__init__()
        self.more = more

    def evaluate(self, model):
        loss = super().evaluate(model)["loss"]
        return {"loss": loss} | self.more(loss)


scaled = Trained(lambda loss: 20 * loss)
not_a_number = Trained(lambda loss: loss * math.nan)
overflows = Evaluated(lambda loss: {"perplexity": math.exp(loss)})
divides_when_trained = Evaluated(lambda loss: {"precision": 1 / (0 if loss < 4 else 1)})
infinite_before_and_no_number = Evaluated(lambda loss: {"perplexity": math.inf if loss > 5 else loss, "f1": math.nan})
never_finite = Evaluated(lambda loss: {"loss": math.nan})


class Heavy(Tiny):
    """The losses of its samples differ by a factor of a thousand, so that a batch of one tells little."""

    def loss(self, model, batch):
        inputs, outputs = batch
        return (torch.where(inputs[:, :1] > 1.5, 30.0, 0.03) * (model(inputs) - outputs).square()).mean()


class Checks(Tiny):
    """Its loss raises if the weights are not finite."""

    def loss(self, model, batch):
        if not all(bool(one.isfinite().all()) for one in model.parameters()):
            raise ValueError("the mean of a distribution must be finite")
        return super().loss(model, batch).nan_to_num(1.0, 1.0)


class ChecksLater(Tiny):
    """Its loss raises if an output is too large, while the weights are finite."""

    def loss(self, model, batch):
        if model(batch[0]).abs().max() > 1e6:
            raise ValueError("the mean of a distribution must be at most 1e6")
        return super().loss(model, batch)


class Fixed(Tiny):
    """Its optimizer has a learning rate of its own."""

    def optimizer(self, model, lr):
        return super().optimizer(model, 0.1)


def test_large_losses_that_tell_nothing_are_no_divergence():
    assert train(one(tasks=[HERE + "scaled"], lr=0.0025))["status"] == "finished"
    rare = one(tasks=[HERE + "Heavy"], lr=1e-12, ref_batchsize=1, traces=["1"])
    assert train(rare)["status"] == "finished"


@pytest.mark.parametrize(("task", "lr"), [("overflows", 40.0), ("Checks", 1e20), ("ChecksLater", 2.0)])
def test_an_error_of_a_model_that_has_diverged_is_a_divergence(task, lr):
    assert train(one(tasks=[HERE + task], lr=lr))["status"] == "diverged"


def test_a_metric_that_is_not_finite_is_missing_in_a_row_that_stays():
    curve = train(one(tasks=[HERE + "infinite_before_and_no_number"]))["curve"]
    assert curve["loss"] == train(one())["curve"]["loss"]
    assert curve["perplexity"][0] is None
    assert curve["perplexity"][-1] == curve["loss"][-1]
    assert set(curve["f1"]) == {None}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (HERE + "divides_when_trained", "failed: ZeroDivisionError: division by zero"),
        (HERE + "not_a_number", r"loss\(\) must return a finite loss before the first update, got nan; mend"),
        (HERE + "never_finite", r"evaluate\(\) must return a finite loss of the untrained model, got nan; mend"),
        (
            "helpers.evaluation_tasks:VectorLoss",
            r"loss\(\) must return the mean loss of a batch, .*, got one of shape \(4, 1\); return loss",
        ),
    ],
)
def test_a_mistake_of_a_task_is_an_error_that_names_the_training(task, message):
    cell = one(tasks=[task])
    with pytest.raises(RuntimeError, match=message) as caught:
        train(cell)
    assert str(caught.value).startswith(
        f"the training {cell.key} ({task}, trace 8, rule constant, lr 0.05, seed 0) fai"
    )


def test_an_optimizer_without_the_learning_rate_is_told():
    with pytest.raises(ValueError, match=r"optimizer\(model, lr\) must use lr, got lr 0.1 for 0.05 and twice it; pass"):
        check_cells([one(tasks=[HERE + "Fixed"])])


class Plain:
    """A controller that does not say what it is."""

    def __call__(self, _):
        return 8


@pytest.mark.parametrize("controller", [Plain(), lambda _: 8])
def test_a_controller_that_does_not_tell_its_numbers_is_refused(controller):
    with pytest.raises(ValueError, match=r"the repr of a controller must tell its numbers, .* at 0x"):
        one(traces={"own": AdaptiveTrace(controller, start=8)})
