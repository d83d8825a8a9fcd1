"""Train a classifier under a batch trace. Ctrl-C and SIGTERM save; resume with any number of processes, such as two:

torchrun --nproc-per-node=2 examples/train.py
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs

TRACE, FOLDER = "traces/test_trace.csv", "runs/train"


def spirals(rows: int) -> TensorDataset:
    """Return points in the plane, and on which of three spirals each is."""
    spiral, radius = torch.arange(rows) % 3, torch.rand(rows)
    angle = 2.1 * spiral + 8 * radius + 0.2 * torch.randn(rows)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), spiral)


def main() -> None:
    """Train on this process' share of each batch."""
    torch.manual_seed(0)  # the same data and weights in each process
    train, test, relu = spirals(20_000), spirals(5_000), torch.nn.ReLU()
    net = torch.nn.Sequential(torch.nn.Linear(2, 128), relu, torch.nn.Linear(128, 128), relu, torch.nn.Linear(128, 3))
    if distributed := dist.is_torchelastic_launched():  # by torchrun
        dist.init_process_group("gloo")
    model = DistributedDataParallel(net) if distributed else net

    sampler = vbs.CustomSampler(train, TRACE, minibatch_size=256, epochs=10)
    loader = DataLoader(train, batch_sampler=sampler)
    inner, tracker = torch.optim.AdamW(net.parameters(), lr=1e-3), vbs.Tracker(FOLDER)  # which has a progress bar
    optimizer = vbs.RootRuleOptimizer(inner, sampler, ref_batchsize=128, model=model, tracker=tracker)
    parts = vbs.EvaluationSampler(test, minibatch_size=1000)
    test_loader, metrics = DataLoader(test, batch_sampler=parts), vbs.Accumulator(parts)
    saved = {"model": net, "optimizer": optimizer}
    with vbs.Preemption(), vbs.Checkpoint(FOLDER, every=200, on_interrupt="save", **saved) as checkpoint, tracker:
        checkpoint.restore()
        for epoch in vbs.remaining_epochs(sampler, optimizer):
            for update in vbs.updates(loader, optimizer):
                for x, y in update:  # a microbatch
                    loss = cross_entropy(model(x), y)
                    optimizer.backward(loss)
                    optimizer.log(loss=loss)
                    optimizer.step()
                checkpoint.step()
            for x, y in test_loader:
                metrics.add(accuracy=(net(x).argmax(1) == y).float().mean())
            accuracy = metrics.read()["accuracy"]
            tracker.log(optimizer.updates, {"accuracy": accuracy})
            if sampler.world.rank == 0:
                print(f"epoch {epoch}: accuracy {accuracy:.1%} after {optimizer.updates} updates")
        checkpoint.save()


if __name__ == "__main__":
    main()
