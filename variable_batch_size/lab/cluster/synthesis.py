"""Random capacity traces: nodes that come and go independently, and preemptions of many nodes at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from variable_batch_size._validation import FloatArray, IntArray, check_int, check_number, check_positive, value_error
from variable_batch_size.lab.cluster.capacity_trace import CapacityTrace

SECONDS = "pass a positive number of seconds"

_MAX_CHANGES = 10**8  # most changes that are expected; they take about 12 GB
_CYCLES_AT_ONCE = 2**16  # cycles of up and down that are drawn at once, of all stretches together


def synthetic(
    nodes: int,
    mean_up: float,
    mean_down: float,
    duration: float,
    seed: int,
    *,
    bulk_every: float | None = None,
    bulk_fraction: float | None = None,
) -> CapacityTrace:
    """Return a random trace of nodes that are preempted and return, independently and optionally in bulk.

    A node is up for an exponential time with mean `mean_up`, then down for one with mean `mean_down`, and so on. Bulk
    preemptions come in a Poisson process, one every `bulk_every` seconds on average; at each, every node that is up
    goes down with probability f = `bulk_fraction`. The trace begins in the stationary state. With the rates
    u = 1 / `mean_up`, d = 1 / `mean_down` and b = 1 / `bulk_every` (0 without bulk preemptions) in 1/s, the number n of
    nodes has::

        probability that a node is up   p = d / (u + f b + d)
        E[n(t)]                         = nodes p
        Var[n(t)]                       = nodes p (1 - p) + nodes (nodes - 1) p^2 b f^2 / (2 (u + f b + d) - b f^2)
        Cov[n(t), n(t + s)]             = Var[n(t)] exp(-s (u + f b + d))

    The second term of the variance is the covariance between nodes. There are no time steps. The same arguments give
    the same trace with the same version of NumPy.

    >>> month = synthetic(nodes=100, mean_up=7200, mean_down=1800, duration=30 * 86400, seed=0)
    >>> round(month.mean), int(month.nodes.max()) <= 100
    (80, True)

    Args:
        nodes: maximum number of nodes, >= 1.
        mean_up: mean time for which a node is up if no bulk preemption ends it, in seconds, > 0; 1e12 leaves only
            those.
        mean_down: mean time until a node returns, in seconds, > 0.
        duration: length of the trace, in seconds, > 0.
        seed: seed of the random numbers, >= 0.
        bulk_every: mean time between bulk preemptions, in seconds, > 0; None for none.
        bulk_fraction: probability in [0, 1] with which a bulk preemption takes a node that is up; by default 1.

    Raises:
        TypeError: if `nodes` or `seed` is not an integer, or another argument not a number.
        ValueError: if one is not in its range, `bulk_fraction` is given without `bulk_every`, or more than 100 million
            changes are expected.
    """
    count = check_int(nodes, "nodes", 1)
    up, down = check_positive(mean_up, "mean_up", SECONDS), check_positive(mean_down, "mean_down", SECONDS)
    end = check_positive(duration, "duration", SECONDS)
    every = None if bulk_every is None else check_positive(bulk_every, "bulk_every", SECONDS)
    fraction = _check_bulk_fraction(bulk_fraction, every)
    bulks = 0.0 if every is None else end / every  # expected number of bulk preemptions
    expected_changes = bulks + count * (1 + 2 * end / (up + down) + fraction * bulks)
    if expected_changes > _MAX_CHANGES:
        requirement = f"nodes, mean_up, mean_down, bulk_every and duration must make at most {_MAX_CHANGES:,} changes"
        raise value_error(requirement, f"{expected_changes:.3g}, expected", "choose longer means or a shorter duration")

    rng = np.random.Generator(np.random.PCG64(check_int(seed, "seed")))
    at_start = _up_at_start(rng, count, up, down, every, fraction)  # (nodes,)
    times = np.sort(rng.uniform(0, end, rng.poisson(bulks)))  # (bulks,)
    hits = _choose_cells(rng, count * len(times), fraction)  # (hits,), cells of a table with a row for each node
    node, bulk = np.divmod(hits, max(1, len(times)))  # (hits,) each

    # A hit leaves a node down, whatever it was before, and being down has no memory: each hit begins a new stretch.
    first = node.searchsorted(np.arange(count))  # (nodes,): index of the first hit; the stretch from 0 comes before it
    starts = np.insert(times[bulk], first, 0.0)  # (stretches,), as below
    begins_up = np.insert(np.zeros(len(node), bool), first, at_start)
    stops = np.append(starts[1:], 0.0)
    stops[np.append(first[1:], len(node)) + np.arange(count)] = end  # of the last stretch of each node
    up_times, down_times = _alternate(rng, starts, stops, begins_up, up, down)
    down_times = down_times[down_times < end]

    seconds = np.concatenate([[0.0], up_times, down_times])  # (changes + 1,)
    change = np.concatenate([[0], np.ones(len(up_times), np.int64), -np.ones(len(down_times), np.int64)])
    order = np.argsort(seconds, kind="stable")
    return CapacityTrace(seconds[order], np.cumsum(change[order]), end)


def _up_at_start(
    rng: np.random.Generator, nodes: int, mean_up: float, mean_down: float, every: float | None, fraction: float
) -> npt.NDArray[np.bool_]:
    """Draw which nodes are up at time 0, (nodes,), as if the process had run for ever before.

    A node that a bulk preemption hit last a time t ago is up with probability p (1 - exp(-t (u + d))), where p is the
    probability for a node that is never hit, u = 1 / `mean_up` and d = 1 / `mean_down`.

    Args:
        rng: draws the random numbers.
        nodes: number of nodes.
        mean_up: mean seconds for which a node is up.
        mean_down: mean seconds until it returns.
        every: mean seconds between two bulk preemptions; None: there are none.
        fraction: probability with which one of them hits a node.
    """
    p_never_hit, rate = 1 / (1 + mean_down / mean_up), 1 / mean_up + 1 / mean_down
    since_hit = np.full(nodes, np.inf)  # seconds
    if every is not None and fraction > 0:
        bulks_back = rng.geometric(fraction, nodes)  # (nodes,): how many bulk preemptions back the last hit is
        distinct, place = np.unique(bulks_back, return_inverse=True)
        # The time of k preemptions of a Poisson process has a gamma distribution of shape k.
        since_hit = np.cumsum(rng.gamma(np.diff(distinct, prepend=0), every))[place]
    return rng.random(nodes) < -p_never_hit * np.expm1(-since_hit * rate)


def _choose_cells(rng: np.random.Generator, cells: int, fraction: float) -> IntArray:
    """Choose each number in [0, cells) with probability `fraction`, and return the chosen ones in order, (chosen,).

    It draws the gaps between them, which are geometric, because they may be few of many.
    """
    chosen_in_batches, last = [np.empty(0, np.int64)], -1
    while fraction > 0 and last < cells - 1:
        size = 16 + int((cells - last) * fraction)  # about as many as are left
        chosen_in_batches.append(last + np.cumsum(np.minimum(rng.geometric(fraction, size), cells + 1)))
        last = int(chosen_in_batches[-1][-1])
    chosen = np.concatenate(chosen_in_batches)
    return chosen[chosen < cells]


def _alternate(
    rng: np.random.Generator,
    starts: FloatArray,
    stops: FloatArray,
    begins_up: npt.NDArray[np.bool_],
    mean_up: float,
    mean_down: float,
) -> tuple[FloatArray, FloatArray]:
    """Draw the times at which nodes go up, and those at which they go down, each (changes,).

    A stretch is the time of one node between two hits of bulk preemptions, or the ends of the trace.

    Args:
        starts, stops: seconds at which each stretch starts and stops, (stretches,).
        begins_up: whether its node begins it up, (stretches,); every node ends it down.
        mean_up, mean_down: see `synthetic`.
    """
    up_times, down_times = [], []
    time = starts + np.where(begins_up, 0, rng.exponential(mean_down, len(starts)))  # (stretches,): up from then on
    while (is_left := time < stops).any():
        time, stops = time[is_left], stops[is_left]
        expected_cycles = 1 + (stops - time).max() / (mean_up + mean_down)
        shape = len(time), int(min(expected_cycles, 1 + _CYCLES_AT_ONCE // len(time)))  # (stretches, cycles)
        up, down = rng.exponential(mean_up, shape), rng.exponential(mean_down, shape)
        cycle_ends = time[:, None] + np.cumsum(up + down, axis=1)
        cycle_begins = np.concatenate([time[:, None], cycle_ends[:, :-1]], axis=1)
        limit = np.broadcast_to(stops[:, None], shape)
        begins_inside = cycle_begins < limit
        up_times.append(cycle_begins[begins_inside])
        # Never later than the end of the cycle, as by rounding.
        down_times.append(np.minimum(np.minimum(cycle_begins + up, cycle_ends), limit)[begins_inside])
        time = cycle_ends[:, -1]
    return np.concatenate([np.empty(0), *up_times]), np.concatenate([np.empty(0), *down_times])


def _check_bulk_fraction(bulk_fraction: float | None, bulk_every: float | None) -> float:
    """Return the probability that a bulk preemption takes a node, by default 1, after checks.

    Args:
        bulk_fraction: what the user has passed; None: nothing.
        bulk_every: mean seconds between bulk preemptions; None: there are none.

    Raises:
        TypeError, ValueError: if it is not a probability, or there are no bulk preemptions.
    """
    if bulk_fraction is None:
        return 1.0
    if bulk_every is None:
        raise value_error("bulk_fraction needs bulk_every", f"bulk_fraction={bulk_fraction!r}", "pass both, or neither")
    fraction = check_number(bulk_fraction, "bulk_fraction", "pass a probability")
    if fraction > 1:
        raise value_error("bulk_fraction must be in [0, 1]", bulk_fraction, "pass a probability")
    return fraction
