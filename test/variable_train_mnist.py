"""MNIST with a global batch size that follows a trace: the whole library in one script.

    python test/variable_train_mnist.py                      several XLA cores of this CPU, or a GPU, or one process
    PJRT_DEVICE=TPU python test/variable_train_mnist.py      every core of a TPU VM
    torchrun --nproc-per-node=2 test/variable_train_mnist.py --device cpu

Ends with exit code 21 when the best accuracy stays below `--target`, and with 143 when a signal asked it to stop and
there is a `--checkpoint` to go on from.
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
RULES: dict[str, type[vbs.CustomOptimizer]] = {
    "constant": vbs.ConstantOptimizer,
    "linear": vbs.LinearRuleOptimizer,
    "root": vbs.RootRuleOptimizer,
    "linear-momentum": vbs.LinearRuleMomentumOptimizer,
    "legw": vbs.LEGWRuleOptimizer,
    "adascale": vbs.AdaScaleOptimizer,
    "sqrt-sde": vbs.SqrtSDERuleOptimizer,
    "adamscale": vbs.AdamScaleOptimizer,
}
FOR_ADAM = {"sqrt-sde", "adamscale"}


class Best:
    """The best accuracy so far, which a checkpoint holds too."""

    accuracy = 0.0

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"accuracy": self.accuracy}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """From a checkpoint."""
        self.accuracy = state["accuracy"]


def train(flags: argparse.Namespace) -> None:
    """What every rank does."""
    device, world = place(flags)
    train_set = TensorDataset(*mnist.load(flags.data_dir, train=True)[: flags.samples])
    test_set = mnist.load(flags.data_dir, train=False)

    # Which samples make up which update is the same for every world; the sampler deals this rank its part of them.
    sampler = vbs.CustomSampler(
        train_set,
        flags.trace,
        world.size,
        world.rank,
        flags.microbatch,
        flags.seed,
        on_end=flags.on_end,
        epochs=flags.epochs,
    )
    shield = vbs.Preemption.shield if flags.checkpoint else None
    loader = DataLoader(train_set, batch_sampler=sampler, num_workers=flags.num_workers, worker_init_fn=shield)
    if device.type == "xla":
        from torch_xla.distributed.parallel_loader import MpDeviceLoader

        loader = MpDeviceLoader(loader, device)  # uploads the next microbatches while this one is computed

    # The optimizer accumulates, sums over the ranks once an update, and scales lr by the rule.
    model = make_model(flags.seed).to(device)
    tracker = vbs.Tracker(flags.logdir)  # scalars, and a progress bar where standard error is a terminal
    optimizer = make_optimizer(flags, model, sampler, tracker)
    scheduler = make_scheduler(flags, optimizer, len(train_set))
    # With --checkpoint a run goes on where the last one stopped, on as many ranks as there are now. A run that is asked
    # to stop (see `main`) saves in the next checkpoint.step() and leaves from there.
    checkpoint, best = None, Best()
    if flags.checkpoint:
        checkpoint = vbs.Checkpoint(
            flags.checkpoint, model=model, optimizer=optimizer, scheduler=scheduler, every=flags.save_every, best=best
        )
        checkpoint.restore()

    backend = vbs.detect(model.parameters())
    loss_fn = nn.CrossEntropyLoss()

    began = time.monotonic()
    backend.print0(f"{world.size} x {device.type}, rule {flags.rule}, {flags.epochs} epochs of {flags.trace}")
    for epoch in range(optimizer.epoch, flags.epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for images, labels in loader:  # one microbatch a turn
            loss_fn(model(images.to(device)), labels.to(device)).backward()
            if optimizer.step() and scheduler:  # True when this one completed an update
                scheduler.step()
            if checkpoint:
                checkpoint.step()
        accuracy = evaluate(model, test_set, device, backend)
        best.accuracy = max(best.accuracy, accuracy)
        backend.print0(
            f"epoch {epoch}: accuracy {accuracy:.2%}, {optimizer.updates} updates, {optimizer.samples} samples, "
            f"last lr {optimizer.current_lr():.4g}, {time.monotonic() - began:.1f} s"
        )
    tracker.close()
    if checkpoint:
        checkpoint.close()
    report(optimizer, best.accuracy, time.monotonic() - began, device, backend)
    if best.accuracy < flags.target:
        backend.print0(f"the best accuracy, {best.accuracy:.2%}, is below the target of {flags.target:.2%}")
        raise SystemExit(21)


def place(flags: argparse.Namespace) -> tuple[torch.device, vbs.World]:
    """This rank's device, and which of how many ranks it is."""
    if flags.device == "xla":
        import torch_xla

        return torch_xla.device(), vbs.XlaBackend().world
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if flags.device == "cuda" else torch.device("cpu")
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("nccl" if flags.device == "cuda" else "gloo")
        return device, vbs.World(dist.get_rank(), dist.get_world_size())
    return device, vbs.World()


def make_model(seed: int) -> nn.Module:
    """A small CNN with the same weights on every rank; its norms do not mix samples, so that gradients are exact."""
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
    """The rule's own class, around SGD or Adam."""
    inner: torch.optim.Optimizer
    if flags.rule in FOR_ADAM:
        inner = torch.optim.Adam(model.parameters(), lr=flags.lr or 0.001)
    else:
        inner = torch.optim.SGD(model.parameters(), lr=flags.lr or 0.01, momentum=flags.momentum)
    own = {"constant": {}, "legw": {"ref_batchsize": flags.ref_batchsize, "warmup_epochs": flags.warmup_epochs}}
    options = own.get(flags.rule, {"ref_batchsize": flags.ref_batchsize})
    return RULES[flags.rule](inner, sampler, tracker=tracker, log_steps=flags.log_steps, **options)


def make_scheduler(
    flags: argparse.Namespace, optimizer: vbs.CustomOptimizer, samples: int
) -> vbs.ProgressScheduler | None:
    """A cosine over the epochs, written in updates at ref-batchsize and read where the training's progress is."""
    if not flags.cosine:
        return None
    total = flags.epochs * samples // flags.ref_batchsize
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    return vbs.ProgressScheduler(cosine, optimizer, total=total)


@torch.no_grad()
def evaluate(model: nn.Module, test_set: TensorDataset, device: torch.device, backend: vbs.Backend) -> float:
    """The accuracy over the whole test set, of which each rank looks at its part."""
    images, labels = test_set.tensors
    size, world = 500, backend.world  # 500 divides the test set, so there is one shape
    correct = torch.zeros(1, device=device)
    for start in range(world.rank * size, len(images), world.size * size):
        part = slice(start, start + size)
        correct += (model(images[part].to(device)).argmax(dim=1) == labels[part].to(device)).sum()
        backend.mark_step()
    backend.all_reduce_sum([correct])
    return backend.host(correct).item() / len(images)


def report(
    optimizer: vbs.CustomOptimizer, best: float, seconds: float, device: torch.device, backend: vbs.Backend
) -> None:
    """The table at the end."""
    rows = {
        "best accuracy": f"{best:.2%}",
        "updates": f"{optimizer.updates:,}",
        "updates at ref_batchsize": f"{optimizer.progress:,.1f}",
        "samples": f"{optimizer.samples:,}",
        "seconds": f"{seconds:.1f}",
    }
    if device.type == "xla":
        backend.barrier()
        rows["compiled graphs"] = str(xla.compiled_graphs())
    for name, value in rows.items():
        backend.print0(f"{name:<26}{value:>12}")


def parse() -> argparse.Namespace:
    """The flags, with defaults that work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--trace", default=str(TRACES / "test_trace.csv"), help='a CSV, or a schedule such as "0:128 500:256"')
    add("--rule", choices=RULES, default="linear", help="how lr follows the batch size")
    add("--epochs", type=int, default=5)
    add("--lr", type=float, help="learning rate at ref-batchsize, by default 0.01, for Adam 0.001")
    add("--momentum", type=float, default=0.5)
    add("--ref-batchsize", type=int, default=128)
    add("--warmup-epochs", type=float, default=0.5, help="of the rule legw, at ref-batchsize")
    add("--cosine", action="store_true", help="let lr fall along a cosine that is read at the training's progress")
    add("--microbatch", type=int, default=32, help="rows that a rank computes at once")
    add("--device", choices=["xla", "cuda", "cpu"], default=default_device())
    add("--cores", type=int, help="XLA cores on a CPU, by default 4; a TPU uses all it has")
    add("--on-end", choices=["error", "hold", "cycle"], help="what follows the trace's last step")
    add("--data-dir", help="folder with MNIST's idx files; by default they are downloaded once")
    add("--samples", type=int, help="train on so many images only, the first ones")
    add("--checkpoint", help="folder of checkpoints, from which a run goes on; by default there are none")
    add("--save-every", type=int, default=50, help="updates from one checkpoint to the next")
    add("--logdir", help="folder for TensorBoard files and scalars.csv; by default nothing is written")
    add("--log-steps", type=int, default=10, help="updates between two rows there")
    add("--num-workers", type=int, default=0, help="processes that load data, on each rank")
    add("--seed", type=int, default=0)
    add("--target", type=float, default=0.97, help="accuracy below which the exit code is 21")
    return parser.parse_args()


def default_device() -> str:
    """XLA where it is installed, except under torchrun; else a GPU, else the CPU."""
    if importlib.util.find_spec("torch_xla") and "RANK" not in os.environ:
        return "xla"
    return "cuda" if torch.cuda.is_available() else "cpu"


def launch(flags: argparse.Namespace) -> None:
    """Call `train` on each rank that this process has to start, or is."""
    if flags.device != "xla":
        try:
            train(flags)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()  # whose threads would end the process by SIGABRT, now and then
    elif os.environ.setdefault("PJRT_DEVICE", "CPU") == "CPU":
        xla.launch(train, (flags,), cores=flags.cores or 4)
    else:
        xla.launch(train, (flags,))


def main() -> None:
    """Read the flags, take the signals, start."""
    flags = parse()
    if flags.data_dir is None:
        mnist.fetch()
    with vbs.Preemption() if flags.checkpoint else nullcontext():
        launch(flags)


if __name__ == "__main__":
    main()
