"""Policy gradients by groups, as in GRPO, on a small maze: every update has the groups that teach something.

python examples/rollouts.py --rule adamscale
torchrun --nproc-per-node=2 examples/rollouts.py --rule adamscale

Each context, a start and a goal, has several rollouts, each of which is better or worse than its group. A group whose
rollouts all succeed, or all fail, has no gradient and is left out, so that the batch size varies by a factor of ten
while the policy learns. Loops that need batches of one size trim them, or pad them with groups of weight 0.
"""

import argparse
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import one_hot

import variable_batch_size as vbs

SIDE, STEPS, ROLLOUTS, CONTEXTS = 6, 12, 8, 48
MOVES = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])
REF = 16  # groups
WALL = np.zeros((SIDE, SIDE), dtype=bool)
WALL[2, 1:5] = True


class Groups(NamedTuple):
    """Rollouts of contexts; the groups are the rows of a batch."""

    places: Tensor  # (groups, ROLLOUTS, STEPS, 4), int64: where it is, and the goal
    moves: Tensor  # (groups, ROLLOUTS, STEPS), int64
    valid: Tensor  # (groups, ROLLOUTS, STEPS), 1 until the goal is reached
    advantage: Tensor  # (groups, ROLLOUTS)


class Policy(nn.Module):
    """Logits of the four moves at a place."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4 * SIDE, width), nn.Tanh(), nn.Linear(width, len(MOVES)))

    def forward(self, places: Tensor) -> Tensor:
        """Return logits, (..., 4), of places, (..., 4)."""
        logits: Tensor = self.layers(one_hot(places, SIDE).flatten(-2).to(self.layers[0].weight.dtype))
        return logits


@torch.no_grad()
def roll_out(policy: Policy, rng: np.random.Generator, contexts: int) -> tuple[Groups, float]:
    """Return the groups of some contexts whose rollouts differ in success, and the share of rollouts that succeed."""
    free = np.argwhere(~WALL)
    start, goal = (free[rng.integers(len(free), size=contexts)].repeat(ROLLOUTS, axis=0) for _ in range(2))
    here, reached = start, (start == goal).all(axis=1)
    places, moves, valid = [], [], []
    for _ in range(STEPS):
        place = np.concatenate([here, goal], axis=1)
        chances = policy(torch.from_numpy(place)).softmax(-1).double().numpy()
        move = (chances.cumsum(axis=1) < rng.random((len(place), 1))).sum(axis=1).clip(max=3)
        places.append(place)
        moves.append(move)
        valid.append(~reached)
        there = (here + MOVES[move]).clip(0, SIDE - 1)
        there = np.where(WALL[tuple(there.T)][:, None], here, there)
        here = np.where(reached[:, None], here, there)
        reached = reached | (here == goal).all(axis=1)
    reward = reached.reshape(contexts, ROLLOUTS).astype(np.float64)
    advantage = (reward - reward.mean(axis=1, keepdims=True)) / (reward.std(axis=1, keepdims=True) + 1e-6)
    fields = (np.stack(field, axis=1) for field in (places, moves, valid))
    whole = [torch.from_numpy(field).unflatten(0, (contexts, ROLLOUTS)) for field in fields]
    groups = Groups(*whole, torch.from_numpy(advantage))
    chosen = torch.from_numpy(reward.std(axis=1) > 0)
    return Groups(*(field[chosen] for field in groups)), float(reward.mean())


def loss_of(policy: Policy, groups: Groups) -> Tensor:
    """Return the mean over groups of -A log pi(move), over the moves of a rollout and the rollouts of a group."""
    chosen = policy(groups.places).log_softmax(-1).gather(-1, groups.moves[..., None])[..., 0]
    loss: Tensor = -(groups.advantage[..., None] * chosen * groups.valid).sum(-1).mean() / STEPS
    return loss


def batches(
    policy: Policy, rng: np.random.Generator, updates: int, contexts: int, cut: str, shares: list[float]
) -> Iterator[Groups]:
    """Yield this rank's groups of each update; `cut`: "none", "trim" or "pad"."""
    for _ in range(updates):
        groups, success = roll_out(policy, rng, contexts)
        shares.append(success)
        number = len(groups.moves)
        if cut == "trim":  # whole microbatches
            groups = Groups(*(field[: number // 8 * 8] for field in groups))
        if cut == "pad":  # with rollouts that no move counts of
            groups = Groups(*(torch.cat([f, f.new_zeros(contexts - number, *f.shape[1:])]) for f in groups))
        yield groups


def train(rule: str, lr: float, seed: int, *, updates: int = 60, cut: str = "none") -> tuple[list[float], list[int]]:
    """Return this rank's share of rollouts that succeed before each update, and the groups of each update."""
    torch.manual_seed(seed)  # the same weights on every rank
    arriving = vbs.ArrivingBatches(minibatch_size=8)
    world, shares, sizes = arriving.world, list[float](), list[int]()
    policy, rng, contexts = Policy(), np.random.default_rng(seed + 1000 * world.rank), CONTEXTS // world.size
    inner = torch.optim.Adam(policy.parameters(), lr=lr)
    optimizer = vbs.CustomOptimizer(inner, arriving, REF, rule=rule)
    for update in vbs.updates(batches(policy, rng, updates, contexts, cut, shares), optimizer):
        for groups in update:
            optimizer.backward(loss_of(policy, groups))
            optimizer.step()
        sizes.append(optimizer.samples - sum(sizes))
    return shares, sizes


def main() -> None:
    """Train, and print how the policy learns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", default="constant", help="a learning-rate rule for Adam")
    parser.add_argument("--lr", type=float, default=0.01, help=f"at {REF} groups")
    parser.add_argument("--cut", choices=["none", "trim", "pad"], default="none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=60)
    flags = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    shares, sizes = train(flags.rule, flags.lr, flags.seed, updates=flags.updates, cut=flags.cut)
    if os.environ.get("RANK", "0") == "0":
        for update in range(0, len(sizes), 10):
            print(f"update {update}: {shares[update]:.0%} of the rollouts succeed, {sizes[update]} groups")


if __name__ == "__main__":
    main()
