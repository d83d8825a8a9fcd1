"""What an engine gets: the cells to train, and how each of them trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from variable_batch_size.lab.evaluation.cell import Cell


class Work(NamedTuple):
    """The cells to train, and how each of them trains.

    Attributes:
        cells: the cells, each once.
        folder: folder of the records.
        threads: number of threads of a training.
        save_every: interval of the checkpoints of a training: time, or a number of updates.
    """

    cells: list[Cell]
    folder: Path
    threads: int
    save_every: timedelta | int


@contextmanager
def named(cell: Cell) -> Iterator[None]:
    """Let an error of a training name its cell."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"the training {cell.key} ({cell}) failed: {type(error).__name__}: {error}") from error
