"""Processes of which one takes a wrong turn: all of them end, with the same sentence, soon."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint
from helpers.processes import run_job
from helpers.reference import network, training

PART_AFTER = 20  # updates


def part(run, saves, metrics, how):
    """Do on one rank what others do not, and return whether the loop is to go on in the next epoch."""
    group = run.optimizer.param_groups[0]
    if how in group:
        group[how] = group[how] / 2
    elif how.startswith("leaves"):
        raise SystemExit(0)
    elif how == "is signalled":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how.startswith("saves"):
        saves.save()
    elif how.startswith("adds a group"):
        run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    elif how == "loads alone":
        run.optimizer.load_state_dict(run.optimizer.state_dict())
    elif how == "reads metrics alone":
        metrics.read()
    return how in ("epoch", "loads alone")  # the loop ends


def loop(run, saves, metrics, how, *, odd):
    for epoch in vbs.remaining_epochs(run.sampler, run.optimizer, until=5):
        for indices in run.sampler:
            loss = run.loss(indices)
            run.optimizer.backward(loss)
            metrics.add(loss=loss)
            if run.optimizer.step():
                saves.step()
                if run.optimizer.updates == PART_AFTER:
                    if odd:
                        if part(run, saves, metrics, how):
                            break
                    elif how == "saves":
                        metrics.read()
                    elif how == "leaves before a save":
                        saves.save()
                    elif how.endswith("late rank") and dist.get_rank() == 0:
                        time.sleep(3)  # it comes to the next sum when the others have ended
        assert epoch < 4, "the ranks have not heard that they differ"


def in_ddp(model):
    """A rank that takes no part in a backward is missed when the time of the process group is over."""
    return DistributedDataParallel(model, process_group=dist.new_group(timeout=timedelta(seconds=5)))


def train(backend, folder, how):
    """Train until an error ends it, after the last rank has parted from the others.

    Return the message of the error, the seconds and the updates.
    """
    began, message = time.monotonic(), ""
    try:
        with vbs.Preemption():
            how, _, wrapper = how.partition(" in ")
            model = in_ddp(network()) if wrapper else network()
            run = training(
                vbs.ConstantOptimizer, [8], dataset_size=40_000, hyperparameters={"lr": 1e-3, "weight_decay": 0.01},
                model=model, backend=backend,
            )  # fmt: skip
            odd = backend.world.rank == backend.world.size - 1
            with checkpoint(folder / "saved", run, every=10**6) as saves:
                loop(run, saves, vbs.Accumulator(run.optimizer), how, odd=odd)
    except (RuntimeError, SystemExit) as error:
        message = str(error)
    return message, time.monotonic() - began, run.optimizer.updates


SECONDS = 30  # half of what a rank waits for the others
HYPERPARAMETER = r"same {} of parameter group 0, but it is {} on rank 0 and {} on rank {{}}; set it to"

PASSED = r"every rank must come to {}, but rank {{}} waits there and rank \d makes the next update; load, save, read"


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("size", [3])
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("weight_decay", HYPERPARAMETER.format("weight_decay", r"0\.01", r"0\.005")),
        ("saves alone", PASSED.format("a save of the Checkpoint")),
        ("loads alone", PASSED.format("the first update .*, of a restored state, .*")),
        ("lr in DDP", HYPERPARAMETER.format("lr", r"0\.001", r"0\.0005")),
        *(
            pytest.param(*case, marks=pytest.mark.nightly("starts processes"))
            for case in [
                (
                    "epoch",
                    r"same epoch, but it is 0 on rank 0 and 1 on rank {}; call set_epoch with the same epoch on eve",
                ),
                (
                    "saves",
                    r"same order, but rank 0 is in Accumulator\.read\(\) and rank {} in a save of the Checkpoint; call",
                ),
                ("is signalled", "^143$"),
                ("adds a group alone", PASSED.format("the first update .*, or with other parameters")),
                ("reads metrics alone", PASSED.format(r"Accumulator\.read\(\)")),
                ("saves alone in DDP", PASSED.format("a save of the Checkpoint")),
                ("loads alone in DDP", PASSED.format("the first update .*, of a restored state, .*")),
                ("adds a group beside a late rank", PASSED.format("the first update .*, or with other parameters")),
            ]
        ),
    ],
    ids=lambda value: value.replace(" ", "_") if len(value) < 30 else "",
)
def test_all_ranks_end_with_one_sentence_soon_after_one_has_parted(how, sentence, size, tmp_path):
    messages, seconds, updates = zip(*run_job("gloo", train, tmp_path, how, ranks=size), strict=True)
    assert messages == size * (messages[0],)
    with pytest.raises(RuntimeError, match=sentence.format(size - 1)):
        raise RuntimeError(messages[0])
    assert max(seconds) < SECONDS
    assert min(updates) >= PART_AFTER


@pytest.mark.slow("starts processes")
@pytest.mark.torch
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("leaves", "restart all ranks from the last checkpoint"),
        ("leaves in DDP", "[Cc]onnection|closed"),
        ("leaves before a save", r"every rank must come to a save of the Checkpoint, but rank {} has not, and a rank"),
    ],
    ids=lambda value: value.replace(" ", "_") if len(value) < 25 else "",
)
def test_ranks_do_not_wait_long_for_a_process_that_has_left(how, sentence, size, tmp_path):
    *others, _ = run_job("gloo", train, tmp_path, how, ranks=size)
    for message, seconds, updates in others:
        with pytest.raises(RuntimeError, match=sentence.format(size - 1)):
            raise RuntimeError(message)
        assert seconds < SECONDS
        assert updates == PART_AFTER
