"""`python -m fuzz.sums`: random trainings in processes that sum plainly, in DistributedDataParallel, or over shards.

Each training is cut into segments, of which each has another number of ranks and is summed in another way: plainly, by
DDP, by FSDP2 (with replicas, with tensor parallelism), or with tensor parallelism alone. It must end like the same one
in one process that never stops.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from helpers.features import OPTIONS, Feature, Run, scaled, tied
from helpers.models import Experts
from helpers.reference import EQUATIONS, Array, Variables, filled, network
from helpers.worlds import NAMES, WRAPPERS, Layout, Place, alone

RANKS = 4
TOLERANCE = 1e-9
LAYOUTS = {  # of all ranks
    "hsdp": Layout(2, 2),
    "tp": Layout(tensors=4),
    "tp x fsdp": Layout(shards=2, tensors=2),
    "tp x plain": Layout(2, tensors=2, by="plain"),
}


class Segment(NamedTuple):
    ranks: int
    by: str  # what sums: "plain", "ddp", "fsdp" or a key of LAYOUTS
    end: int  # the update after which it ends


class Sums(NamedTuple):
    """A random training, and how each part of it is summed."""

    feature: Feature
    dataset_size: int
    minibatch_size: int
    raw: bool  # whether the loop calls `loss.backward()`, where that is right
    wrapper: dict[str, Any]
    segments: list[Segment]


def draw(seed: int) -> Sums:
    rng = random.Random(seed)
    sizes = [rng.choice([rng.randint(1, 4), rng.randint(1, 40)]) for _ in range(rng.randint(2, 7))]
    kind = rng.choice(list(EQUATIONS))
    betas = EQUATIONS[kind].factors(Variables.of(2, 1, 9, 1)).scales_betas
    scales, experts = rng.random() < 0.2, rng.random() < 0.3 and not betas  # which need equally many updates
    stops = sorted(rng.sample(range(1, len(sizes)), min(len(sizes) - 1, rng.randint(0, 2))))
    options = dict(rng.choice(OPTIONS))
    wrapper = dict(rng.choice(WRAPPERS)) | ({"find_unused_parameters": True} if experts else {})
    # Under FSDP2 all ranks use the same parameters, and a state has the shards of the previous gradient.
    whole = experts or options.get("noise") == "differenced" or EQUATIONS[kind].squares
    ways = ["plain", "ddp", "ddp", *(() if whole else ("fsdp", "fsdp", "fsdp", *LAYOUTS))]
    ends = [(rng.randint(1, RANKS), rng.choice(ways), end) for end in (*stops, len(sizes))]
    dataset_size, minibatch_size = max(sizes) + rng.randint(0, 60), rng.randint(1, 9)
    shares_weight = experts and rng.random() < 0.5
    overflows = (rng.randrange(len(sizes)),) if scales and rng.random() < 0.5 else ()
    how = rng.choice(["backward", "optimizer.backward", "updates"])
    measures = "noise" in options or EQUATIONS[kind].noise
    options |= {"find_unused_parameters": experts, "sharded_accumulation": len(sizes) % 3 > 0 or measures}
    feature = Feature(
        kind,
        options,
        model=(tied if shares_weight else lambda: filled(Experts())) if experts else network,
        microbatch=scaled if scales else None,
        by_updates=how == "updates",
        overflows=overflows,
        sizes=sizes,
    )
    segments = [Segment(RANKS if by in LAYOUTS else ranks, by, end) for ranks, by, end in ends]
    return Sums(feature, dataset_size, minibatch_size, how == "backward", wrapper, segments)


class Meshes(NamedTuple):
    groups: list[Any]  # of the first 1, 2, 3 and 4 ranks
    fsdp: list[DeviceMesh]  # of the same
    others: dict[str, DeviceMesh]  # of LAYOUTS

    @staticmethod
    def init() -> Meshes:
        """Call it on every rank."""
        groups = [dist.new_group(range(size + 1)) for size in range(RANKS)]
        ranks = [torch.arange(size + 1).view(1, -1, 1) for size in range(RANKS)]
        others = {name: torch.arange(RANKS).view(layout.shape) for name, layout in LAYOUTS.items()}
        return Meshes(
            groups,
            [DeviceMesh("cpu", own, mesh_dim_names=NAMES) for own in ranks],
            {name: DeviceMesh("cpu", own, mesh_dim_names=NAMES) for name, own in others.items()},
        )

    def place(self, by: str, ranks: int, wrapper: dict[str, Any]) -> Place:
        """Return the place of this rank among the first ones."""
        if by in LAYOUTS:
            return Place(LAYOUTS[by], vbs.backend.DistributedBackend(), self.others[by])
        if by == "fsdp":
            mesh = self.fsdp[ranks - 1]
            group = vbs.backend.DistributedBackend(mesh["shards"].get_group())
            return Place(Layout(shards=ranks), group, mesh)
        group = self.groups[ranks - 1]
        layout = Layout(ranks, by=by, wrapper={**wrapper, "process_group": group})  # type: ignore[arg-type]
        return Place(layout, vbs.backend.DistributedBackend(group))


def begin(case: Sums, place: Place) -> Run:
    """Return a training, before its first update."""
    assert case.feature.model is not None
    model = place.spread(case.feature.model(), by_layer=len(case.feature.sizes) % 2 > 0)
    options: dict[str, Any] = {"dataset_size": case.dataset_size, "minibatch_size": case.minibatch_size}
    run = Run(case.feature, place, raw=case.raw, model=model, spread=False, **options)
    run.loader = DataLoader(range(case.dataset_size), batch_sampler=run.loader, collate_fn=list)
    return run


def difference(found: list[Array], expected: list[Array]) -> float:
    largest = max(float(np.abs(array).max()) for array in expected)
    return max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True)) / largest


def check(seed: int, meshes: Meshes) -> str:
    """Run a case on this rank, and return what is wrong."""
    case, rank, state, wrong = draw(seed), dist.get_rank(), None, ""
    for ranks, by, end in case.segments:
        carried: list[Any] = [None]
        if rank < ranks:
            run = begin(case, meshes.place(by, ranks, case.wrapper))
            (run if state is None else run.load(state)).until(end)
            carried, ended = [run.state()], run.results()
        dist.broadcast_object_list(carried, src=0)
        state = carried[0]
    if rank == 0:
        off = difference(ended, begin(case, alone()).until(len(case.feature.sizes)).results())
        wrong = f"weights or noise differ by {off:.1e}" if not off < TOLERANCE else ""
    return wrong


def work(rank: int, port: int, seeds: list[int], folder: str) -> None:
    """Run cases on this rank until one raises; write what was found."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.dup2(os.open(Path(folder, f"stderr{rank}"), os.O_WRONLY | os.O_CREAT), 2)
    store = dist.TCPStore("localhost", port, RANKS, is_master=rank == 0)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    meshes = Meshes.init()
    for seed in seeds:
        try:
            wrong, failed = check(seed, meshes), False
        except Exception as error:
            wrong, failed = f"rank {rank}: {type(error).__name__}: {error}", True
        with Path(folder, f"rank{rank}").open("a") as file:
            file.write(f"{seed} {wrong[:500]!r}\n")
        if failed:
            os._exit(0)  # the others hear a closed connection


def main() -> int:
    """Run cases; return 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.sums", description=__doc__)
    parser.add_argument("--number", type=int, default=1000, help="how many random trainings to run")
    parser.add_argument("--seed", type=int, help="the seed of the search (default: another one each time)")
    parser.add_argument("--case", type=int, help="run this training only")
    arguments = parser.parse_args()
    seed = random.randrange(2**31) if arguments.seed is None else arguments.seed
    rng = random.Random(seed)
    seeds = [rng.randrange(2**40) for _ in range(arguments.number)] if arguments.case is None else [arguments.case]
    print(f"search seed {seed}" if arguments.case is None else draw(arguments.case), flush=True)
    began, findings, number = time.monotonic(), dict[int, str](), len(seeds)
    while seeds:
        with tempfile.TemporaryDirectory() as folder:
            with socket.create_server(("localhost", 0)) as server:
                port = server.getsockname()[1]
            mp.start_processes(work, (port, seeds, folder), RANKS, start_method="spawn")
            lines = [line.split(" ", 1) for path in sorted(Path(folder).glob("rank*")) for line in path.open()]
            done = max((seeds.index(int(case)) for case, _ in lines), default=len(seeds)) + 1
            for case, wrong in lines:
                if wrong.strip() != "''":
                    findings[int(case)] = findings.get(int(case), "") + wrong.strip()
            seeds = seeds[done:]
    for case, wrong in findings.items():
        print(f"python -m fuzz.sums --case {case}  # {wrong}")
    print(f"{number} cases, {len(findings)} findings, {(time.monotonic() - began) / number * 1000:.0f} ms a case")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
