"""MNIST with a global batch size that follows a trace: a guided tour of the library. Read `train` from top to bottom.

    python test/variable_train_mnist.py                      several XLA cores of this CPU, or a GPU, or one process
    PJRT_DEVICE=TPU python test/variable_train_mnist.py      every core of a TPU VM
    torchrun --nproc-per-node=2 test/variable_train_mnist.py --device cpu

The exit code is 21 if the best accuracy is below `--target`. It is 143 if a signal stopped the training and
`--checkpoint` holds its state: the same command then resumes it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers import mnist
from variable_batch_size.backend import xla

TRACES = Path(__file__).parent.parent / "traces"
RULES_FOR_ADAM = {
    "sqrt-sde",
    "root-half-life",
    "invariant-adam",
    "adamscale",
    "surge",
}  # this script pairs all other rules with SGD


def train(flags: argparse.Namespace) -> None:
    """Train one rank's share of every batch. Each rank (a process, or an XLA core) runs this function."""
    device, world = device_and_world(flags)
    train_set = TensorDataset(*mnist.load(flags.data_dir, train=True)[: flags.samples])
    test_set = mnist.load(flags.data_dir, train=False)

    # 1. The data. Which samples make up an update does not depend on the number of ranks, so runs on one rank and on
    # eight make the same updates, up to rounding. The sampler splits each batch into microbatches and yields those of
    # this rank.
    sampler = vbs.CustomSampler(
        train_set,
        flags.trace,
        num_replicas=world.size,
        rank=world.rank,
        minibatch_size=flags.microbatch,
        seed=flags.seed,
        on_end=flags.on_end,
        epochs=flags.epochs,  # raises here if the trace is too short for them
    )
    # With checkpoints, signals stop the training gracefully (see `main`). Its loader workers must survive until then.
    shield = vbs.Preemption.shield if flags.checkpoint else None
    loader = DataLoader(train_set, batch_sampler=sampler, num_workers=flags.num_workers, worker_init_fn=shield)
    if device.type == "xla":
        from torch_xla.distributed.parallel_loader import MpDeviceLoader

        loader = MpDeviceLoader(loader, device)  # uploads the next microbatches during the computation of this one

    # Each test sample is dealt once, whatever the number of ranks, and the accuracy is the mean over exactly these.
    test_sampler = vbs.EvaluationSampler(test_set, num_replicas=world.size, rank=world.rank, minibatch_size=500)
    test_loader = DataLoader(test_set, batch_sampler=test_sampler)
    metrics = vbs.Accumulator(test_sampler)

    # 2. The model and the optimizer. The wrapper accumulates microbatches, sums over the ranks once per update, and
    # scales lr by the rule.
    model = make_model(flags.seed).to(device)
    tracker = vbs.Tracker(flags.logdir)  # scalars, and a progress bar if standard error is a terminal
    optimizer = make_optimizer(flags, model, sampler, tracker)
    scheduler = make_scheduler(flags, optimizer, len(train_set))

    # 3. The checkpoint. A run resumes at the update after which the last one stopped, on any number of ranks.
    checkpoint, best = None, BestAccuracy()
    if flags.checkpoint:
        checkpoint = vbs.Checkpoint(
            flags.checkpoint,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            every=flags.save_every,
            best="max:accuracy",
            best_accuracy=best,
        )
        checkpoint.restore()

    # 4. The loop. Unlike a plain PyTorch loop, it calls step() after every backward(), although only the last one of an
    # update changes the weights, and it does not call zero_grad().
    backend = vbs.backend.detect(model.parameters())  # how the ranks communicate
    loss_fn = nn.CrossEntropyLoss()
    began = time.monotonic()
    backend.print0(f"{world.size} x {device.type}, rule {flags.rule}, {flags.epochs} epochs of {flags.trace}")
    for epoch in vbs.remaining_epochs(sampler, optimizer, until=flags.epochs):  # not from 0 after a restore
        for update in vbs.updates(loader, optimizer):
            for images, labels in update:  # one microbatch
                optimizer.backward(loss_fn(model(images.to(device)), labels.to(device)))
                updated = optimizer.step()  # True if this microbatch completed an update
            if updated and scheduler:
                scheduler.step()
            if checkpoint:
                checkpoint.step()  # saves if a save is due, and exits after it if a signal asked for that
        accuracy = evaluate(model, test_loader, device, metrics)
        best.accuracy = max(best.accuracy, accuracy)
        backend.print0(
            f"epoch {epoch}: accuracy {accuracy:.2%}, {optimizer.updates} updates, {optimizer.samples} samples, "
            f"last lr {optimizer.current_lr():.4g}, {time.monotonic() - began:.1f} s"
        )
        if world.rank == 0:
            tracker.log(optimizer.updates, {"accuracy": accuracy})
        if checkpoint:
            checkpoint.report(accuracy=accuracy)  # keeps the best one beside the newest ones; last in the epoch

    # 5. The end. Closing waits for files that threads still write.
    tracker.close()
    if checkpoint:
        checkpoint.close()
    report(optimizer, best.accuracy, time.monotonic() - began, device, backend)
    if best.accuracy < flags.target:
        backend.print0(f"the best accuracy, {best.accuracy:.2%}, is below the target of {flags.target:.2%}")
        raise SystemExit(21)


def device_and_world(flags: argparse.Namespace) -> tuple[torch.device, vbs.backend.World]:
    """Return the device of this rank, and the rank with the number of ranks."""
    if flags.device == "xla":
        import torch_xla

        return torch_xla.device(), vbs.backend.XlaBackend().world
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if flags.device == "cuda" else torch.device("cpu")
    if "RANK" in os.environ:  # torchrun started this process
        dist.init_process_group("nccl" if flags.device == "cuda" else "gloo")
        return device, vbs.backend.World(dist.get_rank(), dist.get_world_size())
    return device, vbs.backend.World()


def make_model(seed: int) -> nn.Module:
    """Return a small CNN with the same weights on every rank."""
    # GroupNorm instead of BatchNorm: a layer that mixes samples would make the result depend on the microbatch size.
    model = nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.GroupNorm(2, 10),
        nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.GroupNorm(4, 20),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(layer.bias)
    return model


def make_optimizer(
    flags: argparse.Namespace, model: nn.Module, sampler: vbs.CustomSampler, tracker: vbs.Tracker
) -> vbs.CustomOptimizer:
    """Return SGD or Adam, wrapped with the chosen rule."""
    inner: torch.optim.Optimizer
    if flags.rule in RULES_FOR_ADAM:
        inner = torch.optim.Adam(model.parameters(), lr=flags.lr or 0.001)
    else:
        inner = torch.optim.SGD(model.parameters(), lr=flags.lr or 0.01, momentum=flags.momentum)
    options = {"tracker": tracker, "log_steps": flags.log_steps}
    if flags.rule == "legw":  # a rule with an argument, so its name alone is not enough
        return vbs.LEGWRuleOptimizer(inner, sampler, flags.ref_batchsize, warmup_epochs=flags.warmup_epochs, **options)
    rule = vbs.rules.PowerRule(flags.exponent) if flags.rule == "power" else flags.rule
    return vbs.CustomOptimizer(inner, sampler, flags.ref_batchsize, rule=rule, **options)


def make_scheduler(
    flags: argparse.Namespace, optimizer: vbs.CustomOptimizer, samples: int
) -> vbs.ProgressScheduler | None:
    """Return a cosine schedule over all epochs, if asked for."""
    if not flags.cosine:
        return None
    # An update with twice the batch size can make twice the progress. The schedule is therefore written in updates at
    # ref_batchsize, and after each update the ProgressScheduler takes as many of its steps as the training has made.
    total = flags.epochs * samples // flags.ref_batchsize
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    return vbs.ProgressScheduler(cosine, optimizer, total=total)


class BestAccuracy:
    """The best accuracy so far. Its two methods make it a part of the checkpoint."""

    accuracy = 0.0

    def state_dict(self) -> dict[str, float]:
        """Return the state to save."""
        return {"accuracy": self.accuracy}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a saved state."""
        self.accuracy = state["accuracy"]


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device, metrics: vbs.Accumulator) -> float:
    """Return the accuracy on the test set; each rank evaluates its share."""
    for images, labels in loader:
        hits = model(images.to(device)).argmax(dim=1) == labels.to(device)
        metrics.add(accuracy=hits.float().mean())
    return metrics.read()["accuracy"]  # over all ranks


def report(
    optimizer: vbs.CustomOptimizer, best: float, seconds: float, device: torch.device, backend: vbs.backend.Backend
) -> None:
    """Print the table at the end."""
    rows = {
        "best accuracy": f"{best:.2%}",
        "updates": f"{optimizer.updates:,}",
        "updates at ref_batchsize": f"{optimizer.progress:,.1f}",
        "samples": f"{optimizer.samples:,}",
        "seconds": f"{seconds:.1f}",
    }
    if device.type == "xla":
        backend.barrier()  # until every core has compiled its last graph
        rows["compiled graphs"] = str(xla.compiled_graphs())
    for name, value in rows.items():
        backend.print0(f"{name:<26}{value:>12}")


def parse() -> argparse.Namespace:
    """Return the flags. The defaults train MNIST to about 97.9 % in 5 epochs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--trace",
        default=os.path.relpath(TRACES / "test_trace.csv"),
        help='CSV file, or a schedule such as "0:128 500:256"',
    )
    add("--rule", choices=list(vbs.rules.RULES), default="linear", help="how lr follows the batch size")
    add("--epochs", type=int, default=5)
    add("--lr", type=float, help="learning rate at ref-batchsize; by default 0.01, for Adam 0.001")
    add("--momentum", type=float, default=0.5)
    add("--ref-batchsize", type=int, default=128, help="batch size at which lr was tuned")
    add("--warmup-epochs", type=float, default=0.5, help="of the rule legw, at ref-batchsize")
    add("--exponent", type=float, default=0.75, help="of the rule power")
    add("--cosine", action="store_true", help="decay lr along a cosine that follows the progress of the training")
    add("--microbatch", type=int, default=32, help="rows per forward and backward on a rank")
    add("--device", choices=["xla", "cuda", "cpu"], default=default_device())
    add("--cores", type=int, help="XLA cores on a CPU, by default 4; a TPU uses all its cores")
    add("--on-end", choices=["error", "stop", "hold", "cycle"], help="what follows the last step of the trace")
    add("--data-dir", help="folder with the idx files of MNIST; by default they are downloaded once")
    add("--samples", type=int, help="train on this many images only, the first ones")
    add("--checkpoint", help="folder of checkpoints to resume from and save to; by default there are none")
    add("--save-every", type=int, default=50, help="updates between two checkpoints")
    add("--logdir", help="folder for TensorBoard files and scalars.csv; by default none are written")
    add("--log-steps", type=int, default=10, help="updates between two rows of scalars")
    add("--num-workers", type=int, default=0, help="processes that load data, per rank")
    add("--seed", type=int, default=0)
    add("--target", type=float, default=0.97, help="accuracy below which the exit code is 21")
    return parser.parse_args()


def default_device() -> str:
    """Return XLA if it is installed, except under torchrun; otherwise a GPU, otherwise the CPU."""
    if importlib.util.find_spec("torch_xla"):
        if "RANK" not in os.environ:
            return "xla"
    elif "PJRT_DEVICE" in os.environ:
        raise SystemExit("PJRT_DEVICE is set, but torch_xla, which reads it, is not installed; see docs/devices.md")
    return "cuda" if torch.cuda.is_available() else "cpu"


def launch(flags: argparse.Namespace) -> None:
    """Call `train` on every rank that this process starts, or is."""
    if flags.device != "xla":
        try:
            train(flags)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()  # otherwise its threads sometimes abort the process at exit
    elif os.environ.setdefault("PJRT_DEVICE", "CPU") == "CPU":
        xla.launch(train, (flags,), cores=flags.cores or 4)
    else:
        xla.launch(train, (flags,))


def main() -> None:
    """Parse the flags, fetch the data, handle signals if there is a checkpoint to save to, and train."""
    flags = parse()
    if flags.data_dir is None:
        mnist.fetch()  # before the ranks start, so that they do not all fetch
    with vbs.Preemption() if flags.checkpoint else nullcontext():
        launch(flags)


if __name__ == "__main__":
    main()
