"""FSDP2, HSDP and tensor parallelism: worlds where parts of a sample are computed, and errors; see test_laws.py."""

import time
from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import variable_batch_size as vbs
from helpers.mistakes import OnEveryRank
from helpers.processes import run_job
from helpers.reference import SGD, Array, assert_equal, network, training, twin
from helpers.worlds import ODD, Layout, Place, bare
from variable_batch_size.world import World

SECONDS = 20  # within which ranks end, or go on


class StopError(Exception):
    """Raised by a loop, which swallows it."""


def _fail(*_):
    raise StopError


class Ended(NamedTuple):
    """How a training has ended on a rank."""

    message: str
    seconds: float
    weights: list[Array]  # none after an error


def discard(run, layer, updates, where, *, fails):
    """Raise in the last microbatch of the third update if this rank fails, and start the step over.

    `where`: in the "forward" or "backward" of a layer in the middle of the model, or "between" them and `step()`.
    """
    began = time.monotonic()
    try:
        while run.optimizer.updates < updates:
            run.sampler.set_epoch(run.optimizer.epoch)
            try:
                for indices in run.sampler:
                    due = run.optimizer.microbatch
                    failing = fails and due.ends_step and due.step == 2
                    fails = fails and not failing
                    if failing and where == "forward":
                        layer.register_forward_hook(_fail)
                    if failing and where == "backward":
                        layer.register_full_backward_hook(_fail)
                    run.optimizer.backward(run.loss(indices))
                    if failing and where == "between":
                        raise StopError
                    run.optimizer.step()
            except StopError:
                layer._forward_hooks.clear()
                layer._backward_hooks.clear()
                run.optimizer.discard_step(timeout=3)
    except RuntimeError as error:
        return Ended(str(error), time.monotonic() - began, [])
    return Ended("finished", time.monotonic() - began, run.weights())


def assert_discarded(ranks, who, updates):
    """Check that all ranks go on, if all have discarded the step, or that all have ended."""
    messages, seconds, weights = zip(*ranks, strict=True)
    assert max(seconds) < SECONDS
    if who == "one rank":
        assert "every rank must come to discard_step(), but" in messages[-1]
        assert "finished" not in messages
    else:
        assert messages == len(ranks) * ("finished",)
        for own in weights:
            assert_equal(own, twin(vbs.LinearRuleOptimizer, updates))


SLOW, TORCH = pytest.mark.slow("starts processes"), pytest.mark.torch
TWO = Layout(shards=2)


def context_parallel(backend, by_updates):
    """Two ranks compute the two parts of each sample's loss; two others have other samples. All four have shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    data, context = (mesh[name] for name in ("data", "context"))
    model = Place.of(Layout(shards=4), backend).spread(network())
    options = {"reduction": "sum", "process_group": data.get_group()}
    run = training(sizes=ODD, model=model, world=World(data.get_local_rank(), 2), **options)
    errors = parts(run, context.get_local_rank(), counted=False)
    train = divided_parts if by_updates else parts
    return errors, train(run, context.get_local_rank()), run.weights()


def parts(run, *columns, counted=True):
    """Train on the losses of these outputs; return the error."""
    for indices in run.microbatches(len(ODD)):
        squares = (run.model(run.x[indices]) - run.target[indices]).square()
        run.optimizer.backward(squares[:, list(columns)].sum())
        try:
            run.optimizer.step(count=len(columns) * len(indices) if counted else None)
        except RuntimeError as error:
            run.optimizer.discard_step()
            return str(error)
    return ""


def divided_parts(run, column):
    """Train on the losses of one output, divided by the number of all that the ranks have computed."""
    while run.optimizer.updates < len(ODD):
        for update in vbs.updates(run.sampler, run.optimizer, counts=lambda indices: {"outputs": len(indices)}):
            for indices in update:
                squares = (run.model(run.x[indices]) - run.target[indices]).square()
                run.optimizer.backward(squares[:, column].sum() / update.counts["outputs"], divided=True)
                run.optimizer.step()
            if run.optimizer.updates == len(ODD):
                break
    return ""


@SLOW
@TORCH
@pytest.mark.parametrize("by_updates", [False, True])
def test_ranks_that_compute_parts_of_the_same_samples_need_counts(by_updates):
    expected = training(sizes=ODD, reduction="sum")
    assert parts(expected, 0, 1) == ""
    for without, error, weights in run_job("gloo", context_parallel, by_updates, ranks=4):
        assert "as in context parallelism, but the step has no count; pass reduction" in without
        assert error == ""
        assert_equal(weights, expected.weights())


def replicas_differ(backend):
    """Begin with other values on the second replica; return the error."""
    run = Place.of(Layout(2, 2), backend).training()
    if backend.world.rank >= 2:
        (first, *_) = run.model.parameters()
        assert isinstance(first, DTensor)
        with torch.no_grad():
            first.to_local().add_(1e-9)
    try:
        run.run(1)
    except RuntimeError as error:
        return str(error)
    return "no error"


@SLOW
@TORCH
def test_replicas_that_differ_are_told_from_shards():
    for message in run_job("gloo", replicas_differ, ranks=4):
        assert "ranks 0 and 2 hold the same part of sharded parameters, but with other values; begin" in message


def one_is_slow(backend):
    """Train, and wait on one rank in its first forward, before the part that others have already called."""
    run = Place.of(Layout(shards=3), backend).training()
    if backend.world.rank == 1:
        run.model[1].register_forward_hook(lambda *_: time.sleep(0 if run.optimizer.updates else 3))
    return run.run(3).weights()


@SLOW
def test_a_rank_may_come_later_to_a_forward():
    """Others that wait there for it, and it within its own update, do not take one another for lost."""
    for weights in run_job("gloo", one_is_slow, ranks=3):
        assert_equal(weights, training(sizes=ODD).run(3).weights())


def discards(backend, layout, where, who, options):
    """Raise in the third update, see `discard`."""
    run = Place.of(layout, backend).training(**options)
    fails = who == "all ranks" or backend.world.rank == layout.size - 1
    return discard(run, bare(run.model)[1], len(ODD), where, fails=fails)


@SLOW
@TORCH
@pytest.mark.parametrize(
    ("where", "who", "layout", "options"),
    [
        ("forward", "all ranks", Layout(2, by="ddp"), {}),
        ("backward", "one rank", Layout(3, by="ddp"), {}),
        ("forward", "all ranks", TWO, {}),
        ("backward", "one rank", TWO, {}),
        ("between", "one rank", Layout(2, 2), {"noise": "microbatches"}),
        *(
            pytest.param(*case, marks=pytest.mark.nightly("starts processes"))
            for case in [
                ("forward", "one rank", Layout(3, by="ddp"), {}),
                ("backward", "all ranks", Layout(3, by="ddp"), {}),
                ("between", "all ranks", Layout(3, by="ddp"), {}),
                ("between", "one rank", Layout(2, by="ddp"), {}),
                ("between", "all ranks", Layout(shards=3), {"sharded_accumulation": False}),
                ("forward", "one rank", Layout(shards=3), {"sharded_accumulation": False}),
                ("backward", "all ranks", Layout(2, 2), {"noise": "microbatches"}),
                ("forward", "one rank", Layout(shards=2, tensors=2), {}),
                ("backward", "one rank", Layout(shards=2, tensors=2), {}),
            ]
        ),
    ],
    ids=str,
)
def test_after_an_exception_all_ranks_go_on_or_end(where, who, layout, options):
    assert_discarded(run_job("gloo", discards, layout, where, who, options, ranks=layout.size), who, ODD)


# Mistakes of two ranks. -----------------------------------------------------------------------------------------------

raises = OnEveryRank()
CHANGED = r"has changed outside optimizer\.backward\(\)"


def wrap(model, parameters=None, sampler=None):
    inner = torch.optim.SGD(model.parameters() if parameters is None else parameters, **SGD)
    return vbs.ConstantOptimizer(inner, sampler or vbs.CustomSampler(50, 50), model=model)


def step(place, backward, kind=vbs.LinearRuleOptimizer, then=lambda run: None):
    """Train, with this call for each loss, and another one after each step."""
    run = place.training(kind)
    for indices in run.sampler:
        backward(run, run.loss(indices))
        run.optimizer.step()
        then(run)


def twice(run, loss):
    run.optimizer.backward(loss / 2, retain_graph=True)
    run.optimizer.backward(loss / 2)


def cleared(run, loss):
    run.optimizer.backward(loss)
    run.optimizer.zero_grad()


def clip(run):
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)


def clipped(run, loss):
    run.optimizer.backward(loss)
    clip(run)


@raises(
    r"microbatches a step need at least 32 bits, but FSDP2 adds them in torch\.bfloat16; keep parameters in float32"
)
def narrow_sums(place):
    model = network(torch.float32)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    place.training(sizes=[50], model=model, spread=False, dtype=torch.float32).run(1)


@raises(r"must know the model, but there is none; pass it as model=, the root module if")
def not_passed(place):
    model = fully_shard(network())
    vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), vbs.CustomSampler(50, 50))


@raises(r"but parameter 0, of shape \(4, 3\), is not sharded by it; call fully_shard")
def parameter_before_sharding(place):
    model = network()
    before = list(model.parameters())
    wrap(fully_shard(model), before)


@raises(r"must be the root of what is sharded, but fully_shard\(\) was applied to parts of it")
def root_not_sharded(place):
    model = network()
    fully_shard(model[0])
    wrap(model)


@raises(r"must be sharded over the same mesh, but there are 2: .*; pass the same mesh to each")
def other_meshes(place):
    model = network()
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
    fully_shard(model[0], mesh=mesh["one"])
    fully_shard(model, mesh=mesh["two"])
    wrap(model)


class DeepSpeedEngine(nn.Module):
    """What DeepSpeed returns has this name."""


class Choosing(nn.Sequential):
    """Each rank calls other layers."""

    def forward(self, x):
        layers = [*self.children()]
        chosen = layers[dist.get_rank()] if self.training else layers[0]
        return chosen(x)


raises.add(
    plain_backward=(
        r"sharded each loss, also of a replay, needs its weight, .*; call optimizer\.backward\(loss\), not",
        lambda place: step(place, lambda _, loss: loss.backward()),
    ),
    accumulated_noise=(
        r"but sharded_accumulation=False adds them up before they are seen; omit it",
        lambda place: place.training(vbs.AdaScaleOptimizer, sharded_accumulation=False),
    ),
    second_moment=(
        r"^a rule of Adam's second moment needs whole tensors, but .*; choose another rule",
        lambda place: place.training(vbs.InvariantAdamRuleOptimizer),
    ),
    two_backwards_with_noise=(
        r"needs one backward\(\) for each microbatch of a sharded model, but there is another",
        lambda place: step(place, twice, vbs.AdaScaleOptimizer),
    ),
    other_world=(
        r"deals for rank 0 of 1, but the optimizer's DistributedBackend is rank \d of 2; pass num_replicas",
        lambda place: wrap(fully_shard(network()), sampler=vbs.CustomSampler(50, 50, 1, 0)),
    ),
    first_fsdp=(
        r"not in FullyShardedDataParallel, got .*; shard it with torch\.distributed\.fsdp\.fully_shard\(\)",
        lambda place: wrap(FullyShardedDataParallel(network(), device_id=torch.device("cpu"))),
    ),
    deepspeed=(
        r"not in DeepSpeedEngine, got .*; shard it with torch\.distributed\.fsdp\.fully_shard\(\)",
        lambda place: wrap(DeepSpeedEngine(), network().parameters()),
    ),
    broadcast=(
        r"needs whole tensors, but the model is sharded .*; begin with the same seed on every rank, or load",
        lambda place: vbs.broadcast_parameters(fully_shard(network())),
    ),
    zero_grad=(
        r"has summed over the ranks cannot be dropped, .* discard_step\(\) on all ranks",
        lambda place: step(place, cleared),
    ),
    clipping=(rf"the gradient of parameter 0, of shape .* {CHANGED}", lambda place: step(place, clipped)),
    clipping_after_step=(CHANGED, lambda place: step(place, lambda run, loss: run.optimizer.backward(loss), then=clip)),
    other_parts=(
        r"but rank 0 is in the first forward pass of 0 in a sharded model and rank 1 in the first forward pass of 1",
        lambda place: place.training(sizes=[50], model=Choosing(nn.Linear(3, 2), nn.Linear(3, 2)).double()).run(1),
    ),
)


def make_mistakes(backend):
    return raises.messages(Place.of(TWO, backend))


@cache
def mistakes():
    return run_job("gloo", make_mistakes, ranks=2)


@pytest.mark.parametrize("mistake", raises.patterns)
def test_a_mistake_raises_on_every_rank(mistake):
    raises.check(mistake, mistakes())
