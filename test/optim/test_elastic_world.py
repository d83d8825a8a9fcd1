"""Whoever takes part in an update, and however often its sum breaks: the updates are those of one undisturbed process.

test/integrations/test_torchft.py has real processes that are killed.
"""

import math

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from helpers.elastic_threads import Attempt, ElasticThreads, Script, run_script
from helpers.properties import examples
from variable_batch_size.backend import LocalBackend

SAMPLES, UPDATES = 41, 18
TRACES = {
    "fixed": vbs.BatchTrace.of([13, 7, 1, 29, 2], on_end="cycle"),
    "per device": vbs.AdaptiveTrace(vbs.adaptive.PerDevice(3), every=2, delay=4),
    "noise": vbs.AdaptiveTrace(vbs.adaptive.NoiseScale(), start=8, bounds=(8, 40), every=3, delay=5),
}
ALL = Attempt((0, 1, 2, 3))
# The loop: as documented; with loss.backward(); with a layer that few updates use; and with a step that is discarded.
WAYS = ["plain", "torch", "unused", "fails"]
DATASET = TensorDataset(
    torch.arange(SAMPLES), torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
)


def train(backend, trace, rule, way="plain"):
    """Train, and return what was made; see `WAYS`."""
    drawn = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1), nn.Linear(1, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn, dtype=torch.float64))
    sampler = vbs.CustomSampler(SAMPLES, trace, 1, 0, 4, max_updates=UPDATES)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    options = {"find_unused_parameters": True} if way == "unused" else {}
    optimizer = vbs.CustomOptimizer(inner, sampler, 8, rule=rule, backend=backend, **options)
    if isinstance(backend, ElasticThreads):
        backend.parts = [model, optimizer]
    loader, used, fails = DataLoader(DATASET, batch_sampler=sampler), {}, way == "fails"
    while not optimizer.done:
        for update in vbs.updates(loader, optimizer):
            step, own = optimizer.updates, []
            for index, x in update:
                upcoming = optimizer.microbatch
                own += index.tolist() if upcoming.samples else []
                hidden = model[:3](x)
                loss = (hidden if way == "unused" and step % 3 else model[3](hidden)).square().mean()
                if not upcoming.samples:  # a replay, which has no weight
                    loss = loss * math.inf
                if way == "torch":
                    loss.backward()
                else:
                    optimizer.backward(loss)
                if fails and upcoming.ends_step and step == 5 and optimizer.backend.leads:
                    fails = False
                    optimizer.discard_step()
                    break
                optimizer.log(loss=loss)
                made = optimizer.step()
            if made:
                used[step] = own
            made = False
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return {"weights": weights, "used": used, "trace": sampler.trace, "progress": float(optimizer.progress)}


def attempts(size):
    """Draw who takes part, and which sums break; the last updates are those of all."""
    members = st.sets(st.integers(0, size - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    return st.lists(st.builds(Attempt, members, st.sampled_from([True, True, True, False])), max_size=UPDATES - 2)


@examples(50)
@given(
    st.integers(1, 4).flatmap(lambda size: st.tuples(st.just(size), attempts(size))),
    st.sampled_from(list(TRACES)),
    st.sampled_from(["linear", "adascale"]),
    st.sampled_from(WAYS),
)
@example((4, [ALL, ALL, Attempt((2,), holds=False)]), "fixed", "adascale", "plain")  # then 2 has a replay, of 1 sample
@example(
    (3, [Attempt((1, 2), holds=False), Attempt((0, 2))]), "per device", "linear", "plain"
)  # 0 has decided for itself
def test_the_updates_are_those_of_one_process(case, name, rule, way):
    size, script = case
    found = run_script(lambda backend: train(backend, TRACES[name], rule, way), Script(size, script))
    alone = train(LocalBackend(), found[0]["trace"], rule, way if way == "unused" else "torch")
    for one in found:
        assert one["trace"] == found[0]["trace"]
        assert one["progress"] == found[0]["progress"]
        for own, other, expected in zip(one["weights"], found[0]["weights"], alone["weights"], strict=True):
            assert torch.equal(own, other)
            torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)
    for step, expected in alone["used"].items():
        assert sorted(index for one in found for index in one["used"].get(step, [])) == sorted(expected), step
