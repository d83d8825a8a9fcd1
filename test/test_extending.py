"""What docs/extending.md tells to write works: rules, and a backend in processes that share a `TCPStore`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rule_pages import description
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.pages import DOCS, blocks
from helpers.processes import spawn

PAGE = DOCS / "extending.md"


def names_of(*parts):
    """Run the blocks of the page that contain these texts, after a quick start, and return their names."""
    torch.manual_seed(0)
    samples = 216  # two cycles of the page's trace
    dataset = TensorDataset(torch.randn(samples, 20), torch.randint(3, (samples,)))
    names = {"torch": torch, "vbs": vbs, "dataset": dataset, "model": torch.nn.Linear(20, 3)}
    names["sampler"] = vbs.CustomSampler(dataset, [64, 40, 112], num_replicas=1, rank=0, minibatch_size=16)
    names["inner"] = torch.optim.SGD(names["model"].parameters(), lr=0.01)
    for part in parts:
        (block,) = (block for block in blocks(PAGE, "python") if part in block)
        exec(block, names)
    return names


def train_in_process(rank, port, size, folder):
    torch.set_num_threads(1)
    names = names_of("class StoreBackend", "def train")
    store = dist.TCPStore("localhost", port, is_master=False)
    weights = names["train"](names["StoreBackend"](store, vbs.backend.World(rank, size)))
    torch.save(weights, folder / f"rank{rank}.pt")


@pytest.mark.slow("starts processes")
def test_the_backend_of_the_page_connects_processes(tmp_path):
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    spawn(train_in_process, (store.port, 2, tmp_path), nprocs=2)
    alone = names_of("class StoreBackend", "def train")["train"](vbs.backend.LocalBackend())
    assert alone.abs().sum() > 0
    for rank in range(2):
        assert torch.equal(torch.load(tmp_path / f"rank{rank}.pt"), alone)


@pytest.mark.parametrize("rule", ["CubeRootRule", "HalfGainRule"])
def test_the_rules_of_the_page_train(rule):
    names = names_of("class CubeRootRule", f"class {rule}")
    optimizer, sampler = names["optimizer"], names["sampler"]
    factors = []
    for data, target in DataLoader(names["dataset"], batch_sampler=sampler):
        torch.nn.functional.cross_entropy(names["model"](data), target).backward()
        if optimizer.step():
            factors.append(optimizer.lr_factor())
    assert optimizer.updates == 3
    ratios = [size / 128 for size in (64, 40, 112)]
    if rule == "CubeRootRule":
        assert factors == pytest.approx([k ** (1 / 3) for k in ratios])
    else:
        assert all((1 + k) / 2 <= factor <= 1 for k, factor in zip(ratios, factors, strict=True))


def test_the_rule_for_the_package_describes_itself():
    names = {"__name__": "cube_root"}
    (block,) = blocks(PAGE, "py")
    exec(block, names)
    assert set(description(names["CubeRootRule"])) == {"Scales", "Progress", "Use when", "Fails when"}
    assert names["CubeRootRule"]()(vbs.rules.RuleInput(8 * 64, 64)) == vbs.rules.Scaling(
        lr=pytest.approx(2.0), progress=8.0
    )


def test_the_trace_from_a_program_prints_what_the_page_shows(capsys):
    names_of("nodes = ")
    assert [capsys.readouterr().out] == blocks(PAGE, "text")
