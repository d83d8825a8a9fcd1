"""Train with PyTorch/XLA's SPMD mode, where one process shards each microbatch and the parameters over all devices.

PJRT_DEVICE=TPU python examples/spmd.py
PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/spmd.py
"""

import numpy as np
import torch
import torch_xla.runtime as xr
from torch.utils.data import DataLoader, TensorDataset
from torch_xla.distributed import spmd
from torch_xla.distributed.parallel_loader import MpDeviceLoader
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDPv2

import variable_batch_size as vbs
from variable_batch_size.backend import xla


def main() -> None:
    """Train on the devices of this process."""
    xr.use_spmd()  # before the first tensor on a device
    devices = xr.global_runtime_device_count()
    mesh = spmd.Mesh(np.arange(devices), (devices, 1), ("fsdp", "tensor"))

    torch.manual_seed(0)
    data = torch.randn(1000, 20)
    dataset = TensorDataset(data, data[:, :3].argmax(1))
    net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    model = FSDPv2(net, mesh=mesh)  # each device holds a part of each parameter

    sampler = vbs.CustomSampler(dataset, trace="0:128 10:48 15:200", minibatch_size=32)  # rows on all devices
    rows = spmd.ShardingSpec(mesh, ("fsdp", None))  # each device computes a part of them
    loader = MpDeviceLoader(DataLoader(dataset, batch_sampler=sampler), "xla", input_sharding=rows)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = vbs.RootRuleOptimizer(inner, sampler, ref_batchsize=128, max_grad_norm=1.0)

    for epoch in vbs.remaining_epochs(sampler, optimizer, until=3):
        for update in vbs.updates(loader, optimizer):
            for inputs, target in update:
                loss = torch.nn.functional.cross_entropy(model(inputs), target)
                optimizer.backward(loss)
                optimizer.log(loss=loss)
                optimizer.step()  # also executes the recorded graph
        print(f"{epoch} {optimizer.updates} {optimizer.samples} {optimizer.logged['loss'].item():.4f}")
    print("compiled graphs:", xla.compiled_graphs())


if __name__ == "__main__":
    main()
