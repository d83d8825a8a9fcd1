"""What does the batch of a contrastive loss bring? Recall of pairs that were held out, after as many samples.

A CLIP loss trains two towers on synthetic pairs, under AdamW and the root rule: over batches of several sizes by
`vbs.whole_batch`, and within the microbatches of the largest, which is what accumulation alone does.
"""

from __future__ import annotations

import argparse
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from records import Measured
from results import record

PAIRS, HELD_OUT, LATENT, EPOCHS, SMALLEST = 8192, 512, 16, 4, 16
SIZES = (16, 64, 256)


def pairs(number: int, maps: tuple[Tensor, Tensor]) -> TensorDataset:
    """Return two noisy views of latent vectors."""
    latent = torch.randn(number, LATENT)
    views = [torch.tanh(latent @ one / 4) for one in maps]
    return TensorDataset(*(view + 0.5 * torch.randn_like(view) for view in views))


def tower(width: int) -> nn.Sequential:
    """Return an encoder of one view."""
    return nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 32))


def recall(batch_size: int, rate: float, seed: int, *, whole: bool) -> float:
    """Train, and return how many of the held out pairs are each other's nearest, as a fraction."""
    torch.manual_seed(seed)
    maps = torch.randn(LATENT, 40), torch.randn(LATENT, 30)
    data, held_out = pairs(PAIRS, maps), pairs(HELD_OUT, maps)
    towers = nn.ModuleList([tower(40), tower(30)])
    temperature = nn.Parameter(torch.tensor(2.0))

    def encode(rows: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(normalize(one(row), dim=1) for one, row in zip(towers, rows, strict=True))

    def loss(image: Tensor, text: Tensor) -> Tensor:
        logits, labels = temperature.exp() * image @ text.T, torch.arange(len(image))
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    sampler = vbs.CustomSampler(data, batch_size, 1, 0, SMALLEST, seed=seed, epochs=EPOCHS)
    inner = torch.optim.AdamW([*towers.parameters(), temperature], lr=rate)
    optimizer = vbs.RootRuleOptimizer(inner, sampler, ref_batchsize=SMALLEST)
    loader = DataLoader(data, batch_sampler=sampler)
    for _ in vbs.remaining_epochs(sampler, optimizer):
        for update in vbs.updates(loader, optimizer):
            if whole:
                vbs.whole_batch(optimizer, update, encode=encode, loss=loss)
                continue
            for rows in update:
                optimizer.backward(loss(*encode(rows)))
                optimizer.step()
    with torch.no_grad():
        image, text = encode([*held_out.tensors])
        return (image @ text.T).argmax(dim=1).eq(torch.arange(HELD_OUT)).double().mean().item()


def main() -> None:
    """Measure, and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rates", type=float, nargs="*", default=[5e-4, 1e-3, 2e-3], help=f"at B = {SMALLEST}")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    for rate, (size, whole) in product(flags.rates, [*((size, True) for size in SIZES), (SIZES[-1], False)]):
        found = [recall(size, rate, seed, whole=whole) for seed in range(flags.seeds)]
        what = f"loss of {'the whole batch' if whole else f'microbatches of {SMALLEST}'}, B = {size}"
        measured = Measured(float(np.mean(found)), deviation=float(np.std(found, ddof=1)), n=len(found))
        on = f"{HELD_OUT} synthetic pairs held out, {EPOCHS} epochs of {PAIRS}"
        record("recall of the nearest pair", what, measured, "fraction", on=on, where="CPU", case=f"rate {rate:g}")


if __name__ == "__main__":
    main()
