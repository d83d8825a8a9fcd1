"""Ranks get shares by their speed, as many rounds as they can where nothing waits in them; see test_laws.py."""

from functools import cache

import pytest

from helpers.processes import run_job
from helpers.worlds import ODD, Layout, Place


def deal(backend, layout):
    """The samples of the microbatches of this rank in each update."""
    sampler = Place.of(layout, backend).training(sampling={"speeds": (3, 1)}).sampler
    found = []
    for _ in ODD:
        found.append([microbatch.samples for microbatch in sampler.batch.microbatches])
        sampler.advance()
    return found


@cache
def dealt(layout):
    return run_job("gloo", deal, layout, ranks=2)


@pytest.mark.parametrize("layout", [Layout(2, by="plain"), Layout(2, by="ddp"), Layout(shards=2)], ids=str)
def test_the_fast_rank_gets_three_quarters(layout):
    fast, slow = dealt(layout)
    shares = [(sum(one), sum(other)) for one, other in zip(fast, slow, strict=True)]
    assert [sum(share) for share in shares] == [9, 4, 17, 1, 12, 3, 2, 2]  # an epoch has 50 samples
    assert shares == [(7, 2), (3, 1), (13, 4), (1, 0), (9, 3), (3, 0), (2, 0), (2, 0)]
    rounds = [(len(one), len(other)) for one, other in zip(fast, slow, strict=True)]
    if layout.by == "fsdp":  # whose ranks gather the parameters together
        assert all(one == other for one, other in rounds)
        assert (slow[0], fast[2], slow[2]) == ([1, 1], [3, 3, 3, 4], [1, 1, 1, 1])
    else:
        assert rounds == [(2, 1), (1, 1), (4, 1), (1, 1), (3, 1), (1, 1), (1, 1), (1, 1)]
