"""Train as one of several replica groups of torchft, whose processes shard the model; torchrun starts a group.

torchft_lighthouse --min_replicas 2 --join_timeout_ms 1000 --bind [::]:29510
REPLICA_GROUP_ID=0 TORCHFT_LIGHTHOUSE=http://localhost:29510 \
    torchrun --standalone --nproc-per-node=2 examples/sharded_groups.py
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchft import Manager, ProcessGroupGloo

import variable_batch_size as vbs
from variable_batch_size.integrations.torchft import TorchftBackend

GROUPS = 3


def main() -> None:
    """Train as one process of a group."""
    group = int(os.environ["REPLICA_GROUP_ID"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # the processes of this group
    manager = Manager(  # which finds them in the environment of torchrun
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=None,  # see backend.register()
        state_dict=None,
        min_replica_size=GROUPS // 2 + 1,
        use_async_quorum=False,
        init_sync=False,  # all groups start with the same weights
        quorum_timeout=timedelta(minutes=10),  # longer than other groups take to return
        quorum_retries=600,  # one per second, if the lighthouse is restarted
        replica_id=f"group{group}",
        hostname=os.environ["MASTER_ADDR"],  # where the other groups reach this one: torchrun --local-addr
    )
    backend = TorchftBackend(manager)

    torch.manual_seed(0)  # the same data and initial weights everywhere
    data = torch.randn(1000, 20)
    dataset = TensorDataset(data, data[:, :3].argmax(1))
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer)  # among the processes of this group

    sampler = vbs.CustomSampler(dataset, "0:128 200:96", num_replicas=1, rank=0, minibatch_size=32, max_updates=300)
    loader = DataLoader(dataset, batch_sampler=sampler)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=96, model=model, backend=backend)
    backend.register(model=model, optimizer=optimizer)  # what a returning group takes over

    while not optimizer.done:
        for update in vbs.updates(loader, optimizer):
            for inputs, target in update:
                loss = cross_entropy(model(inputs), target)
                optimizer.backward(loss)
                updated = optimizer.step()  # also False if a group was lost; the update is then repeated
            if updated and optimizer.updates % 50 == 0 and backend.leads:
                print(f"update {optimizer.updates}: {backend.world.size} processes, loss {loss.item():.3f}", flush=True)
    manager.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
