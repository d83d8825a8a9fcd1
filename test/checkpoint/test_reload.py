"""state -> load -> state is the identity for every optimizer that a checkpoint holds: names, dtypes, bits."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint, restore_checkpoint, save_checkpoint, updates
from helpers.processes import run_job
from helpers.reference import network, training
from variable_batch_size.checkpoint.tensor_file import bytes_of
from variable_batch_size.checkpoint.values import encode

KINDS = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
NOT_WRAPPED = torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam
STEPPING = [kind for kind in KINDS if issubclass(kind, torch.optim.Optimizer) and kind not in NOT_WRAPPED]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def flat(state):
    """Return a state as JSON, and the dtype and bytes of each tensor of this rank."""
    tensors = dict[str, torch.Tensor]()
    json = encode(state, "", tensors, {})
    local = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in tensors.items()}
    plain = {name: one.resolve_conj().resolve_neg().contiguous() for name, one in local.items()}
    return json, {name: (one.dtype, bytes(bytes_of(one))) for name, one in plain.items()}


class Masters(torch.optim.Optimizer):
    """SGD with momentum on float32 masters, as those of users for bfloat16; a state with all kinds of values."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float().clone()
                    state["by name"] = OrderedDict(kind="heavy ball", moments=[torch.zeros_like(state["master"])])
                    state["same"], state["steps"] = torch.zeros_like(p), torch.tensor(0)
                momentum = state["by name"]["moments"][0]
                momentum.mul_(0.9).add_(p.grad.float())
                state["steps"] += 1
                state["same"].add_(p.grad)
                p.copy_(state["master"].add_(momentum, alpha=-group["lr"]))


class Rounding(Masters):
    """Loads its state as it likes."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)


class Exact(Masters):
    def load_state_dict(self, state_dict):
        flat = [p for group in self.param_groups for p in group["params"]]
        self.state.update({flat[number]: dict(state) for number, state in state_dict["state"].items()})
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})


def trained(kind, dtype, updates=2, **options):
    def make(parameters, **hyperparameters):
        return kind([p for p in parameters if p.ndim == 2 or kind is not torch.optim.Muon], **hyperparameters)

    options = {"model": network(dtype), "dtype": dtype, "hyperparameters": {"lr": 0.01}} | options
    return training(vbs.ConstantOptimizer, inner=make, **options).run(updates)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [*STEPPING, Masters], ids=lambda kind: kind.__name__)
def test_an_optimizer_has_the_saved_state_after_a_restore(kind, dtype, tmp_path):
    run, later = trained(kind, dtype), trained(kind, dtype, updates=0)
    save_checkpoint(tmp_path, run)
    expected = flat(run.optimizer.inner.state_dict())
    restore_checkpoint(tmp_path, later)
    assert flat(later.optimizer.inner.state_dict()) == expected
    assert flat(later.run(2).optimizer.state_dict()) == flat(run.run(2).optimizer.state_dict())
    assert flat(later.model.state_dict()) == flat(run.model.state_dict())


def test_an_optimizer_of_torch_that_is_a_part_of_its_own_has_it_too(tmp_path):
    states = []
    for restores in (False, True):
        other = nn.Linear(2, 2, dtype=torch.bfloat16)
        own = Masters(other.parameters(), lr=0.1)
        run = training()
        with checkpoint(tmp_path, run, other=other, own=own) as saves:
            if restores:
                assert saves.restore()
            else:
                other(torch.ones(2, dtype=torch.bfloat16)).sum().backward()
                own.step()
                saves.save()
        states.append(flat(own.state_dict()))
    assert states[0] == states[1]


@pytest.mark.parametrize(("saved", "here"), [(torch.bfloat16, torch.float32), (torch.float64, torch.bfloat16)])
def test_a_model_of_another_dtype_keeps_what_had_its_own(saved, here, tmp_path):
    """A state that had the dtype of its parameter has it again, as torch's own optimizers need it."""
    save_checkpoint(tmp_path, trained(Masters, saved))
    later = trained(Masters, here, updates=0)
    with pytest.warns(UserWarning, match="is converted to other dtypes"):
        restore_checkpoint(tmp_path, later)
    for parameter, state in later.optimizer.inner.state.items():
        assert (state["master"].dtype, state["same"].dtype) == (torch.float32, parameter.dtype)
    later.run(1)
    save_checkpoint(tmp_path / "adam", trained(torch.optim.Adam, saved))
    later = trained(torch.optim.Adam, here, updates=0)
    with pytest.warns(UserWarning, match="is converted to other dtypes"):
        restore_checkpoint(tmp_path / "adam", later)
    later.run(1)


@pytest.mark.parametrize("steps", [False, True])
def test_an_optimizer_that_loads_another_state_is_refused_before_there_is_anything_to_lose(steps, tmp_path):
    run = trained(Rounding, torch.bfloat16, updates=0)
    told = r"load_state_dict\(\) of Rounding must give back .* but master was torch.float32 and is torch.bfloat16;"
    with checkpoint(tmp_path, run) as saves:
        run.run(1)
        with pytest.raises(RuntimeError, match=told):
            saves.step() if steps else saves.save()
    assert updates(tmp_path) == []
    with pytest.raises(RuntimeError, match=told):
        checkpoint(tmp_path, run)


def test_one_that_loads_it_right_by_itself_is_accepted(tmp_path):
    run, later = trained(Exact, torch.bfloat16), trained(Exact, torch.bfloat16, updates=0)
    before = flat(run.optimizer.inner.state_dict())
    save_checkpoint(tmp_path, run)
    assert flat(run.optimizer.inner.state_dict()) == before
    restore_checkpoint(tmp_path, later)
    assert flat(later.optimizer.inner.state_dict()) == before


class Stated(Masters):
    """SGD whose state is what `extra` returns for a parameter and its number, and counts updates."""

    def __init__(self, params, lr, extra):
        super().__init__(params, lr)
        self.extra = extra

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                state = self.state[p]
                state["updates"] = state.get("updates", 0) + 1
                state.update(self.extra(number, state["updates"]))
                p.sub_(p.grad, alpha=group["lr"])


class StatedByItself(Stated):
    """Loads its state by a method of its own, which torch's rounds."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)


EXTRAS = {
    "texts": {"a", "b"},
    "numbers": {1, 2},
    "frozen": frozenset({"a"}),
    "sparse": torch.eye(3).to_sparse(),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "float64": torch.ones(2, dtype=torch.float64),
}
WHEN = {"at once": lambda *_: True, "second parameter": lambda number, _: number, "later": lambda _, made: made > 2}


@pytest.mark.parametrize("kind", [Stated, StatedByItself])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", EXTRAS)
def test_a_state_of_each_kind_comes_back_or_is_refused_by_name_whenever_it_appears(name, when, kind, tmp_path):
    def make(parameters, lr):
        return kind(parameters, lr, lambda *place: {name: EXTRAS[name]} if WHEN[when](*place) else {})

    run, later = trained(make, torch.float16, updates=0), trained(make, torch.float16, updates=0)
    told, saved = "", [None]
    with checkpoint(tmp_path, run, keep=9) as saves:
        for _ in range(4):
            run.run(1)
            try:
                saves.save()
                saved.append(flat(run.optimizer.inner.state_dict()))
            except RuntimeError as error:
                told = str(error)
    if told:
        assert re.search(rf"load_state_dict\(\) of {kind.__name__} must give back .*, but {name} ", told)
        assert (kind, len(saved)) == (StatedByItself, 3 if when == "later" else 1)
    with checkpoint(tmp_path, later) as saves:
        assert saves.restore() == (len(saved) > 1)
    if len(saved) > 1:
        assert flat(later.optimizer.inner.state_dict()) == saved[-1]


def sharded(backend, folder, restores):
    states = []
    for kind in (Masters, torch.optim.NAdam, torch.optim.Adam):
        run = trained(kind, torch.float64, 0 if restores else 2, backend=backend, model=fully_shard(network()))
        if restores:
            restore_checkpoint(folder / kind.__name__, run)
        else:
            save_checkpoint(folder / kind.__name__, run)
        states.append(flat(run.optimizer.inner.state_dict()))
    return states


@pytest.mark.slow("starts processes")
@pytest.mark.torch
def test_the_states_of_sharded_parameters_are_restored(tmp_path):
    saved, restored = (run_job("gloo", sharded, tmp_path, restores, ranks=2) for restores in (False, True))
    assert saved == restored


# ------------------------------------------------------------------------------------------------------ hyperparameters


def restored(folder, schedule=None, **hyperparameters):
    """Return what a restore says of these hyperparameters."""
    run = training(inner=torch.optim.SGD, hyperparameters=hyperparameters)
    parts = {} if schedule is None else {"scheduler": schedule(run.optimizer)}
    with checkpoint(folder, run, **parts) as saves, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saves.restore()
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def test_other_hyperparameters_of_the_script_are_named(tmp_path):
    run = training(inner=torch.optim.SGD, hyperparameters={"lr": 0.1, "momentum": 0.5})
    with checkpoint(tmp_path, run) as saves:
        run.run(1)
        saves.save()
    assert restored(tmp_path, lr=0.1, momentum=0.5) == []
    (told,) = restored(tmp_path, lr=torch.tensor(0.25), momentum=0.5, weight_decay=0.01)
    assert "lr of group 0 was 0.1 and is 0.25; weight_decay of group 0 was 0 and is 0.01. To change" in told
    assert told.endswith("To change them, set optimizer.param_groups after restore()")


def test_hyperparameters_that_differ_are_told_at_each_restart(tmp_path):
    """The run goes on with those of the checkpoint, until the script has them again; a tensor of the value is equal."""
    rates, told = [0.1, torch.tensor(0.1), 0.2, 0.2, torch.tensor(0.2), 0.1], list[list[str]]()
    for lr in rates:
        run = training(inner=torch.optim.AdamW, hyperparameters={"lr": lr, "foreach": False})
        with checkpoint(tmp_path, run) as saves, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                saves.restore()
            run.run(1)
            saves.save()
        told.append(sorted({str(one.message).partition("the script's: ")[2].partition(". To")[0] for one in caught}))
        assert float(run.optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert all(one.startswith("lr of group 0 was 0.1 and is 0.2") for line in told for one in line)
    assert [len(line) for line in told] == [0, 0, 1, 1, 1, 0]


SCHEDULES = {
    "step": lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
    "cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=9),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_schedule_has_changed_is_no_difference(name, tmp_path):
    run = training(inner=torch.optim.SGD, hyperparameters={"lr": 0.1, "momentum": 0.5})
    scheduler = SCHEDULES[name](run.optimizer)
    with checkpoint(tmp_path, run, scheduler=scheduler) as saves:
        for _ in range(3):
            run.run(1)
            scheduler.step(*[1.0] * (name == "plateau"))
        saves.save()
    assert run.optimizer.param_groups[0]["lr"] not in (0.1, 0.004)
    assert restored(tmp_path, SCHEDULES[name], lr=0.1, momentum=0.5) == []
    if name == "step":
        (told,) = restored(tmp_path, SCHEDULES[name], lr=0.2, momentum=0.5)
        assert "lr of group 0 was 0.1 and is 0.2" in told


@pytest.mark.parametrize("created", ["first", "late"])
def test_a_rate_that_the_loop_sets_is_no_difference(created, tmp_path):
    run = training(inner=torch.optim.SGD, hyperparameters={"lr": 0.1, "momentum": 0.5})
    if created == "late":
        run.run(1).optimizer.param_groups[0]["lr"] = 0.07
    with checkpoint(tmp_path, run) as saves:
        for update in range(3):
            run.optimizer.param_groups[0]["lr"] = 0.1 / (1 + update)
            run.run(1)
        saves.save()
    assert restored(tmp_path, lr=0.1, momentum=0.5) == []
