"""An ordinary loop of Accelerate around `prepare`, and what its tests run in processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers import fsdp2_on_cpu
from helpers.trainer_cases import CASES, Case, chosen, expected
from helpers.yardstick import (
    EPOCHS,
    MICROBATCH,
    REF,
    SAMPLES,
    STOPS,
    TRACE,
    UPDATES,
    Samples,
    difference,
    network,
    samples,
    weights,
)
from variable_batch_size.integrations.accelerate import prepare


@dataclass
class Loop:
    """An ordinary loop of Accelerate with the objects that `prepare` returns."""

    case: Case
    sampler_options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=lambda: {"cpu": True})
    dataset: Any = field(default_factory=Samples)
    steps_per_update: int | None = 1
    losses: list[float] = field(default_factory=list)
    syncs: int = 0

    def __post_init__(self) -> None:
        case = self.case
        self.accelerator = Accelerator(**self.settings)
        model = network(case.dropout)
        inner = case.make_inner(model)
        loader = DataLoader(self.dataset, batch_size=MICROBATCH, shuffle=True)
        objects = [model, inner, loader, *filter(None, [case.scheduler(inner)])]
        self.model, self.optimizer, self.loader, *schedulers = prepare(
            self.accelerator,
            *objects,
            trace=vbs.AdaptiveTrace(chosen, start=24, every=3, delay=5) if case.adaptive else TRACE,
            rule=case.rule,
            ref_batchsize=REF,
            sampler_options=self.sampler_options,
            optimizer_options={} if case.clip is None else {"max_grad_norm": case.clip},
            steps_per_update=self.steps_per_update,
        )
        self.scheduler = schedulers[0] if schedulers else None

    def run(self, saved: Callable[[int], Path | None] = lambda updates: None, until: int = UPDATES) -> Loop:
        """Train, and save where `saved` says; as a user would write it."""
        accelerator, optimizer = self.accelerator, self.optimizer
        for _ in range(optimizer.epoch, EPOCHS):
            for batch in self.loader:
                x, target = batch if isinstance(batch, list) else (batch["x"], batch["target"])
                with accelerator.accumulate(self.model):
                    loss = cross_entropy(self.model(x), target)
                    accelerator.backward(loss)
                    optimizer.log(loss=loss)
                    optimizer.step()
                    if self.scheduler is not None:
                        self.scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    self.syncs += 1
                    self.losses.append(float(optimizer.logged["loss"]))
                    if (folder := saved(optimizer.updates)) is not None:
                        accelerator.save_state(str(folder))
                    if optimizer.updates == until:
                        return self
        return self


def reset() -> None:
    """Forget the settings of earlier accelerators, as Accelerate's own tests do."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def at(folder: Path) -> Callable[[int], Path | None]:
    """Save after the updates of `STOPS`."""
    return lambda updates: folder / f"at-{updates}" if updates in STOPS else None


def trained(case: Case, **options: Any) -> Loop:
    """Run a case, whose warning about AdaScale and Adam is known."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "AdaScale's gain is meant for SGD")
        return Loop(case, **options)


def check(loop: Loop) -> None:
    """Compare a whole training with the one by hand."""
    wanted, losses = expected(loop.case)
    assert difference(loop.model, wanted) < 1e-12, loop.case
    assert loop.optimizer.updates == UPDATES
    assert loop.optimizer.samples == EPOCHS * SAMPLES
    assert loop.losses == pytest.approx(losses[-len(loop.losses) :], rel=1e-12)
    if loop.scheduler is not None:
        assert loop.scheduler.scheduler.last_epoch == UPDATES


def resumed(case: Case, folder: Path, **options: Any) -> Iterator[tuple[int, Loop]]:
    """Continue from each of `STOPS`, to the end."""
    for stop in STOPS:
        loop = trained(case, **options)
        torch.manual_seed(99)  # dropout must not depend on what was drawn before
        loop.accelerator.load_state(str(folder / f"at-{stop}"))
        assert loop.optimizer.updates == stop
        yield stop, loop.run()


def two_processes(folder: Path) -> None:
    """What two processes do; some of it is compared by the test that starts them."""
    for case in CASES:
        check(trained(case).run())
    trained(Case()).run(at(folder / "two"))
    for _, loop in resumed(Case(), folder / "one"):
        check(loop)
    assert isinstance(loop.model, DistributedDataParallel)
    _dropout(folder)
    _adaptive()
    _metrics()
    _within_an_update()
    _gathered_rows()
    _schedules()
    _data_parallel()


def _dropout(folder: Path) -> None:
    case = Case(dropout=0.3)
    torch.manual_seed(torch.distributed.get_rank())
    whole = trained(case).run(at(folder / "dropout"))
    for stop, loop in resumed(case, folder / "dropout"):
        assert difference(loop.model, weights(whole.model)) == 0.0, stop


def _adaptive() -> None:
    loop = trained(Case(adaptive=True)).run(until=10**9)
    updates = loop.optimizer.updates
    sizes = loop.optimizer.sampler.trace.batch_sizes(range(updates)).tolist()
    assert len(set(sizes)) > 3
    wanted, _ = expected(Case(), tuple(sizes), updates)
    assert difference(loop.model, wanted) < 1e-12


def _metrics() -> None:
    """Evaluation with Accelerate's own loader and `gather_for_metrics`: every sample once."""
    reset()
    accelerator = Accelerator(cpu=True)
    model = network()
    inner = Case().make_inner(model)
    data = TensorDataset(*samples())
    train, test = DataLoader(data, MICROBATCH, shuffle=True), DataLoader(data, 13)
    model, _, _, test = prepare(accelerator, model, inner, train, test, trace=TRACE)
    seen = 0
    with torch.no_grad():
        for x, target in test:
            hits, _ = accelerator.gather_for_metrics((model(x).argmax(1) == target, target))
            seen += len(hits)
    assert seen == SAMPLES


def _within_an_update() -> None:
    """Ranks compute equally many microbatches, also if the noise is measured, so that they may communicate in each."""
    loop = trained(Case("sgd", rule="adascale"))
    accelerator = loop.accelerator
    for x, target in loop.loader:
        loss = cross_entropy(loop.model(x), target)
        accelerator.backward(loss)
        accelerator.wait_for_everyone()
        assert accelerator.gather(loss.detach()).shape == accelerator.gather_for_metrics(loss.detach()).shape == (2,)
        assert accelerator.reduce(torch.tensor(float(accelerator.sync_gradients))).item() in (0, 2)
        loop.optimizer.step()
    assert loop.optimizer.updates == 11


def _gathered_rows() -> None:
    """The last microbatches of an update have unequal numbers of rows, which would abort gloo."""
    loop = trained(Case("sgd"))
    accelerator, shapes = loop.accelerator, set()
    for _ in range(2):
        for x, target in loop.loader:
            accelerator.backward(loss := cross_entropy(loop.model(x), target))
            if loop.optimizer.step():
                assert accelerator.gather(loss.detach()).shape == (2,)
                padded = accelerator.gather_for_metrics(accelerator.pad_across_processes({"x": x}, pad_index=0))
                rows = accelerator.gather(torch.tensor(len(x))).tolist()
                assert len(padded["x"]) == 2 * max(rows)
                shapes.add(tuple(rows))
    assert any(first != second for first, second in shapes)


def _schedules() -> None:
    """A schedule whose numbers were multiplied by the processes, as scripts of Accelerate do, ends where it should."""
    processes = torch.distributed.get_world_size()
    for given, steps in (None, 1), (1, 1), (processes, processes):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop = Loop(Case("sgd", schedule=False), steps_per_update=given)
            assert not caught  # no schedule yet
            total = UPDATES * steps
            decay = LambdaLR(loop.optimizer.inner, lambda step, total=total: 1 - step / total)
            loop.scheduler = loop.accelerator.prepare(decay)
            loop.accelerator.prepare(StepLR(loop.optimizer.inner, 10**6))
        told = [str(warning.message) for warning in caught if warning.category is UserWarning]
        assert len(told) == (given is None and loop.accelerator.is_main_process), told
        for text in told:
            assert "steps once per update, where Accelerate itself makes 2 steps on 2 processes; leave * acc" in text
        loop.run()
        assert loop.scheduler.get_last_lr() == pytest.approx([0.0], abs=1e-12)


class WithALayer(torch.nn.Module):
    """The network, and a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.unused = network(), torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def _data_parallel() -> None:
    """The settings of DistributedDataParallel are those of Accelerate, a communication hook too."""
    wanted, _ = expected(Case("sgd", rule="constant", schedule=False), updates=11)
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    for handler, model, close in (unused, WithALayer(), 1e-12), (hook, network(), 1e-2):
        reset()
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        objects = model, SGD(model.parameters(), 0.1, 0.9), ordinary()[2]
        wrapped, optimizer, loader = prepare(accelerator, *objects, trace=TRACE)
        assert isinstance(wrapped, DistributedDataParallel)
        assert wrapped.find_unused_parameters is (handler is unused)
        for x, target in loader:
            accelerator.backward(cross_entropy(wrapped(x), target))
            optimizer.step()
        found = weights(getattr(model, "net", model))
        assert float((found - wanted).abs().max()) < close
    reset()
    parts = [torch.nn.Linear(6, 5).double() for _ in range(2)]
    inner = SGD([parameter for part in parts for parameter in part.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="must train one DistributedDataParallel, got 2 models; put all parts"):
        prepare(Accelerator(cpu=True), *parts, inner, ordinary()[2], trace=TRACE)


def sharded(folder: Path) -> None:
    """The cases with FSDP2, and states of some updates."""
    fsdp2_on_cpu.enable()
    for case in CASES:
        loop = trained(case, settings=plugin())
        assert loop.accelerator.is_fsdp2
        fsdp2_on_cpu.check_sharded(loop.model)
        check(loop.run())
    for kind in "FULL_STATE_DICT", "SHARDED_STATE_DICT":
        trained(Case(), settings=plugin(kind)).run(at(folder / kind))


def resume_sharded(folder: Path, saved: Path) -> None:
    """Continue from them, on another number of processes."""
    fsdp2_on_cpu.enable()
    for kind in "FULL_STATE_DICT", "SHARDED_STATE_DICT":
        for _, loop in resumed(Case(), saved / kind, settings=plugin(kind)):
            fsdp2_on_cpu.check_sharded(loop.model)
            check(loop)


def plugin(kind: str = "FULL_STATE_DICT") -> dict[str, Any]:
    """The settings of an Accelerator with FSDP2, of which there is one in a process."""
    reset()
    policy = {"auto_wrap_policy": "no_wrap", "state_dict_type": kind}
    return {"cpu": True, "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, **policy)}


def ordinary(**options: Any) -> tuple[Any, Any, Any]:
    """A model, its optimizer and a loader."""
    model = network()
    loader = DataLoader(**{"dataset": Samples(), "batch_size": MICROBATCH, "shuffle": True} | options)
    return model, SGD(model.parameters(), lr=0.1), loader
