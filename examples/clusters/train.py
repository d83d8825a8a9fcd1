"""A small training script that saves and exits with 143 after a signal, and resumes when it is started again.

    python examples/clusters/train.py --checkpoint runs/a
    torchrun --nproc-per-node=8 examples/clusters/train.py --checkpoint runs/a

Any launcher that sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT works. It trains for some minutes.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs


def train(folder: str, epochs: int, per_device: int | None) -> None:
    """Train on the samples of this rank."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if "RANK" in os.environ:
        if device.type != "cpu":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        # A rank that waits longer for another rank exits with an error.
        dist.init_process_group(dist.get_default_backend_for_device(device), timeout=timedelta(minutes=5))

    generator = torch.Generator().manual_seed(0)
    data = torch.randn(20000, 20, generator=generator)
    dataset = TensorDataset(data, data[:, :3].argmax(1))
    model = torch.nn.Linear(20, 3).to(device)
    vbs.broadcast_parameters(model)  # all ranks start with the weights of rank 0

    trace: str | vbs.AdaptiveTrace = "0:128 10:48 15:200"
    if per_device is not None:
        trace = vbs.AdaptiveTrace(vbs.adaptive.PerDevice(per_device), every=None)  # follows the number of ranks
    sampler = vbs.CustomSampler(dataset, trace=trace, minibatch_size=32)
    loader = DataLoader(dataset, batch_sampler=sampler)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=128)

    with vbs.Preemption(), vbs.Checkpoint(folder, model=model, optimizer=optimizer, every=100) as checkpoint:
        checkpoint.restore()
        for _ in vbs.remaining_epochs(sampler, optimizer, until=epochs):
            for update in vbs.updates(loader, optimizer):
                for data, target in update:
                    loss = torch.nn.functional.cross_entropy(model(data.to(device)), target.to(device))
                    optimizer.backward(loss)
                    optimizer.step()
                checkpoint.step()
        checkpoint.save()


def main() -> None:
    """Parse the flags and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="folder or URL of checkpoints, which all ranks share")
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--per-device", type=int, help="samples of a batch per device, for any number of devices")
    flags = parser.parse_args()
    try:
        train(flags.checkpoint, flags.epochs, flags.per_device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
