"""What a training may have beside batches that change. None of it depends on the world, nor on where a run resumes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.utils.checkpoint import checkpoint

import variable_batch_size as vbs
from helpers.models import Experts, Mixed, half_frozen
from helpers.reference import (
    ADAM,
    EQUATIONS,
    HYPERPARAMETERS,
    OPTIMIZERS,
    REF,
    Array,
    Training,
    assert_equal,
    batches,
    data,
    filled,
    network,
)
from helpers.worlds import ODD, Layout, Place, load, state_of

LENGTHS = torch.tensor([3.0, 1, 4, 1, 5, 0, 0, 2, 6, 5]).double().repeat(5)  # tokens of the samples
SOME = LENGTHS + 1
MARKS = (torch.arange(50) % 7 == 0).double() / 3  # weights of samples


@dataclass(frozen=True)
class Feature:
    """A kind of training."""

    kind: type[vbs.CustomOptimizer] = vbs.LinearRuleOptimizer
    options: dict[str, Any] = field(default_factory=dict)  # of the optimizer
    sampling: Callable[[int], dict[str, Any]] = lambda size: {}  # options of the sampler, in a world of a size
    model: Callable[[], nn.Module] | None = None
    microbatch: Callable[[Run, list[int]], bool] | None = None  # what the loop does; it returns what `step()` has
    # The loss of the update, of output, target and samples of a whole batch; None: there is nothing to train on.
    whole: Callable[[Tensor, Tensor, list[int]], Tensor | None] = lambda output, target, _: _of_rows(output, target)
    prepare: Callable[[Any, int], None] = lambda model, update: None  # the model, before each microbatch of an update
    by_updates: bool = False  # whether the loop is over `vbs.updates`
    counts: Callable[[list[int]], dict[str, Any]] | None = None  # of a microbatch, for `vbs.updates`
    overflows: tuple[int, ...] = (1, 4)  # updates in which a scaled loss of rank 0 is infinite
    sizes: Sequence[int] = ODD
    tolerance: float = 1e-12  # relative to the largest weight
    unlike: tuple[str, ...] = ()  # where it cannot be: "ddp", "sharded", "tensors", "threads", "cores"

    def fits(self, layout: Layout) -> bool:
        """Return whether it can be trained over ranks of a layout."""
        found = {layout.by, layout.where, "sharded" * layout.sharded, "tensors" * (layout.tensors > 1)}
        return not found & {*self.unlike}

    @property
    def depends_on_cut(self) -> bool:
        """Whether the result depends on how a step is cut into microbatches."""
        equation = EQUATIONS.get(self.kind)
        return bool(self.options.get("noise")) or (equation is not None and equation.depends_on_cut)

    @property
    def logs(self) -> bool:
        """Whether the loop logs means."""
        return self.microbatch is _logging or isinstance(self.microbatch, partial)

    @property
    def scales(self) -> bool:
        """Whether the loop has a GradScaler, and overflows."""
        own = getattr(self.microbatch, "keywords", {})
        return self.microbatch in (scaled, _dividing_scaled) or own.get("scaled", False)

    @property
    def keeps_gradients(self) -> bool:
        """Whether a state has the gradients of the last update, of FSDP2 their shards."""
        return self.options.get("noise") == "differenced"


class Run:
    """A training of a feature, in a place; `raw`: whether the loop calls `loss.backward()`, where that is allowed.

    Options of the sampler and the training come in the place of those of the feature.
    """

    def __init__(self, feature: Feature, place: Place, *, raw: bool = False, **options: Any) -> None:
        self.feature, self.place = feature, place
        self.raw = raw and place.layout.by == "plain"
        sampling = {"fixed_shape": place.layout.where == "cores", **feature.sampling(place.world.size)}
        options["sampling"] = sampling | options.get("sampling", {})
        model = None if feature.model is None else feature.model()
        self.training = place.training(
            feature.kind, **{"sizes": feature.sizes, "model": model, **feature.options, **options}
        )
        self.optimizer, self.loss = self.training.optimizer, self.training.loss
        self.loader: Any = self.training.sampler
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self.overflows = {*feature.overflows} if place.world.rank == 0 else set[int]()
        self.logged: list[float] = []
        self.made = 0  # updates of which `step()` has said so
        self.update: Any = None  # under way, of `vbs.updates`

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Call the one `backward()` or the other."""
        loss.backward(**options) if self.raw else self.optimizer.backward(loss, **options)  # type: ignore[no-untyped-call]

    def _microbatches(self) -> Iterable[list[int]]:
        return self._of_updates() if self.feature.by_updates else self.loader

    def _count(self, indices: list[int]) -> dict[str, Any]:
        assert self.feature.counts is not None
        counts, device = self.feature.counts(indices), self.place.device or "cpu"
        return {name: count.to(device) if isinstance(count, Tensor) else count for name, count in counts.items()}

    def _of_updates(self) -> Iterator[list[int]]:
        counts = None if self.feature.counts is None else self._count
        for update in vbs.updates(self.loader, self.optimizer, counts=counts):
            self.update = update
            yield from update

    def until(self, updates: int) -> Run:
        """Train until this update, over any number of epochs."""
        while self.optimizer.updates < updates:
            for indices in self._microbatches():
                before = self.optimizer.updates
                self.feature.prepare(self.training.model, before)
                made = (self.feature.microbatch or plainly)(self, indices)
                self.made += made
                if made and "loss" in self.optimizer.logged:
                    self.logged.append(float(self.optimizer.logged["loss"]))
                if before < self.optimizer.updates == updates:
                    break
        return self

    def results(self) -> list[Array]:
        """What must be the same: weights, progress, means and, if it is measured, the noise."""
        self._meet()
        return [*results(self.training), np.array([self.optimizer.lr_factor(), *self.logged])]

    def said(self) -> tuple[int, int, float | None]:
        """How many updates were made, the samples, and the norm of the last gradient: nan if there was none."""
        norm = self.optimizer.grad_norm
        return self.made, self.optimizer.samples, None if norm is None else norm.item()

    def state(self) -> Any:
        """A state that can be loaded in another place; every rank has to call it."""
        self._meet()
        return state_of(self.training), [*self.logged], self.made

    def _meet(self) -> None:
        """On XLA no replica may read its device while others compute."""
        if self.place.layout.where == "cores":
            self.place.backend.mark_step()
            self.place.backend.barrier()  # type: ignore[attr-defined]

    def load(self, state: Any) -> Run:
        """Go on from a state."""
        load(self.training, state[0])
        self.logged, self.made = [*state[1]], state[2]
        return self


EXPONENTS = {vbs.ConstantOptimizer: 0.0, vbs.RootRuleOptimizer: 0.5, vbs.LinearRuleOptimizer: 1.0}  # of the lr in B/ref


class ByTorch(NamedTuple):
    """What torch alone ends with."""

    weights: list[Array]
    progress: float
    skipped: int  # updates, because of their norm
    losses: list[float]  # of updates that were made
    samples: int
    norm: float  # of the last gradient; nan if there was none


def by_torch(feature: Feature) -> ByTorch | None:
    """Train without this library: a whole batch an update; None if that is not simple, see `reference.twin`."""
    options = {"inner": torch.optim.SGD, "ref_batchsize": REF, "dtype": torch.float64, **feature.options}
    if feature.kind not in EXPONENTS:
        return None
    model = network(options["dtype"]) if feature.model is None else feature.model()
    x, target = (tensor.to(options["dtype"]) for tensor in data(50))
    hyperparameters = options.get("hyperparameters") or HYPERPARAMETERS[options["inner"]]
    inner = options["inner"](model.parameters(), **hyperparameters)
    limit = options.get("skip_grad_norm", lambda batch_size: math.inf)
    rates, progress, skipped, used = [group["lr"] for group in inner.param_groups], 0.0, 0, 0
    norm, losses = math.nan, list[float]()
    for update, samples in enumerate(batches(feature.sizes, 50)):
        feature.prepare(model, update)
        inner.zero_grad()
        loss = feature.whole(model(x[samples]), target[samples], samples.tolist())
        used, norm = used + len(samples), math.nan
        if loss is None or (feature.scales and update in feature.overflows):
            continue
        loss.backward()  # type: ignore[no-untyped-call]
        total = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
        if "max_grad_norm" in options:  # not by clip_grad_norm_, which torch_xla replaces where it is imported
            nn.utils.clip_grads_with_norm_(model.parameters(), options["max_grad_norm"], total)
        norm = total.item()
        if update and norm > limit(len(samples)):
            skipped += 1
            continue
        k = len(samples) / options["ref_batchsize"]
        for group, rate in zip(inner.param_groups, rates, strict=True):
            group["lr"] = rate * k ** EXPONENTS[feature.kind]
        inner.step()
        progress += k if EXPONENTS[feature.kind] else 1
        losses.append(loss.item())
    real = (torch.view_as_real(one) if one.is_complex() else one for one in model.parameters())
    return ByTorch([one.detach().double().numpy() for one in real], progress, skipped, losses, used, norm)


def assert_by_torch(found: Sequence[Array], said: tuple[int, int, float | None], feature: Feature) -> None:
    """Compare what a training has found and said with torch alone, if that can train so."""
    if (right := by_torch(feature)) is None:
        return
    *weights, numbers, (_, *logged) = found
    assert_equal(weights, right.weights, feature.tolerance)
    made, samples, norm = said
    assert (made, samples) == (len(right.losses), right.samples)
    assert (norm is None) == (not {"max_grad_norm", "grad_norm", "skip_grad_norm"} & feature.options.keys())
    assert norm is None or norm == pytest.approx(right.norm, rel=1e-9, nan_ok=True)
    assert numbers[0] == pytest.approx(right.progress, rel=1e-12)
    assert "skip_grad_norm" not in feature.options or numbers[1] == right.skipped
    assert not feature.logs or logged == pytest.approx(right.losses, rel=1e-12)


def results(run: Training) -> list[Array]:
    """The weights, the progress, the skipped updates and, if it is measured, the noise.

    An error of the noise may not reach the weights.
    """
    large = run.optimizer._abilities.skipper
    skipped = [] if large is None else large.state_dict()["skipped"].values()
    numbers = np.array([run.optimizer.progress, *skipped])
    if run.optimizer._abilities.noise is not None:
        numbers = np.append(numbers, np.nan_to_num(np.array(astuple(run.optimizer.noise())), posinf=0))
    return [*run.weights(), numbers]


# What loops do with a microbatch. -------------------------------------------------------------------------------------


def plainly(run: Run, indices: list[int]) -> bool:
    run.backward(run.loss(indices))
    return run.optimizer.step()


def _logging(run: Run, indices: list[int]) -> bool:
    loss, replay = run.loss(indices), run.optimizer.microbatch.samples == 0
    run.backward(loss)
    run.optimizer.log(loss=loss * torch.nan if replay else loss, hits=1)  # of a replay it may be anything
    return run.optimizer.step()


def _of_rows(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(dim=1).mean()


def _of_tokens(output: Tensor, target: Tensor, indices: list[int], of: Tensor = LENGTHS) -> Tensor | None:
    lengths = of[indices]
    return ((output - target).square().sum(dim=1) * lengths).sum() / lengths.sum() if lengths.any() else None


def _counting(run: Run, indices: list[int], of: Tensor = LENGTHS, *, scaled: bool = False) -> bool:
    own, lengths = run.training, of[indices].to(run.place.device)
    of_token = (own.model(own.x[indices]) - own.target[indices]).square().sum(dim=1)
    loss, tokens = (of_token * lengths).sum(), lengths.sum()
    run.optimizer.log(loss=loss)
    if scaled:
        return _step_scaled(run, loss, count=tokens)
    run.backward(loss)
    return run.optimizer.step(count=int(tokens) if run.raw else tokens)


def _count(indices: list[int], *, rows: bool = True, marks: Tensor = MARKS) -> dict[str, Any]:
    """Tokens, of which some samples have none; marked samples, of which most updates have none; and rows."""
    counts = {"tokens": LENGTHS[indices].sum(), "marked": marks[indices].sum().item()}
    return counts | ({"rows": len(indices)} if rows else {})


def _of_terms(output: Tensor, target: Tensor, indices: list[int], totals: Mapping[str, Any]) -> Tensor:
    """The sum of the terms, each divided by its total."""
    lengths, marks = (of[indices].to(output.device) for of in (LENGTHS, MARKS))
    terms = {
        "tokens": ((output - target).square().sum(dim=1) * lengths).sum(),
        "marked": (output.exp().sum(dim=1) * marks).sum(),
        "rows": output.square().sum(),
    }
    return torch.stack([terms[name] / total for name, total in totals.items()]).sum()


def _dividing(run: Run, indices: list[int], *, scaled: bool = False) -> bool:
    own = run.training
    loss = _of_terms(own.model(own.x[indices]), own.target[indices], indices, run.update.counts)
    if scaled:
        return _step_scaled(run, loss, divided=True)
    run.optimizer.backward(loss, divided=True)
    return run.optimizer.step()


def _divided(**options: Any) -> Feature:
    """A loss of terms with counts of their own."""
    counts = partial(_count, **options)

    def whole(output: Tensor, target: Tensor, indices: list[int]) -> Tensor | None:
        totals = {name: float(count) for name, count in counts(indices).items() if count}
        return _of_terms(output, target, indices, totals) if totals else None

    own: dict[str, Any] = {"microbatch": _dividing, "by_updates": True, "counts": counts, "whole": whole}
    return Feature(options={"max_grad_norm": 0.5}, **own)


def _dividing_scaled(run: Run, indices: list[int]) -> bool:
    return _dividing(run, indices, scaled=True)


def scaled(run: Run, indices: list[int]) -> bool:
    return _step_scaled(run, run.loss(indices))


def _step_scaled(run: Run, loss: Tensor, count: Tensor | None = None, **options: Any) -> bool:
    if run.optimizer.updates in run.overflows:
        run.overflows.discard(run.optimizer.updates)
        loss = loss * torch.inf
    run.optimizer.backward(loss, scaler=run.scaler, **options)
    made = run.scaler.step(run.optimizer, count=count)
    run.scaler.update()
    return bool(made)


def _several_losses(run: Run, indices: list[int]) -> bool:
    loss = run.loss(indices)
    run.backward(loss / 4, retain_graph=True)
    run.backward(3 * loss / 4)
    return run.optimizer.step()


def _evaluating(run: Run, indices: list[int]) -> bool:
    """Forwards that no backward follows."""
    run.loss(indices)
    run.backward(run.loss(indices))
    with torch.no_grad():
        run.loss(indices)
    return run.optimizer.step()


def _by_closure(run: Run, indices: list[int]) -> bool:
    def closure() -> None:
        if run.place.layout.by == "plain":
            run.optimizer.zero_grad()
        run.backward(run.loss(indices))

    return run.optimizer.step(closure)


def _clearing(run: Run, indices: list[int]) -> bool:
    """As in a loop of torch, and where another backward has come before the first microbatch."""
    if not run.optimizer.inside_step:
        run.loss(indices).mul(7).backward()
    run.optimizer.zero_grad()
    made = plainly(run, indices)
    run.optimizer.zero_grad()
    run.optimizer.zero_grad(set_to_none=False)
    return made


def _quietly(run: Run, indices: list[int]) -> bool:
    """Torch 2.15 compiles with a warning about inputs that are no leaves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plainly(run, indices)


def _freeze(model: Any, update: int) -> None:
    model[0].requires_grad_(update in (2, 3, 6))


def _with_settings_of_fsdp2(run: Run, indices: list[int]) -> bool:
    """What a loop for FSDP2 sets."""
    model: Any = run.training.model
    if run.place.layout.sharded and hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(len(indices) % 2 > 0)
        model.set_gradient_divide_factor(7.0)
    return plainly(run, indices)


# Models. --------------------------------------------------------------------------------------------------------------


def tied() -> nn.Module:
    """Return experts two of whose layers have one weight."""
    model: Any = filled(Experts())
    model.common.weight = model.rare.weight
    return model  # type: ignore[no-any-return]


def _images() -> nn.Module:
    """Parameters that are not contiguous, apart from `.grad`."""
    own = nn.Sequential(nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4, 2))
    return filled(own.double()).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


class Deep(nn.Sequential):
    """A network whose middle is computed again in backward, in either way of torch, or compiled."""

    plan: ClassVar[dict[str, Any]] = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "3": RowwiseParallel(input_layouts=Replicate()),
    }

    def __init__(self, recomputed: bool, *, reentrant: bool = False) -> None:
        middle = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        super().__init__(nn.Linear(3, 4), middle, nn.Tanh(), nn.Linear(4, 2))
        self.recomputed, self.reentrant = recomputed, reentrant
        filled(self.double())

    def forward(self, x: Tensor) -> Tensor:
        first, middle, tanh, last = self
        x = first(x)
        for _ in range(1 + self.reentrant):  # twice
            x = checkpoint(middle, x, use_reentrant=self.reentrant) if self.recomputed else middle(x)
        return last(tanh(x))  # type: ignore[no-any-return]


def _compiled() -> nn.Module:
    model: Any = Deep(recomputed=False)
    model[1].compile(backend="aot_eager")
    return model  # type: ignore[no-any-return]


class OverSequence(nn.Sequential):
    """A network over sequences of four, whose norm each rank of tensor parallelism computes for a part of them."""

    plan: ClassVar[dict[str, Any]] = {
        "0": ColwiseParallel(output_layouts=Shard(1)),
        "1": SequenceParallel(),
        "2": RowwiseParallel(input_layouts=Shard(1)),
    }

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        filled(self.double())

    def forward(self, x: Tensor) -> Tensor:
        scales = torch.arange(1, 5, dtype=x.dtype)[:, None]  # (sequence, 1)
        y: Tensor = super().forward(x[:, None] * scales)
        return y.square().mean(1)


class Phase(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rotation = nn.Parameter(torch.tensor([[1 + 1j, 2, 0], [1j, 0, -1]], dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(torch.complex128), self.rotation).abs()


def _inner(kind: Any, **own: Any) -> dict[str, Any]:
    """An inner optimizer of two groups."""

    def create(parameters: Any, **options: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        groups = [{"params": every[0::2]}, {"params": every[1::2], "weight_decay": 0.0}]
        return kind(groups, **options)  # type: ignore[no-any-return]

    return {"inner": create, "hyperparameters": ADAM | own}


# The features. --------------------------------------------------------------------------------------------------------

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "sum"},
    {"max_grad_norm": 0.5},
    {"grad_norm": True},
    {"noise": "microbatches"},
    {"noise": "differenced"},
)
ADASCALE = Feature(vbs.AdaScaleOptimizer)
UNUSED = Feature(options={"find_unused_parameters": True}, model=lambda: filled(Experts()), unlike=("sharded",))
LARGE_LAST = (*ODD, 40)  # for `largest_norm`: the last update is made
PAIR = {"rule": (vbs.rules.LinearRule(), vbs.rules.RootRule()), **_inner(torch.optim.AdamW)}


def _features() -> dict[str, Feature]:
    found = dict[str, Feature]()
    for number, (name, kind) in enumerate(OPTIMIZERS.items()):  # each rule, with an option
        own = OPTIONS[number % 4]
        found[name] = Feature(kind, own, unlike=("sharded",) if EQUATIONS[kind].squares else ())
    for options in OPTIONS[1:]:
        found[" ".join(map(str, *options.items()))] = Feature(options=options)
        squares = {"ref_batchsize": 4, **options}
        found[f"second moment {options}"] = Feature(vbs.InvariantAdamRuleOptimizer, squares, unlike=("sharded",))
    found["accumulated"] = Feature(options={"sharded_accumulation": False})
    found["means"] = Feature(microbatch=_logging)
    found["means, noise"] = replace(ADASCALE, microbatch=_logging)
    sums = {"reduction": "sum", "max_grad_norm": 0.5}
    some = {"microbatch": partial(_counting, of=SOME), "whole": partial(_of_tokens, of=SOME)}
    found["counts"] = Feature(vbs.ConstantOptimizer, sums, **some)
    own = {"microbatch": partial(_counting, of=SOME, scaled=True), "unlike": ("cores",)}
    found["counts, scaled"] = replace(found["counts"], **own)
    # On a device that the host does not read an update without any is made.
    none = Feature(vbs.ConstantOptimizer, sums, microbatch=_counting, whole=_of_tokens)
    found["no counts"] = replace(none, unlike=("cores",))
    found["scaled"] = Feature(vbs.RootRuleOptimizer, microbatch=scaled, unlike=("cores",))
    found["scaled, noise"] = replace(ADASCALE, microbatch=scaled, unlike=("cores",))
    found["several losses"] = Feature(microbatch=_several_losses, unlike=("ddp", "sharded"))
    found["evaluating"] = Feature(microbatch=_evaluating)
    found["closure"] = Feature(microbatch=_by_closure)
    found["zero_grad"] = Feature(microbatch=_clearing, unlike=("ddp", "sharded", "cores"))
    found["updates"] = Feature(by_updates=True)
    found["denominators"] = divided = _divided()
    found["denominators of sums"] = replace(divided, options={"reduction": "sum"})
    found["denominators, scaled"] = replace(divided, microbatch=_dividing_scaled, unlike=("cores",))
    found["whole denominators"] = _divided(marks=MARKS.ceil())
    # An update may have none at all.
    found["denominators, no counts"] = replace(_divided(rows=False), unlike=("cores",))
    found["settings of FSDP2"] = Feature(microbatch=_with_settings_of_fsdp2)
    for noise in (None, "microbatches", "differenced"):
        options = {"noise": noise, "find_unused_parameters": True}
        found[f"unused, {noise}"] = replace(UNUSED, options=options)
        found[f"tied, {noise}"] = replace(UNUSED, options=options, model=tied, unlike=("sharded", "cores"))
    found["unused, AdamW"] = replace(UNUSED, options=_inner(torch.optim.AdamW) | UNUSED.options)
    found["half frozen"] = Feature(model=half_frozen, unlike=("tensors",))
    found["freezing"] = replace(UNUSED, model=half_frozen, prepare=_freeze, unlike=("ddp", "sharded"))
    found["images"] = Feature(model=_images, unlike=("sharded", "cores"))
    found["images, noise"] = replace(ADASCALE, model=_images, unlike=("sharded", "cores"))
    found["complex"] = Feature(model=Phase, unlike=("ddp", "sharded", "cores"))
    for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float32, 1e-5)):
        halves = () if dtype is torch.float32 else ("ddp", "sharded", "cores")
        found[str(dtype)] = Feature(vbs.RootRuleOptimizer, {"dtype": dtype}, tolerance=tolerance, unlike=halves)
    narrow = {"dtype": torch.bfloat16, "reduction": "sum"}
    found["torch.bfloat16, sum"] = replace(found["torch.bfloat16"], options=narrow)
    mixed = Feature(
        model=lambda: filled(Mixed(torch.float32, torch.float64, torch.bfloat16)),
        tolerance=2e-2,
        unlike=("ddp", "sharded", "cores"),
    )
    found["several dtypes"] = mixed
    found["several dtypes, noise"] = replace(mixed, kind=vbs.AdaScaleOptimizer)
    found["rule by group"] = Feature(vbs.CustomOptimizer, PAIR)
    for name, own in {"foreach": {"foreach": True}, "fused": {"fused": True}, "plain": {"foreach": False}}.items():
        found[f"AdamW {name}"] = Feature(options=_inner(torch.optim.AdamW, **own), unlike=("cores",))
    found["fused Adam"] = Feature(options=_inner(torch.optim.Adam, fused=True), unlike=("cores",))
    for kind in (vbs.LinearRuleOptimizer, vbs.AdaScaleOptimizer):
        found[f"recomputed {kind.__name__}"] = Feature(kind, model=lambda: Deep(recomputed=True), unlike=("cores",))
        # torch 2.15 with tensor parallelism cannot compile again for a single row.
        sizes, nowhere = (9, 8, 17, 12, 30, 9, 8, 17), ("cores", "threads")
        compiled = Feature(kind, model=_compiled, microbatch=_quietly, sizes=sizes, unlike=nowhere)
        found[f"compiled {kind.__name__}"] = compiled
    again = Feature(model=lambda: Deep(recomputed=True, reentrant=True))
    found["recomputed by reentrant passes"] = replace(again, unlike=("ddp", "sharded", "cores"))
    for options in ({"max_grad_norm": 0.5}, {"noise": "microbatches"}, {"noise": "differenced"}):
        found[f"over sequences {options}"] = Feature(options=options, model=OverSequence)
    found["speeds"] = Feature(sampling=_speeds, unlike=("cores", "tensors"))
    found["speeds, noise"] = replace(ADASCALE, sampling=_speeds, unlike=("cores", "tensors"))
    sizes = (24, 26, 36, 14, 40, 10, 24, 26)
    found["equal rounds"] = Feature(sampling=lambda size: {"equal_rounds": True}, sizes=sizes, unlike=("cores",))
    for options in ({}, {"max_grad_norm": 0.5}, {"noise": "microbatches"}, {"noise": "differenced"}):
        found[f"skipping {options}"] = Feature(options={"skip_grad_norm": largest_norm, **options}, sizes=LARGE_LAST)
    limited = {"skip_grad_norm": largest_norm}
    found["skipping, AdaScale"] = Feature(vbs.AdaScaleOptimizer, limited, sizes=LARGE_LAST)
    adamw = {**limited, **_inner(torch.optim.AdamW)}
    found["skipping, AdamW"] = Feature(vbs.RootRuleOptimizer, adamw, sizes=LARGE_LAST)
    found["skipping, betas"] = Feature(vbs.SqrtSDERuleOptimizer, adamw, sizes=LARGE_LAST)
    squares = {"ref_batchsize": 4, **limited}
    found["second moment, skipping"] = Feature(
        vbs.InvariantAdamRuleOptimizer, squares, sizes=LARGE_LAST, unlike=("sharded",)
    )
    return found


def largest_norm(batch_size: int) -> float:
    """A `skip_grad_norm` that skips some updates, and none of a large batch."""
    return math.inf if batch_size >= 40 else 1.8 + 1.2 / batch_size**0.5


def _speeds(size: int) -> dict[str, Any]:
    return {"speeds": (3, 1, 2, 1, 5, 1, 1, 1)[:size]}


FEATURES = _features()
