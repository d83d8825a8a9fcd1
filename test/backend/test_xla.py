"""Real replicas on XLA:CPU. One launch for each world serves as many tests as possible, because a launch is slow."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import xla_jobs
from variable_batch_size.backend._xla_launch import Rendezvous, run_threads
from variable_batch_size.backend.xla import launch

torch_xla = pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla
Reports = list[dict[str, Any]]  # by rank
STARTUP = 120.0  # seconds, to import torch_xla twice on a busy machine
SHUTDOWN = 14.0  # seconds; an incomplete collective would only end XLA:CPU after 15
IMPORTS = """
import signal, sys
from helpers import xla_jobs
from pathlib import Path
from variable_batch_size.backend.xla import XlaBackend, launch
"""
HANDLE = "signal.signal(signal.SIGTERM, lambda *_: xla_jobs.STOP.set())\n"
TRAIN = "if __name__ == '__main__':\n    launch(xla_jobs.train_until_stopped, (Path(sys.argv[1]),), cores=2)\n"


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_DEVICE", "CPU")
        yield


other_world = pytest.mark.nightly("launches another world")


@pytest.fixture(scope="module", params=[2, *(pytest.param(cores, marks=other_world) for cores in (1, 4))])
def ranks(on_cpu, request, tmp_path_factory):
    """The reports of the ranks of a world."""
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    launch(xla_jobs.report, (folder,), cores=request.param)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(request.param)]


def test_sums_are_exact_in_every_dtype_on_all_ranks(ranks):
    size = len(ranks)
    assert [rank["size"] for rank in ranks] == [size] * size
    for rank in ranks:
        for i, (dtype, total) in enumerate(zip(xla_jobs.MIXED, rank["sums"], strict=True)):
            assert total.dtype == dtype
            assert torch.equal(total, torch.full_like(total, size * i + size * (size - 1) // 2))


def test_a_list_of_tensors_takes_one_collective_per_dtype(ranks):
    expected = ["f32", "s32", "s64"] if len(ranks) > 1 else []  # bfloat16 travels with float32 on XLA:CPU
    assert all(sorted(rank["collectives"]) == expected for rank in ranks)


def test_ranks_wait_on_the_host_for_a_slow_rank(ranks):
    assert all(rank["waited"] for rank in ranks)


def test_a_rank_copies_to_the_host_while_others_wait_in_a_collective(ranks):
    assert torch.equal(ranks[0]["hosted"], torch.tensor([2.0, 4.0, 6.0]))
    assert all(torch.equal(rank["hosted"], torch.tensor([1.0, 2.0, 3.0])) for rank in ranks[1:])


def test_a_scalar_keeps_the_dtype_of_a_half_precision_tensor_but_is_not_rounded_to_it(ranks):
    assert all(torch.equal(rank["5/3"], torch.full((2,), 5 / 3, dtype=torch.bfloat16)) for rank in ranks)


def test_a_squared_norm_is_exact(ranks):
    for rank in ranks:
        for dtype, found in rank["norms"].items():
            exact = sum(tensor.double().square().sum().item() for tensor in xla_jobs.norm_of(dtype))
            assert found.item() == pytest.approx(exact, rel=1e-12 if dtype is torch.float64 else 1e-6), dtype


@pytest.mark.parametrize("cause", ["scalar", "lr"])
def test_scalars_and_learning_rates_do_not_compile(ranks, cause):
    assert [rank[f"{cause} compiles"] for rank in ranks] == [0] * len(ranks)


@pytest.mark.slow("launches XLA")
@pytest.mark.parametrize(
    "job", [xla_jobs.fail_in_one_rank, pytest.param(xla_jobs.fail_in_one_loader, marks=other_world)]
)
def test_an_exception_ends_all_ranks_immediately_with_its_traceback(tmp_path, capfd, job):
    with pytest.raises(RuntimeError, match="an exception ended one"):
        launch(job, (tmp_path,), cores=2)
    pid, when = (tmp_path / "failed").read_text().split()
    assert time.time() - float(when) < SHUTDOWN
    assert not alive(int(pid))
    assert re.search("Traceback.*in fail\n.*LookupError: nothing on shelf 17", capfd.readouterr().err, re.DOTALL)
    assert "CPU_NUM_DEVICES" not in os.environ  # only the child had the variables


@other_world
def test_systemexit_in_one_rank_ends_a_script_that_has_used_xla_with_the_same_code(tmp_path):
    script = """
def work(code):
    if XlaBackend().world.rank == 1:
        sys.exit(code)
    XlaBackend().barrier()

if __name__ == "__main__":
    import torch_xla
    torch_xla.device()
    launch(work, (21,), cores=2)
"""
    assert start(script, tmp_path).wait(STARTUP) == 21


@pytest.mark.slow("launches XLA")
@pytest.mark.parametrize(
    ("script", "by", "code"),
    [
        (TRAIN, signal.SIGTERM, 128 + signal.SIGTERM),
        pytest.param(HANDLE + TRAIN, signal.SIGTERM, 0, marks=other_world),
        pytest.param(HANDLE + TRAIN, signal.SIGINT, -signal.SIGINT, marks=other_world),  # reaches the child as SIGTERM
        pytest.param(TRAIN, signal.SIGKILL, -signal.SIGKILL, marks=other_world),
    ],
    ids=["SIGTERM", "SIGTERM with a handler in the child", "Ctrl-C", "SIGKILL"],
)
def test_a_signal_to_the_parent_leaves_no_child_training(tmp_path, script, by, code):
    parent = start(script, tmp_path)
    try:
        assert eventually(lambda: child_of(tmp_path), STARTUP)
        parent.send_signal(by)
        assert parent.wait(STARTUP) == code
        assert eventually(lambda: not alive(child_of(tmp_path)), STARTUP)
    finally:
        for pid in filter(alive, (parent.pid, child_of(tmp_path))):
            os.kill(pid, signal.SIGKILL)
        parent.wait()


@other_world
def test_several_replicas_that_launch_did_not_start_raise():
    code = """
import torch_xla, torch_xla.core.xla_model as xm
from variable_batch_size.backend.xla import XlaBackend
xm.set_replication(torch_xla.device(), torch_xla.devices())  # as torch_xla.launch does
XlaBackend()
"""
    variables = environment() | {"CPU_NUM_DEVICES": "2"}
    run = subprocess.run([sys.executable, "-c", code], env=variables, stderr=subprocess.PIPE)
    assert b"2 replicas on XLA:CPU must be started together, but these were not" in run.stderr
    assert b"; call variable_batch_size.backend.xla.launch(fn, args, cores=2)" in run.stderr


def test_a_rendezvous_raises_on_the_other_ranks_when_one_has_left():
    rendezvous, messages = Rendezvous(3), []

    def rank(barriers):
        try:
            for _ in range(barriers):
                rendezvous.wait()
            rendezvous.leave()
        except RuntimeError as error:
            messages.append(str(error))

    run_threads([partial(rank, barriers) for barriers in (1000, 1001, 1001)])
    assert len(messages) == 2
    assert all("give all ranks the same number of updates" in message for message in messages)


@other_world
def test_a_handler_runs_if_another_thread_receives_the_signal():
    """The kernel may choose any thread; and a signal that comes just before the main thread waits does not wake it."""
    handled, job = threading.Event(), list[bool]()

    def rank():
        time.sleep(0.2)  # the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        job.append(handled.wait(SHUTDOWN))

    before = signal.signal(signal.SIGUSR1, lambda *_: handled.set())
    try:
        run_threads([rank])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert job == [True]


@pytest.mark.slow("launches XLA")
def test_learning_rates_do_not_compile_without_launch_either(tmp_path):
    script = """
if __name__ == "__main__":
    import torch, torch_xla
    from helpers import xla_jobs
    from variable_batch_size.backend.xla import compiled_graphs
    counts = []
    for lr in (0.5, 1.0, 0.0, 0.25):
        x = torch.ones(5).to(torch_xla.device())
        torch_xla.sync()
        xla_jobs.sgd_step(x, XlaBackend().hyperparameter(lr))
        torch_xla.sync()
        counts.append(compiled_graphs())
    sys.exit(40 + counts[-1] - counts[0])
"""
    assert start(script, tmp_path).wait(60) == 40


def test_launch_on_a_tpu_calls_torch_xla(monkeypatch):
    calls = []

    def torch_xla_launch(fn, args):
        fn(3, *args)  # torch_xla passes the ordinal first

    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr(torch_xla, "launch", torch_xla_launch)
    launch(calls.append, ("all cores",))
    assert calls == ["all cores"]


def environment():
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def start(script, folder):
    """Start a script that uses `launch`, in a process of its own."""
    path = folder / "program.py"
    path.write_text(IMPORTS + script)
    return subprocess.Popen([sys.executable, str(path), str(folder)], env=environment())


def child_of(folder):
    """Return the pid of the process that runs `train_until_stopped`, or 0 before it does."""
    return next((int(path.name) for path in folder.iterdir() if path.name.isdigit()), 0)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition, seconds):
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(met)
