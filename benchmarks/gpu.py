"""How far are updates on a GPU from those of one big batch, and how many kernels does an update launch?

The deviation is the largest difference of a weight to a slow float64 twin, in machine epsilons of the dtype and
relative to the largest weight, over trainings of every rule with random batch sizes. The kernels are those of one
update of a perceptron with four microbatches, beside gradient accumulation by hand.
"""

from __future__ import annotations

import random

import torch

import variable_batch_size as vbs
from helpers.gpu import GPUS, ROWS, TOLERANCES, deviation, launches, updates, updates_by_hand
from helpers.reference import OPTIMIZERS
from records import Measured
from results import record

CASES = 20  # trainings of each rule and dtype
MICROBATCHES = 4


def random_deviation(rule: str, dtype: torch.dtype, rng: random.Random) -> float:
    """Return the deviation of a training with random batch sizes."""
    sizes = [rng.randint(1, 96) for _ in range(rng.randint(2, 4))]
    return deviation(
        OPTIMIZERS[rule],
        sizes,
        dtype,
        dataset_size=max(sizes) + rng.randint(0, 40),
        minibatch_size=rng.randint(4, 40),
        fixed_shape=rng.random() < 0.5,
        seed=rng.getrandbits(64),
        max_grad_norm=rng.choice([None, 0.5]),
    )


def record_deviations(where: str) -> None:
    for dtype in TOLERANCES:
        rng = random.Random(0)
        found = {rule: max(random_deviation(rule, dtype, rng) for _ in range(CASES)) for rule in OPTIMIZERS}
        worst = max(found, key=lambda rule: found[rule])
        largest = Measured(found[worst] / torch.finfo(dtype).eps, n=CASES * len(found))
        own = {"on": str(dtype).removeprefix("torch."), "where": where, "note": f"rule {worst}"}
        record("deviation from one big batch", "largest of all rules", largest, "machine epsilons", **own)


def record_launches(where: str) -> None:
    sizes = [MICROBATCHES * ROWS]
    sides = {
        "accumulation by hand": updates_by_hand(sizes),
        "constant": updates(vbs.ConstantOptimizer, sizes),
        "linear rule": updates(vbs.LinearRuleOptimizer, sizes),
        "linear rule, clipped": updates(vbs.LinearRuleOptimizer, sizes, max_grad_norm=1.0),
        "AdaScale": updates(vbs.AdaScaleOptimizer, sizes),
    }
    for side, each in sides.items():
        own = {"on": "perceptron", "where": where, "case": f"{MICROBATCHES} microbatches of {ROWS}"}
        record("kernels launched by an update", side, launches(each), "launches", **own)


if __name__ == "__main__":
    if GPUS:
        gpu = f"{torch.cuda.get_device_name()}, 1 process"
        record_deviations(gpu)
        record_launches(gpu)
    else:
        print("No GPU was found: nothing was measured.")
