"""What the integrations share: settings, and a loader that reads another sampler."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from helpers.yardstick import MICROBATCH, SAMPLES, TRACE, Samples, network
from variable_batch_size.integrations.loading import sampler_for, with_sampler
from variable_batch_size.integrations.settings import Settings
from variable_batch_size.integrations.versions import require_version

MANY = 1_000


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(MANY))


def dealt(**options):
    settings = Settings(TRACE, sampler_options={"fixed_shape": False, **options})
    return sampler_for(DataLoader(Samples(), MICROBATCH, shuffle=True), settings, num_replicas=1, rank=0)


def test_options_are_known_by_their_names_and_win():
    with pytest.raises(ValueError, match=r"options must be arguments of CustomSampler, got sed; pass some of .*seed"):
        Settings(TRACE, sampler_options={"sed": 1})
    with pytest.raises(ValueError, match="options must be arguments of CustomOptimizer, got nois; pass some"):
        Settings(TRACE, optimizer_options={"nois": "microbatches"})
    with pytest.raises(TypeError, match=r"trace= is required, the global batch size; pass trace="):
        Settings.taken_from({"rule": "linear"})
    sampler = dealt(shuffle=False, minibatch_size=4)
    assert next(iter(sampler)) == [0, 1, 2, 3]
    inner = torch.optim.SGD(network().parameters(), lr=0.1)
    optimizer = Settings(8, optimizer_options={"max_grad_norm": 2.0}).wrap_optimizer(inner, sampler, max_grad_norm=1.0)
    assert optimizer.max_grad_norm == 2.0


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_loader_keeps_its_settings(kind):
    def collate(rows):
        return rows

    sampler = dealt()
    before = kind(Samples(), batch_size=4, shuffle=True, collate_fn=collate, num_workers=1, prefetch_factor=3)
    loader = with_sampler(before, sampler)
    assert isinstance(loader, kind)
    assert loader.batch_sampler is sampler
    assert (loader.collate_fn, loader.num_workers, loader.prefetch_factor) == (collate, 1, 3)
    state = torch.get_rng_state()
    assert sum(map(len, with_sampler(kind(Samples(), collate_fn=collate), sampler))) == SAMPLES
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loader_without_batches_gets_them():
    x, target = next(iter(with_sampler(DataLoader(Samples(), batch_size=None), dealt())))
    assert x.shape == (MICROBATCH, 6)
    assert target.shape == (MICROBATCH,)


def test_iterable_datasets_are_refused():
    with pytest.raises(TypeError, match=r"the dataset must have an index.*pass a map-style dataset"):
        sampler_for(DataLoader(Stream()), Settings(8))


def test_versions_are_checked():
    require_version("torch", "2.9", "transformers")
    for library, below, found in (
        ("torch", None, r"99 or newer, got 2\."),
        ("no-such-library", "3", "than 3, got none;"),
    ):
        with pytest.raises(
            ImportError, match=rf"this needs {library} .*{found}.* run: pip install .*variable_batch_size\[keras"
        ):
            require_version(library, "99", "keras", below=below)
    with pytest.raises(ImportError, match=r"this needs torch 2\.0 or newer, but older than 2\.1, got 2"):
        require_version("torch", "2.0", "torchft", below="2.1")


class Noisy(Samples):
    """Each item is a number that a worker draws."""

    def __getitem__(self, index):
        return torch.randint(2**62, ())


def test_workers_draw_other_numbers_in_each_epoch_run_and_seed():
    def drawn(seed, epochs):
        sampler = dealt(seed=seed)
        loader = with_sampler(DataLoader(Noisy(), num_workers=1, persistent_workers=False), sampler)
        found = []
        for epoch in epochs:
            sampler.set_epoch(epoch)
            found.append({int(number) for microbatch in loader for number in microbatch})
        return found

    first, second = drawn(0, [0, 1])
    assert drawn(0, [1]) == [second]  # as after a resume
    (other,) = drawn(1, [0])
    assert len(first | second | other) == 3 * SAMPLES
