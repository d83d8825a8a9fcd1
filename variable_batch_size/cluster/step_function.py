"""Step functions: their means over spans of equal length, for pictures."""

from __future__ import annotations

import numpy as np

from variable_batch_size._validation import FloatArray


def binned(edges: FloatArray, values: FloatArray, columns: int) -> tuple[FloatArray, FloatArray]:
    """Return the means of a step function in columns of equal width.

    >>> binned(np.array([0.0, 1.0, 4.0]), np.array([1.0, 0.0]), 2)
    (array([0., 2., 4.]), array([0.5, 0. ]))

    Args:
        edges: where each value begins, and the last one ends, (values + 1,).
        values: (values,).
        columns: number of columns.

    Returns:
        Where each column begins, and the last one ends, (columns + 1,); the means, (columns,).
    """
    integral = np.concatenate([[0.0], np.cumsum(values * np.diff(edges))])  # (values + 1,)
    borders = np.linspace(edges[0], edges[-1], columns + 1)  # (columns + 1,)
    return borders, np.diff(np.interp(borders, edges, integral)) / np.diff(borders)
