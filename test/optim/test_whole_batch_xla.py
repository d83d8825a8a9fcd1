"""A loss of the whole batch on XLA's cores: the weights of one big batch, and no graph after the second update."""

import pytest
import torch

torch_xla = pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy, normalize  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from torch_xla.distributed.parallel_loader import MpDeviceLoader  # noqa: E402

import variable_batch_size as vbs  # noqa: E402
from helpers.processes import run_job  # noqa: E402
from variable_batch_size.backend.xla import compiled_graphs  # noqa: E402

ROWS, SIZE, UPDATES = 60, 11, 8


def pairs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 6, generator=generator)]


def towers(*, dropout):
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3) if dropout else nn.Tanh(), nn.Linear(16, 8))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    return model


def loss(first, second):
    logits = 5 * normalize(first, dim=1) @ normalize(second, dim=1).T
    return cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def train(backend, dropout):
    model = towers(dropout=dropout).to(torch_xla.device())
    data = TensorDataset(*pairs())
    sampler = vbs.CustomSampler(data, SIZE, minibatch_size=4, shuffle=False, drop_last=True, max_updates=UPDATES)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler, SIZE, model=model)
    loader, compiled, passes = MpDeviceLoader(DataLoader(data, batch_sampler=sampler), torch_xla.device()), [], []

    def encode(rows):
        first = model(rows[0])
        if dropout:
            passes.append(first.detach().cpu())
        return first, model(rows[1])

    for _ in vbs.remaining_epochs(sampler, optimizer):
        for update in vbs.updates(loader, optimizer):
            passes.clear()
            vbs.whole_batch(optimizer, update, encode=encode, loss=loss)
            half = len(passes) // 2
            assert all(
                torch.equal(one.cpu(), other.cpu()) for one, other in zip(passes[:half], passes[half:], strict=True)
            )
            compiled.append(compiled_graphs())
    backend.barrier()
    return [parameter.detach().cpu() for parameter in model.parameters()], compiled


def train_by_hand():
    model = towers(dropout=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(UPDATES):
        begin = number % (ROWS // SIZE) * SIZE
        first, second = (rows[begin : begin + SIZE] for rows in pairs())
        inner.zero_grad()
        loss(model(first), model(second)).backward()
        inner.step()
    return list(model.parameters())


@pytest.mark.slow("compiles")
@pytest.mark.parametrize("cores", [1, 2, 3])
def test_cores_make_the_updates_of_one_big_batch(cores):
    expected = train_by_hand()
    for weights, compiled in run_job("cores", train, False, ranks=cores):
        for weight, parameter in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight, parameter, rtol=1e-4, atol=1e-5)
        assert compiled[2:] == compiled[2:3] * (UPDATES - 2)


@pytest.mark.slow("compiles")
def test_both_passes_have_the_same_dropout():
    run_job("cores", train, True, ranks=2)
