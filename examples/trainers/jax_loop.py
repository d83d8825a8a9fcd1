"""A loop in JAX whose batch size follows a trace, in one process: sampler, plan and rule without an optimizer of torch.

    python examples/trainers/jax_loop.py

All microbatches have one shape (`fixed_shape=True`), so each of the two functions is compiled once.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import variable_batch_size as vbs

REF = 16  # the batch size at which LEARNING_RATE was tuned
LEARNING_RATE, MOMENTUM = 0.1, 0.9
RULE = vbs.rules.RULES["root"]()
Tree = Any


def mean_loss(params: Tree, x: jax.Array, target: jax.Array) -> jax.Array:
    """The mean cross entropy over the rows; samples that fill up a microbatch are repeated equally often."""
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    log_p = jax.nn.log_softmax(hidden @ params["w2"] + params["b2"])
    return -jnp.take_along_axis(log_p, target[:, None], axis=1).mean()


@jax.jit
def accumulate(total: tuple[Any, Tree], params: Tree, x: Any, target: Any, weight: Any) -> tuple[Any, Tree]:
    """Add loss and gradient of a microbatch with its weight n / B."""
    added = jax.value_and_grad(mean_loss)(params, x, target)
    return jax.tree.map(lambda sum_, value: sum_ + weight * value, total, added)


@jax.jit
def update(params: Tree, velocity: Tree, gradient: Tree, learning_rate: Any) -> tuple[Tree, Tree]:
    """SGD with momentum."""
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
    return jax.tree.map(lambda p, v: p - learning_rate * v, params, velocity), velocity


def check_rule(rule: vbs.rules.Rule) -> None:
    """Raise ValueError if a rule scales anything besides the learning rate, because `update` does not."""
    scaling = rule(vbs.rules.RuleInput(2 * REF, REF))
    others = {field.name for field in fields(scaling)} - {"lr", "progress"}
    if left_out := sorted(name for name in others if getattr(scaling, name) != 1):
        raise ValueError(
            f"the rule must scale the learning rate only, but {rule} also has the factors {', '.join(left_out)}, which "
            f"this loop leaves out; use vbs.rules.RULES['linear'], for example, or apply them in update()"
        )


def train(x: Any, target: Any, sampler: vbs.CustomSampler, params: Tree, velocity: Tree, updates: int) -> Any:
    """Make the next `updates` updates, or fewer if the sampler ends before; return parameters, velocity and losses.

    `x` and `target` are arrays of NumPy or JAX, with a row for each sample.
    """
    check_rule(RULE)
    params, velocity = jax.tree.map(jnp.asarray, (params, velocity))
    zero = jax.tree.map(jnp.zeros_like, (jnp.zeros((), x.dtype), params))
    losses = []
    while len(losses) < updates and not sampler.done:
        microbatches, epoch = iter(sampler), sampler.epoch
        while sampler.epoch == epoch and len(losses) < updates:
            batch, total = sampler.batch, zero
            for microbatch in batch.microbatches:
                rows = np.asarray(next(microbatches))  # an array: JAX takes no list of indices
                weight = microbatch.samples / batch.batch_size
                total = accumulate(total, params, x[rows], target[rows], weight)
            loss, gradient = total
            scaling = RULE(vbs.rules.RuleInput(batch.batch_size, REF, updates=batch.step, samples=sampler.samples))
            params, velocity = update(params, velocity, gradient, LEARNING_RATE * scaling.lr)
            sampler.advance()  # commits the update: the next epoch, and sampler.state_dict(), follow it
            losses.append(float(loss))
    return params, velocity, losses


def main() -> None:
    """Train a small classifier, save in the middle of an epoch, and continue."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 20)).astype(np.float32)
    target = (x @ rng.normal(size=(20, 3))).argmax(1)
    sizes = {"w1": (20, 32), "b1": (32,), "w2": (32, 3), "b2": (3,)}
    params = {name: jnp.asarray(rng.normal(size=size) / 4, jnp.float32) for name, size in sizes.items()}
    velocity = jax.tree.map(jnp.zeros_like, params)

    def sampler() -> vbs.CustomSampler:
        trace = "0:128 10:48 15:200"
        return vbs.CustomSampler(len(x), trace, num_replicas=1, rank=0, minibatch_size=32, fixed_shape=True)

    first = sampler()
    params, velocity, losses = train(x, target, first, params, velocity, updates=12)
    print(f"update {first.updates}, epoch {first.epoch}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    second = sampler()
    second.load_state_dict(first.state_dict())  # save params and velocity with it
    params, velocity, losses = train(x, target, second, params, velocity, updates=20)
    print(f"update {second.updates}, epoch {second.epoch}: loss {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
