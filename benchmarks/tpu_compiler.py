"""What does a TPU's own compiler say of an update, with the library and by hand? No TPU is needed, and none is run.

The trainings of tpu_trainings.py run on two cores of XLA:CPU, which dumps their graphs; tpu_compile_graphs.py compiles
these for a topology with libtpu, in the environment whose interpreter TPU_COMPILER names (`make tpu-compiler`).

Cycles are the compiler's estimates: only their ratios within a run mean anything. An all-reduce has no estimate. The
case "kernels and all-reduces" adds 2 (n - 1) / n x bytes / bandwidth for n cores of a ring, as if nothing ran beside
them; the case "kernels" is right if they overlap wholly. Donation is not in the graphs: outputs with the shape of
an argument count as if they replaced it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import variable_batch_size as vbs
from results import record
from tpu_trainings import CORES, MEASURED, SIDES, TRAINED

CYCLES_A_SECOND, BYTES_A_SECOND, HBM_A_SECOND = 1.5e9, 200e9, 819e9  # of a v5e: clock, links and memory
V5E, V5E_CORES = "v5e:2x2", 4
POD, POD_CORES = "v5e:16x16", 256
OTHERS = [POD, "v4:2x2x1", "v5:2x2x1", "v6e:2x2"]  # v5 is v5p
TIMES = 4  # samples of 1,024 tokens for each one of the tour's trace: 0.5 million tokens at its 128, as GPT-2 had
RATIOS = [
    ("linear", "by hand"),
    ("linear", "by hand, zeroed"),
    ("linear", "by hand, one graph less"),
    ("AdaScale", "linear"),
    ("root", "linear"),
    ("sqrt-SDE", "linear"),
    ("invariant Adam", "linear"),
    ("linear, clipping", "linear"),
    ("linear, logging", "linear"),
    ("linear, reproducible", "linear"),
    ("linear, bfloat16", "by hand, bfloat16"),
]


class Update(NamedTuple):
    """A steady update: each graph that a core executes with the number of times, and its copies to the host."""

    graphs: Counter[str]  # paths of HloProtos
    copies: float


def dump(folder: Path, name: str, sides: Sequence[str], *, program: str = "tpu_trainings") -> dict[str, Update]:
    """Return an update of each side, from a training whose graphs are dumped to a folder, unless they are there."""
    debug = folder / "debug.txt"
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_proto",
        "PT_XLA_DEBUG_LEVEL": "2",  # names each graph that is compiled, and each that is executed, by its hash
        "PT_XLA_DEBUG_FILE": str(debug),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    code = f"import sys; from {program} import main; main(*sys.argv[1:])"
    if not (folder / "executed.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-c", code, str(folder), name, *sides], env=environment, check=True)
    text = debug.read_bytes()
    compiled = re.findall(rb"^Compilation Analysis:   Graph Hash: (\w+)", text, re.MULTILINE)
    paths = sorted(
        str(path.resolve()) for path in folder.glob("*.before_optimizations.hlo.pb")
    )  # numbered in the order of compilation
    path_of = dict(zip(compiled, paths, strict=True))
    updates = {}
    parts = json.loads((folder / "executed.json").read_text())
    for side, part in ((side, parts[side]) for side in sides):
        lines = text[part["begin"] : part["end"]]
        executed = Counter(re.findall(rb"^Execution Analysis:   Graph Hash: (\w+)", lines, re.MULTILINE))
        graphs = Counter({path_of[hash]: number // (MEASURED * CORES) for hash, number in executed.items()})
        updates[side] = Update(graphs, part["copies"])
    return updates


def compile_updates(updates: Mapping[str, Update], topology: str) -> dict[str, dict[str, Any]]:
    """Return by path what the compiler says of all graphs of some updates, see `tpu_compile_graphs.Graph`."""
    paths = sorted({path for update in updates.values() for path in update.graphs})
    done = subprocess.run(
        [os.environ["TPU_COMPILER"], "-c", "from tpu_compile_graphs import main; main()"],
        cwd=Path(__file__).parent,
        input=json.dumps([(topology, path) for path in paths]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(zip(paths, json.loads(done.stdout), strict=True))


def totals(update: Update, compiled: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, str]]:
    """Return what an update costs a core, with units."""
    graphs = [compiled[path] for path in update.graphs.elements()]
    sums = [number for graph in graphs for reduced in graph["all_reduces"] for number in reduced.values()]
    return {
        "graphs": (len(graphs), "graphs"),
        "all-reduces": (sum(len(graph["all_reduces"]) for graph in graphs), "all-reduces"),
        "bytes of all-reduces": (sum(sums) / 1e6, "MB"),
        "kernels": (sum(len(graph["kernels"]) for graph in graphs), "kernels"),
        "estimated cycles": (cycles(graphs), "cycles"),
        "bytes accessed": (sum(graph["bytes_moved"] for graph in graphs) / 1e6, "MB"),
        "peak memory": (max(graph["peak_memory"] for graph in graphs) / 1e6, "MB"),
        "host transfers": (sum(graph["host_transfers"] for graph in graphs) + update.copies, "transfers"),
    }


def cycles(graphs: Sequence[Mapping[str, Any]]) -> int:
    """Return the estimated cycles of all kernels."""
    return sum(estimate for graph in graphs for _, estimate in graph["kernels"])


def measure(name: str, sides: Sequence[str], topologies: Sequence[str], kept: Path | None = None) -> None:
    """Record the updates of a model: all numbers on the first topology, and the ratio of linear / by hand on others.

    Of the largest model, also what bounds its updates under the trace of the tour on a pod.
    """
    with tempfile.TemporaryDirectory() as folder:
        updates = dump(kept / name if kept else Path(folder), name, sides)
        for topology in topologies:
            first, pod = topology == topologies[0], name == "gpt-large" and topology == POD
            chosen = updates if first or pod else {side: updates[side] for side in ("by hand", "linear")}
            compiled = compile_updates(chosen, topology)
            (libtpu,) = {graph["libtpu"] for graph in compiled.values()}
            own = {"on": TRAINED[name].title, "where": topology, "libraries": f"libtpu {libtpu}"}
            found = {side: totals(update, compiled) for side, update in chosen.items()}
            for side, quantities in found.items() if first else ():
                for quantity, (value, unit) in quantities.items():
                    record(f"{quantity} of an update on a TPU", side, value, unit, **own)
            for side, update in chosen.items() if pod else ():
                for case, seconds in bounds(update, compiled).items():
                    record("least time of the updates of the tour's trace", side, seconds, "s", case=case, **own)
            for one, other in RATIOS:
                if found.keys() >= {one, other}:
                    for case, (ours, theirs) in costs(found[one], found[other], topology).items():
                        what = f"{one} / {other}"
                        record("estimated cycles on a TPU, ratio", what, ours / theirs, case=case, **own)


def bounds(update: Update, compiled: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds that a core takes at least for the updates of the tour's trace, by what bounds them.

    A core has ceil(4 B / 256) microbatches of 1,024 tokens. Each takes the mean of the two that are compiled.
    """
    trace = vbs.BatchTrace.from_csv(Path(__file__).parent.parent / "traces" / "test_trace.csv")
    sizes = trace.batch_sizes(range(len(trace)))
    rounds = np.ceil(TIMES * sizes / POD_CORES).sum()
    graphs = [compiled[path] for path in update.graphs.elements()]
    last = [graph for graph in graphs if graph["all_reduces"]]
    microbatches = [graph for graph in graphs if not graph["all_reduces"]]

    def total(cost: Callable[[Mapping[str, Any]], float]) -> float:
        return float(rounds * np.mean([*map(cost, microbatches)]) + len(sizes) * sum(map(cost, last)))

    summed = total(lambda graph: sum(number for sums in graph["all_reduces"] for number in sums.values()))
    return {
        "kernels": total(lambda graph: cycles([graph])) / CYCLES_A_SECOND,
        "memory": total(lambda graph: graph["bytes_moved"]) / HBM_A_SECOND,
        "links": 2 * (POD_CORES - 1) / POD_CORES * summed / BYTES_A_SECOND,
    }


def costs(
    one: Mapping[str, tuple[float, str]], other: Mapping[str, tuple[float, str]], topology: str
) -> dict[str, tuple[float, float]]:
    """Return the cycles of both, without and, on the v5e, with the all-reduces."""
    pairs = {"kernels": (one["estimated cycles"][0], other["estimated cycles"][0])}
    if topology == V5E:
        cycles_a_mb = 2 * (V5E_CORES - 1) / V5E_CORES * 1e6 / BYTES_A_SECOND * CYCLES_A_SECOND
        first, second = (
            side["estimated cycles"][0] + cycles_a_mb * side["bytes of all-reduces"][0] for side in (one, other)
        )
        pairs["kernels and all-reduces"] = first, second
    return pairs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=TRAINED, default=[*TRAINED], help="models to train")
    parser.add_argument("--topologies", nargs="*", default=[V5E, *OTHERS], help="all numbers on the first one")
    parser.add_argument("--few", action="store_true", help="only by hand, linear and AdaScale, as for gpt-large")
    parser.add_argument("--folder", type=Path, help="keep the graphs there, and do not train for those that are there")
    flags = parser.parse_args()
    if "TPU_COMPILER" not in os.environ:
        raise SystemExit("TPU_COMPILER must name a Python with jax and libtpu; run: make tpu-compiler")
    for name in flags.models:
        unlike = set() if TRAINED[name].vocabulary else {"sqrt-SDE", "invariant Adam"}  # of Adam
        unlike |= set() if name == "cnn" else {"linear, reproducible"}  # which takes minutes to compile
        possible = [side for side in SIDES if side not in unlike]
        if name == "gpt-large":
            measure(name, ["by hand", "linear", "AdaScale"], [V5E, POD], flags.folder)
        else:
            measure(name, possible[:5] if flags.few else possible, flags.topologies, flags.folder)
