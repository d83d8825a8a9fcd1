"""Background saves: what they hold, who waits for them, and when they are published."""

from __future__ import annotations

import copy
import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint, intact, path_of, restore_checkpoint, start, updates
from helpers.reference import SIZES, assert_equal, training
from helpers.sharded import always_sharded, wide
from variable_batch_size.checkpoint import tensor_file
from variable_batch_size.checkpoint.names import Names
from variable_batch_size.checkpoint.write_thread import wait_for_all
from variable_batch_size.testing import run_ranks

__all__ = ["always_sharded"]


def tensors(state):
    """Return the tensors of a nested state by path."""
    if isinstance(state, torch.Tensor):
        return {"": state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    return {f"{key}.{path}": value for key, part in items for path, value in tensors(part).items()}


@pytest.mark.parametrize("kind", [vbs.LinearRuleOptimizer, vbs.AdaScaleOptimizer, vbs.SqrtSDERuleOptimizer])
@pytest.mark.parametrize("world", [1, 2])
def test_a_background_save_holds_the_state_at_the_call(kind, world, tmp_path):
    """The blob is large enough for all tensors to change long before it is written."""
    stop = 3

    def train(backend):
        run, blob = training(kind, backend=backend), nn.Linear(1500, 1500)
        with checkpoint(tmp_path, run, blob=blob, every=1) as saves:
            run.run(1)
            assert saves.step()
            run.run(stop - 1)
            state = {
                "model": run.model.state_dict(),
                "optimizer": Names(run.model).optimizer_state(run.optimizer),
                "blob": blob.state_dict(),
            }
            state = copy.deepcopy(state)
            assert saves.step()
            for _ in range(len(SIZES) - stop):
                with torch.no_grad():
                    blob.weight.zero_()
                run.run(1)
        assert_equal(run.weights(), training(kind).run(len(SIZES)).weights())
        return state

    expected = tensors(run_ranks(train, world)[0])
    found = tensors(vbs.read_checkpoint(path_of(tmp_path, stop))["parts"])
    assert len(expected) > 5
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    resumed = training(kind)
    restore_checkpoint(tmp_path, resumed, blob=nn.Linear(1500, 1500))
    assert_equal(resumed.run(len(SIZES) - stop).weights(), training(kind).run(len(SIZES)).weights())


def test_save_returns_the_path_at_which_it_publishes(tmp_path):
    run = training().run(1)
    with checkpoint(tmp_path, run) as saves:
        first = saves.save(wait=False)
        run.run(1)
        second = saves.save(wait=False)
        assert intact(first)
        third = saves.save()
        assert saves.latest == third
    names = ["update-00000001-0001-1-1", "update-00000002-0001-2-1", "update-00000002-0001-3-1"]
    assert [first, second, third] == [str(tmp_path / name) for name in names]
    assert updates(tmp_path) == [1, 2]


def test_restore_waits_for_the_background_save(tmp_path):
    def train(backend):
        run = training(backend=backend)
        with checkpoint(tmp_path, run, blob=nn.Linear(1000, 1000), every=2) as saves:
            run.run(2)
            assert saves.step()
            run.run(1)
            assert saves.restore()
            assert run.optimizer.updates == 2
        return run.run(1)

    for run in run_ranks(train, 2):
        assert_equal(run.weights(), training().run(3).weights())


def test_close_waits_for_the_background_save(tmp_path):
    run = training().run(1)
    saves = checkpoint(tmp_path, run, blob=nn.Linear(1000, 1000))
    saves.save(wait=False)
    saves.close()
    assert intact(path_of(tmp_path, 1))
    saves.close()
    with checkpoint(tmp_path, run):
        pass


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_another_checkpoint_on_the_folder_waits_for_the_background_save(
    dropped, world, tmp_path, monkeypatch, always_sharded
):
    """As when a notebook's cell runs again. Nothing is written before the other one waits."""
    write, saved, waited = tensor_file.write, [], threading.Event()

    def write_late(*arguments):
        assert waited.wait(100)
        return write(*arguments)

    def wait():
        if len(saved) == world:
            waited.set()
        return wait_for_all()

    monkeypatch.setattr(tensor_file, "write", write_late)
    monkeypatch.setattr("variable_batch_size.checkpoint.checkpoint.wait_for_all", wait)

    def run(backend):
        run = wide(backend).run(2)
        saves = checkpoint(tmp_path, run, blob=nn.Linear(9, 9))
        saved.append(saves.save(wait=False))
        if dropped:
            del saves
        resumed = wide(backend)
        with checkpoint(tmp_path, resumed, blob=nn.Linear(9, 9)) as saves:
            assert saves.restore()
        return resumed.optimizer.updates

    try:
        assert run_ranks(run, world) == world * [2]
    finally:
        waited.set()


another = pytest.mark.nightly("starts another process")


@pytest.mark.slow("starts a process")
@pytest.mark.parametrize(
    "end", ["", pytest.param("raise SystemExit(3)", marks=another), pytest.param("del saves, run", marks=another)]
)
def test_a_process_exits_after_the_background_save(end, tmp_path):
    script = f"""
run = training()
saves = checkpoint(folder, run, blob=torch.nn.Linear(2000, 2000), every=1)
run.run(1)
saves.step()
{end}
"""
    process = start(script, tmp_path)
    _, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (3 if "3" in end else 0, "")
    assert updates(tmp_path) == [1]
    assert intact(path_of(tmp_path, 1))


def test_a_failed_save_raises_even_while_another_exception_is_handled(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device")

    run = training().run(1)
    try:
        raise MemoryError
    except MemoryError:
        saves = checkpoint(tmp_path, run)
        monkeypatch.setattr(tensor_file, "write", fails)
        saves.save(wait=False)
        with pytest.raises(RuntimeError, match="could not be written to"), saves:
            pass


def fail(text):
    raise KeyError(text)


def caught(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_a_write_is_raised_once_on_every_rank(failing, tmp_path, monkeypatch, always_sharded):
    """A close() without the other ranks warns of it."""
    whole, full, one_at_a_time = tensor_file.write, [True], threading.Lock()

    def write(file, *rest):
        if full and f"tensors-{failing}" in file.name:
            raise OSError(28, "No space left on device")
        return whole(file, *rest)

    monkeypatch.setattr(tensor_file, "write", write)

    def run(backend):
        run, errors = wide(backend).run(1), []
        saves = checkpoint(tmp_path, run, keep=9)
        for call in (saves.save, saves.restore):
            saves.save(wait=False)
            errors += [caught(call), caught(saves.restore)]
        saves.save(wait=False)
        with one_at_a_time, warnings.catch_warnings(record=True) as warned:  # it would record those of all threads
            warnings.simplefilter("always")
            saves.__exit__(KeyError, KeyError(), None)
        return errors + [str(one.message) for one in warned if one.category is RuntimeWarning]

    for rank, told in enumerate(run_ranks(run, 2)):
        once = "Checkpoint update-00000001 could not be written"
        assert [text.startswith(once) for text in told] == [True, False, True, False, *[True] * (rank == failing)], told
    full.clear()
    assert updates(tmp_path) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_state_dict_that_fails_on_one_rank_prevents_the_save_on_all(failing, tmp_path):
    """As the optimizer's does after an exception within its step."""

    def run(backend):
        run, errors = training(backend=backend).run(1), []
        with checkpoint(tmp_path, run, every=1) as saves:
            run.run(1)
            state_dict = run.optimizer.state_dict
            if backend.world.rank == failing:
                run.optimizer.state_dict = partial(fail, "load a state first")
            for save in (saves.save, saves.step, partial(saves.save, wait=False)):
                errors.append(caught(save))
            run.optimizer.state_dict = state_dict
            assert updates(tmp_path) == []
            saves.save()
        return errors

    assert run_ranks(run, 2) == 2 * [3 * ["'load a state first'"]]
    assert updates(tmp_path) == [2]
