"""Is the noise scale of a sign-like optimizer smaller by (1 - beta1) / (1 + beta1), the noise of its momentum?

    python benchmarks/momentum_noise.py

For batches of k = 1 to 32 references, and each constant learning rate of a grid, this counts the updates to a target
loss; the best rate has the fewest. Three predictions of (best rate at k) / (best rate at 1) are compared: the root of
AdaScale's gain, the same with a noise scale that is smaller by the factor, and the same with a noise scale in the
l1 norm, (sum of sigma_i)^2 / (sum of |g_i|)^2; for SGD, the gain instead of its root. The gain is also what an update
is to be worth, which is compared with (updates at 1) / (updates at k). sigma^2 and |g|^2 are averages over the training
at the reference with its best rate. The error is the mean over k > 1 of |log2(predicted / measured)|, so that 1 is a
factor of 2. Intervals of 95% are over replicates, each with seeds of its own; records have their quartiles.

Tasks: a noisy quadratic, sum of h_i x_i^2 / 2 in 100 dimensions with gradient noise of variance S h_i for one sample
(Zhang et al. 2019, arXiv 1907.04164), h_i = i^-c; and a perceptron with 32 hidden units on 1024 small digits of
MNIST. All learning rates and seeds are trained at once. Ten minutes on one core.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from records import spread
from results import record
from variable_batch_size.lab.evaluation.statistics import mean_interval
from variable_batch_size.lab.evaluation.tasks import mnist_files
from variable_batch_size.rules import adascale_gain

TIMES = (1, 2, 4, 8, 16, 32)
BETA = 0.9
FACTOR = (1 - BETA) / (1 + BETA)
REPLICATES = 5
L2, SMALLER, L1 = "noise scale", f"noise scale x {FACTOR:.3f}", "noise scale in l1"
RATE, WORTH = "best learning rate", "worth of an update"
Array: TypeAlias = NDArray[np.float64]
State: TypeAlias = dict[str, Tensor]


# Optimizers: the change of x, of shape (rates, seeds, d), per unit of the learning rate. -----------------------------


def sgd(g: Tensor, state: State, update: int) -> Tensor:
    """Return the velocity, times 1 - beta."""
    state["m"] = state["m"].lerp_(g, 1 - BETA) if state else g * (1 - BETA)
    return state["m"]


def signum(g: Tensor, state: State, update: int) -> Tensor:
    """Return the sign of the momentum."""
    return sgd(g, state, update).sign()


def lion(g: Tensor, state: State, update: int) -> Tensor:
    """Return the sign of Lion's mean, with betas of 0.9 and 0.99."""
    m = state["m"] if state else torch.zeros_like(g)
    step = torch.lerp(m, g, 1 - BETA).sign()
    state["m"] = m.lerp_(g, 0.01)
    return step


def adam(g: Tensor, state: State, update: int) -> Tensor:
    """Return Adam's step with betas of 0.9 and 0.99."""
    m = sgd(g, state, update)
    state["v"] = state["v"].lerp_(g * g, 0.01) if "v" in state else g * g * 0.01
    return m / (1 - BETA**update) / ((state["v"] / (1 - 0.99**update)).sqrt() + 1e-12)


def muon(g: Tensor, state: State, update: int) -> Tensor:
    """Return the orthogonal factor of the momentum, as a matrix of 10 rows, by Muon's iteration."""
    m = sgd(g, state, update)
    x = m.view(*m.shape[:-1], 10, -1)
    x = x / (x.flatten(-2).norm(dim=-1)[..., None, None] + 1e-12)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.reshape(m.shape)


OPTIMIZERS: dict[str, Callable[[Tensor, State, int], Tensor]] = {
    "SGD": sgd,
    "Signum": signum,
    "Lion": lion,
    "Adam": adam,
    "Muon": muon,
}


# Tasks ----------------------------------------------------------------------------------------------------------------


@dataclass
class Quadratic:
    """A noisy quadratic."""

    exponent: float
    one_sample: float  # S; the reference is one sample
    target: float = 0.1  # of the first loss
    updates: int = 8000  # at most
    reference: int = 1
    seeds: int = 8  # of a replicate
    h: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.h = torch.arange(1, 101, dtype=torch.float32) ** -self.exponent

    def __str__(self) -> str:
        return f"quadratic, h = i^-{self.exponent:g}, S = {self.one_sample:g}"

    def start(self, rates: int, runs: int) -> Tensor:
        """Return the first weights, (rates, runs, d)."""
        return torch.ones(rates, runs, len(self.h))

    def loss(self, x: Tensor) -> Tensor:
        """Return the loss of each run."""
        return 0.5 * (self.h * x * x).sum(-1)

    def gradient(self, x: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Return the gradient of a batch; all rates have the same samples."""
        return self.h * x + torch.randn(x.shape[1:], generator=generator) * (self.one_sample * self.h / size).sqrt()

    def noise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the variance of a gradient at the reference, and the true gradient, (..., d)."""
        return (self.one_sample * self.h).expand_as(x), self.h * x


class Digits:
    """A perceptron on 1024 digits of MNIST, of 7 x 7 pixels; the loss is that of all of them."""

    target, updates, reference, seeds = 0.3, 1500, 8, 2
    hidden = 32

    def __init__(self) -> None:
        images, labels = mnist_files.load(train=True)[:1024]
        self.x, self.y = torch.nn.functional.avg_pool2d(images, 4).flatten(1), labels
        self.sizes = 49 * self.hidden, self.hidden, self.hidden * 10, 10

    def __str__(self) -> str:
        return "perceptron on digits"

    def start(self, rates: int, runs: int) -> Tensor:
        """Return the same weights for all rates, (rates, runs, d)."""
        generator = torch.Generator().manual_seed(0)
        parts = [torch.randn(runs, n, generator=generator) for n in self.sizes]
        scaled = [parts[0] / 7, 0 * parts[1], parts[2] / self.hidden**0.5, 0 * parts[3]]
        return torch.cat(scaled, 1).expand(rates, runs, -1).clone()

    def of_rows(self, w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient: w (rates, runs, d), x (runs, n, 49), y (runs, n)."""
        v, a, u, b = w.split(self.sizes, -1)
        v, u = v.unflatten(-1, (49, self.hidden)), u.unflatten(-1, (self.hidden, 10))
        hidden = (x @ v + a[..., None, :]).relu()
        logs = (hidden @ u + b[..., None, :]).log_softmax(-1)
        one = torch.nn.functional.one_hot(y, 10).float()
        error = (logs.exp() - one) / y.shape[-1]
        back = (error @ u.mT) * (hidden > 0)
        parts = [(x.mT @ back).flatten(-2), back.sum(-2), (hidden.mT @ error).flatten(-2), error.sum(-2)]
        return -(logs * one).sum((-1, -2)) / y.shape[-1], torch.cat(parts, -1)

    def loss(self, w: Tensor) -> Tensor:
        """Return the loss of each run."""
        return self.of_rows(w, self.x[None], self.y[None])[0]

    def gradient(self, w: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Return the gradient of a batch; all rates have the same samples."""
        rows = torch.randint(len(self.x), (w.shape[1], size), generator=generator)
        return self.of_rows(w, self.x[rows], self.y[rows])[1]

    def noise(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return the variance of a gradient at the reference, and the true gradient, (..., d)."""
        true, square = self.of_rows(w, self.x[None], self.y[None])[1], torch.zeros(1)
        for _ in range(8):
            rows = torch.randint(len(self.x), (w.shape[1], self.reference))
            square = square + (self.of_rows(w, self.x[rows], self.y[rows])[1] - true).square() / 8
        return square, true


# What is measured -----------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """Of each replicate, (replicates,): the best rate, the updates that it takes, and whether it is inside the grid."""

    rates: Array
    updates: Array
    inside: Array


def train(task: Quadratic | Digits, name: str, k: int, grid: Tensor, every: int) -> Found:
    """Train with all rates until the mean loss of the seeds of a replicate, every so many updates, is at the target."""
    generator = torch.Generator().manual_seed(1000 + k)
    x, state = task.start(len(grid), REPLICATES * task.seeds), State()

    def losses() -> Tensor:
        return task.loss(x).unflatten(1, (REPLICATES, task.seeds)).mean(-1).nan_to_num(nan=torch.inf)

    earlier, before = losses(), 0
    target = task.target * (1.0 if isinstance(task, Digits) else float(earlier.mean()))
    reached = torch.full_like(earlier, torch.inf)
    for update in range(1, task.updates + 1):
        x = x - grid[:, None, None] * OPTIMIZERS[name](task.gradient(x, k * task.reference, generator), state, update)
        if update % every:
            continue
        now = losses()
        between = before + ((earlier - target) / (earlier - now)).clamp(0, 1) * (update - before)
        reached = torch.where((now <= target) & reached.isinf(), between, reached)
        earlier, before = now, update
        if update > 1.5 * reached.min(0).values.max():  # no other rate will be better
            break
    return best(reached, grid)


def best(reached: Tensor, grid: Tensor) -> Found:
    """Return the best rate by a parabola through the logarithms of the updates around the fewest."""
    rates, updates, inside = [], [], []
    for own in reached.T:
        i = min(max(int(own.argmin()), 1), len(grid) - 2)
        a, b, c = own[i - 1 : i + 2].log().tolist()
        bend = a - 2 * b + c
        known = math.isfinite(bend) and bend > 0
        shift = min(max(0.5 * (a - c) / bend, -1.0), 1.0) if known else 0.0
        rates.append(float(grid[i] * (grid[1] / grid[0]) ** shift) if own[i].isfinite() else math.nan)
        updates.append(float(own.min()) if own[i].isfinite() else math.nan)
        inside.append(0 < int(own.argmin()) < len(grid) - 1)
    return Found(np.array(rates), np.array(updates), np.array(inside))


def search(task: Quadratic | Digits, name: str, k: int, center: float) -> Found:
    """Search the best rate around a first guess, again around what is found if that is at the end of the grid."""
    every = 10 if isinstance(task, Digits) else 2
    for _ in range(4):
        found = train(task, name, k, center * 2.0 ** (torch.arange(-7, 8) / 3), every)
        if found.inside.all():
            return found
        center = float(np.nanmedian(found.rates)) if np.isfinite(found.rates).any() else center / 4
    return found


def scales_along(task: Quadratic | Digits, name: str, rate: float, updates: int) -> dict[str, float]:
    """Return the noise scales in references, from sums over a training at the reference."""
    generator, x, state = torch.Generator().manual_seed(5), task.start(1, 8), State()
    totals = np.zeros(4)
    for update in range(1, updates + 1):
        if update % 5 == 1:
            variance, true = task.noise(x)
            deviation = variance.mean(1).sqrt()  # over runs
            measured = variance.sum(-1), true.square().sum(-1), deviation.sum(-1), true.abs().sum(-1)
            totals += [float(one.mean()) for one in measured]
        x = x - rate * OPTIMIZERS[name](task.gradient(x, task.reference, generator), state, update)
    sigma2, mu2, sigma1, mu1 = totals
    return {L2: sigma2 / mu2, SMALLER: FACTOR * sigma2 / mu2, L1: (sigma1 / mu1) ** 2}


def study(task: Quadratic | Digits, name: str) -> dict[tuple[str, str], Array]:
    """Return the error of each prediction of each question, (replicates,), of an optimizer on a task."""
    coarse = train(task, name, 8, torch.logspace(-4, 1.5, 23), 10)
    center, power = float(np.nanmedian(coarse.rates)), 1.0 if name == "SGD" else 0.5
    found = {8: search(task, name, 8, center)}
    for k in (4, 2, 1, 16, 32):  # beside the last one
        neighbour = k * 2 if k < 8 else k // 2
        found[k] = search(task, name, k, float(np.nanmedian(found[neighbour].rates)) * (k / neighbour) ** (0.8 * power))
    first = found[1]
    rates = {k: found[k].rates / first.rates for k in TIMES}
    worth = {k: first.updates / found[k].updates for k in TIMES}
    updates = round(float(np.nanmedian(first.updates)))
    print(f"\n{task}, {name}: at k = 1 the best rate is {np.nanmedian(first.rates):.2g}, {updates} updates", end="")
    print("" if all(one.inside.all() for one in found.values()) else "; SOME AT THE END OF A GRID")
    print("  best rate       ", *(f"{np.nanmean(rates[k]):6.2f}" for k in TIMES))
    print("  worth           ", *(f"{np.nanmean(worth[k]):6.2f}" for k in TIMES))
    errors = {}
    for what, scale in scales_along(task, name, float(np.nanmedian(first.rates)), updates).items():
        gains = {k: float(adascale_gain(scale, 1.0, k, 1)) for k in TIMES}
        print(f"  gain, B = {scale:6.2f}", *(f"{gains[k]:6.2f}" for k in TIMES), f"(root {gains[32] ** 0.5:.2f})", what)
        for question, values, exponent in ((RATE, rates, power), (WORTH, worth, 1.0)):
            each = [np.abs(np.log2(gains[k] ** exponent / values[k])) for k in TIMES if k > 1]
            errors[question, what] = np.mean(each, 0)
    for question in (RATE, WORTH):
        print(f"  error of the {question}:", end="")
        for what in (L2, SMALLER, L1):
            print(f" {what} {text(errors[question, what])};", end="")
        print(f" smaller - l2 {text(errors[question, SMALLER] - errors[question, L2])}", flush=True)
    return errors


def text(values: Array) -> str:
    """Return the mean and its interval."""
    interval = mean_interval(values[np.isfinite(values)])
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="study pairs of a task and an optimizer whose names contain this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    groups = {
        "quadratics": [Quadratic(0.5, 3), Quadratic(1, 3), Quadratic(1, 10), Quadratic(2, 3)],
        "digits": [Digits()],
    }
    for on, tasks in groups.items():
        for name in OPTIMIZERS:
            chosen = [task for task in tasks if arguments.only in f"{task}, {name}"]
            if chosen and not (on == "digits" and name == "Muon"):  # its weights are no single matrix
                found = [study(task, name) for task in chosen]
                for question, what in found[0]:
                    errors = np.mean([own[question, what] for own in found], 0)
                    record(f"error of the {question}", what, spread(errors.tolist()), "log2", on=on, case=name)


if __name__ == "__main__":
    main()
