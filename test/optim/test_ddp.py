"""DistributedDataParallel: loops that no other world has, and errors where it cannot sum; see test_laws.py."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.mistakes import OnEveryRank
from helpers.models import Experts, Gan
from helpers.processes import run_job
from helpers.reference import ADAM, SGD, assert_equal, filled, network, training, twin
from helpers.worlds import ODD, Layout, Place, alone

WORLDS = [2, pytest.param(3, marks=pytest.mark.slow("starts another world"))]
SLOW = pytest.mark.slow("starts processes")


def in_ddp(size):
    return Layout(size, by="ddp")


# Loops of several optimizers and models. ------------------------------------------------------------------------------


def two_optimizers(place):
    """Of one model, with different rules, one of which measures."""
    module = place.spread(network())
    first, second = list(module.parameters())[:2], list(module.parameters())[2:]
    run = place.training(
        vbs.AdaScaleOptimizer, model=module, spread=False, inner=lambda _, **o: torch.optim.SGD(first, **o)
    )
    given = {"model": module} if place.layout.by == "ddp" else {}
    other = vbs.RootRuleOptimizer(torch.optim.AdamW(second, **ADAM), run.sampler, 20, backend=place.backend, **given)
    for indices in run.microbatches(len(ODD)):
        run.optimizer.backward(run.loss(indices), others=other)
        run.optimizer.step()
        other.step()
    return run.weights()


def left_within_a_step(place, *, scaled):
    """An optimizer that was left before the last microbatch of a step, and stays; another one trains the model."""
    module, runs = place.spread(network()), []
    options = {} if scaled else {"noise": "microbatches"}
    for updates, scale in ((0, 1024.0), (len(ODD), 8.0)):
        sizes = ODD if runs else [8 * place.world.size, *ODD]
        run = place.training(sizes=sizes, model=module, spread=False, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scaled)
        for indices in run.sampler:
            run.optimizer.backward(run.loss(indices), scaler=scaler)
            scaler.step(run.optimizer)
            scaler.update()
            if run.optimizer.updates == updates:
                break
        runs.append(run)
    return runs[-1].weights()


def switched_off(place):
    """A wrapper that the optimizer does not know, and that does not sum."""
    run = place.training(spread=False)
    run.model = place.spread(run.model)
    if isinstance(run.model, DistributedDataParallel):
        run.model.require_backward_grad_sync = False
    return run.run(len(ODD)).weights()


def compiled(place):
    """`torch.compile` around the wrapper."""
    run = place.training(vbs.AdaScaleOptimizer)
    if place.layout.by == "ddp":
        run.model = torch.compile(run.model, backend="aot_eager")
    found = run.run(len(ODD)).weights()
    torch._dynamo.reset()
    return found


def train_gan(gan):
    """With unequal numbers of microbatches; a loss leaves the gradients of the other model alone."""
    sampler = vbs.CustomSampler(40, [4, 12, 3, 9, 12], minibatch_size=2, on_end="hold", fixed_shape=False)
    turns = (gan.discriminator, gan.loss_d), (gan.generator, gan.loss_g)
    optimizers = [
        vbs.ConstantOptimizer(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5), sampler, model=module)
        for module, _ in turns
    ]
    for rows in sampler:
        for (module, loss), optimizer in zip(turns, optimizers, strict=True):
            optimizer.zero_grad()
            optimizer.backward(loss(rows), inputs=list(module.parameters()))
            optimizer.step()
    return gan.weights()


def run_loops(backend, layout):
    place = Place.of(layout, backend)
    for loop in (two_optimizers, switched_off, compiled):
        assert_equal(loop(place), loop(alone()))
    for scaled in (True, False):
        assert_equal(left_within_a_step(place, scaled=scaled), left_within_a_step(alone(), scaled=scaled))
    assert_equal(
        train_gan(Gan(DistributedDataParallel)), train_gan(Gan())
    )  # whose microbatches see earlier updates of the other


@SLOW
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly("starts another world"))])
def test_loops_of_several_optimizers_and_models(size):
    run_job("gloo", run_loops, in_ddp(size), ranks=size)


def replay(backend, layout):
    """Whether an update has changed the random numbers and the statistics of this rank; only rank 0 has samples."""
    found = []
    for by in ("plain", "ddp"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
        run = Place.of(Layout(layout.size, by=by), backend).training(sizes=[2], model=filled(model))
        (statistics,) = (part for part in run.model.modules() if isinstance(part, nn.BatchNorm1d))
        before = torch.get_rng_state(), *(buffer.clone() for buffer in statistics.buffers())
        run.run(1)
        after = torch.get_rng_state(), *statistics.buffers()
        found += [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    return found


def test_a_replay_leaves_statistics_and_random_numbers_as_they_were():
    assert run_job("gloo", replay, in_ddp(2), ranks=2) == [8 * [True], 8 * [False]]


def groups(backend):
    """Two pairs of ranks train on equal batches; then one rank changes its learning rate, which all four hear."""
    rank, weights, messages = backend.world.rank, [], []
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = pairs[rank // 2]
    for ddp in (False, True):
        model = DistributedDataParallel(network(), process_group=own) if ddp else network()
        run = training(sizes=ODD, dataset_size=400, model=model, process_group=own).run(len(ODD))
        weights.append([array.copy() for array in run.weights()])
        run.optimizer.param_groups[0]["lr"] *= 1 + (rank == 3)
        try:
            run.run(20)
        except RuntimeError as error:
            messages.append(str(error))
    return weights, messages


@SLOW
def test_ranks_outside_a_group_agree_on_everything_but_the_batch():
    expected = twin(vbs.LinearRuleOptimizer, ODD, dataset_size=400)
    for trained, messages in run_job("gloo", groups, ranks=4):
        for weights in trained:
            assert_equal(weights, expected)
        for message in messages:
            assert "same lr of parameter group 0, but it is 0.02 on rank 0 and 0.04 on rank 3" in message
        assert len(messages) == 2


# Mistakes. ------------------------------------------------------------------------------------------------------------

raises = OnEveryRank()
FORWARD = r"cannot sum, because it was not called after the last step\(\); call it \(not its \.module\), then optimizer"
CARRIED = r"with a DistributedDataParallel each loss, also of a replay, needs .*; call optimizer\.backward\(loss\), not"


def losses(run):
    """The loss of each microbatch, and a step after it."""
    for indices in run.sampler:
        yield run.loss(indices)
        run.optimizer.step()


def wrapped(place, **options):
    """The same place, with options of DistributedDataParallel."""
    return place._replace(layout=replace(place.layout, wrapper=options))


@raises(FORWARD)
def bare_forward(place):
    run = wrapped(place, **({"hook": allreduce_hook} if place.world.size == 3 else {})).training()
    for indices in run.sampler:
        run.optimizer.backward(run.model.module(run.x[indices]).sum())
        run.optimizer.step()


@raises(FORWARD)
def all_forwards_before_the_backwards(place):
    run = place.training(sizes=[8 * place.world.size])
    for update in vbs.updates(run.sampler, run.optimizer):
        for loss in [run.loss(indices) for indices in update]:
            run.optimizer.backward(loss)
            run.optimizer.step()


@raises(CARRIED)
def no_backward_of_a_replay(place):
    run = place.training(sizes=[1])  # on rank 0 it is no replay
    for _ in run.sampler:
        run.optimizer.step()


@raises(r"^the DistributedDataParallel leaves out parameter 0, of shape \(4, 3\), which was frozen .*; create it")
def frozen_when_wrapped(place):
    model = network()
    model[0].requires_grad_(False)
    run = place.training(model=model).run(1)
    model[0].requires_grad_(True)
    run.run(1)


@raises(r"must make every update together, but the DistributedDataParallel is within its join\(\); leave it out")
def within_join(place):
    run = place.training()
    with run.model.join():
        for loss in losses(run):
            run.optimizer.backward(loss)


def two(place, **given):
    """Two optimizers of one model."""
    model = place.spread(network())
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    run = place.training(sizes=[50], model=model, spread=False, inner=lambda _, **own: torch.optim.SGD(first, **own))
    inner = torch.optim.SGD(second, **SGD)
    other = vbs.ConstantOptimizer(inner, run.sampler, model=model, backend=place.backend, **given)
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices), others=[other] if given else ())
        run.optimizer.step()
        other.step()


def unknown(place, *, ours):
    """A DistributedDataParallel that the optimizer does not know, in every backward."""
    run = place.training(sizes=[50], spread=False)
    run.model = DistributedDataParallel(run.model, gradient_as_bucket_view=place.world.size == 3)
    for loss in losses(run):
        run.optimizer.backward(loss) if ours else loss.backward()


@raises(r"over the ranks that share a batch, but it has ranks \[\d\] and the optimizer \[0, .*; pass")
def other_ranks(place):
    own = [dist.new_group([rank]) for rank in range(place.world.size)]
    wrapped(place, process_group=own[dist.get_rank()]).training()


@raises(r"^zero_grad\(\) would drop sums of a Dis.*; remove it, or call model\.module for another optimi")
def gan_with_zero_grad(place):
    """The generator's loss goes through the discriminator's wrapper before the discriminator's own does."""
    own, sampler = Gan(DistributedDataParallel), vbs.CustomSampler(40, 40, minibatch_size=40, fixed_shape=False)
    inner = torch.optim.SGD(own.discriminator.parameters(), lr=0.1)
    optimizer = vbs.ConstantOptimizer(inner, sampler, model=own.discriminator)
    for rows in sampler:
        own.discriminator(own.generator(own.noise[rows])).sum().backward()
        optimizer.zero_grad()
        optimizer.backward(own.loss_d(rows))
        optimizer.step()


@raises(r"in the last backward\(\) of a step, but there is another one; add the losses")
def second_backward(place):
    run = place.training(sizes=[50])
    for loss in losses(run):
        run.optimizer.backward(loss, retain_graph=True)
        run.optimizer.backward(loss)


@raises(r"has changed outside optimizer\.backward\(\); ")
def zero_grad_before_the_last_microbatch(place):
    run = place.training(sizes=[8 * place.world.size])
    for loss in losses(run):
        run.model.zero_grad()
        run.optimizer.backward(loss)


@raises(r"has changed outside optimizer\.backward\(\); clip with max_grad_norm=")
def clipped_in_the_loop(place):
    run = place.training(sizes=[50], minibatch_size=64)
    for loss in losses(run):
        run.optimizer.backward(loss)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)


@raises(r"another optimizer, or the loop, has switched its reduction; train a")
def earlier_optimizer_of_the_same_parameters(place):
    model = place.spread(network())
    earlier, later = (place.training(sizes=[size], model=model, spread=False) for size in (8 * place.world.size, 1))
    later.run(1)
    earlier.run(1)


def step(place, backward, **options):
    """Train with a backward of the loss."""
    run = place.training(sizes=[50], **options)
    for loss in losses(run):
        backward(run.optimizer, loss)


raises.add(
    plain_backward=(CARRIED, lambda place: step(place, lambda _, loss: loss.backward())),
    graph_of_the_gradients=(
        r"^create_graph=True does not work with DDP or FSDP2, .*; omit it, or train",
        lambda place: step(place, lambda optimizer, loss: optimizer.backward(loss, create_graph=True)),
    ),
    parameter_outside=(
        r"must have all parameters of the optimizer, but parameter 4, of shape \(1,\), is not in it",
        lambda place: place.training(
            inner=lambda own, **rest: torch.optim.SGD([*own, nn.Parameter(torch.zeros(1))], **SGD)
        ),
    ),
    several_microbatches_in_half_precision=(
        r"need at least 32 bits, but some .* have fewer; keep them in float32",
        lambda place: place.training(sizes=[50], dtype=torch.bfloat16).run(1),
    ),
    static_graph=(
        r"with static_graph=True must sum in each backward\(\), but .*; create it without static_graph",
        lambda place: wrapped(place, static_graph=True).training(sizes=[50]).run(2),
    ),
    unused_parameters=(
        r"for all its parameters .*, but it got only some; create it with find_unused_para",
        lambda place: wrapped(place, bucket_cap_mb=1e-5).training(sizes=[50], model=filled(Experts())).run(1),
    ),
    an_optimizer_that_is_not_named=(rf"{CARRIED} loss.backward.*, with others= for several optimizers", two),
    optimizers_of_other_reductions=(
        r"have the same reduction, got sum at Micro.*; pass one sampler to them",
        lambda place: two(place, reduction="sum"),
    ),
    wrapper_that_the_optimizer_does_not_know=(
        r"only backward\(\) may change .*; pass DDP as model=",
        lambda place: unknown(place, ours=False),
    ),
    wrapper_that_the_optimizer_does_not_know_and_backward=(
        r"step\(\) alone sums over the ranks, but within .*as a DistributedDataParallel does; pass it as model=, or",
        lambda place: unknown(place, ours=True),
    ),
    not_a_model=(
        r"model must be a torch\.nn\.Module, got 'bare' \(str\); pass the model whose",
        lambda place: vbs.ConstantOptimizer(
            torch.optim.SGD(network().parameters()), vbs.CustomSampler(9, 3), model="bare"
        ),
    ),
)


def make_mistakes(backend, layout):
    return raises.messages(Place.of(layout, backend))


@cache
def mistakes(size):
    return run_job("gloo", make_mistakes, in_ddp(size), ranks=size)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("mistake", raises.patterns)
def test_a_mistake_raises_on_every_rank(size, mistake):
    raises.check(mistake, mistakes(size))
