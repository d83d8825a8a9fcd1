"""What does an update in Keras cost with a trace, relative to Keras' own accumulation with a constant batch?"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras as keras_library
import numpy as np
import torch

from records import spread
from results import TRAINER, record
from step import ratios
from variable_batch_size.integrations.keras import VariableBatchModel

ROWS, MICROBATCHES, UPDATES, WIDTH = 32, 4, 8, 1024


def keras(pairs: int = 31) -> None:
    """Print and record the ratio: fits of a few updates of both sides, interleaved."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS * MICROBATCHES * UPDATES, 784)).astype("float32")
    y = rng.integers(10, size=len(x))

    def side(*, trace: bool) -> Callable[[], None]:
        layers = [keras_library.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
        model: Any = keras_library.Sequential([keras_library.Input((784,)), *layers, keras_library.layers.Dense(10)])
        accumulation = {} if trace else {"gradient_accumulation_steps": MICROBATCHES}
        if trace:
            model = VariableBatchModel(model, trace=ROWS * MICROBATCHES, rule="root", ref_batchsize=ROWS)
        optimizer = keras_library.optimizers.SGD(1e-3, momentum=0.9, **accumulation)
        model.compile(optimizer, keras_library.losses.SparseCategoricalCrossentropy(from_logits=True))

        return lambda: model.fit(x, y, batch_size=ROWS, verbose=0) and None

    found = ratios((side(trace=True), side(trace=False)), 1, pairs, lambda: None)
    record(
        TRAINER,
        "Keras / its accumulation",
        spread(list(found)),
        on=f"{MICROBATCHES} microbatches of {ROWS}, 3 layers of {WIDTH}",
        where="CPU, 1 process, 1 thread",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=31, help="pairs of blocks")
    keras(parser.parse_args().pairs)
