"""Mistakes with DistributedDataParallel, exceptions and groups, which the processes of test_ddp.py run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.ddp_jobs import ODD, Gan, here, wrapped
from helpers.mishaps import Ended, discard
from helpers.models import Experts
from helpers.reference import SGD, Array, filled, network, training

# Errors. -------------------------------------------------------------------------------------------------------------


def _with_hook() -> DistributedDataParallel:
    model = wrapped()
    model.register_comm_hook(None, allreduce_hook)
    return model


def _bare_forward() -> None:
    run = training(model=wrapped(), backend=here())
    for indices in run.sampler:
        run.optimizer.backward(run.model.module(run.x[indices]).sum())  # type: ignore[operator, union-attr]
        run.optimizer.step()


def _bare_forward_with_a_hook() -> None:
    run = training(sizes=[50], model=_with_hook(), backend=here())
    for indices in run.sampler:
        run.optimizer.backward(run.model.module(run.x[indices]).sum())  # type: ignore[operator, union-attr]
        run.optimizer.step()


def _all_forwards_first(model: nn.Module) -> None:
    run = training(sizes=[8 * dist.get_world_size()], model=model, backend=here())
    loader = torch.utils.data.DataLoader(range(50), batch_sampler=run.sampler)
    for update in vbs.updates(loader, run.optimizer):
        for loss in [run.loss(indices) for indices in update]:
            run.optimizer.backward(loss)
            run.optimizer.step()


def _all_forwards_before_the_backwards() -> None:
    _all_forwards_first(wrapped())


def _all_forwards_before_the_backwards_with_a_hook() -> None:
    _all_forwards_first(_with_hook())


def _no_backward_of_a_replay() -> None:
    run = training(sizes=[1], model=wrapped(), backend=here())  # on rank 0 it is no replay
    for _ in run.sampler:
        run.optimizer.step()


def _graph_of_the_gradients() -> None:
    run = training(model=wrapped(), backend=here())
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices), create_graph=True)


def _frozen_when_wrapped() -> None:
    model: Any = network()
    model[0].requires_grad_(False)
    run = training(model=wrapped(model), backend=here()).run(1)
    model[0].requires_grad_(True)
    run.run(1)


def _parameter_outside() -> None:
    other = nn.Parameter(torch.zeros(1))
    training(model=wrapped(), inner=lambda own, **rest: torch.optim.SGD([*own, other], **SGD), backend=here())


def _plain_backward() -> None:
    run = training(sizes=[50], model=wrapped(), backend=here())
    for indices in run.sampler:
        run.loss(indices).backward()
        run.optimizer.step()


def _several_microbatches_in_half_precision() -> None:
    training(sizes=[50], model=wrapped(network(torch.bfloat16)), dtype=torch.bfloat16, backend=here()).run(1)


def _static_graph() -> None:
    training(sizes=[50], model=wrapped(static_graph=True), backend=here()).run(2)


def _scale_unknown_in_backward() -> None:
    run, scaler = training(sizes=[50], model=wrapped(), backend=here()), torch.amp.GradScaler("cpu")
    for indices in run.sampler:
        scaler.scale(run.loss(indices)).backward()
        scaler.step(run.optimizer)


def _two_optimizers(**given: Any) -> None:
    model = wrapped()
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    run = training(sizes=[50], model=model, inner=lambda _, **own: torch.optim.SGD(first, **own), backend=here())
    sampler = given.pop("sampler", run.sampler)
    other = vbs.ConstantOptimizer(torch.optim.SGD(second, **SGD), sampler, model=model, backend=here(), **given)
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices), others=[other] if given else ())
        run.optimizer.step()
        other.step()


def _an_optimizer_that_is_not_named() -> None:
    _two_optimizers()


def _optimizers_of_other_reductions() -> None:
    _two_optimizers(reduction="sum")


def _unknown_wrapper(*, carried: bool) -> None:
    run = training(sizes=[50], backend=here())
    model = wrapped(run.model)
    for indices in run.sampler:
        loss = (model(run.x[indices]) - run.target[indices]).square().mean()
        run.optimizer.backward(loss) if carried else loss.backward()
        run.optimizer.step()


def _wrapper_that_the_optimizer_does_not_know() -> None:
    _unknown_wrapper(carried=False)


def _wrapper_that_the_optimizer_does_not_know_and_backward() -> None:
    _unknown_wrapper(carried=True)


def _other_ranks() -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    training(model=wrapped(process_group=groups[dist.get_rank()]), backend=here())


def _unused_parameters() -> None:
    training(sizes=[50], model=wrapped(filled(Experts()), bucket_cap_mb=1e-5), backend=here()).run(1)


def _gan(zero: bool) -> None:
    """The generator's loss goes through the discriminator's wrapper before the discriminator's own does."""
    own, sampler = Gan(ddp=True), vbs.CustomSampler(40, 40, minibatch_size=40, fixed_shape=False)
    inner = torch.optim.SGD(own.discriminator.parameters(), lr=0.1)
    optimizer = vbs.ConstantOptimizer(inner, sampler, model=own.discriminator)
    for rows in sampler:
        own.discriminator(own.generator(own.noise[rows])).sum().backward()
        if zero:
            optimizer.zero_grad()
        optimizer.backward(own.loss_d(rows))
        optimizer.step()


def _gan_with_zero_grad() -> None:
    _gan(zero=True)


def _gan_without_zero_grad() -> None:
    _gan(zero=False)


def _second_backward() -> None:
    run = training(sizes=[50], model=wrapped(), backend=here())
    for indices in run.sampler:
        output = run.model(run.x[indices])
        run.optimizer.backward(output.sum(), retain_graph=True)
        run.optimizer.backward(output.square().sum())
        run.optimizer.step()


def _zero_grad_before_the_last_microbatch() -> None:
    run = training(sizes=[8 * dist.get_world_size()], model=wrapped(), backend=here())
    for indices in run.sampler:
        run.model.zero_grad()
        run.optimizer.backward(run.loss(indices))
        run.optimizer.step()


def _clipped_in_the_loop() -> None:
    run = training(sizes=[50], minibatch_size=64, model=wrapped(), backend=here())
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices))
        nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
        run.optimizer.step()


def _earlier_optimizer_of_the_same_parameters() -> None:
    model, several = wrapped(), 8 * dist.get_world_size()
    earlier, later = (training(sizes=[size], model=model, backend=here()) for size in (several, 1))
    later.run(1)
    earlier.run(1)


def _not_a_model() -> None:
    training(**{"model": network()}, backend=here()).run(1)
    vbs.ConstantOptimizer(torch.optim.SGD(network().parameters()), vbs.CustomSampler(9, 3), model="bare")  # type: ignore[arg-type]


ERRORS: tuple[Callable[[], None], ...] = (
    _bare_forward, _bare_forward_with_a_hook, _all_forwards_before_the_backwards,
    _all_forwards_before_the_backwards_with_a_hook, _no_backward_of_a_replay, _graph_of_the_gradients,
    _frozen_when_wrapped, _parameter_outside, _plain_backward, _several_microbatches_in_half_precision, _static_graph,
    _scale_unknown_in_backward, _an_optimizer_that_is_not_named, _optimizers_of_other_reductions,
    _wrapper_that_the_optimizer_does_not_know, _wrapper_that_the_optimizer_does_not_know_and_backward, _other_ranks,
    _unused_parameters, _gan_with_zero_grad, _gan_without_zero_grad, _second_backward,
    _zero_grad_before_the_last_microbatch, _clipped_in_the_loop, _earlier_optimizer_of_the_same_parameters,
    _not_a_model,
)  # fmt: skip


def run_mistakes(backend: vbs.backend.Backend) -> dict[str, str]:
    """Make the mistakes, and return the messages."""
    messages = {}
    for mistake in ERRORS:
        try:
            mistake()
        except (RuntimeError, TypeError, ValueError) as error:
            messages[mistake.__name__.lstrip("_")] = str(error)
    return messages


# Exceptions. ---------------------------------------------------------------------------------------------------------


def discards(backend: vbs.backend.Backend, where: str, who: str) -> Ended:
    """Raise in the third update of a training in DistributedDataParallel, see `discard`."""
    run, world = training(sizes=ODD, model=wrapped(), backend=here()), backend.world
    fails = who == "all ranks" or world.rank == world.size - 1
    layer: Any = run.model.module[1]  # type: ignore[index]
    return discard(run, layer, len(ODD), where, fails=fails)


def groups(backend: vbs.backend.Backend) -> tuple[list[list[Array]], list[str]]:
    """Two pairs of ranks train on equal batches; then one rank changes its learning rate, which all four hear."""
    rank, weights, messages = backend.world.rank, list[list[Array]](), list[str]()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = pairs[rank // 2]
    for ddp in (False, True):
        model: nn.Module = DistributedDataParallel(network(), process_group=own) if ddp else network()
        run = training(sizes=ODD, dataset_size=400, model=model, process_group=own).run(len(ODD))
        weights.append([array.copy() for array in run.weights()])
        run.optimizer.param_groups[0]["lr"] *= 1 + (rank == 3)
        try:
            run.run(20)
        except RuntimeError as error:
            messages.append(str(error))
    return weights, messages
