"""An example of each controller, for the contract suite, where a new one is a line; and functions around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from helpers.pages import DOCS, blocks
from variable_batch_size.adaptive import ConstantBatch, Controller, Goodput, NoiseScale, NormTest, PerDevice, Seesaw
from variable_batch_size.trace import BatchTrace


@dataclass(frozen=True)
class Halving:
    """A schedule: samples -> factor on the learning rate, which halves every so many samples, and is 0 in the end."""

    samples: int
    end: int

    def __call__(self, samples: int) -> float:
        return 0.0 if samples >= self.end else 0.5 ** min(samples // self.samples, 2000)


EXAMPLES: tuple[Controller, ...] = (
    PerDevice(64),
    ConstantBatch(1024),
    NoiseScale(0.5),
    NormTest(0.7),
    Goodput((32, 4096)),
    Seesaw(Halving(10_000, 10**6), 256, 2048),
)

_recipes: dict[str, Any] = {}
exec(next(block for block in blocks(DOCS / "controllers.md", "python") if "def smoothed" in block), _recipes)
after, monotone, smoothed = (_recipes[name] for name in ("after", "monotone", "smoothed"))

WARM_UP = BatchTrace.from_runs([100, 200], [10, 5], on_end="hold")
FUNCTIONS: tuple[Controller, ...] = (
    monotone(NoiseScale()),
    smoothed(NoiseScale(), 0.3, 1),
    after(5_000, ConstantBatch(100), NormTest(1.0)),
    after(5_000, lambda input: WARM_UP.batch_size(input.updates), smoothed(Goodput((32, 4096)), 0.5, 1)),
)
