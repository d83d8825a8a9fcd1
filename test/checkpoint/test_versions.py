"""A committed checkpoint of each version of the format is read by this library, and a training resumes from it.

`python test/checkpoint/test_versions.py test/checkpoint/version-2` writes one, on two ranks that shard the model.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import variable_batch_size as vbs
from helpers.pages import DOCS
from helpers.processes import run_job
from variable_batch_size.checkpoint.contents import KEYS, write_manifest
from variable_batch_size.checkpoint.values import encode

UPDATES, LAST = 3, 6
SHARED = torch.arange(6.0)
VALUES = {
    "types": [None, True, 1, -0.5, "text", (1, ("2",)), {1, 2}, frozenset({3}), b"\0\xff", 1 - 2j, torch.Size([2, 3])],
    "floats": [float("inf"), float("-inf"), float("nan"), 5e-324],
    "keys": {1: "a", "1": "b", (2, 3): "c", None: "d", "$": "e"},
    "dicts": [OrderedDict(b=1, a=2), Counter("aab")],
    "of torch": [torch.bfloat16, torch.device("cpu", 0), torch.tensor(3), torch.empty(0, 2)],
    "tensors": [
        torch.arange(4).to(kind)
        for kind in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.complex128)
    ],
    "shared": [SHARED, SHARED.view(2, 3).T, SHARED],
    "sparse": torch.eye(2).to_sparse(),
}


class Values:
    """A part whose state is `VALUES`."""

    state: Any = None

    def state_dict(self):
        return VALUES

    def load_state_dict(self, state_dict):
        self.state = state_dict


def train(world_and_rank, until, folder=None):
    """Train until an update as a rank of a world, from a checkpoint in the folder if there is one; else save one."""
    features = torch.sin(torch.arange(120.0, dtype=torch.float64)).view(40, 3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.cos(number + torch.arange(float(parameter.numel()))).view_as(parameter))
    if world_and_rank[0] > 1:
        fully_shard(model)
    sampler = vbs.CustomSampler(features, "0:3 2:8 4:5", *world_and_rank, minibatch_size=2, seed=4)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = vbs.AdamScaleOptimizer(inner, sampler, ref_batchsize=4, model=model)
    cosine = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    parts = {"model": model, "optimizer": optimizer, "scheduler": cosine, "values": Values()}
    saves = vbs.Checkpoint(folder, **parts, best="max:accuracy") if folder else None
    resumed = saves is not None and saves.restore()
    for _ in vbs.remaining_epochs(sampler, optimizer, until=9):
        for rows in sampler:
            if optimizer.updates == until:
                break
            optimizer.backward(model(features[rows]).square().mean())
            optimizer.step()
            if not optimizer.inside_step:
                cosine.step()
        if optimizer.updates == until:
            break
    if saves and not resumed:
        saves.report(accuracy=0.5)
    if saves:
        saves.close()
    return [parameter.detach() for parameter in model.parameters()]


def encoded(value):
    tensors = dict[str, Tensor]()
    return encode(value, "", tensors, {}), tensors


@pytest.mark.parametrize("version", [2])
def test_a_training_resumes_from_a_checkpoint_of_a_version(version, tmp_path):
    folder = Path(__file__).parent / f"version-{version}"
    found = vbs.read_checkpoint(folder)["parts"]["values"]
    (json, tensors), (own, expected) = encoded(found), encoded(VALUES)
    assert json == own
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype
        assert tensor.stride() == expected[name].stride()
        assert torch.equal(tensor, expected[name])
    shutil.copytree(folder, tmp_path / "saved")
    weights = train((1, 0), LAST, tmp_path / "saved")
    for one, other in zip(weights, train((1, 0), LAST), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_page_has_the_list_of_keys_and_no_other_key_is_written():
    page = (DOCS / "checkpoint_format.md").read_text()
    page = page[page.index("- `rank-0.json`") : page.index("- `tensors-0.safetensors`")]
    assert not [key for key in KEYS if f"`{key}`" not in page]
    with pytest.raises(ValueError, match=r"^the keys of a checkpoint's JSON must be in KEYS, got color; add them$"):
        write_manifest({"color": 1})


def test_the_page_reads_the_weights_without_the_library():
    page = (DOCS / "checkpoint_format.md").read_text()
    code = page[page.index("import json\n") :].partition("```")[0]
    assert len(code.splitlines()) <= 20
    folder = Path(__file__).parent / "version-2"
    found = {"folder": folder}
    exec(code, found)
    expected = vbs.read_checkpoint(folder)["parts"]["model"]
    assert found["weights"].keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found["weights"][name], tensor)


def write(backend, folder):
    train((2, backend.world.rank), UPDATES, folder)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir()
    run_job("gloo", write, place, ranks=2)
    for path in place.iterdir():
        if path.is_file():
            path.unlink()
