"""Train a GPT with FSDP2 while its batch size grows from 1 to 64 sequences, and resume on any number of processes.

torchrun --nproc-per-node=3 examples/fsdp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs

VOCABULARY, LENGTH, WIDTH, SEQUENCES = 16, 32, 64, 2000


class GPT(nn.Module):
    """A language model of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next tokens, (rows, length, vocabulary), of tokens, (rows, length)."""
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits


def sequences() -> Tensor:
    """Return random texts in which a token depends on the previous one, (sequences, length + 1)."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(VOCABULARY, (SEQUENCES,), generator=generator)]
    for _ in range(LENGTH):
        jump = torch.randint(3, (SEQUENCES,), generator=generator)
        rows.append((3 * rows[-1] + jump) % VOCABULARY)
    return torch.stack(rows, 1)


def main() -> None:
    """Train on the samples of this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="folder to save checkpoints in, and to resume from")
    parser.add_argument("--updates", type=int, default=120, help="number of updates after which training ends")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16, and sum in float32")
    options = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)  # the same weights on every rank, which keeps only its shards
    model = GPT().to(device)
    dtype = torch.bfloat16 if options.bfloat16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    sampler = vbs.CustomSampler(SEQUENCES, "0:1 20:4 40:16 80:64", minibatch_size=8, max_updates=options.updates)
    loader = DataLoader(TensorDataset(sequences()), batch_sampler=sampler)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    inner = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    optimizer = vbs.RootRuleOptimizer(inner, sampler, ref_batchsize=16, model=model, max_grad_norm=1.0)
    checkpoint = None
    if options.folder is not None:
        checkpoint = vbs.Checkpoint(options.folder, model=model, optimizer=optimizer, every=50)
        checkpoint.restore()

    for _ in vbs.remaining_epochs(sampler, optimizer, until=10):
        for update in vbs.updates(loader, optimizer):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, (optimizer.samples + 16) / 200)  # a warm-up of 200 sequences
            for (tokens,) in update:
                tokens = tokens.to(device)
                logits = model(tokens[:, :-1]).float()
                loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                optimizer.backward(loss)
                optimizer.log(loss=loss)
                optimizer.step()
            if optimizer.updates % 20 == 0 and dist.get_rank() == 0:
                print(f"{optimizer.updates} {optimizer.samples} {optimizer.logged['loss'].item():.4f}", flush=True)
            if checkpoint is not None:
                checkpoint.step()
    if checkpoint is not None:
        checkpoint.save()
        checkpoint.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
