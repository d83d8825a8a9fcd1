"""What an optimizer logs: rows every so many updates or samples, norms, the time left, the progress bar, and means."""

import copy
import fcntl
import math
import os
import pty
import re
import struct
import termios
import weakref
from collections import Counter
from contextlib import redirect_stderr

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import batches, data, gradient, training
from helpers.runs import LoggedTraining, samplings
from helpers.tensorboard import events
from variable_batch_size.backend import Backend, LocalBackend
from variable_batch_size.testing import run_ranks


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


def test_a_state_has_all_rows_before_it_on_the_disk(tmp_path):
    """After kill -9 a training goes on from the state, so that neither log may miss what was before it."""
    with vbs.Tracker(tmp_path, progress=False) as tracker:
        run = training(sizes=[4], tracker=tracker, log_steps=1).run(1)
        run.optimizer.state_dict()
        run.run(4)
        tracker.log_later(6, lambda: {"late": 1.0})  # as of a device
        run.optimizer.state_dict()
        logged = [event.step for event in events(tmp_path) if event.HasField("summary") and event.step]
        assert logged == [*range(1, 7)]
        assert pd.read_csv(tmp_path / "scalars.csv")["update"].tolist() == [*range(1, 7)]


@given(samplings(largest_dataset=60), st.booleans())
@examples(60)
def test_the_fraction_of_the_training_that_is_done(case, known):
    """It grows, and is 1 at the end if the end is known."""
    run, found = LoggedTraining(case), [0.0]
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


# optimizer.log: means over exactly the samples of each step, in the message of the gradients. -------------------------


class Counting(LocalBackend):
    """Counts the tensors of each message."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def all_reduce_sum(self, tensors):
        self.messages.append([tensor.numel() for tensor in tensors])
        super().all_reduce_sum(tensors)


@pytest.mark.parametrize("alone", [True, False])
def test_it_travels_in_the_message_of_the_gradients_and_costs_nothing_unless_asked_for(alone, monkeypatch):
    monkeypatch.setattr(Counting, "alone", alone)  # a process that makes the update alone has nothing to sum
    messages = {}
    for log in (True, False):
        backend = Counting()
        run = training(sizes=[9], backend=backend)
        for indices in run.sampler:
            run.loss(indices).backward()
            if log:
                run.optimizer.log(loss=1.0, hits=2)
            if run.optimizer.step():
                break
        (messages[log],) = map(Counter, backend.messages)
    sums_and_weights = messages[True] - messages[False]
    assert sums_and_weights == ({} if alone else {2: 2})


def test_values_of_a_discarded_step_do_not_count():
    run = training(sizes=[9])
    run.loss(next(iter(run.sampler))).backward()
    run.optimizer.log(loss=1e9)
    run.optimizer.step()
    run.optimizer.log(loss=1e9)
    run.optimizer.discard_step()
    for indices in run.sampler:
        run.loss(indices).backward()
        run.optimizer.log(loss=2.0)
        if run.optimizer.step():
            break
    assert run.optimizer.logged["loss"].item() == 2.0
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert run.optimizer.logged == {}


def update_of(run, value, count=None):
    """Make an update that logs a value of each microbatch."""
    update = next(iter(vbs.updates(run.sampler, run.optimizer)))
    for indices in update:
        run.optimizer.backward(run.loss(indices))
        run.optimizer.log(a=value)
        run.optimizer.step(**({} if count is None else {"count": count}))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("value", [0.1, 1e39, torch.tensor(0.1, dtype=torch.float64)], ids=str)
def test_a_row_has_the_numbers_of_logged(value, world, tmp_path):
    def train(backend):
        with vbs.Tracker(tmp_path, progress=False) as tracker:
            options = {"tracker": tracker, "log_steps": 1, "backend": backend}
            run = training(vbs.LinearRuleOptimizer, [8], dtype=torch.float32, **options)
            update_of(run, value)
        return run.optimizer.logged["a"]

    mean = run_ranks(train, world)[0]
    assert mean.dtype == torch.float32
    assert pd.read_csv(tmp_path / "scalars.csv")["a"].tolist() == [mean.item()]


class Widen(torch.nn.Linear):
    """A layer in float64, after others in float32."""

    def forward(self, rows):
        return super().forward(rows.double())


def test_means_have_one_dtype_in_any_world():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), Widen(4, 2, dtype=torch.float64))

    def train(backend):
        run = training(sizes=[8], dtype=torch.float32, model=copy.deepcopy(model), backend=backend)
        update_of(run, 0.1)
        return run.optimizer.logged["a"].dtype

    assert run_ranks(train, 1) + run_ranks(train, 2) == [torch.float32] * 3


@pytest.mark.parametrize("reads", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("world", [1, 2])
def test_an_update_without_a_token_has_no_mean(world, reads, monkeypatch):
    if not reads:
        monkeypatch.setattr(Backend, "reads", lambda self, tensor: False)

    def train(backend):
        run = training(sizes=[8], reduction="sum", backend=backend)
        update_of(run, 3.0, count=0)
        return run.optimizer.logged["a"].item()

    assert all(map(math.isnan, run_ranks(train, world)))


class Kept(vbs.Stage):
    """Keeps the updates."""

    def __init__(self):
        self.updates = []

    def end(self, update):
        self.updates.append(update)


def test_an_update_keeps_its_means():
    run, kept = training(sizes=[8]), Kept()
    run.optimizer.register(kept)
    for value in (1.0, 2.0, 3.0):
        update_of(run, value)
    assert [update.means["a"].item() for update in kept.updates] == [1, 2, 3]


def test_the_means_are_on_the_device_of_the_gradients_whatever_the_default_device_is():
    run = training(sizes=[8])
    update_of(run, 2.0)
    with torch.device("meta"):
        assert run.optimizer.logged["a"].item() == 2


def test_a_row_can_be_read_twice():
    run = training(sizes=[8])
    update_of(run, 2.0)
    read = run.optimizer._abilities.means.reader()
    assert read() == read() == {"a": 2.0}


def test_a_logged_loss_keeps_no_graph():
    run = training(sizes=[8])
    output = run.model(run.x)
    kept = weakref.ref(output)
    run.optimizer.log(a=output.square().sum())  # whose graph saves the output
    del output
    assert kept() is None


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_a_complex_value_raises_before_the_weights_change():
    run = training()
    with pytest.raises(ValueError, match=r"a must be a real number, got a tensor of torch.complex64; pass its .abs"):
        run.optimizer.log(a=torch.tensor(1 + 2j))


@pytest.mark.parametrize("missing", [(0, 1), (0, 2), (1, 0), (1, 2)], ids=str)
@pytest.mark.parametrize("reproducible", [False, True], ids=["", "reproducible"])
def test_a_microbatch_without_a_value_raises_in_one_process(reproducible, missing):
    run = training(sizes=[12, 12], sampling={"reproducible": reproducible})

    def train():
        for number, update in enumerate(vbs.updates(run.sampler, run.optimizer)):
            for index, indices in enumerate(update):
                run.optimizer.backward(run.loss(indices))
                if (number, index) != missing:
                    run.optimizer.log(loss=1.0)
                run.optimizer.step()

    with pytest.raises(RuntimeError, match=r"log\(\) must be called for every microbatch of a step"):
        train()


def test_a_name_twice_for_a_microbatch_raises():
    run = training()
    run.optimizer.log(loss=1.0)
    with pytest.raises(RuntimeError, match="'loss' was logged twice; call log"):
        run.optimizer.log(loss=1.0)


def test_a_new_name_after_the_first_update_raises():
    run = training(sizes=[4]).run(1)
    with pytest.raises(RuntimeError, match=r"as in the first update, none, but 'loss' is new; log it from the first"):
        run.optimizer.log(loss=1.0)


def test_a_value_for_some_microbatches_of_a_step_only_raises():
    run = training(sizes=[9])
    batches = iter(run.sampler)
    run.loss(next(batches)).backward()
    run.optimizer.log(loss=1.0)
    run.optimizer.step()
    for _ in range(1):
        run.loss(next(batches)).backward()
        run.optimizer.step()
    run.loss(next(batches)).backward()
    with pytest.raises(RuntimeError, match="'loss' has 1 values for 3 microbatches; call it before each step"):
        run.optimizer.step()


def test_one_rank_that_does_not_log_raises_on_all():
    def train(backend):
        run = training(sizes=[8], backend=backend)
        run.loss(next(iter(run.sampler))).backward()
        if backend.world.rank == 0:
            run.optimizer.log(loss=1.0)
        try:
            run.optimizer.step()
        except RuntimeError as error:
            return str(error)
        return ""

    for message in run_ranks(train, 2):
        assert "rank 0 has loss and rank 1 has none; call log() for every microbatch on every rank" in message


@pytest.mark.parametrize("counted", [False, True])
def test_one_rank_that_stops_logging_raises_on_all(counted):
    def train(backend):
        kind, reduction = vbs.ConstantOptimizer, "sum" if counted else "mean"
        run = training(kind, sizes=[8], backend=backend, reduction=reduction)
        try:
            for indices in run.sampler:
                run.loss(indices).backward()
                if backend.world.rank == 0 or run.optimizer.updates == 0:
                    run.optimizer.log(loss=1.0)
                run.optimizer.step(**({"count": 3} if counted else {}))
        except RuntimeError as error:
            return str(error)
        return ""

    for message in run_ranks(train, 2):
        assert "'loss' has values for 50% of the samples of all ranks; call it before each step" in message
