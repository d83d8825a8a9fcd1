"""What the processes of test_sharded_models.py run: a training that goes on over other ranks, summed in another way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.checkpoints import checkpoint
from helpers.features import results
from helpers.processes import run_job
from helpers.reference import Array, Training, network, training
from helpers.worlds import ODD, Layout, Place
from variable_batch_size.adaptive import NoiseScale


class Segment(NamedTuple):
    """The updates up to `until`, over some ranks; without a layout in DistributedDataParallel, or in one process."""

    layout: Layout | None
    until: int
    ranks: int = 1


class Setting(NamedTuple):
    kind: type[vbs.CustomOptimizer]
    options: dict[str, Any] = {}
    adaptive: bool = False
    compiled: bool = False  # a part of the model, in every second segment
    width: int = 4


def build(setting: Setting, layout: Layout | None, number: int) -> tuple[Training, vbs.ProgressScheduler]:
    model: Any = network(width=setting.width)
    trace: Any = vbs.AdaptiveTrace(NoiseScale(2.0), start=9, bounds=(4, 40), every=2, delay=4)
    options: dict[str, Any] = {"sizes": trace, "dataset_size": 300} if setting.adaptive else {"sizes": ODD}
    if setting.compiled and number % 2:
        model[1] = torch.compile(model[1], backend="aot_eager")
    if layout is None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        model = DistributedDataParallel(model) if ranks > 1 else model
        own = vbs.backend.DistributedBackend() if ranks > 1 else vbs.backend.LocalBackend()
        run = training(setting.kind, model=model, backend=own, **options, **setting.options)
    else:
        place = Place.of(layout, vbs.backend.DistributedBackend())
        run = place.training(setting.kind, model=model, **options, **setting.options)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 500)
    return run, vbs.ProgressScheduler(cosine, run.optimizer, by="samples")


def train(setting: Setting, segment: Segment, number: int, folder: Path | None) -> list[Array]:
    """Restore a checkpoint in this folder, if there is one, train, save, and return the results."""
    run, scheduler = build(setting, segment.layout, number)
    average = network()  # a further part
    if segment.layout is not None:
        average = Place.of(segment.layout, vbs.backend.DistributedBackend()).spread(average)
    with torch.no_grad():
        for one in average.parameters():
            one.fill_(float(number == 0))
    saves = None
    if folder is not None:
        parts = {"scheduler": scheduler, "average": average}
        saves = checkpoint(folder, run, **parts, best="min:loss", keep=1)
        assert saves.restore() == (number > 0)
        assert all((one == 1).all() for one in average.parameters())
    for _ in range(segment.until - run.optimizer.updates):
        run.run(1)
        scheduler.step()
        if saves is not None:
            saves.report(loss=abs(run.optimizer.updates - 2))  # that of the second update stays
    if saves is not None:
        saves.save(wait=number % 2 > 0)
        saves.close()
    return results(run)


def work(backend: vbs.backend.Backend, setting: Setting, segment: Segment, number: int, folder: Path) -> list[Array]:
    return train(setting, segment, number, folder)


def along(setting: Setting, segments: Sequence[Segment], folder: Path) -> list[Array]:
    """The results after the last segment."""
    for number, segment in enumerate(segments):
        ranks = segment.layout.size if segment.layout else segment.ranks
        found, *_ = run_job("gloo", work, setting, segment, number, folder / "saved", ranks=ranks)
    return found
