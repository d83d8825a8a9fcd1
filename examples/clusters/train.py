"""A small training that saves and exits with 143 when a signal asks for it, and that resumes.

    torchrun --nproc-per-node=8 examples/clusters/train.py --checkpoint runs/a

Any launcher will do that sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs


def train(folder: str, epochs: int) -> None:
    """Train one rank's share of every batch."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(1000, 20, generator=generator), torch.randint(3, (1000,), generator=generator))
    model = torch.nn.Linear(20, 3).to(device)
    vbs.broadcast_parameters(model)  # all ranks start with the weights of rank 0

    sampler = vbs.CustomSampler(dataset, trace="0:128 10:48 15:200", minibatch_size=32)
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
    parser.add_argument("--checkpoint", required=True, help="folder of checkpoints, which all ranks share")
    parser.add_argument("--epochs", type=int, default=10)
    flags = parser.parse_args()
    try:
        train(flags.checkpoint, flags.epochs)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
