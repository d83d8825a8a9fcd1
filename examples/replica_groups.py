"""Train as one of several replica groups of torchft, each of which can end and return.

torchft_lighthouse --min_replicas 2 --join_timeout_ms 1000 --bind [::]:29510
REPLICA_GROUP_ID=0 TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/replica_groups.py 2> >(grep -v torchft::)
"""

import os
import socket
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchft import Manager, ProcessGroupGloo

import variable_batch_size as vbs
from variable_batch_size.integrations.torchft import TorchftBackend

GROUPS = 3


def main() -> None:
    """Train as one group."""
    group = int(os.environ["REPLICA_GROUP_ID"])
    host = os.environ.get("POD_IP", socket.gethostname())  # where the other groups reach this one
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=None,  # see backend.register()
        state_dict=None,
        min_replica_size=GROUPS // 2 + 1,
        use_async_quorum=False,
        quorum_timeout=timedelta(minutes=10),  # longer than other groups take to return
        quorum_retries=600,  # one per second, if the lighthouse is restarted
        replica_id=f"group{group}",
        hostname=host,
        store_addr=host,
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    backend = TorchftBackend(manager)

    torch.manual_seed(0)  # the same data in every group
    data = torch.randn(1000, 20)
    dataset = TensorDataset(data, data[:, :3].argmax(1))
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))

    trace = vbs.AdaptiveTrace(vbs.adaptive.PerDevice(32), every=10)  # or "0:128 200:96", for any number of groups
    sampler = vbs.CustomSampler(dataset, trace, num_replicas=1, rank=0, minibatch_size=32, max_updates=300)
    loader = DataLoader(dataset, batch_sampler=sampler)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=96, backend=backend)
    backend.register(model=model, optimizer=optimizer)  # what a returning group takes over

    folder = os.environ.get("CHECKPOINTS", "runs/groups")  # or a URL
    create = partial(vbs.Checkpoint, folder, model=model, optimizer=optimizer, every=50, run="groups")
    checkpoint = create() if group == 0 else None
    if checkpoint is not None:  # if all groups end, the others take over what it restores
        checkpoint.restore()
    while not optimizer.done:
        for update in vbs.updates(loader, optimizer):
            for inputs, target in update:
                loss = cross_entropy(model(inputs), target)
                optimizer.backward(loss)
                updated = optimizer.step()  # also False if a group was lost; the update is then repeated
            if updated and optimizer.updates % 50 == 0 and backend.leads:
                print(f"update {optimizer.updates}: {backend.world.size} groups, loss {loss.item():.3f}", flush=True)
            if checkpoint is not None:
                checkpoint.step()
    if checkpoint is None and backend.leads:  # group 0 is lost, and finds the result when it returns
        checkpoint = create()
    if checkpoint is not None:
        checkpoint.save()
        checkpoint.close()
    manager.shutdown()


if __name__ == "__main__":
    main()
