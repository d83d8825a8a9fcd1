"""Train a small GPT with a batch size that follows a trace.

python examples/language_model/variable.py
torchrun --nproc-per-node=2 examples/language_model/variable.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import gpt
import variable_batch_size as vbs


def train(flags: argparse.Namespace, device: torch.device) -> None:
    """Train one rank's share of every batch."""
    train_set, val_set = gpt.load(flags.text)
    samples = flags.epochs * len(train_set)

    # 1. The data.
    sampler = vbs.CustomSampler(
        train_set,
        flags.trace,
        minibatch_size=flags.microbatch,
        seed=flags.seed,
        max_samples=samples,
    )
    loader = DataLoader(
        train_set,
        batch_sampler=sampler,
        num_workers=1,
        persistent_workers=True,
        worker_init_fn=vbs.Preemption.shield,
    )
    val_sampler = vbs.EvaluationSampler(
        val_set, minibatch_size=flags.microbatch
    )
    val_loader = DataLoader(val_set, batch_sampler=val_sampler)
    metrics = vbs.Accumulator(val_sampler)

    # 2. The model and the optimizer.
    torch.manual_seed(flags.seed)
    model = gpt.GPT().to(device)
    vbs.broadcast_parameters(model)
    autocast = torch.autocast(
        device.type, torch.bfloat16, enabled=not flags.float32
    )
    groups = gpt.parameter_groups(model)
    inner = torch.optim.AdamW(groups, lr=flags.lr, betas=(0.9, 0.95))
    tracker = vbs.Tracker(flags.folder)
    optimizer = vbs.RootRuleOptimizer(
        inner, sampler, flags.batch, max_grad_norm=1.0, tracker=tracker
    )

    # 3. The schedule.
    total = samples // flags.batch  # updates of flags.batch samples
    scheduler = vbs.ProgressScheduler(
        LambdaLR(optimizer, gpt.warmup_cosine(total)),
        optimizer,
        by="samples",
        total=total,
    )

    # 4. The checkpoint.
    checkpoint = vbs.Checkpoint(
        flags.folder,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        every=20,  # updates
        best="min:loss",
    )
    checkpoint.restore()

    # 5. The loop.
    with checkpoint, tracker:
        for epoch in vbs.remaining_epochs(sampler, optimizer):
            for update in vbs.updates(loader, optimizer):
                for blocks in update:
                    with autocast:
                        loss = gpt.loss_of(model, blocks.to(device))
                    optimizer.backward(loss)
                    optimizer.log(loss=loss)
                    optimizer.step()
                scheduler.step()
                checkpoint.step()

            # 6. The end of an epoch.
            val_loss = evaluate(model, val_loader, autocast, device, metrics)
            if sampler.world.rank == 0:
                print(f"epoch {epoch}: validation loss {val_loss:.3f}")
                tracker.log(optimizer.updates, {"val_loss": val_loss})
            checkpoint.report(loss=val_loss)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: DataLoader[Tensor],
    autocast: torch.autocast,
    device: torch.device,
    metrics: vbs.Accumulator,
) -> float:
    """Return the validation loss; each rank computes a share of it."""
    for blocks in loader:
        with autocast:
            loss = gpt.loss_of(model, blocks.to(device))
        metrics.add(loss=loss)
    return metrics.read()["loss"]


def main() -> None:
    """Start this rank, and train."""
    parser = gpt.parser(__doc__, folder="runs/variable")
    parser.add_argument(
        "--trace",
        default="0:16 20:32 40:48",
        help="a schedule, first update : batch size; or a CSV file",
    )
    flags = parser.parse_args()
    device = gpt.choose_device()
    if "RANK" in os.environ:  # torchrun started this process
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        with vbs.Preemption():
            train(flags, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
