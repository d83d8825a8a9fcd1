"""Train a small GPT with a fixed batch size, in plain PyTorch.

The batch is divided equally: `--batch` has to be a multiple of the number of
ranks times `--microbatch`.

    python examples/language_model/plain.py
    torchrun --nproc-per-node=2 examples/language_model/plain.py
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

import gpt


def train(flags: argparse.Namespace, device: torch.device) -> None:
    """Train one rank's share of every batch."""
    rank, ranks = 0, 1
    if dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
    train_set, val_set = gpt.load(flags.text)

    # 1. The data.
    sampler = DistributedSampler(train_set, ranks, rank, seed=flags.seed)
    loader = DataLoader(
        train_set,
        batch_size=flags.batch // ranks,
        sampler=sampler,
        drop_last=True,
        num_workers=1,
        persistent_workers=True,
    )
    val_share = Subset(val_set, range(rank, len(val_set), ranks))
    val_loader = DataLoader(val_share, batch_size=flags.microbatch)

    # 2. The model and the optimizer.
    torch.manual_seed(flags.seed)
    model = gpt.GPT().to(device)
    net = DistributedDataParallel(model) if ranks > 1 else model
    autocast = torch.autocast(
        device.type, torch.bfloat16, enabled=not flags.float32
    )
    groups = gpt.parameter_groups(model)
    optimizer = torch.optim.AdamW(groups, lr=flags.lr, betas=(0.9, 0.95))

    # 3. The schedule.
    total = flags.epochs * len(loader)  # updates
    scheduler = LambdaLR(optimizer, gpt.warmup_cosine(total))

    # 4. The checkpoint.
    folder, first, best = Path(flags.folder), 0, float("inf")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "newest.pt").exists():
        state = torch.load(folder / "newest.pt", map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first, best = state["epoch"] + 1, state["best"]

    # 5. The loop.
    for epoch in range(first, flags.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            microbatches = batch.split(flags.microbatch)
            mean = torch.zeros((), device=device)
            for number, blocks in enumerate(microbatches, 1):
                last = number == len(microbatches)
                with nullcontext() if last or ranks == 1 else net.no_sync():
                    with autocast:
                        loss = gpt.loss_of(net, blocks.to(device))
                    loss = loss / len(microbatches)
                    loss.backward()
                mean += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if scheduler.last_epoch % 10 == 0:
                if ranks > 1:
                    dist.all_reduce(mean)
                if rank == 0:
                    update = scheduler.last_epoch
                    print(f"update {update}: loss {mean / ranks:.3f}")

        # 6. The end of an epoch.
        val_loss = evaluate(model, val_loader, autocast, device)
        if rank == 0:
            print(f"epoch {epoch}: validation loss {val_loss:.3f}")
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch,
                "best": min(best, val_loss),
            }
            save(state, folder / "newest.pt")
            if val_loss < best:
                save(state, folder / "best.pt")
        best = min(best, val_loss)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: DataLoader[Tensor],
    autocast: torch.autocast,
    device: torch.device,
) -> float:
    """Return the validation loss; each rank computes a share of it."""
    sums = torch.zeros(2, device=device)  # of losses, of blocks
    for blocks in loader:
        with autocast:
            loss = gpt.loss_of(model, blocks.to(device))
        sums += torch.stack([loss, torch.ones_like(loss)]) * len(blocks)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def save(state: dict[str, object], path: Path) -> None:
    """Write a file, or leave the old one if the process is killed."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def main() -> None:
    """Start this rank, and train."""
    flags = gpt.parser(__doc__, folder="runs/plain").parse_args()
    device = gpt.choose_device()
    if "RANK" in os.environ:  # torchrun started this process
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(flags, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
