"""Train on every core of a TPU, or on XLA devices emulated on the CPU.

PJRT_DEVICE=TPU python examples/xla.py
PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python examples/xla.py
"""

import torch
import torch_xla
from torch.utils.data import DataLoader, TensorDataset
from torch_xla.distributed.parallel_loader import MpDeviceLoader

import variable_batch_size as vbs
from variable_batch_size.backend import xla


def train(epochs: int) -> None:
    """Train on the samples of this rank; `launch` calls this once per core."""
    generator = torch.Generator().manual_seed(0)  # a separate one, because ranks can be threads that share torch's
    dataset = TensorDataset(torch.randn(1000, 20, generator=generator), torch.randint(3, (1000,), generator=generator))

    model = torch.nn.Linear(20, 3).to(torch_xla.device())
    vbs.broadcast_parameters(model)
    sampler = vbs.CustomSampler(dataset, trace="0:128 10:48 15:200", minibatch_size=32)
    # Upload the next microbatches while this one is computed.
    loader = MpDeviceLoader(DataLoader(dataset, batch_sampler=sampler), torch_xla.device())
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=128)

    backend = vbs.backend.XlaBackend()
    for epoch in vbs.remaining_epochs(sampler, optimizer, until=epochs):
        for update in vbs.updates(loader, optimizer):
            for data, target in update:
                optimizer.backward(torch.nn.functional.cross_entropy(model(data), target))
                optimizer.step()  # also executes the recorded graph, without torch_xla.sync()
        backend.print0(epoch, optimizer.updates, optimizer.samples)
    backend.barrier()  # until every core has compiled its last graph
    backend.print0("compiled graphs:", xla.compiled_graphs())


if __name__ == "__main__":
    xla.launch(train, (3,))
