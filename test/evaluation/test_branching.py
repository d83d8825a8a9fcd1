"""Branches see the same samples, continue a training exactly, know a quadratic's answer, and change no file."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers.branching_tasks import Quadratic
from helpers.commands import environment
from helpers.evaluation_tasks import Tiny
from helpers.pages import ROOT
from variable_batch_size.evaluation import Candidate, branch
from variable_batch_size.evaluation.branching.branch import Branches
from variable_batch_size.evaluation.branching.ranking import ranking
from variable_batch_size.evaluation.branching.start import Start
from variable_batch_size.evaluation.branching.trial import train_trial, untrained_metrics

SAMPLES = 2000  # of a full training of Tiny; its dataset has 96
BATCH = 16


def trained(folder: Path, rule: str = "linear", *, samples: int = 20 * BATCH, schedule: bool = True) -> Any:
    """Train Tiny by the means of branches, from the beginning, save it, and return its parts."""
    start = Start.read(None, Tiny(), samples=SAMPLES, seed=3, schedule=schedule)
    parts = start.begin(Candidate(rule), BATCH, 0, samples=samples)
    trial = train_trial(parts, "a", 0, untrained_metrics(parts.task, 3))
    own = {"model": parts.model, "optimizer": parts.optimizer, "scheduler": parts.scheduler}
    with vbs.Checkpoint(folder, **own) as saved:
        saved.save()
    return parts, trial


def content(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_mtime_ns}" for path in files}


@pytest.mark.parametrize("rule", ["linear", "adascale"])  # the second one needs the noise averages
@pytest.mark.parametrize("begun", [20 * BATCH, 13 * BATCH])  # within an epoch of 6 updates, with dropout
def test_its_own_rule_and_batch_size_continue_a_training_bit_for_bit(tmp_path: Path, rule: str, begun: int) -> None:
    before = torch.get_rng_state()
    parts, longer = trained(tmp_path / "long", rule, samples=45 * BATCH)
    trained(tmp_path / "short", rule, samples=begun)
    updates = begun // BATCH
    found = branch(
        tmp_path / "short", Tiny(), batch_size=BATCH, candidates=[rule], updates=45 - updates, samples=SAMPLES
    )
    (trial,) = found.trials
    assert trial.losses == longer.losses[updates:]
    assert trial.metrics == longer.metrics
    start = Start.read(tmp_path / "short", Tiny(), samples=SAMPLES)
    again = start.begin(Candidate(rule), BATCH, 0, updates=45 - updates)
    train_trial(again, "a", 0, {"loss": 1.0})
    for one, other in zip(again.model.state_dict().values(), parts.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert again.optimizer.progress == parts.optimizer.progress
    assert (found.updates, found.samples) == (updates, begun)
    torch.set_rng_state(before)


def test_a_training_of_an_evaluation_is_continued_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint has a curve beside model, optimizer and scheduler."""
    from variable_batch_size.evaluation import Experiment, training

    cell, *_ = Experiment(
        ["helpers.evaluation_tasks:Tiny"], [str(BATCH)], ["root"], seeds=[5], samples=40 * BATCH, between=SAMPLES
    ).cells()
    monkeypatch.setattr(training.shutil, "rmtree", lambda *_, **__: None)
    path = training.train(cell, tmp_path, save_every=25)
    losses = json.loads(path.read_text())["curve"]["loss"]
    found = branch(
        tmp_path / "checkpoints" / cell.key,
        cell.task,
        batch_size=BATCH,
        candidates=["root"],
        updates=15,
        samples=cell.samples,
    )
    assert found.updates == 25
    assert found.trials[0].metrics["loss"] == losses[-1]


@pytest.mark.parametrize("begun", [3, 6, 9])  # within the first epoch, at its end, within the second one
def test_an_ordinary_loop_is_continued_bit_for_bit_over_the_ends_of_epochs(tmp_path: Path, begun: int) -> None:
    torch.manual_seed(5)
    task, losses = Tiny(), []
    model, data = task.model(3), task.dataset()
    sampler = vbs.CustomSampler(data, BATCH, minibatch_size=4, seed=3, fixed_shape=False)
    optimizer = vbs.CustomOptimizer(task.optimizer(model, 0.01), sampler, 8, rule="root", max_grad_norm=5.0)
    checkpoint = vbs.Checkpoint(tmp_path, model=model, optimizer=optimizer)
    for _ in vbs.remaining_epochs(sampler, optimizer, until=4):
        for batch in DataLoader(data, batch_sampler=sampler):
            loss = task.loss(model, batch)
            losses.append(loss.item())
            loss.backward()
            if optimizer.step() and optimizer.updates == begun:
                checkpoint.save()
    checkpoint.close()
    found = branch(tmp_path, task, batch_size=BATCH, candidates=["root"], updates=24 - begun, schedule=False)
    each = BATCH // 4  # microbatches of an update
    expected = [sum(losses[first : first + each]) / each for first in range(begun * each, len(losses), each)]
    assert found.trials[0].losses == pytest.approx(expected, rel=1e-12)


def test_all_candidates_read_the_very_same_samples_in_the_same_order(tmp_path: Path) -> None:
    task = Quadratic()
    found = branch(None, task, batch_size=33, candidates=["constant", "linear*0.5", "adascale"], updates=150, orders=2)
    per_trial = len(task.read) // 6
    runs = [task.read[begin : begin + per_trial] for begin in range(0, len(task.read), per_trial)]
    assert len(runs) == 6
    assert runs[0] == runs[2] == runs[4]
    assert runs[1] == runs[3] == runs[5] != runs[0]
    assert sorted(runs[0][:4096]) == list(range(4096))  # an epoch
    assert sum(found.trials[0].samples) == per_trial <= found.cost.samples_each
    assert found.trials[0].losses[0] == found.trials[2].losses[0]  # and begin with the same weights


def test_a_quadratic_is_ranked_as_its_curvature_says() -> None:
    """At 16 times the reference, the linear learning rate, 1.6, is above 0.5: it diverges; the root, 0.4, does not."""
    found = branch(None, Quadratic(), batch_size=128, candidates=["linear", "root*2", "root", "constant"], updates=100)
    ranks = {place.name: place.rank for place in found.places}
    assert ranks["linear"] == ranks["root*2"] == 3
    assert [place.name for place in found.places[:2]] == ["constant", "root"]  # less noise at the end
    assert (ranks["constant"], ranks["root"]) == (1, 2)
    assert found.best == ("constant",)
    text = str(found)
    assert "diverged" in text
    assert "constant is better than all others." in text
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["best"] == ["constant"]


def test_no_difference_is_seen_where_there_is_none() -> None:
    """At the reference AdaScale's gain is 1; a learning rate that differs by a thousandth is nearly the same."""
    found = branch(None, Quadratic(), batch_size=8, candidates=["root", "adascale"], updates=40)
    assert found.pairs[0].difference[:3] == (0.0, 0.0, 0.0)
    assert found.conclusion() == "No difference is seen between any of the candidates: train longer branches."
    few = branch(None, Quadratic(), batch_size=8, candidates=["root", "root*2"], updates=14)
    assert few.conclusion().endswith(": 7 updates are too few for an interval, compare 8 or more (--updates, --last).")
    assert f"more than {few.places[0].name}" in str(few)
    assert [place.rank for place in few.places] == [None, None]
    assert [[row[1], row[3], row[-1]] for row in few.table()[1]] == [["-"] * 3] * 2
    assert len(few.best) == 2
    assert [place.rank for place in found.places] == [1, 1]
    near = branch(None, Quadratic(), batch_size=8, candidates=["root", "root*1.001"], updates=60, orders=4)
    assert near.places[1].same == (near.places[0].name,)


def test_candidates_that_train_alike_are_one() -> None:
    own: dict[str, Any] = {"candidates": ["constant", "linear", "root*2", "root*0.5", "legw:5"], "updates": 140}
    found = branch(None, Quadratic(), batch_size=32, **own)
    assert [trial.name for trial in found.trials] == ["constant = root*0.5", "linear = root*2", "legw:5"]
    assert found.cost.branches == 3
    (alone,) = branch(None, Quadratic(), batch_size=32, **own | {"candidates": ["root*2"]}).trials
    assert alone.losses == found.trials[1].losses
    one = branch(None, Quadratic(), batch_size=8, candidates=["root", "linear"], updates=20)
    assert one.conclusion() == "root = linear is the only candidate."


@pytest.mark.parametrize(("updates", "names"), [(56, ["root*3 = linear"]), (57, ["root*3", "linear"])])
def test_the_smaller_update_at_the_end_of_an_epoch_tells_candidates_apart(updates: int, names: list[str]) -> None:
    """At 9 times the reference, 56 updates of 72 samples leave 64 of the 4,096."""
    candidates = tuple(map(Candidate.of, ["root*3", "linear"]))
    assert list(Branches(Start.read(None, Quadratic()), 72, candidates, updates).distinct) == names


def test_a_checkpoint_after_the_warm_up_trains_legw_as_the_root_rule(tmp_path: Path) -> None:
    trained(tmp_path)
    for updates, names in ((20, ["legw:20 = root"]), (30, ["legw:30", "root"])):
        candidates = [f"legw:{updates}", "root"]
        found = branch(tmp_path, Tiny(), batch_size=32, candidates=candidates, updates=20, samples=SAMPLES)
        assert [trial.name for trial in found.trials] == names


def test_a_decay_lets_the_learning_rate_fall_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one then wins: the noise that it adds is gone at the end."""
    rates: list[float] = []
    monkeypatch.setattr(Quadratic, "optimizer", lambda self, model, lr: Recorded(model.parameters(), lr, rates))
    own: dict[str, Any] = {"batch_size": 8, "candidates": ["root"], "updates": 10}
    assert (
        branch(None, Quadratic(), **own).trials[0].losses[0]
        == branch(None, Quadratic(), decay=1, **own).trials[0].losses[0]
    )
    assert rates == pytest.approx([0.1] * 10 + [0.1 * left / 10 for left in range(10, 0, -1)])
    rates.clear()
    branch(None, Quadratic(), decay=0.4, **own)
    assert rates == pytest.approx([0.1] * 6 + [0.1, 0.075, 0.05, 0.025])
    with pytest.raises(ValueError, match=r"decay must be a share of the updates, got 1\.5"):
        branch(None, Quadratic(), decay=1.5, **own)


class Recorded(torch.optim.SGD):
    """Keeps the learning rate of each step."""

    def __init__(self, parameters: Any, lr: float, rates: list[float]) -> None:
        super().__init__(parameters, lr=lr)
        self.rates = rates

    def step(self, closure: Any = None) -> Any:
        self.rates.append(float(self.param_groups[0]["lr"]))
        return super().step(closure)


def test_evaluations_are_compared_over_orders_only() -> None:
    own: dict[str, Any] = {"batch_size": 32, "candidates": ["constant", "root*1.5"], "updates": 60, "by": "evaluation"}
    one, several = (branch(None, Quadratic(), orders=orders, **own) for orders in (1, 6))
    assert one.conclusion().endswith("of its noise, compare several orders (--orders).")
    close = branch(None, Quadratic(), orders=2, **own | {"candidates": ["root", "root*1.001"]})
    assert close.conclusion().endswith("between any of the candidates: compare more orders (--orders).")
    assert several.places[0].name == "constant"
    ends = [[trial.metrics["loss"] for trial in several.trials if trial.name == name] for name in own["candidates"]]
    assert several.places[0].loss == pytest.approx(sum(ends[0]) / 6)
    assert several.pairs[0].difference.value == pytest.approx((sum(ends[0]) - sum(ends[1])) / 6)
    assert several.pairs[0].difference.low < several.pairs[0].difference.high
    assert "the loss of the evaluation at the end" in str(one)


def test_the_checkpoint_is_only_read(tmp_path: Path) -> None:
    trained(tmp_path)
    before = content(tmp_path)
    arguments: dict[str, Any] = {"batch_size": 32, "candidates": ["root", "linear*0.4"], "updates": 20}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that the rule changes is what branches are for
        first = branch(tmp_path, Tiny(), samples=SAMPLES, **arguments)
    assert content(tmp_path) == before
    for path in tmp_path.rglob("*"):
        path.chmod(0o500 if path.is_dir() else 0o400)
    again = branch(next(tmp_path.glob("update-*")), Tiny(), samples=SAMPLES, **arguments)
    assert again.as_json() == first.as_json()
    assert content(tmp_path) == before
    other = branch(tmp_path, Tiny(), samples=SAMPLES, **arguments | {"candidates": ["linear*0.4", "root"]})
    assert {t.name: t for t in other.trials} == {t.name: t for t in first.trials}  # no branch changes another


# Forks a process for each attempt, and kills it after a random time.
KILLS = """
import json, os, random, signal, sys, time
import torch
from helpers.evaluation_tasks import Tiny
from variable_batch_size.evaluation import branch

def run():
    arguments = {"candidates": ["root", "linear*0.4"], "updates": 40, "samples": 2000, "orders": 2}
    return branch(sys.argv[1], Tiny(), batch_size=32, **arguments)

torch.set_num_threads(1)
draw, killed = random.Random(0), 0
for attempt in range(6):
    child = os.fork()
    if child == 0:
        run()
        os._exit(0)
    time.sleep(draw.uniform(0.01, 0.3))
    os.kill(child, signal.SIGKILL)
    killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
print(json.dumps([killed, run().as_json()]))
"""


@pytest.mark.slow("kills it several times")
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_killed_and_repeated_it_says_the_same(tmp_path: Path) -> None:
    trained(tmp_path)
    before, command = content(tmp_path), [sys.executable, "-c", KILLS, str(tmp_path)]
    variables = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'test'}", OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    killed, found = json.loads(done.stdout)
    assert killed > 2
    assert content(tmp_path) == before
    expected = branch(
        tmp_path, Tiny(), batch_size=32, candidates=["root", "linear*0.4"], updates=40, samples=SAMPLES, orders=2
    )
    assert found == json.loads(json.dumps(expected.as_json()))


def test_states_of_noise_and_optimizer_are_those_of_the_checkpoint_for_all(tmp_path: Path) -> None:
    parts, _ = trained(tmp_path, "adascale")
    start = Start.read(tmp_path, Tiny(), samples=SAMPLES)
    for text in ("adascale", "root", "adascale*0.5", "linear"):
        begun = start.begin(Candidate.of(text), 32, 0, updates=10)
        assert begun.optimizer.progress == parts.optimizer.progress
        factor = Candidate.of(text).lr_factor
        assert begun.optimizer.param_groups[0]["lr"] == parts.optimizer.param_groups[0]["lr"] * factor
        for one, other in zip(begun.optimizer.state.values(), parts.optimizer.state.values(), strict=True):
            assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])
        if text.startswith("adascale"):
            assert begun.optimizer.noise() == parts.optimizer.noise()


@pytest.mark.parametrize("saved", [True, False])
def test_the_schedule_continues_only_if_it_was_saved_and_is_wanted(tmp_path: Path, saved: bool) -> None:
    parts, _ = trained(tmp_path, schedule=saved)
    rate = parts.optimizer.param_groups[0]["lr"]
    for wanted in (True, False):
        said = (
            nullcontext() if saved or not wanted else pytest.warns(UserWarning, match=r"has no scheduler, so the lear")
        )
        with said:
            start = Start.read(tmp_path, Tiny(), samples=SAMPLES, schedule=wanted)
        begun = start.begin(Candidate("root", 0.5), 32, 0, updates=20)
        assert begun.optimizer.param_groups[0]["lr"] == 0.5 * rate
        train_trial(begun, "a", 0, {"loss": 100.0})
        ends = 0.05 * 0.5 * (1 - 0.9 * (begun.optimizer.samples // 8 * 8) / SAMPLES)
        assert begun.optimizer.param_groups[0]["lr"] == pytest.approx(ends if saved and wanted else 0.5 * rate)


def test_a_wrong_argument_is_told_before_a_branch_trains(tmp_path: Path) -> None:
    task = Quadratic()
    own: dict[str, Any] = {"batch_size": 32, "candidates": ["root"], "updates": 10}
    for change, message in (
        ({"candidates": []}, "candidates must have at least one item"),
        ({"candidates": ["root", "root*1"]}, "candidates must be different"),
        ({"candidates": ["rot"]}, "a rule must be one of"),
        ({"candidates": ["root*x"]}, "the factor of the candidate root must be a positive number, got 'x'"),
        ({"candidates": ["root*-1"]}, "the factor of the candidate root must be a positive number, got '-1'"),
        ({"candidates": ["root0.5"]}, r"a candidate must be a rule, or .*, got 'root0.5'; pass \"root\*0.5\""),
        ({"candidates": ["root", "legw"]}, "the rule legw needs its"),
        ({"candidates": ["root", "sqrt-sde"]}, "candidate sqrt-sde: "),
        ({"batch_size": 5000}, "every batch size of the trace must"),
        ({"last": 1.5}, "last must be between 0 and 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=message.replace("(", r"\(")):
            branch(None, task, **own | change)
    with pytest.raises(ValueError, match=r"must end within the 240 samples of the schedule of the task Tiny, got 0 \+"):
        branch(None, Tiny(), **own)
    with pytest.raises(ValueError, match="path must be the folder of a checkpoint"):
        branch(tmp_path / "none", task, **own)
    trained(tmp_path)
    with pytest.raises(ValueError, match=r"the dataset of the task Quadratic must be that of the checkpoint .* 4,096"):
        branch(tmp_path, task, **own)
    assert not task.read
    with pytest.raises(ValueError, match="ref_batchsize must be that of the checkpoint, 8, got 16; omit it"):
        branch(tmp_path, Tiny(), **own | {"ref_batchsize": 16})
    for given in ("lr", "seed"):
        with pytest.raises(
            ValueError, match=f"{given} must be omitted beside a checkpoint, which has its own, got 1; "
        ):
            branch(tmp_path, Tiny(), **own | {given: 1})
    with pytest.raises(ValueError, match=r"of the task Tiny must be that of .*, got lr 0.0428 in it, and 0.0464 by"):
        branch(tmp_path, Tiny(), **own | {"samples": 4000})


def test_the_cost_is_known_beforehand() -> None:
    start = Start.read(None, Quadratic())
    branches = Branches(start, 64, (Candidate("root"), Candidate("constant")), 32, orders=2)
    assert str(Branches(start, 64, (Candidate("root"),), 32).cost).startswith(
        "1 branch of at most 2,048 samples, 2,048 in all"
    )
    assert str(branches.cost) == (
        "4 branches of at most 2,048 samples, 8,192 in all, 25 % of a full training, and 5 evaluations"
    )
    assert sum(map(sum, (trial.samples for trial in branches.run().trials))) == 8192


@pytest.mark.usefixtures("published_mnist")
def test_mnist_in_seconds() -> None:
    found = branch(None, "mnist-cnn", batch_size=256, candidates=["linear", "linear*64"], updates=12, minibatch_size=64)
    assert found.places[0].name == "linear"
    assert found.trials[0].losses[-1] < 2.3


def test_all_intervals_hold_together() -> None:
    """Four candidates that are the same but for noise: none is told apart from another in 19 of 20 cases."""
    rng, repeats, wrong = np.random.default_rng(0), 400, 0
    for _ in range(repeats):
        places, pairs = ranking({name: [rng.normal(size=100)] for name in "abcd"})
        wrong += any(place.rank > 1 for place in places)
        assert len(pairs) == 6
    assert wrong / repeats < 0.07
