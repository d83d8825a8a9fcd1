"""`vbs checkpoint`, on checkpoints of a training."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint, path_of, save_checkpoint, truncate_state
from helpers.console import run_main
from helpers.pages import DOCS, blocks
from helpers.processes import run_job
from helpers.reference import ADAM, assert_equal, network, training
from variable_batch_size.checkpoint import conversion


class Done(NamedTuple):
    """What a command has returned and printed."""

    returncode: int
    stdout: str
    stderr: str


def execute(*words):
    return Done(*run_main("checkpoint", *words))


OPTIONS = {"kind": vbs.AdamScaleOptimizer, "inner": torch.optim.AdamW, "hyperparameters": ADAM}


@pytest.fixture
def trained(tmp_path):
    run = training(**OPTIONS)
    with checkpoint(tmp_path / "run", run, best="min:loss") as saves:
        for loss in (0.5, 1.5, 2.5):
            run.run(1)
            saves.report(loss=loss)
            saves.save()
    return run, tmp_path / "run"


def test_show_and_verify(trained):
    run, folder = trained
    shown = execute("show", folder)
    lines = shown.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [[path_of(folder, n).name, str(n)] for n in (3, 2, 1)]
    assert lines[-1].split()[-3:] == ["loss", "0.5", "best"]
    one = execute("show", path_of(folder, 3)).stdout
    assert "optimizer" in one
    assert "vbs-checkpoint" in one
    assert "AdamScaleRule" in one
    rates = json.loads(execute("show", path_of(folder, 3), "--json").stdout)
    assert rates["reference_lr"] == [ADAM["lr"]]
    assert rates["last_lr"] == pytest.approx(ADAM["lr"] * rates["last_lr_factor"])
    assert rates["weights"] == vbs.weights_hash(run.model)
    assert rates["weights"] in one
    facts = json.loads(execute("show", folder, "--json").stdout)
    assert facts[path_of(folder, 1).name]["metrics"] == {"loss": 0.5}
    assert execute("verify", folder).returncode == 0
    truncate_state(path_of(folder, 2))
    assert execute("show", folder).stdout.splitlines()[2].endswith("damaged")
    done = execute("verify", folder)
    assert (done.returncode, [line.rpartition(": ")[2] for line in done.stdout.splitlines()]) == (
        1,
        ["intact", "checksum mismatch of tensors-0.safetensors", "intact"],
    )
    as_json = json.loads(execute("verify", folder, "--json").stdout)
    assert [damage and damage[:17] for damage in as_json.values()] == [None, "checksum mismatch", None]
    (path_of(folder, 2) / "rank-0.json").write_text("{")
    assert "damaged" in execute("show", folder).stdout
    missing = execute("show", folder / "none")
    assert (missing.returncode, "nothing is there" in missing.stderr, "Errno" in missing.stderr) == (1, True, False)


@pytest.mark.parametrize("samples", [True, False])
def test_a_training_begins_with_the_states_of_one_that_had_a_sampler(samples, tmp_path):
    """Its position stays behind."""
    run = training().run(3)
    save_checkpoint(tmp_path / "run", run)
    conversion.to_torch(tmp_path / "run", tmp_path / "state.pt")
    assert set(torch.load(tmp_path / "state.pt", weights_only=True)) == {"model", "optimizer"}
    conversion.from_torch(tmp_path / "state.pt", tmp_path / "begun")
    later = training()
    parts = {"model": later.model, "optimizer": later.optimizer}
    with vbs.Checkpoint(tmp_path / "begun", **parts, **({"sampler": later.sampler} if samples else {})) as saves:
        assert saves.restore(strict=False)
        assert_equal(later.weights(), run.weights(), tolerance=0)
        assert later.run(2).optimizer.updates == 2
        saves.save()


def test_a_training_begins_with_the_weights_of_a_data_parallel_model(tmp_path):
    run = training().run(1)
    torch.save({"model": {f"module.{key}": one for key, one in run.model.state_dict().items()}}, tmp_path / "state.pt")
    conversion.from_torch(tmp_path / "state.pt", tmp_path / "begun")
    later = training()
    with checkpoint(tmp_path / "begun", later) as saves:
        with pytest.raises(RuntimeError, match="has other parts than this training: optimizer is not in it"):
            saves.restore()
        assert saves.restore(strict=False)
    assert_equal(later.weights(), run.weights(), tolerance=0)
    assert not later.optimizer.inner.state


def test_a_module_of_that_name_keeps_it(tmp_path):
    state = torch.optim.swa_utils.AveragedModel(network()).state_dict()
    torch.save({"model": state}, tmp_path / "state.pt")
    conversion.from_torch(tmp_path / "state.pt", tmp_path / "begun")
    assert set(vbs.read_checkpoint(tmp_path / "begun")["parts"]["model"]) == set(state)


class Tied(torch.nn.Module):
    """A model with tied, transposed, half and integer tensors."""

    def __init__(self):
        super().__init__()
        self.first, self.head = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        self.head.weight = self.first.weight
        self.norm = torch.nn.LayerNorm(2).bfloat16()
        self.register_buffer("seen", torch.tensor(3))
        self.conv = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)


def test_the_page_loads_the_weights_without_the_library(tmp_path, monkeypatch):
    run, model = training(), Tied()
    run.run(1)
    with vbs.Checkpoint(tmp_path / "run", model=model, optimizer=run.optimizer) as saves:
        saves.save()
    done = execute("to-safetensors", tmp_path / "run", tmp_path / "model.safetensors")
    assert done.returncode == 0, done.stderr
    (code,) = (block for block in blocks(DOCS / "checkpoints.md", "python") if "load_file" in block)
    assert "variable_batch_size" not in code
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(5)
    other = Tied()
    exec(code, {"model": other})
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
        assert other.state_dict()[name].dtype == tensor.dtype


def sharded(backend, folder):
    run = training(backend=backend, model=fully_shard(network())).run(2)
    save_checkpoint(folder, run, best="min:loss")
    return run.weights()


@pytest.mark.slow("starts processes")
def test_the_weights_of_a_sharded_training_are_whole(tmp_path):
    weights, _ = run_job("gloo", sharded, tmp_path / "run", ranks=2)
    conversion.to_safetensors(tmp_path / "run", tmp_path / "model.safetensors")
    model = network()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_equal([one.detach().numpy() for one in model.parameters()], weights, tolerance=0)


def test_what_a_file_of_safetensors_cannot_hold_is_named(tmp_path, monkeypatch):
    run, model = training(), network()
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    with vbs.Checkpoint(tmp_path / "run", model=model, optimizer=run.optimizer) as saves:
        saves.save()
    wrong = execute("to-safetensors", tmp_path / "run", tmp_path / "model.safetensors")
    told = "must have only dense tensors in its state, got Tensor at sparse"
    assert (wrong.returncode, told in wrong.stderr) == (1, True), wrong.stderr
    monkeypatch.setitem(sys.modules, "safetensors", None)
    wrong = execute("to-safetensors", tmp_path / "run", tmp_path / "model.safetensors")
    told = "pip install 'variable_batch_size[safetensors]'"
    assert (wrong.returncode, told in wrong.stderr) == (1, True), wrong.stderr
    assert not (tmp_path / "model.safetensors").exists()


def test_plain_states_go_out_and_in(trained, tmp_path):
    run, folder = trained
    file = tmp_path / "state.pt"
    done = execute("to-torch", folder, file)
    assert done.returncode == 0, done.stderr
    states = torch.load(file, weights_only=True)
    assert execute("to-torch", folder, tmp_path / "best.pt", "--best").returncode == 0
    best = torch.load(tmp_path / "best.pt", weights_only=True)["model"]
    assert_equal([*best.values()], training(**OPTIONS).run(1).weights(), tolerance=0)
    model = network()
    model.load_state_dict(states["model"])
    inner = torch.optim.AdamW(model.parameters(), **ADAM)
    inner.load_state_dict(states["optimizer"])
    expected = run.optimizer.inner.state_dict()
    torch.testing.assert_close(inner.state_dict()["state"], expected["state"], rtol=0, atol=0)

    torch.save({"model": model.state_dict(), "optimizer": inner.state_dict()}, file)
    done = execute("from-torch", file, tmp_path / "begun")
    assert done.returncode == 0, done.stderr
    later = training(**OPTIONS)
    with vbs.Checkpoint(tmp_path / "begun", model=later.model, optimizer=later.optimizer) as saves:
        assert saves.restore(strict=False)
    assert later.optimizer.updates == 0
    assert_equal(later.weights(), run.weights(), tolerance=0)
    torch.testing.assert_close(later.optimizer.inner.state_dict()["state"], expected["state"], rtol=0, atol=0)
    again = execute("from-torch", file, tmp_path / "begun")
    assert (again.returncode, "must have no checkpoints" in again.stderr) == (1, True)
    (tmp_path / "text.pt").write_text("text")
    wrong = execute("from-torch", tmp_path / "text.pt", tmp_path / "other")
    assert (wrong.returncode, "must be one that torch.load(file, weights_only=True) reads" in wrong.stderr) == (1, True)
    wrong = execute("to-torch", folder, tmp_path / "none" / "state.pt")
    assert (wrong.returncode, "must be in a folder that there is" in wrong.stderr) == (1, True)
    torch.save([1], file)
    wrong = execute("from-torch", file, tmp_path / "other")
    assert (wrong.returncode, "must have a dict of state dicts" in wrong.stderr) == (1, True)


def test_one_that_is_damaged_or_incomplete_is_named_with_what_is_missing(trained, tmp_path):
    _, folder = trained
    path = path_of(folder, 3)

    def told(command):
        done = execute(command, path, *[tmp_path / "out"] * command.startswith("to-"))
        assert done.returncode == 1
        assert not (tmp_path / "out").exists()
        return (done.stdout + done.stderr).replace("\n", " ")

    def damage_tensors():
        truncate_state(path)
        return "checksum mismatch of tensors-0.safetensors"

    def delete_json():
        (path / "rank-0.json").unlink()
        return "the JSON of a rank is missing"

    for damage in (damage_tensors, delete_json):
        reason = damage()
        for command in ("show", "verify", "to-torch", "to-safetensors"):
            text = told(command)
            assert str(path) in text, text
            assert reason in text, text
            assert command == "verify" or "pass another one" in text, text
    whole = execute("verify", folder)  # restore() warns of it, too
    assert (whole.returncode, f"{path}: {reason}, and it was saved" in whole.stdout) == (1, True), whole.stdout
    assert reason in json.loads(execute("verify", folder, "--json").stdout)[str(path)]
    for name in ("update-00000001", "update-00000002"):
        (next(folder.glob(f"{name}-*")) / "rank-0.json").unlink()
    assert "which has only incomplete ones; pass another one" in execute("verify", folder).stderr


@pytest.mark.parametrize("command", ["to-torch", "to-safetensors"])
def test_a_file_is_there_whole_or_not_at_all_with_a_plain_mode(command, trained, tmp_path):
    """On a full disk the earlier one stays."""
    _, folder = trained
    plain, out = tmp_path / "plain", tmp_path / "out"
    plain.mkdir()
    (plain / "file").write_text("")
    assert execute(command, folder, out).returncode == 0
    assert out.stat().st_mode == (plain / "file").stat().st_mode
    before = out.read_bytes()
    out.chmod(0o640)
    assert execute(command, folder, out).returncode == 0
    assert (out.stat().st_mode & 0o777, out.read_bytes() == before) == (0o640, True)
    full = "import resource; from variable_batch_size.cli.main import main\n"
    full += "from variable_batch_size.checkpoint import conversion; import safetensors.torch\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (500, -1)); main()"
    before, listed = out.read_bytes(), sorted(tmp_path.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", full, "checkpoint", command, folder, out], capture_output=True, text=True, check=False
    )
    text = " ".join(done.stderr.split())
    assert (done.returncode, f"{out} could not be written (" in text) == (1, True), text
    assert "Traceback" not in text
    assert (out.read_bytes(), sorted(tmp_path.iterdir())) == (before, listed)
    done = execute(command, folder, plain)
    assert (done.returncode, "FILE must be a file, got" in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize("states", [{"model": {1: torch.ones(1)}}, {"model": {}, 3: {}}, {"model": {}, "a/b": {}}])
def test_a_name_that_is_no_text_is_refused(states, tmp_path):
    torch.save(states, tmp_path / "state.pt")
    done = execute("from-torch", tmp_path / "state.pt", tmp_path / "begun")
    assert (done.returncode, "names of states and tensors must be texts" in done.stderr) == (1, True), done.stderr


def test_a_folder_without_a_name_is_refused():
    for call in (lambda: checkpoint("", training()), lambda: vbs.read_checkpoint("")):
        with pytest.raises(ValueError, match=r"^the folder of checkpoints must be a path or a URL, got ''; pass for"):
            call()
