"""Compile graphs of PyTorch/XLA for TPUs, without a TPU; imports only what `pip install "jax[cpu]" libtpu` brings.

`main` reads pairs of a topology such as "v5e:2x2" and the path of an HloProto from stdin, as JSON, and writes a `Graph`
for each of them to stdout. The cycles are the estimates that the compiler writes beside each kernel. An all-reduce has
none.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, TypedDict

os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise a second process that compiles at the same time aborts
}

import numpy as np
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.experimental import topologies
from jaxlib import _jax

INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?\S+ = (\(.*?\)|\S+) ([\w-]+)\(", re.MULTILINE)
ARRAY = re.compile(r"(pred|bf16|[fsuc]\d+)\[([\d,]*)\]")
HOST = ("infeed", "outfeed", "send", "recv", "send-done", "recv-done")


class Graph(TypedDict):
    """What the compiler says of a graph; bytes are those of one core."""

    libtpu: str
    all_reduces: list[dict[str, int]]  # bytes by dtype, for each
    kernels: list[tuple[str, int]]  # shape of the result, estimated cycles
    bytes_moved: float
    peak_memory: int  # without the outputs that may replace an argument
    host_transfers: int


def compile_all(requests: list[tuple[str, str]]) -> Iterator[Graph]:
    """Yield a graph for each topology and path."""
    for topology, path in requests:
        yield read(compiled(devices(topology), Path(path).read_bytes()))


@functools.cache
def devices(topology: str) -> tuple[Any, ...]:
    """Return the cores of a topology, one replica each."""
    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def compiled(cores: tuple[Any, ...], proto: bytes) -> Any:
    """Return the executable of an HloProto for all cores."""
    computation = xla_client.XlaComputation(module_of(proto))
    with jax_mlir.make_ir_context():
        module = ir.Module.parse(_jax.mlir.xla_computation_to_mlir_module(computation))
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = len(cores), 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.arange(len(cores)).reshape(-1, 1))
    return cores[0].client.compile(module, executable_devices=_jax.DeviceList(cores), compile_options=options)


def module_of(proto: bytes) -> bytes:
    """Return the HloModuleProto in an HloProto: its first field, after a tag of one byte and a varint of its length."""
    length, at = 0, 1
    for at in range(1, 11):
        length |= (proto[at] & 0x7F) << 7 * (at - 1)
        if proto[at] < 0x80:
            break
    return proto[at + 1 : at + 1 + length]


def read(executable: Any) -> Graph:
    """Return what the compiler says of an executable."""
    (module,) = executable.hlo_modules()
    text = module.to_string()
    entry = text[text.index("\nENTRY") + 1 :]
    lines = [(match, line) for line in entry.splitlines() if (match := INSTRUCTION.match(line))]
    memory, cost = executable.get_compiled_memory_stats(), executable.cost_analysis()
    shapes = defaultdict(list)
    for match, _ in lines:
        shapes[match[2]].append(match[1])
    signature = entry.splitlines()[0].rsplit(" -> ", 1)
    arguments, results = (Counter(match.groups() for match in ARRAY.finditer(part)) for part in signature)
    replaced = sum(size(*array) * number for array, number in (arguments & results).items())
    return Graph(
        libtpu=version("libtpu"),
        all_reduces=[by_dtype(shape) for shape in shapes["all-reduce"]],
        kernels=[
            (re.sub(r"\{.*?\}|/\*.*?\*/", "", match[1]), int(found[1]))
            for match, line in lines
            if (found := re.search(r'"estimated_cycles":"(\d+)"', line))
        ],
        bytes_moved=cost.get("bytes accessed", 0.0),
        peak_memory=memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - replaced,
        host_transfers=sum(len(shapes[name]) for name in HOST),
    )


def by_dtype(shape: str) -> dict[str, int]:
    """Return the bytes of an array or a tuple of arrays, by dtype."""
    found: Counter[str] = Counter()
    for dtype, dims in ARRAY.findall(shape):
        found[dtype] += size(dtype, dims)
    return dict(found)


def size(dtype: str, dims: str) -> int:
    """Return the bytes of an array."""
    return prod(map(int, filter(None, dims.split(",")))) * (
        1 if dtype == "pred" else int(re.sub(r"\D", "", dtype)) // 8
    )


def main() -> None:
    """Answer the request on stdin."""
    json.dump(list(compile_all(json.load(sys.stdin))), sys.stdout)
