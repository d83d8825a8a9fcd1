"""DistributedDataParallel: loops that no other world has, and errors where it cannot sum; see test_laws.py."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.mishaps import Ended, assert_discarded, discard
from helpers.mistakes import OnEveryRank
from helpers.models import Experts
from helpers.processes import run_job
from helpers.reference import ADAM, SGD, Array, Training, assert_equal, filled, network, training, twin
from helpers.worlds import ODD, Layout, Place, alone
from variable_batch_size.backend import Backend

WORLDS = [2, pytest.param(3, marks=pytest.mark.slow("starts another world"))]
SLOW = pytest.mark.slow("starts processes")


def in_ddp(size: int) -> Layout:
    return Layout(size, by="ddp")


# Loops of several optimizers and models. ------------------------------------------------------------------------------


def two_optimizers(place: Place) -> list[Array]:
    """Of one model, with different rules, one of which measures."""
    module = place.spread(network())
    first, second = list(module.parameters())[:2], list(module.parameters())[2:]
    run = place.training(
        vbs.AdaScaleOptimizer, model=module, spread=False, inner=lambda _, **o: torch.optim.SGD(first, **o)
    )
    given: dict[str, Any] = {"model": module} if place.layout.by == "ddp" else {}
    other = vbs.RootRuleOptimizer(torch.optim.AdamW(second, **ADAM), run.sampler, 20, backend=place.backend, **given)
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices), others=other)
        run.optimizer.step()
        other.step()
        if other.updates == len(ODD):
            break
    return run.weights()


def left_within_a_step(place: Place, *, scaled: bool) -> list[Array]:
    """An optimizer that was left before the last microbatch of a step, and stays; another one trains the model."""
    module, runs = place.spread(network()), list[Training]()
    options: dict[str, Any] = {} if scaled else {"noise": "microbatches"}
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


def switched_off(place: Place) -> list[Array]:
    """A wrapper that the optimizer does not know, and that does not sum."""
    run = place.training(spread=False)
    run.model = place.spread(run.model)
    if isinstance(run.model, DistributedDataParallel):
        run.model.require_backward_grad_sync = False
    return run.run(len(ODD)).weights()


def compiled(place: Place) -> list[Array]:
    """`torch.compile` around the wrapper."""
    run = place.training(vbs.AdaScaleOptimizer)
    if place.layout.by == "ddp":
        run.model = torch.compile(run.model, backend="aot_eager")  # type: ignore[assignment]
    found = run.run(len(ODD)).weights()
    torch._dynamo.reset()
    return found


class Gan:
    """A generator and a discriminator, through which the generator's loss goes."""

    def __init__(self, *, ddp: bool) -> None:
        models = [filled(nn.Linear(*sizes).double()) for sizes in ((2, 3), (3, 1))]
        self.generator, self.discriminator = map(DistributedDataParallel, models) if ddp else models
        numbers = torch.linspace(-1, 1, 240, dtype=torch.float64)
        self.real, self.noise = numbers[:120].view(40, 3), numbers[-80:].view(40, 2)

    def loss_d(self, rows: Any) -> Tensor:
        with torch.no_grad():
            fake = self.generator(self.noise[rows])
        both: Tensor = self.discriminator(torch.cat([self.real[rows], fake]))
        return (both[: len(rows)] - 1).square().mean() + both[len(rows) :].square().mean()

    def loss_g(self, rows: Any) -> Tensor:
        judge: Any = self.discriminator
        judged: Tensor = getattr(judge, "module", judge)(self.generator(self.noise[rows]))
        return (judged - 1).square().mean()

    def train(self) -> list[Array]:
        """With unequal numbers of microbatches, and gradients of one loss in the parameters of the other model."""
        sampler = vbs.CustomSampler(40, [4, 12, 3, 9, 12], minibatch_size=2, on_end="hold", fixed_shape=False)
        modules = self.discriminator, self.generator
        optimizers = [
            vbs.ConstantOptimizer(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5), sampler, model=module)
            for module in modules
        ]
        for rows in sampler:
            for optimizer, loss in zip(optimizers, (self.loss_d, self.loss_g), strict=True):
                optimizer.zero_grad()
                optimizer.backward(loss(rows))
                optimizer.step()
        return [parameter.detach().numpy() for module in modules for parameter in module.parameters()]


def run_loops(backend: Backend, layout: Layout) -> None:
    place = Place.of(layout, backend)
    for loop in (two_optimizers, switched_off, compiled):
        assert_equal(loop(place), loop(alone()))
    for scaled in (True, False):
        assert_equal(left_within_a_step(place, scaled=scaled), left_within_a_step(alone(), scaled=scaled))
    assert_equal(Gan(ddp=True).train(), Gan(ddp=False).train())  # whose microbatches see earlier updates of the other


@SLOW
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly("starts another world"))])
def test_loops_of_several_optimizers_and_models(size: int) -> None:
    run_job("gloo", run_loops, in_ddp(size), ranks=size)


def replay(backend: Backend, layout: Layout) -> list[bool]:
    """Whether an update has changed the random numbers and the statistics of this rank; only rank 0 has samples."""
    found = []
    for by in ("plain", "ddp"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
        run = Place.of(Layout(layout.size, by=by), backend).training(sizes=[2], model=filled(model))  # type: ignore[arg-type]
        (statistics,) = (part for part in run.model.modules() if isinstance(part, nn.BatchNorm1d))
        before = torch.get_rng_state(), *(buffer.clone() for buffer in statistics.buffers())
        run.run(1)
        after = torch.get_rng_state(), *statistics.buffers()
        found += [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    return found


def test_a_replay_leaves_statistics_and_random_numbers_as_they_were() -> None:
    assert run_job("gloo", replay, in_ddp(2), ranks=2) == [8 * [True], 8 * [False]]


def discards(backend: Backend, layout: Layout, where: str, who: str) -> Ended:
    """Raise in the third update, see `discard`."""
    run, world = Place.of(layout, backend).training(), backend.world
    layer: Any = run.model.module[1]  # type: ignore[index]
    return discard(run, layer, len(ODD), where, fails=who == "all ranks" or world.rank == world.size - 1)


@SLOW
@pytest.mark.torch
@pytest.mark.parametrize(
    ("where", "who", "size"),
    [
        ("forward", "all ranks", 2),
        ("backward", "one rank", 3),
        *(
            pytest.param(*case, marks=pytest.mark.nightly("starts processes"))
            for case in [
                ("forward", "one rank", 3),
                ("backward", "all ranks", 3),
                ("between", "all ranks", 3),
                ("between", "one rank", 2),
            ]
        ),
    ],
)
def test_after_an_exception_all_ranks_go_on_or_end(where: str, who: str, size: int) -> None:
    assert_discarded(run_job("gloo", discards, in_ddp(size), where, who, ranks=size), who, ODD)


def groups(backend: Backend) -> tuple[list[list[Array]], list[str]]:
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


@SLOW
def test_ranks_outside_a_group_agree_on_everything_but_the_batch() -> None:
    expected = twin(vbs.LinearRuleOptimizer, ODD, dataset_size=400)
    for trained, messages in run_job("gloo", groups, ranks=4):
        for weights in trained:
            assert_equal(weights, expected)
        for message in messages:
            assert "same lr of parameter group 0, but it is 0.02 on rank 0 and 0.04 on rank 3" in message
        assert len(messages) == 2


# Mistakes. ------------------------------------------------------------------------------------------------------------

raises = OnEveryRank()
FORWARD = (
    r"must sum in the last .*, but no forward of it came after the step\(\) .*; call it \(not its \.module\), then o"
)
CARRIED = r"with a DistributedDataParallel each loss must carry its weight, .*; call optimizer\.backward\(loss\) in the"
UNKNOWN = r"only backward\(\) may change .*; pass a DistributedDataParallel to"
SUMMED = r"summed over the ranks by step\(\) alone, but within .*as a DistributedDataParallel does; pass it to the opt"
LATER = r"but zero_grad\(\) would drop them on this one; call model\.module for another optimi"


def train(run: Training) -> None:
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices))
        run.optimizer.step()


def wrapped(place: Place, **options: Any) -> Place:
    """The same place, with options of DistributedDataParallel."""
    return place._replace(layout=replace(place.layout, wrapper=options))


@raises(FORWARD)
def bare_forward(place: Place) -> None:
    run: Any = place.training()
    for indices in run.sampler:
        run.optimizer.backward(run.model.module(run.x[indices]).sum())
        run.optimizer.step()


@raises(FORWARD)
def bare_forward_with_a_hook(place: Place) -> None:
    bare_forward(wrapped(place, hook=allreduce_hook))


@raises(FORWARD)
def all_forwards_before_the_backwards(place: Place) -> None:
    run = place.training(sizes=[8 * place.world.size])
    for update in vbs.updates(run.sampler, run.optimizer):  # type: ignore[type-var]
        for loss in [run.loss(indices) for indices in update]:
            run.optimizer.backward(loss)
            run.optimizer.step()


@raises(FORWARD)
def all_forwards_before_the_backwards_with_a_hook(place: Place) -> None:
    all_forwards_before_the_backwards(wrapped(place, hook=allreduce_hook))


@raises(CARRIED)
def no_backward_of_a_replay(place: Place) -> None:
    run = place.training(sizes=[1])  # on rank 0 it is no replay
    for _ in run.sampler:
        run.optimizer.step()


@raises(r"^create_graph=True needs .*, but .* sums them in backward\(\); omit it, or train")
def graph_of_the_gradients(place: Place) -> None:
    run = place.training()
    run.optimizer.backward(run.loss(next(iter(run.sampler))), create_graph=True)


@raises(r"must sum all gradients, but it leaves out that of parameter 0, of shape \(4, 3\), which")
def frozen_when_wrapped(place: Place) -> None:
    model: Any = network()
    model[0].requires_grad_(False)
    run = place.training(model=model).run(1)
    model[0].requires_grad_(True)
    run.run(1)


@raises(r"must have all parameters of the optimizer, but parameter 4, of shape \(1,\), is not in it")
def parameter_outside(place: Place) -> None:
    other = nn.Parameter(torch.zeros(1))
    place.training(inner=lambda own, **rest: torch.optim.SGD([*own, other], **SGD))


@raises(CARRIED)
def plain_backward(place: Place) -> None:
    run = place.training(sizes=[50])
    for indices in run.sampler:
        run.loss(indices).backward()
        run.optimizer.step()


@raises(r"with at least 32 bits, but some .* have fewer; keep them in float32")
def several_microbatches_in_half_precision(place: Place) -> None:
    place.training(sizes=[50], dtype=torch.bfloat16).run(1)


@raises(r"with static_graph=True must sum in each backward\(\), but .*; create it without static_graph")
def static_graph(place: Place) -> None:
    wrapped(place, static_graph=True).training(sizes=[50]).run(2)


@raises(r"must make every update together, but the DistributedDataParallel is within its join\(\); leave it out")
def within_join(place: Place) -> None:
    run = place.training()
    with run.model.join():  # type: ignore[operator]
        train(run)


@raises(r"was scaled in the loop, .*; call optimizer\.backward\(loss, scaler=scaler\) and")
def scale_unknown_in_backward(place: Place) -> None:
    run, scaler = place.training(sizes=[50]), torch.amp.GradScaler("cpu")
    for indices in run.sampler:
        scaler.scale(run.loss(indices)).backward()
        scaler.step(run.optimizer)


def _two(place: Place, **given: Any) -> None:
    model = place.spread(network())
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    run = place.training(sizes=[50], model=model, spread=False, inner=lambda _, **own: torch.optim.SGD(first, **own))
    other = vbs.ConstantOptimizer(
        torch.optim.SGD(second, **SGD), run.sampler, model=model, backend=place.backend, **given
    )
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices), others=[other] if given else ())
        run.optimizer.step()
        other.step()


@raises(rf"{CARRIED} place of .*, with others= if several optimizers update")
def an_optimizer_that_is_not_named(place: Place) -> None:
    _two(place)


@raises(r"have the same reduction, got sum at Micro.*; pass one sampler to them")
def optimizers_of_other_reductions(place: Place) -> None:
    _two(place, reduction="sum")


def _unknown(place: Place, *, ours: bool, **options: Any) -> None:
    """In every backward of a DistributedDataParallel that the optimizer does not know."""
    run = place.training(sizes=[50], spread=False)
    run.model = DistributedDataParallel(run.model, **options)
    for indices in run.sampler:
        loss = (run.model(run.x[indices]) - run.target[indices]).square().mean()
        run.optimizer.backward(loss) if ours else loss.backward()  # type: ignore[no-untyped-call]
        run.optimizer.step()


@raises(UNKNOWN)
def wrapper_that_the_optimizer_does_not_know(place: Place) -> None:
    _unknown(place, ours=False)


@raises(UNKNOWN)
def wrapper_that_the_optimizer_does_not_know_with_views(place: Place) -> None:
    _unknown(place, ours=False, gradient_as_bucket_view=True)


@raises(SUMMED)
def wrapper_that_the_optimizer_does_not_know_and_backward(place: Place) -> None:
    _unknown(place, ours=True)


@raises(SUMMED)
def wrapper_that_the_optimizer_does_not_know_and_backward_with_views(place: Place) -> None:
    _unknown(place, ours=True, gradient_as_bucket_view=True)


@raises(r"over the ranks that share a batch, but it has ranks \[\d\] and the optimizer \[0, .*; pass")
def other_ranks(place: Place) -> None:
    own = [dist.new_group([rank]) for rank in range(place.world.size)]
    wrapped(place, process_group=own[dist.get_rank()]).training()


@raises(r"for all its parameters .*, but it got only some; create it with find_unused_para")
def unused_parameters(place: Place) -> None:
    wrapped(place, bucket_cap_mb=1e-5).training(sizes=[50], model=filled(Experts())).run(1)


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


@raises(LATER)
def gan_with_zero_grad(place: Place) -> None:
    _gan(zero=True)


@raises(LATER)
def gan_without_zero_grad(place: Place) -> None:
    _gan(zero=False)


@raises(r"in the last backward\(\) of a step, but there is another one; add the losses")
def second_backward(place: Place) -> None:
    run = place.training(sizes=[50])
    for indices in run.sampler:
        output = run.model(run.x[indices])
        run.optimizer.backward(output.sum(), retain_graph=True)
        run.optimizer.backward(output.square().sum())
        run.optimizer.step()


@raises(r"only optimizer\.backward\(\) may change gradients between")
def zero_grad_before_the_last_microbatch(place: Place) -> None:
    run = place.training(sizes=[8 * place.world.size])
    for indices in run.sampler:
        run.model.zero_grad()
        run.optimizer.backward(run.loss(indices))
        run.optimizer.step()


@raises(r"only optimizer\.backward\(\) may change gradients between .*, clip with max_grad_norm=")
def clipped_in_the_loop(place: Place) -> None:
    run = place.training(sizes=[50], minibatch_size=64)
    for indices in run.sampler:
        run.optimizer.backward(run.loss(indices))
        nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
        run.optimizer.step()


@raises(r"another optimizer, or the loop, has switched its reduction; train a")
def earlier_optimizer_of_the_same_parameters(place: Place) -> None:
    model = place.spread(network())
    earlier, later = (place.training(sizes=[size], model=model, spread=False) for size in (8 * place.world.size, 1))
    later.run(1)
    earlier.run(1)


@raises(r"model must be a torch\.nn\.Module, got 'bare' \(str\); pass the model whose")
def not_a_model(place: Place) -> None:
    vbs.ConstantOptimizer(torch.optim.SGD(network().parameters()), vbs.CustomSampler(9, 3), model="bare")  # type: ignore[arg-type]


def make_mistakes(backend: Backend, layout: Layout) -> dict[str, str]:
    return raises.messages(Place.of(layout, backend))


@cache
def mistakes(size: int) -> list[dict[str, str]]:
    return run_job("gloo", make_mistakes, in_ddp(size), ranks=size)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("mistake", raises.patterns)
def test_a_mistake_raises_on_every_rank(size: int, mistake: str) -> None:
    raises.check(mistake, mistakes(size))
