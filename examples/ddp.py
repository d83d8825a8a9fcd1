"""Train a DistributedDataParallel model with a variable batch size.

torchrun --nproc-per-node=2 examples/ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs


def main() -> None:
    """Train on the samples of this rank."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backends = {"cpu": "gloo", device.type: dist.get_default_backend_for_device(device)}
    dist.init_process_group(",".join(":".join(pair) for pair in backends.items()))

    torch.manual_seed(0)  # the same data on every rank
    data = torch.randn(1000, 20)
    dataset = TensorDataset(data, data[:, :3].argmax(1))
    net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)).to(device)
    model = DistributedDataParallel(net)

    sampler = vbs.CustomSampler(dataset, trace="0:128 10:48 15:200", minibatch_size=32)
    loader = DataLoader(dataset, batch_sampler=sampler)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=128, model=model, max_grad_norm=1.0)

    for epoch in vbs.remaining_epochs(sampler, optimizer, until=3):
        for update in vbs.updates(loader, optimizer):
            for inputs, target in update:
                loss = cross_entropy(model(inputs.to(device)), target.to(device))
                optimizer.backward(loss)
                optimizer.log(loss=loss)
                optimizer.step()
        if dist.get_rank() == 0:
            print(f"{epoch} {optimizer.updates} {optimizer.samples} {optimizer.logged['loss'].item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
