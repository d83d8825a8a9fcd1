"""What an optimizer logs: rows every so many updates or samples, the gradient norm, the time left, the progress bar."""

import fcntl
import math
import os
import pty
import re
import struct
import termios
from contextlib import redirect_stderr

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import batches, data, gradient, training
from helpers.strategies import Run, cases


def trained(folder, updates, kind=vbs.LinearRuleOptimizer, **options):
    with vbs.Tracker(folder, progress=False) as tracker:
        return training(kind, tracker=tracker, **options).run(updates)


@given(sizes=st.lists(st.integers(1, 50), min_size=2, max_size=12), every=st.integers(1, 120))
@examples(30)
def test_a_row_for_each_so_many_samples(sizes, every, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    run = trained(folder, len(sizes), sizes=sizes, log_samples=every)
    used = np.cumsum([min(len(samples), 50) for samples in batches(sizes, 50)])
    due = [
        int(update)
        for update in range(1, len(used) + 1)
        if used[update - 1] // every > (used[update - 2] if update > 1 else 0) // every
    ]
    path = folder / "scalars.csv"
    found = pd.read_csv(path)["update"].tolist() if path.exists() else []
    assert found == due
    assert run.optimizer.samples == used[-1]


def test_the_norm_of_the_gradient_before_clipping(tmp_path):
    sizes = [20, 7, 1, 33]
    for options in ({}, {"max_grad_norm": 0.01}, {"rule": "linear-momentum"}):
        folder = tmp_path / str(len(str(options)))
        run = trained(folder, 1, vbs.CustomOptimizer, sizes=sizes, log_steps=1, grad_norm=True, **options)
        x, target = (tensor.numpy() for tensor in data(50))
        (first, *_) = batches(sizes, 50)
        start = training().weights()
        expected = math.sqrt(sum((g**2).sum() for g in gradient(start, x[first], target[first])))
        assert run.optimizer.grad_norm is not None
        assert run.optimizer.grad_norm.item() == pytest.approx(expected, rel=1e-12)
        assert pd.read_csv(folder / "scalars.csv")["vbs/grad_norm"].tolist() == pytest.approx([expected])


def test_the_seconds_continue_after_a_restore(tmp_path):
    """From those of the restored update on, not of later ones; in a new training they begin at 0."""
    state = trained(tmp_path, 4, log_steps=1).optimizer.state_dict()
    path = tmp_path / "scalars.csv"
    table = pd.read_csv(path)
    table["vbs/seconds"] = [0.0, 1000.0, 2000.0, 3000.0]
    table.loc[len(table)] = {"update": 5, "vbs/seconds": 9000.0}
    table.astype({"update": int}).to_csv(path, index=False)
    with vbs.Tracker(tmp_path, progress=False) as tracker:
        run = training(vbs.LinearRuleOptimizer, tracker=tracker, log_steps=1)
        run.optimizer.load_state_dict(state)
        run.run(2)
    seconds = pd.read_csv(path)["vbs/seconds"].tolist()
    assert seconds[:5] == [0.0, 1000.0, 2000.0, 3000.0, 3000.0]
    assert 3000 < seconds[5] < 4000
    trained(tmp_path, 1, log_steps=1)
    assert pd.read_csv(path)["vbs/seconds"].tolist() == [0.0]


def test_logged_means_are_columns(tmp_path):
    with vbs.Tracker(tmp_path, progress=False) as tracker:
        run = training(sizes=[4], tracker=tracker, log_steps=2)
        for number, indices in enumerate(run.sampler, 1):
            run.loss(indices).backward()
            run.optimizer.log(loss=number / 2, accuracy=0.5)
            run.optimizer.step()
            if number == 6:
                break
    table = pd.read_csv(tmp_path / "scalars.csv")
    assert table["loss"].tolist() == [1.0, 2.0, 3.0]
    assert table["accuracy"].tolist() == [0.5] * 3


@given(cases(largest_dataset=60), st.booleans())
@examples(60)
def test_the_fraction_of_the_training_that_is_done(case, known):
    """It grows, and is 1 at the end if the end is known."""
    run, found = Run(case), [0.0]
    epochs = case.epochs if known else None
    while run.optimizer.epoch < case.epochs and not run.optimizer.done:
        run.set_epoch(run.optimizer.epoch)
        for batch in run.sampler:
            if run.take(batch):
                batches, position = run.sampler.batches, run.sampler.position
                found.append(batches.plan.fraction(batches.epoch(position), position.step, epochs))
    assert found == sorted(found)
    ends = known or run.optimizer.done
    assert found[-1] == 1 if ends else 0 <= found[-1] <= 1


def drawn_on_a_terminal(**sampling):
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("4H", 24, 160, 0, 0))  # rows and columns
    with os.fdopen(reader, "rb", buffering=0) as screen, os.fdopen(writer, "w") as stderr:
        with redirect_stderr(stderr), vbs.Tracker() as tracker:
            run = training(sizes=[10], tracker=tracker, log_steps=1, sampling=sampling)
            for epoch in range(2):
                run.sampler.set_epoch(epoch)
                for indices in run.sampler:
                    run.loss(indices).backward()
                    run.optimizer.log(loss=0.25)
                    run.optimizer.step()
        print("end", end="", file=stderr, flush=True)
        drawn = b""
        while not drawn.endswith(b"end"):
            drawn += screen.read(4096)
    return drawn.decode()


def test_the_bar_shows_loss_batch_size_rate_and_the_time_left():
    shown = r"50\.0/50\.0 .*loss=0\.25, B=10, lr=0\.003125"
    assert re.search(shown + r", left=00:0\d", drawn_on_a_terminal(epochs=2), re.DOTALL)
    endless = drawn_on_a_terminal()
    assert re.search(shown, endless, re.DOTALL)
    assert "left" not in endless


def test_the_epoch_is_a_fraction_of_the_whole_one_wherever_the_training_ends(tmp_path):
    found = []
    for name, sampling in (("endless", {}), ("ending", {"max_updates": 3}), ("samples", {"max_samples": 30})):
        trained(tmp_path / name, 3, sizes=[10], log_steps=1, sampling=sampling)
        found.append(pd.read_csv(tmp_path / name / "scalars.csv")["vbs/epoch"].tolist())
    assert found == [pytest.approx([0.2, 0.4, 0.6])] * 3
