"""What docs/coming_from.md and docs/ddp.md say of other lines and ours: both columns run, or numbers are computed."""

from __future__ import annotations

import math
import re
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace as Namespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import variable_batch_size as vbs
from helpers.pages import DOCS
from helpers.processes import run_job
from variable_batch_size.adaptive.stopwatch import UpdateStopwatch
from variable_batch_size.tracker import SCALARS, read_scalars

PAGE = (DOCS / "ddp.md").read_text() + (DOCS / "coming_from.md").read_text()
BY_HAND = "Accumulation written by hand"
NAMES = {
    kind.__name__: kind for kind in (DataLoader, DistributedDataParallel, DistributedSampler, SGD, StepLR, nullcontext)
}


def columns(section):
    """Return the code of the left and the right column of a section, which read the samples in their order."""
    text = PAGE.split(f"# {section}\n")[1].split("\n## ")[0]
    left, right = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)[0] for kind in ("py", "python"))
    left = left.replace("shuffle=True", "shuffle=False").replace("Sampler(dataset", "Sampler(dataset, shuffle=False")
    return left, right.replace("minibatch_size=32", "minibatch_size=32, shuffle=False")


class Weights(nn.Module):
    """One parameter per sample, whose gradient is the weight of the sample in an update."""

    def __init__(self, samples):
        super().__init__()
        self.moved = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, samples):
        return self.moved[samples]


def weights(code, samples):
    """Run a training of one epoch, and return how many samples were divided by each number; and the model."""
    model, dataset = Weights(samples), TensorDataset(torch.arange(samples), torch.arange(samples))
    exec(
        code,
        {**NAMES, "vbs": vbs, "model": model, "dataset": dataset, "cross_entropy": lambda output, _: output.mean()},
    )
    return Counter((-0.1 / model.moved[model.moved != 0]).round().tolist()), model


def run_columns(backend):
    """Run both columns about DistributedDataParallel in one of two processes; return the weights."""
    trained = []
    for code in columns("DistributedDataParallel"):
        torch.manual_seed(0)
        dataset = TensorDataset(torch.randn(1024, 20).double(), torch.randint(3, (1024,)))
        torch.manual_seed(backend.world.rank)  # rank 0 broadcasts its weights
        model = nn.Linear(20, 3).double()
        names = {**NAMES, "clip_grad_norm_": clip_grad_norm_, "cross_entropy": cross_entropy}
        names |= {"dist": dist, "vbs": vbs, "dataset": dataset, "model": model}
        body = code.removeprefix("dist.init_process_group()\n").replace("1.0", "0.05")  # which clips
        assert body != code
        exec(body, names)
        assert names["scheduler"].last_epoch == 12
        trained.append([parameter.detach() for parameter in model.parameters()])
    return trained


@pytest.mark.slow("starts processes")
def test_both_columns_about_data_parallel_train_the_same_weights():
    (left, right), (_, other) = run_job("gloo", run_columns, ranks=2)
    torch.testing.assert_close(right, left, rtol=1e-12, atol=1e-14)
    assert all(map(torch.equal, right, other))


def test_distributed_sampler_repeats_samples():
    assert "it yields 1002 of 1000 samples" in PAGE
    dealt = [list(DistributedSampler(range(1000), 3, rank)) for rank in range(3)]
    assert sum(map(len, dealt)) == 1002
    ours = [vbs.CustomSampler(1000, 128, 3, rank, fixed_shape=False) for rank in range(3)]
    assert sorted(i for sampler in ours for batch in sampler for i in batch) == list(range(1000))


def test_accumulation_by_hand_is_the_same_while_microbatches_are_full():
    left, right = columns(BY_HAND)
    assert weights(left, 1024)[0] == weights(right, 1024)[0] == {128: 1024}


def test_accumulation_by_hand_weighs_samples_of_a_short_microbatch_four_times():
    assert "a sample of the last microbatch counts four times" in PAGE
    left, right = columns(BY_HAND)
    assert weights(left, 1000)[0] == {128: 992, 32: 8}
    assert weights(right, 1000)[0] == {128: 896, 104: 104}


def test_accumulation_by_hand_leaves_gradients_for_the_next_epoch():
    left, right = columns(BY_HAND)
    found, model = weights(left, 320)  # 10 microbatches
    assert found == {128: 256}
    assert model.moved.grad is not None
    assert model.moved.grad.count_nonzero() == 64
    assert weights(right, 320)[0] == {128: 256, 64: 64}


def test_a_mean_of_means_weighs_tokens_by_their_neighbors():
    assert "token of the second text counts ten times as much" in PAGE
    model, texts = Weights(110), [torch.arange(100), torch.arange(100, 110)]
    for tokens in texts:
        (model(tokens).mean() / 2).backward()
    assert model.moved.grad is not None
    assert model.moved.grad[-1] == pytest.approx(10 * model.moved.grad[0])
    sampler = vbs.CustomSampler(2, 2, num_replicas=1, rank=0, minibatch_size=1)
    model = Weights(110)
    optimizer = vbs.ConstantOptimizer(SGD(model.parameters(), lr=1.0), sampler, reduction="sum")
    for (text,) in sampler:
        model(texts[text]).sum().backward()
        optimizer.step(count=len(texts[text]))
    torch.testing.assert_close(model.moved.detach(), torch.full((110,), -1 / 110, dtype=torch.float64))


def test_the_loop_of_the_eth_module_trains_the_same_weights():
    trained = []
    for with_updates in (True, False):
        torch.manual_seed(0)
        dataset, model = TensorDataset(torch.randn(1000, 20), torch.randint(3, (1000,))), nn.Linear(20, 3)
        sampler = vbs.CustomSampler(dataset, [128] * 16 + [192] * 8, num_replicas=1, rank=0, minibatch_size=32)
        loader = DataLoader(dataset, batch_sampler=sampler)
        optimizer = vbs.LinearRuleOptimizer(SGD(model.parameters(), lr=0.1, momentum=0.5), sampler, ref_batchsize=128)
        if with_updates:
            for _ in vbs.remaining_epochs(sampler, optimizer, 3):
                for update in vbs.updates(loader, optimizer):
                    for data, target in update:
                        optimizer.backward(cross_entropy(model(data), target))
                        optimizer.step()
        else:
            for epoch in range(3):
                sampler.set_epoch(epoch)
                optimizer.set_epoch(epoch)
                for data, target in loader:
                    cross_entropy(model(data), target).backward()
                    optimizer.step()
        trained.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*trained)


def test_the_eth_module_drops_the_end_of_an_epoch():
    assert "1000 samples are 7 steps of 128. Here they are 8" in PAGE
    theirs, epoch_end = 0, 1000 // 32 * 32  # its loop over the trace of an epoch
    while (theirs + 1) * 128 <= epoch_end:
        theirs += 1
    steps = [
        len(list(vbs.CustomSampler(1000, 128, 1, 0, 128, drop_last=drop_last, fixed_shape=False)))
        for drop_last in (True, False)
    ]
    assert [theirs, *steps] == [7, 7, 8]


def test_the_eth_module_s_momentum_rule_is_the_same():
    lr, momentum, decay, ref, rows, sizes = 0.1, 0.5, 0.01, 64, 16, [64, 128, 32]
    torch.manual_seed(0)
    values = torch.randn(sum(sizes), dtype=torch.float64)
    model = nn.Linear(1, 1, bias=False).double()
    weight, velocity, start = model.weight.item(), 0.0, 0
    sampler = vbs.CustomSampler(len(values), sizes, num_replicas=1, rank=0, minibatch_size=rows, shuffle=False)
    inner = SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=decay)
    optimizer = vbs.LinearRuleMomentumOptimizer(inner, sampler, ref)
    for indices in sampler:
        (model(values[indices, None]) - 1).square().mean().backward()
        optimizer.step()
    for size in sizes:  # sums of the means of minibatches, lr * rows / ref, weight decay * (size / rows)
        batch = values[start : start + size]
        gradient = (2 * (weight * batch - 1) * batch).view(-1, rows).mean(1).sum().item()
        velocity = momentum * velocity + gradient + decay * (size // rows) * weight
        weight, start = weight - lr * rows / ref * velocity, start + size
    assert model.weight.item() == pytest.approx(weight, rel=1e-12)


def test_adaptdl_rounds_the_batch_to_equal_local_batches():
    assert "64 samples on three replicas become 66" in PAGE
    assert math.ceil(64 / 3) * 3 == 66
    ours = [next(iter(vbs.CustomSampler(1000, 64, 3, rank, fixed_shape=False))) for rank in range(3)]
    assert sum(map(len, ours)) == 64


def test_the_lines_for_adaptdl_choose_batch_sizes_and_log_them(tmp_path, monkeypatch, capsys):
    """Whatever time the updates take: the controller never learns it, and doubles the batch size."""
    monkeypatch.setattr(UpdateStopwatch, "throughput", lambda self: None)
    torch.manual_seed(0)
    dataset, folders = TensorDataset(torch.randn(1000, 20), torch.randint(3, (1000,))), iter(["scalars", "checkpoints"])
    names = {**NAMES, "vbs": vbs, "torch": torch, "dataset": dataset, "model": nn.Linear(20, 3)}
    names |= {"cross_entropy": cross_entropy, "tempfile": Namespace(mkdtemp=lambda: str(tmp_path / next(folders)))}
    rows = "rows=float(optimizer.microbatch.rows == len(data))"
    exec(columns("AdaptDL")[1].replace("train.add(loss=loss)", f"train.add(loss=loss, {rows})"), names)
    assert names["optimizer"].samples == 12 * 1000
    assert names["train"].read()["rows"] == 1
    assert len(capsys.readouterr().out.splitlines()) >= 2 * 12
    logged = [row.get("decision/batch_size") for row in read_scalars(tmp_path / "scalars" / SCALARS)[1]]
    chosen = [int(size) for size in logged if size]
    assert chosen[:2] == [64, 128]
    assert names["sampler"].trace.runs[1].tolist() == chosen


def test_adaptdl_multiplies_an_accumulated_gradient_twice():
    """By the rule, and as a sum: what its 0.2.11 does with microbatches of `batch_size` samples."""
    assert "16 times as large as with one" in PAGE
    ref, accumulated = 8, 4
    theirs = sum(1.0 for _ in range(accumulated)) * accumulated  # means of gradients of 1, and LinearScale
    moved = []
    for size in (ref, accumulated * ref):
        sampler = vbs.CustomSampler(size, size, num_replicas=1, rank=0, minibatch_size=ref)
        model = Weights(size)
        optimizer = vbs.LinearRuleOptimizer(SGD(model.parameters(), lr=1.0), sampler, ref)
        for indices in sampler:
            model(torch.tensor(indices)).mean().backward()
            optimizer.step()
        moved.append(-model.moved.sum().item())
    assert (theirs, moved[1] / moved[0]) == (16, pytest.approx(4))


def test_run_ai_rounds_down():
    assert "one step of 33" in PAGE
    batch, largest, gpus = 100, 30, 3
    steps = max(1, batch // (largest * gpus))
    assert (steps, batch // (steps * gpus)) == (1, 33)
    assert "two steps of at most 17" in PAGE
    assert vbs.elastic(batch, largest, gpus)[:3] == (2, 17, 100)
