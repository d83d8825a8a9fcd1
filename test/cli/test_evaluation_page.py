"""The commands of docs/evaluation.md and evaluations.md, with few samples and a small task in the place of MNIST."""

from __future__ import annotations

import re
import shlex
import shutil

import pytest
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers.console import run_main
from helpers.pages import DOCS, ROOT, blocks, commands
from variable_batch_size.lab.evaluation import load_task, read

PAGE = DOCS / "evaluation.md"
LINES = [
    line
    for page in (PAGE, DOCS / "evaluations.md", DOCS / "spot_machines.md")
    for line in commands(page)
    if line.startswith("vbs ")
]


def small(words):
    """Return the arguments of a command that trains for a moment."""
    words = ["helpers.evaluation_tasks:Tiny" if word == "mnist-cnn" else word for word in words]
    words = [
        "8"
        if word == "256"
        else word.replace("0:32 128:128 192:512", "0:8 4:32").replace("per-device:64", "per-device:4")
        for word in words
    ]
    if "--from" in words:
        return [*words, "--samples", "4608"]  # it needs a second epoch
    return [*words, "--samples", "128", "--between", "64"] if words[0] == "evaluate" else words


def save(folder):
    """Save a checkpoint of a training of the task of the page."""
    task = load_task("ball:Ball")
    model = task.model(0)
    sampler = vbs.CustomSampler(task.dataset(), 16, 1, 0, 8)
    optimizer = vbs.LinearRuleOptimizer(task.optimizer(model, 0.05), sampler, ref_batchsize=16)
    with vbs.Checkpoint(folder, model=model, optimizer=optimizer) as checkpoint:
        for update in vbs.updates(DataLoader(task.dataset(), batch_sampler=sampler), optimizer):
            for batch in update:
                optimizer.backward(task.loss(model, batch))
                optimizer.step()
            if optimizer.updates == 64:
                checkpoint.save()
                break


@pytest.mark.nightly("trains for its page")
@pytest.mark.filterwarnings("ignore:trace .* the batch size is")  # the traces of the page change
def test_the_commands_of_the_page(tmp_path, monkeypatch):
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    task, _ = blocks(PAGE, "python")
    (tmp_path / "ball.py").write_text(task)
    monkeypatch.chdir(tmp_path)
    outputs = []
    (tmp_path / "benchmarks").mkdir()
    save("runs/a")
    for line in LINES:
        if found := re.search(r"benchmarks/\w+\.(csv|jsonl)\.gz", line):
            shutil.copy(ROOT / found[0], found[0])
        status, out, err = run_main(*small(shlex.split(line)[1:]))
        assert status == 0, err
        outputs.append(out)
    assert [out for out in outputs if out.startswith("report: runs/small/report.html (95 of 95 runs)")]
    told = [out for out in outputs if "lost beside the reference: " in out]
    assert {"runs/small", "runs/warmup"} <= {out.split("/report.html")[0].removeprefix("report: ") for out in told}
    for name in (
        "large/report.html",
        "small/report.html",
        "small/report.csv",
        "ball/report-ball-Ball.png",
        "ends/report.csv",
        "spot/report.csv",
        "machines/evaluation.jsonl",
    ):
        assert (tmp_path / "runs" / name).exists()


@pytest.mark.filterwarnings("ignore:trace .* the batch size is")
def test_the_task_of_the_page_learns(tmp_path, monkeypatch):
    task, _ = blocks(PAGE, "python")
    assert len(task.splitlines()) <= 27
    (tmp_path / "learned_ball.py").write_text(task)
    monkeypatch.chdir(tmp_path)
    arguments = ["evaluate", "learned_ball:Ball", "--trace", "16", "--rule", "constant", "--seeds", "1"]
    assert run_main(*arguments)[0] == 0
    for curve in read("evaluation").trainings["curve"]:
        assert curve["loss"][-1] < 0.5 * curve["loss"][0]


@pytest.mark.nightly("trains for its page")
def test_the_tuning_of_the_page(tmp_path, monkeypatch):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    task, tuning = blocks(PAGE, "python")
    (tmp_path / "tuned_ball.py").write_text(task.replace("8192", "2048"))
    monkeypatch.chdir(tmp_path)
    namespace = {}
    exec(tuning.replace("ball:Ball", "tuned_ball:Ball").replace("n_trials=20", "n_trials=4"), namespace)
    assert 0 < namespace["study"].best_value < 0.7
    assert 0.01 <= namespace["study"].best_params["lr"] <= 1
    assert len(read("runs/tuning").trainings) == 4 * 3
