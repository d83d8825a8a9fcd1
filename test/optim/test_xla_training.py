"""The laws of updates, and one graph, on PyTorch/XLA: real replicas on several cores of this CPU."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from helpers.laws import check, features_of
from helpers.reference import batches, data, training
from helpers.worlds import Layout

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

from torch_xla.distributed.parallel_loader import MpDeviceLoader  # noqa: E402

import variable_batch_size as vbs  # noqa: E402
from helpers.xla_training import (  # noqa: E402
    SAMPLES,
    Job,
    XlaCase,
    measure,
    overflow,
    part,
    run_jobs,
    tell,
    unequal_speeds,
    unsupported_optimizers,
    watch,
)
from variable_batch_size.backend.xla import launch  # noqa: E402
from variable_batch_size.optim.tensors.late import READ_EVERY  # noqa: E402

WARM = 6  # updates after which nothing may compile
FLAGS = 1 + READ_EVERY  # numbers that each of several ranks reads once: what has gradients, and what was compared
MANY = {seed: tuple(random.Random(seed).sample(range(1, SAMPLES + 1), 40)) for seed in (0, 1, 2, 4)}  # all different
EVERY = 5  # updates between two questions to a controller
WIDTHS = iter(range(5, 100))  # hidden units of the trainings whose compilations count


def watched(kind, seed, cores, *options, **more):
    return Job(cores, watch, (XlaCase(kind, MANY[seed], 8, width=next(WIDTHS), **more), WARM, *options))


def measured(dtype, cores):
    return Job(cores, measure, (XlaCase(vbs.ConstantOptimizer, MANY[2][:30], 8, dtype, width=next(WIDTHS)), WARM))


JOBS = {
    "silent 1": watched(vbs.ConstantOptimizer, 0, 1),
    "silent 2": watched(vbs.SqrtSDERuleOptimizer, 0, 2),  # scales betas
    "silent 3": watched(vbs.ConstantOptimizer, 0, 3),
    "log 1": watched(vbs.ConstantOptimizer, 2, 1, False, True),
    "log 3": watched(vbs.LinearRuleOptimizer, 2, 3, False, True),
    "log noise 2": watched(vbs.AdaScaleOptimizer, 2, 2, False, True),
    "progress 1": watched(vbs.AdaScaleOptimizer, 1, 1, True),
    "progress 3": watched(vbs.AdaScaleOptimizer, 1, 3, True),
    "progress of AdamScale 2": watched(vbs.AdamScaleOptimizer, 1, 2, True),
    "progress of Surge 2": watched(vbs.SurgeRuleOptimizer, 1, 2, True),
    **{f"controller {cores}": watched(vbs.AdaScaleOptimizer, 4, cores, True, every=EVERY) for cores in (1, 2)},
    "counts 1": watched(vbs.ConstantOptimizer, 2, 1, counted=True),
    "counts 2": watched(vbs.ConstantOptimizer, 2, 2, counted=True),
    "overflow 2": Job(2, overflow, (XlaCase(vbs.AdaScaleOptimizer, (20, 7, 33, 12, 50, 3), 4), 3)),
    "means 1": measured(torch.float32, 1),
    "means 2": measured(torch.float64, 2),
    "means 3": measured(torch.float32, 3),
    "unsupported 1": Job(1, unsupported_optimizers),
    "speeds 2": Job(2, unequal_speeds),
    "told 2": Job(2, tell, ((20, 20, 1, 2, 3),)),
    "parted 2": Job(2, part),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return a function that returns the folder of a job, after its world has run all of its jobs."""
    launched = {}

    def folder(name):
        cores = JOBS[name].cores
        if cores not in launched:
            path = tmp_path_factory.mktemp(f"cores{cores}")
            launch(run_jobs, (path, [item for item in JOBS.items() if item[1].cores == cores]), cores=cores)
            launched[cores] = path
        return launched[cores] / name

    return folder


def jobs(*beginnings):
    """Parametrize a test by the jobs whose names begin so; one world of them is launched before a merge."""
    names = [name for name in JOBS if name.startswith(beginnings)]
    slow, nightly = pytest.mark.slow("launches XLA"), pytest.mark.nightly("launches another world")
    return pytest.mark.parametrize(
        "job", [pytest.param(name, marks=slow if JOBS[name].cores == 2 else nightly) for name in names]
    )


@jobs("speeds")
def test_speeds_need_ranks_that_run_on_their_own(job, folder_of):
    for rank in range(2):
        message = (folder_of(job) / f"rank{rank}").read_text()
        assert message.startswith("speeds= needs a fixed world whose ranks run on their own, got a device on which all")


def test_a_loader_for_a_device_must_read_the_optimizers_sampler():
    run = training()
    other = MpDeviceLoader(DataLoader(range(9), batch_sampler=[[0], [1]]), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"must read the optimizer's own sampler, but it reads another list"):
        vbs.updates(other, run.optimizer)
    vbs.updates(MpDeviceLoader(DataLoader(range(50), batch_sampler=run.sampler), torch.device("cpu")), run.optimizer)


def delta_of(job, folder_of, collectives=1):
    """Return what was counted, after the check of the collectives of an update on a rank, if there are several."""
    delta = torch.load(folder_of(job) / "delta.pt")
    cores = JOBS[job].cores
    assert delta.pop("all_reduce") == (collectives * (len(MANY[0]) - WARM) * cores if cores > 1 else 0)
    return delta


@jobs("counts")
def test_denominators_compile_nothing_and_take_one_collective_more(job, folder_of):
    delta, cores = delta_of(job, folder_of, collectives=2), JOBS[job].cores
    assert delta.pop("to host") == (FLAGS * cores if cores > 1 else 0)
    assert delta == dict.fromkeys(delta, 0)


@jobs("silent")
def test_nothing_compiles_and_the_host_reads_nothing_while_batch_size_and_lr_change(job, folder_of):
    delta, cores = delta_of(job, folder_of), JOBS[job].cores
    assert delta.pop("to host") == (FLAGS * cores if cores > 1 else 0)
    assert delta == dict.fromkeys(delta, 0)
    rows = (folder_of(job) / "log" / "scalars.csv").read_text().splitlines()
    assert len(rows) == 1 + len(MANY[0]) // 5


@jobs("log")
def test_logged_values_compile_nothing_and_are_read_later(job, folder_of):
    delta, updates = delta_of(job, folder_of), len(MANY[2])
    rows = range(WARM - 2, updates - 2)  # those of the last 2 updates are read when the tracker is closed
    numbers = 6 if "noise" in job else 2  # means, norm; lr, progress (2 reads), noise
    assert (
        delta.pop("to host") <= numbers * len([update for update in rows if update % 5 == 0]) + FLAGS * JOBS[job].cores
    )
    assert delta == dict.fromkeys(delta, 0)
    table = (folder_of(job) / "log" / "scalars.csv").read_text().splitlines()
    assert len(table) == 1 + updates // 5
    one = table[0].split(",").index("one")
    assert [float(row.split(",")[one]) for row in table[1:]] == pytest.approx([1.0] * 8)


@jobs("progress")
def test_the_host_reads_only_the_progress_of_earlier_updates(job, folder_of):
    delta, cores = delta_of(job, folder_of), JOBS[job].cores
    reads = len(MANY[1]) - WARM + FLAGS * (cores > 1)
    assert delta.pop("to host") == reads * cores
    assert delta == dict.fromkeys(delta, 0)


@jobs("controller")
def test_a_controller_compiles_nothing_and_reads_noise_and_progress_later(job, folder_of):
    delta, cores, updates = delta_of(job, folder_of), JOBS[job].cores, len(MANY[4])
    questions = [update for update in range(WARM - 1, updates - 1) if update % EVERY == 0]
    reads = updates - WARM + FLAGS * (cores > 1)  # of the progress schedule, as above
    assert delta.pop("to host") == reads * cores + 2 * len(questions)  # on rank 0 only
    assert delta == dict.fromkeys(delta, 0)


@jobs("overflow")
def test_a_nonfinite_gradient_leaves_weights_noise_and_progress_unchanged(job, folder_of):
    for rank in range(JOBS[job].cores):
        before, skipped, after = torch.load(folder_of(job) / f"overflow{rank}.pt")
        assert all(map(torch.equal, before[0], skipped[0]))
        assert before[1:3] == skipped[1:3]
        assert not all(map(torch.equal, skipped[0], after[0]))
        assert after[1][2] == before[1][2] + 1
        for weights, *_, seen_by_hook in (before, skipped, after):
            assert all(map(torch.equal, weights, seen_by_hook))


@jobs("means")
def test_means_equal_those_of_one_process_and_add_compiles_and_reads_nothing(job, folder_of):
    case = JOBS[job].arguments[0]
    used, x = list(batches(case.sizes, SAMPLES)), data(SAMPLES)[0][:, 0]
    for rank in range(JOBS[job].cores):
        found, delta = torch.load(folder_of(job) / f"means{rank}.pt")
        assert delta == dict.fromkeys(delta, 0)
        for means, updates in zip(found, (used[:WARM], used[WARM:]), strict=True):
            samples = np.concatenate(updates)
            assert 0 < means.pop("loss") < 10
            uneven = (len(updates[0]) * 2**30 + 0.5 * (len(samples) - len(updates[0]))) / len(samples)
            assert means.pop("uneven") == pytest.approx(uneven, rel=1e-12)  # a float32 sum would be 1e-8 too small
            expected = {"x": float(x[samples].mean()), "number": 2, "samples": len(samples)}
            assert means == pytest.approx(expected, rel=1e-12 if case.dtype is torch.float64 else 1e-6)


@jobs("unsupported")
def test_rejects_optimizers_and_parameters_that_adascale_does_not_support_on_xla(job, folder_of):
    *kinds, half, timescale = torch.load(folder_of(job) / "messages.pt")
    for name, text in zip(("Rprop", "ASGD", "Adafactor"), kinds, strict=True):
        assert text.startswith("on xla a learning rate that depends on the noise needs an optimizer whose change is")
        assert f"unlike {name}; use another" in text
    assert "at least 32 bits" in half
    assert "some are torch.bfloat16; keep the parameters in float32" in half
    assert timescale.endswith("use the rule without ConstantTimescale")


@jobs("told")
def test_several_ranks_are_told_of_a_parameter_without_a_gradient_on_xla(job, folder_of):
    for rank in range(JOBS[job].cores):
        assert "pass find_unused_parameters=True to the optimizer" in (folder_of(job) / f"rank{rank}").read_text()


@jobs("parted")
def test_replicas_that_differ_in_one_update_are_told_so_on_xla(job, folder_of):
    first, other = [(folder_of(job) / f"rank{rank}").read_text() for rank in range(2)]
    assert first == other
    assert first == (
        "31 after all ranks must train with the same weight_decay of parameter group 0, but it is 0.5 on rank 0 and "
        "0.25 on rank 1; set it to one value on all ranks, and restore a checkpoint of at most 3 updates: the weights "
        "differ since"
    )


LAYOUTS = {cores: Layout(cores, by="plain", where="cores") for cores in (1, 2, 4)}


@pytest.mark.parametrize(
    ("cores", "name"),
    [
        pytest.param(
            cores,
            name,
            marks=pytest.mark.slow("launches XLA") if cores == 2 else pytest.mark.nightly("launches another world"),
        )
        for cores, layout in LAYOUTS.items()
        for name in features_of(layout)
    ],
)
def test_replicas_make_the_updates_of_one_process_from_any_state(cores, name):
    check(name, LAYOUTS[cores])
