"""What ranks claim to share: who writes it, and whether it is the same on all of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.checkpoints import Held, checkpoint, save_checkpoint, updates
from helpers.processes import run_job
from helpers.properties import examples
from helpers.reference import network, training
from helpers.worlds import Layout, Place
from variable_batch_size.backend import LocalBackend
from variable_batch_size.checkpoint import shards
from variable_batch_size.checkpoint.compare import byte_digests
from variable_batch_size.checkpoint.contents import DamagedError, verify
from variable_batch_size.checkpoint.folder import Folder
from variable_batch_size.checkpoint.names import Names
from variable_batch_size.checkpoint.saving import COMPARED_EVERY
from variable_batch_size.checkpoint.shards import assign_writers
from variable_batch_size.checkpoint.storage import Storage
from variable_batch_size.checkpoint.values import encode
from variable_batch_size.testing import run_ranks


@examples(200)
@given(
    sizes=st.lists(st.integers(1, 1000), max_size=30),
    world_size=st.integers(1, 9),
    others=st.integers(0, 3000),
    smallest=st.integers(1, 2000),
)
def test_the_ranks_write_equally_much(sizes, world_size, others, smallest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SMALLEST", smallest)
        ranks = assign_writers({str(number): size for number, size in enumerate(sizes)}, world_size, others)
    writers, loads = max(1, min(world_size, sum(sizes) // smallest)), Counter[int]()
    for number, size in enumerate(sizes):
        loads[ranks[str(number)]] += size
    assert set(loads) <= {index * world_size // writers for index in range(writers)}
    mean = (sum(sizes) + others) / writers
    assert all(load + (0 if rank else others) <= mean + max(sizes) for rank, load in loads.items())


@given(
    contents=st.binary(max_size=70),
    kind=st.sampled_from([torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]),
    place=st.integers(0, 10**6),
    bit=st.integers(0, 7),
)
def test_each_bit_changes_a_sum(contents, kind, place, bit):
    size = len(contents) // kind.itemsize * kind.itemsize
    if not size:
        return
    changed = bytearray(contents[:size])
    changed[place % size] ^= 1 << bit
    one, other = (torch.frombuffer(bytearray(own[:size]), dtype=kind) for own in (contents, changed))
    assert byte_digests({"a": one}) != byte_digests({"a": other})
    assert byte_digests({"a": one}) == byte_digests({"a": one.clone()})


@given(st.integers(2, 9000), st.sampled_from([torch.uint8, torch.float32, torch.float64]), st.integers(0, 10**6))
def test_an_exchange_of_two_values_changes_a_digest(size, kind, seed):
    """As in the counts of classes on two ranks, which have the same sum; of any number of bytes."""
    generator = torch.Generator().manual_seed(seed)
    one = (torch.rand(size, generator=generator) * 200 + torch.arange(size) % 3).to(kind)
    first, second = torch.randperm(size, generator=generator)[:2].tolist()
    assume(one[first] != one[second])
    other = one.clone()
    other[[first, second]] = one[[second, first]]
    assert byte_digests({"a": one}) != byte_digests({"a": other})
    assert byte_digests({"a": one[1:]}) == byte_digests({"a": one[1:].clone()})  # wherever it begins in memory


def change_weight(run):
    with torch.no_grad():
        run.model.get_parameter("2.bias")[0] += 1e-4


def change_state(run):
    next(iter(run.optimizer.state.values()))["momentum_buffer"].view(-1)[0] += 1e-4


def drop_state(run):
    del next(iter(run.optimizer.state.values()))["momentum_buffer"]


CHANGES = [
    (change_weight, r"2\.bias of the model \(Sequential\) on rank 1 is another one than on rank 0; write weights"),
    (change_state, r"state/0\.weight/momentum_buffer of the optimizer \(LinearRuleOptimizer\) on rank 1 is another"),
    (drop_state, r"state/0\.weight/momentum_buffer of the optimizer \(LinearRuleOptimizer\) on rank 1 is another"),
]


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_ranks_that_differ_in_what_they_share_are_told_at_the_first_save(change, told, tmp_path):
    def train(backend):
        run = training(backend=backend, hyperparameters={"lr": 0.01, "momentum": 0.9}).run(2)
        with checkpoint(tmp_path, run) as saves:
            if backend.world.rank == 1:
                change(run)
            for wait in (True, False):
                with pytest.raises(RuntimeError, match=told):
                    saves.save(wait)

    run_ranks(train, 3)
    assert updates(tmp_path) == []


def test_contents_are_compared_at_every_tenth_save(tmp_path):
    """A save between two of these is as fast as without."""

    def train(backend):
        run, saved = training(backend=backend).run(1), 0
        with checkpoint(tmp_path, run) as saves:
            for _ in range(2 * COMPARED_EVERY):
                try:
                    saves.save(wait=False)
                except RuntimeError:
                    return saved
                saved += 1
                if backend.world.rank == 1:
                    change_weight(run)
        return saved

    assert run_ranks(train, 2) == 2 * [COMPARED_EVERY]


def test_a_difference_by_rounding_is_told_once(tmp_path):
    """As between devices of different kinds, on which ranks make the same updates."""

    def train(backend):
        run = training(backend=backend).run(1)
        with checkpoint(tmp_path, run) as saves:
            with torch.no_grad():
                run.model.get_parameter("2.bias")[0] += 1e-9 * backend.world.rank
            for _ in range(COMPARED_EVERY + 1):
                saves.save()
                run.run(1)

    told = r"2\.bias of the model \(Sequential\) on rank 1 differs by rounding from rank 0"
    with pytest.warns(UserWarning, match=told) as caught:
        run_ranks(train, 2)
    assert len(caught) == 1
    assert updates(tmp_path)[-1] == COMPARED_EVERY + 1


def holder():
    return Held({"count": 3, "names": ["a", "b"], "by": {"loss": 0.5}, "seen": torch.arange(3.0)})


class Everything:
    """A training with all kinds of parts."""

    def __init__(self, backend):
        model = network()
        model.register_buffer("queue", torch.zeros(6, 2))
        model.register_buffer("steps", torch.tensor(0))
        model.register_parameter("frozen", torch.nn.Parameter(torch.ones(3), requires_grad=False))
        self.run = training(backend=backend, model=model, hyperparameters={"lr": 0.01, "momentum": 0.9})
        self.others = {
            "average": vbs.WeightAverage(model.parameters(), 0.9, self.run.optimizer),
            "scheduler": vbs.ProgressScheduler(
                torch.optim.lr_scheduler.StepLR(self.run.optimizer, 3), self.run.optimizer
            ),
            "teacher": torch.nn.Linear(2, 2, dtype=torch.float64).requires_grad_(False),
            "holder": holder(),
        }
        own = self.others["trained"] = torch.nn.Linear(2, 2, dtype=torch.float64)  # by each rank for itself
        self.others["own_optimizer"] = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
        torch.nn.init.ones_(own.weight)
        torch.nn.init.ones_(own.bias)
        own(torch.ones(2, dtype=torch.float64)).sum().backward()
        self.others["own_optimizer"].step()
        for parameter in self.others["teacher"].parameters():
            torch.nn.init.ones_(parameter)

    def make(self, updates):
        """Make updates, and step the schedule."""
        self.run.run(updates)
        self.others["scheduler"].step()

    def checkpoint(self, folder):
        return checkpoint(folder, self.run, **self.others)

    def tensors(self):
        """The tensors of all parts, by the names of a checkpoint."""
        return self._encoded()[1]

    def state(self):
        """All of it, as text."""
        parts, tensors = self._encoded()
        return f"{parts} { {name: one.tolist() for name, one in tensors.items()} }"

    def _encoded(self):
        found = {}
        names = Names(self.run.model)
        states = {"model": names.model_state(), "optimizer": names.optimizer_state(self.run.optimizer)}
        states |= {name: part.state_dict() for name, part in self.others.items()}
        return {name: encode(state, name, found, {}) for name, state in states.items()}, found


SHARED = "model/0", "model/2", "model/frozen", "optimizer/state"  # the optimizer has all parameters of the model


def names():
    everything = Everything(LocalBackend())
    everything.make(1)
    return [*everything.tensors()]


@pytest.mark.parametrize("name", [*names(), "holder"])
def test_what_differs_on_a_rank_raises_or_comes_back(name, tmp_path):
    """Every tensor of every part, and what is no tensor; buffers and the user's parts at each save."""
    late = not name.startswith((*SHARED, "average"))

    def save(backend):
        everything = Everything(backend)
        everything.make(2)
        with everything.checkpoint(tmp_path) as saves:
            if late:
                saves.save()
            if backend.world.rank == 1 and name == "holder":
                everything.others["holder"].held = {"count": 4, "more": [torch.ones(7)], "by": {}}
            elif backend.world.rank == 1:
                with torch.no_grad():
                    everything.tensors()[name].view(-1)[:1] += 1
            try:
                saves.save()
            except RuntimeError as error:
                return str(error)
        return everything.state()

    def restore(backend):
        everything = Everything(backend)
        with everything.checkpoint(tmp_path) as saves:
            assert saves.restore()
        return everything.state()

    saved = run_ranks(save, 2)
    if name.startswith(SHARED):
        assert all(
            f"must hold the same parameters and states of optimizers, but {name.split('/', 1)[1]}" in one
            for one in saved
        )
        return
    assert saved[0] != saved[1]
    assert run_ranks(restore, 2) == saved
    assert run_ranks(restore, 3) == 3 * [saved[0]]


def test_each_file_of_each_rank_is_verified(tmp_path):
    """The one that holds only what rank 1 had of its own, too."""

    def save(backend):
        everything = Everything(backend)
        everything.make(2)
        everything.run.model.queue.fill_(backend.world.rank)
        with everything.checkpoint(tmp_path) as saves:
            saves.save()

    run_ranks(save, 2)
    (name,) = Folder(tmp_path).names()
    verify(Folder(tmp_path).storage, name)
    files = sorted(file.name for file in (tmp_path / name).iterdir())
    assert files == ["rank-0.json", "rank-1.json", "tensors-0.safetensors", "tensors-1.safetensors"]
    for file in files:
        content = (tmp_path / name / file).read_bytes()
        (tmp_path / name / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DamagedError):
            verify(Folder(tmp_path).storage, name)
        (tmp_path / name / file).write_bytes(content)


def test_names_of_a_part_do_not_meet_those_of_ranks(tmp_path):
    held = {"a": torch.zeros(2), "a@1": torch.ones(2), "1/a": torch.ones(2)}

    def one(backend, restores):
        run = training(backend=backend).run(0 if restores else 1)
        holder = Held({name: tensor + backend.world.rank for name, tensor in held.items()})
        with checkpoint(tmp_path, run, holder=holder) as saves:
            if restores:
                assert saves.restore()
            else:
                saves.save()
        return {name: tensor.tolist() for name, tensor in holder.held.items()}

    assert run_ranks(lambda backend: one(backend, False), 2) == run_ranks(lambda backend: one(backend, True), 2)


def test_a_part_that_one_rank_lacks_is_named(tmp_path):
    def one(backend):
        others = {} if backend.world.rank else {"holder": holder()}
        save_checkpoint(tmp_path, training(backend=backend).run(1), **others)

    with pytest.raises(RuntimeError, match=r"must save the same parts, but rank 1 has no holder; pass it"):
        run_ranks(one, 2)


def shards_without_elements(backend, folder):
    """Save a model whose tensors have fewer rows than there are ranks."""
    run = Place.of(Layout(shards=3), backend).training(model=network(width=2))
    run.run(2)
    save_checkpoint(folder, run)


@pytest.mark.slow("starts processes")
def test_ranks_without_a_part_of_a_tensor_differ_in_nothing(tmp_path):
    run_job("gloo", shards_without_elements, tmp_path / "saved", ranks=3)
    assert updates(tmp_path / "saved") == [2]


def replicas(backend, folder):
    """Save on two replicas of two shards; on rank 3 a shard differs from that of rank 1."""
    run, errors = Place.of(Layout(2, 2), backend).training(), list[str]()
    run.run(2)
    save_checkpoint(folder, run)
    again = checkpoint(folder, run)
    if backend.world.rank == 3:
        with torch.no_grad():
            next(iter(run.model.parameters())).to_local().add_(1e-3)
    try:
        again.save()
    except RuntimeError as error:
        errors.append(str(error))
    return errors


@pytest.mark.slow("starts processes")
def test_replicas_of_a_shard_are_compared(tmp_path):
    for errors in run_job("gloo", replicas, tmp_path / "saved", ranks=4):
        assert len(errors) == 1
        assert "0.weight of the model" in errors[0]
        assert "on rank 3 is another one" in errors[0]


@pytest.mark.slow("restores on 128 ranks")
def test_128_ranks_restore_what_two_have_saved(tmp_path, monkeypatch):
    """Rank 0 reads the small files for all of them."""
    monkeypatch.setattr(shards, "SMALLEST", 1)
    read, ranks, original = list[str](), 128, Storage.read

    def count(storage, *names):
        if names[-1].startswith("rank-"):
            read.append(names[-1])
        return original(storage, *names)

    def save(backend):
        save_checkpoint(tmp_path, training(backend=backend).run(3))

    def restore(backend):
        run = training(backend=backend)
        saves = checkpoint(tmp_path, run)
        assert saves.restore()
        saves.close()
        return run.optimizer.updates

    run_ranks(save, 2)
    monkeypatch.setattr(Storage, "read", count)
    assert run_ranks(restore, ranks) == ranks * [3]
    assert read == ["rank-0.json", "rank-1.json"]
