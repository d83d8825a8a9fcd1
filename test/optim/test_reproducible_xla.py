"""One hash of the weights on any number of XLA's cores."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch_xla = pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

from torch_xla.distributed.parallel_loader import MpDeviceLoader  # noqa: E402

import variable_batch_size as vbs  # noqa: E402
from helpers.reproducible_training import SIZES, updates_of  # noqa: E402
from variable_batch_size.backend.xla import launch  # noqa: E402


def train(folder, rule):
    """Train with dropout and clipping, and write the hash of the weights; ranks are threads that share generators."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(200, 20, generator=generator), torch.randint(5, (200,), generator=generator)
    dataset = TensorDataset(*data)
    net = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 5))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    net = net.to(torch_xla.device())
    options = {"minibatch_size": 4, "on_end": "cycle", "reproducible": True, "max_updates": 20}
    sampler = vbs.CustomSampler(dataset, SIZES, **options)
    loader = MpDeviceLoader(DataLoader(dataset, batch_sampler=sampler), torch_xla.device())
    inner = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    optimizer = vbs.CustomOptimizer(inner, sampler, 16, rule=rule, max_grad_norm=1.0)
    for _ in updates_of(net, loader, optimizer):
        pass
    told = vbs.weights_hash(net), optimizer.logged["loss"].item().hex(), float(optimizer.progress).hex()
    backend = vbs.backend.XlaBackend()
    backend.barrier()
    (folder / f"{rule}-{backend.world.size}-{backend.world.rank}").write_text(" ".join(told))


@pytest.mark.parametrize(
    ("rule", "worlds"),
    [
        pytest.param("linear", (1, 2), marks=pytest.mark.slow("compiles")),
        pytest.param("adascale", (1, 2, 4), marks=pytest.mark.nightly("compiles")),
    ],
)
def test_any_number_of_cores_makes_the_same_updates_to_the_last_bit(rule, worlds, tmp_path):
    for cores in worlds:
        launch(train, (tmp_path, rule), cores=cores)
    told = [path.read_text() for path in tmp_path.iterdir()]
    assert len(told) == sum(worlds)
    assert len(set(told)) == 1
