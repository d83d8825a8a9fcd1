"""The format: what is loaded equals what was saved, in type too; damage and other versions are told."""

from __future__ import annotations

import io
import math
import warnings
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

import variable_batch_size as vbs
from helpers.checkpoints import resealed
from helpers.properties import examples
from variable_batch_size.checkpoint import tensor_file
from variable_batch_size.checkpoint.contents import parse_manifest, write_manifest
from variable_batch_size.checkpoint.reading import _Wanted
from variable_batch_size.checkpoint.saving import Copies, describe
from variable_batch_size.checkpoint.shards import Part
from variable_batch_size.checkpoint.tensor_file import DTYPES
from variable_batch_size.checkpoint.values import decode, encode


def is_copied(kind):
    """Return whether torch can copy tensors of a dtype: it only has the names of some, as uint4."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        try:
            torch.empty(2, 2, dtype=kind).T.clone()
        except (NotImplementedError, RuntimeError):
            return False
    return True


KINDS = [kind for kind in DTYPES.values() if is_copied(kind)]


COPIES = Copies(vbs.backend.LocalBackend())  # whose memory each save reuses


def through_json(value):
    """A value as it is read from a checkpoint with one file that was saved in the background."""
    tensors = dict[str, Tensor]()
    state = encode(value, "", tensors, {})
    file, parts = io.BytesIO(), {name: Part.whole(one.shape)._asdict() for name, one in tensors.items()}
    facts = tensor_file.write(file, COPIES.copy_to_host(tensors), parts)
    assert facts["bytes"] == len(file.getvalue())
    known = {name: describe(one) for name, one in tensors.items()}
    read = parse_manifest(write_manifest({"state": state, "tensors": known, "file": facts}))
    tensor_file.check(file, read["file"])
    loaded = {name: _Wanted(of_tensor, None) for name, of_tensor in read["tensors"].items()}
    for name, chunk in read["file"]["chunks"].items():
        part = Part(tuple(chunk["offset"]), tuple(chunk["shape"]))
        loaded[name].add(part, tensor_file.read(file, chunk, read["tensors"][name]["dtype"]))
    whole = {name: tensor.whole() for name, tensor in loaded.items()}
    return decode(read["state"], whole.__getitem__)


def assert_same(found, expected, where=""):
    if isinstance(expected, Tensor):
        assert (type(found), found.dtype, found.shape, found.layout) == (
            Tensor,
            expected.dtype,
            expected.shape,
            expected.layout,
        ), where
        found, expected = found.to_dense(), expected.detach().to_dense()
        assert (
            found.cpu()
            .resolve_conj()
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(expected.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8))
        ), where
        return
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert [*map(repr, found)] == [*map(repr, expected)], where
        assert vars(found) == vars(expected) if isinstance(expected, OrderedDict) else True
        for own, key in zip(found, expected, strict=True):
            assert_same(own, key)
            assert_same(found[own], expected[key], f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, (own, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(own, other, f"{where}/{index}")
    elif isinstance(expected, float):
        assert (found, math.copysign(1, found)) == (expected, math.copysign(1, expected)) or found != found, where
    elif isinstance(expected, complex):
        assert repr(found) == repr(expected), where
    else:
        assert found == expected, where


@st.composite
def tensors(draw):
    kind, shape = draw(st.sampled_from(KINDS)), draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * kind.itemsize
    contents = draw(st.binary(min_size=size, max_size=size))
    if kind is torch.bool:
        contents = bytes(byte % 2 for byte in contents)
    tensor = torch.frombuffer(bytearray(contents), dtype=kind) if contents else torch.empty(0, dtype=kind)
    tensor = tensor.view(shape)
    return tensor.permute(draw(st.permutations(range(len(shape)))))


hashable = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(), st.just("$")
)
leaves = st.one_of(
    hashable,
    st.complex_numbers(),
    st.floats(),
    st.sampled_from([torch.float32, torch.device("cuda:1"), torch.Size([2, 3]), torch.Size([])]),
    st.sets(hashable).map(frozenset),
    st.sets(st.integers()),
    st.lists(st.integers()).map(Counter),
    tensors(),
)
values = st.recursive(
    leaves,
    lambda value: st.one_of(
        st.lists(value, max_size=3),
        st.lists(value, max_size=3).map(tuple),
        st.dictionaries(hashable, value, max_size=3),
        st.dictionaries(st.text(), value, max_size=3),
        st.dictionaries(hashable, value, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


@examples(200)
@given(values)
def test_what_is_loaded_equals_what_was_saved(value):
    assert_same(through_json(value), value)


SHARED = torch.arange(12.0)
LAYOUTS = {
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.randn(3, 1).expand(3, 4),
    "every other": SHARED[::2],
    "overlapping": SHARED[1:5],
    "other shape": SHARED.view(3, 4),
    "parameter": nn.Parameter(torch.randn(3)),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "sparse": torch.eye(3).to_sparse(),
    "empty and sparse": torch.zeros(4, 5).to_sparse(),
}


def test_a_set_is_the_same_whatever_its_order():
    """That of two equal sets differs where hashes collide, and of texts between two processes."""
    first, second = {0, 8}, {8, 0}
    assert [*first] != [*second]
    assert encode(first, "", {}, {}) == encode(second, "", {}, {})
    assert encode(frozenset(first), "", {}, {}) == encode(frozenset(second), "", {}, {})


def test_tensors_of_every_layout():
    for _ in range(2):  # the second copies reuse the memory of the first
        assert_same(through_json(LAYOUTS), LAYOUTS)


@pytest.mark.parametrize("name", sorted({*LAYOUTS} - {"expanded", "parameter"}))  # which torch does not fill
def test_a_copy_does_not_change_with_the_tensor(name):
    tensor = LAYOUTS[name].clone()
    copy, before = COPIES.copy_to_host({"part": tensor})["part"], tensor.to_dense().clone()
    tensor.zero_()
    assert torch.equal(copy.to_dense(), before)


def test_memory_is_reused_for_tensors_of_the_same_name_and_layout():
    kept = Copies(vbs.backend.LocalBackend())

    def addresses(**shapes):
        copies = kept.copy_to_host({name: torch.randn(shape) for name, shape in shapes.items()})
        return {name: copy.data_ptr() for name, copy in copies.items()}

    first = addresses(a=(3, 4), b=(3, 4), c=(5,))
    assert len({*first.values()}) == 3
    again = addresses(b=(3, 4), c=(4, 3), a=(3, 4))
    assert (again["a"], again["b"]) == (first["a"], first["b"])
    assert kept.copy_to_host({"c": torch.ones(2, 2)})["c"].shape == (2, 2)


def test_safetensors_reads_the_files():
    kept = {name: torch.randn(3, 4).to(kind) for name, kind in (("a", torch.float64), ("b/c", torch.bfloat16))}
    kept |= {
        "i": torch.arange(5),
        "empty": torch.empty(0, 2),
        "scalar": torch.tensor(2.5),
        "bool": torch.tensor([True]),
    }
    kept["transposed"] = torch.randn(3, 4).T
    file = io.BytesIO()
    kept["complex"] = torch.tensor([1 + 2j], dtype=torch.complex128)
    tensor_file.write(file, kept, {name: Part.whole(one.shape)._asdict() for name, one in kept.items()})
    found = load_safetensors(file.getvalue())
    assert found.pop("complex").tolist() == [[1.0, 2.0]]
    assert_same(found, {name: kept[name] for name in found})


def test_tied_tensors_are_saved_once_and_stay_tied():
    weight = nn.Parameter(torch.randn(3))
    found = through_json({"a": weight, "b": [weight.detach()], "part": weight[:2]})
    assert found["a"] is found["b"][0]
    tensors = dict[str, Tensor]()
    encode({"a": weight, "b": [weight.detach()], "part": weight[:2]}, "own", tensors, {})
    assert [*tensors] == ["own/a", "own/part"]


def test_keys_with_the_same_text_do_not_mix_their_tensors():
    state = {1: torch.ones(1), "1": torch.zeros(1), "a/b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    assert_same(through_json(state), state)


# The states that torch has. ------------------------------------------------------------------------------------------


def optimizers():
    """One of each, after two updates."""
    found = {}
    for name, kind in vars(torch.optim).items():
        if not isinstance(kind, type) or kind is torch.optim.Optimizer or not issubclass(kind, torch.optim.Optimizer):
            continue
        torch.manual_seed(0)
        weights = nn.Parameter(torch.randn(4, 3))
        options = {"ASGD": {}, "Rprop": {}}.get(name, {"lr": torch.tensor(0.1)} if name == "Adam" else {})
        own = kind([weights], **options)
        for _ in range(2):
            loss = weights.square().sum()
            own.zero_grad()
            loss.backward()
            if name == "SparseAdam":
                weights.grad = weights.grad.to_sparse() if weights.grad is not None else None
            own.step(lambda loss=loss: loss) if name == "LBFGS" else own.step()
        found[name] = own
    return found


@pytest.mark.torch
def test_states_of_all_optimizers_of_torch():
    found = optimizers()
    assert len(found) >= 13
    for name, own in found.items():
        state = own.state_dict()
        assert_same(through_json(state), state, name)


def test_states_of_a_gradient_scaler_a_model_and_a_loader():
    from torchdata.stateful_dataloader import StatefulDataLoader

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
    loader = StatefulDataLoader(range(9), batch_size=2, shuffle=True)
    next(iter(loader))
    for state in (scaler.state_dict(), model.state_dict(), loader.state_dict()):
        assert_same(through_json(state), state)
    assert through_json(model.state_dict())["0.weight"].stride() == model[0].weight.stride()


# Refusals. -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        {"a": [lambda: None]},
        {"a": torch.ones(2).as_subclass(type("Own", (Tensor,), {}))},
        {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
        {"a": torch.ones(2).to_mkldnn()},
        {"a": slice(2)},
        {"a": torch.empty(2, device="meta")},
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_no_checkpoint_can_hold_is_named_with_its_place(value):
    with pytest.raises(TypeError, match=r"only tensors and plain Python values, got a .* at part/a"):
        encode(value, "part", {}, {})


def test_any_change_of_the_text_is_seen():
    text = write_manifest({"state": [1, {"b": 0.1}], "trace": "\u00e9"})
    assert parse_manifest(text)["state"] == [1, {"b": 0.1}]
    for place in range(len(text)):
        changed = chr(ord(text[place]) ^ 1)
        for other in (text[:place], text[:place] + text[place + 1 :], text[:place] + changed + text[place + 1 :]):
            with pytest.raises(ValueError):  # noqa: PT011
                parse_manifest(other)


def test_endless_values_are_named():
    value = []
    value.append(value)
    with pytest.raises(TypeError, match="got endless or very deep ones at part"):
        encode(value, "part", {}, {})


@pytest.mark.parametrize("version", ['"2"', "null", "true", "2.0"])
def test_a_version_that_is_no_number_is_damage(version):
    with pytest.raises(ValueError, match="it is no JSON of vbs-checkpoint"):
        parse_manifest(resealed(write_manifest({}), version))
