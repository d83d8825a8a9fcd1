"""The checker of gradients: no false word about loops that are right, and what is wrong with those that are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import variable_batch_size as vbs
from helpers.gradient_loops import MICROBATCHES, RANKS, ROWS, Loop, batch_of, loss_fn, model_of, parts_of, run_loops
from helpers.pages import DOCS, blocks
from helpers.processes import run_job
from helpers.properties import examples
from variable_batch_size.testing import check_gradient

DTYPES = [torch.float64, torch.float32]
RIGHT = ["whole_batch", "weighed_microbatches", "all_tokens", "ours", "clipped"]
RIGHT += ["cleared_before", "zeroed_before", "zeroed_after"]


def report_of(name, dtype=torch.float64, **options):
    loop = Loop(dtype)
    return check_gradient(loop.model, loss_fn, loop.batch, getattr(loop, name), **options)


def tokens():
    return batch_of()[2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RIGHT)
def test_right_loops_are_exact(name, dtype):
    if name == "ours" and dtype == torch.float32:
        dtype = torch.float64
    report = report_of(name, dtype, counts=tokens() if "token" in name else None, parts=parts_of(MICROBATCHES))
    assert report.exact, report
    assert str(report).startswith("exact: each row weighs what it has to")
    if name == "clipped":
        assert report.factor < 0.1
        assert "(clipped, scaled or summed?)" in str(report)
    else:
        assert report.factor == pytest.approx(1, abs=1e-4)
        assert "times" not in str(report)
    assert list(report.parts.values()) == pytest.approx([1, 1, 1, 1], abs=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_of_means_counts_the_smaller_part_more(dtype):
    report = report_of("mean_of_means", dtype)
    assert not report.exact
    assert report.parts == pytest.approx({"rows 0 to 15": 0.8125, "rows 16 to 25": 1.3}, abs=1e-3)
    assert report.weights == pytest.approx([0.8125] * 16 + [1.3] * 10, abs=1e-3)
    assert str(report).splitlines() == [
        "not exact: rows weigh from 0.8125 to 1.3 of what they have to",
        "  rows 0 to 15: 0.8125",
        "  rows 16 to 25: 1.3",
    ]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("short_last_microbatch", {}, ["rows 0 to 23: 0.8125", "rows 24 to 25: 3.25"]),
        ("dropped_rows", {}, ["rows 0 to 23: 1.0833", "rows 24 to 25: 0"]),
        ("padded_by_repeated_rows", {}, ["rows 0 to 1: 1.8571", "rows 2 to 25: 0.92857"]),
        ("cleared_within", {}, ["rows 0 to 23: 0"]),
        ("one_rank_alone", {"parts": parts_of(RANKS)}, ["part 0: 1.625", "part 1: 0"]),
        ("rows_where_tokens_are_meant", {"counts": tokens()}, ["not exact: rows weigh from "]),
        ("gradients_of_the_step_before", {}, ["is no weighted sum of", "zero_grad() is missing"]),
        ("another_loss", {}, ["is no weighted sum of"]),
    ],
)
def test_wrong_loops_are_named(name, options, words):
    report = report_of(name, **options)
    assert not report.exact
    for word in words:
        assert word in str(report)


UNCLEARED = "not exact: the gradient of the step before is added to this one; call zero_grad() in each step"


@pytest.mark.parametrize("grad", [None, "zeros", "of a step"])
def test_a_loop_that_never_clears_is_not_exact_from_the_first_check_on(grad):
    loop = Loop()
    if grad:
        loop.mean(0, ROWS).backward()
    if grad == "zeros":
        loop.optimizer.zero_grad(set_to_none=False)
    for _ in range(2):
        report = check_gradient(loop.model, loss_fn, loop.batch, loop.never_cleared)
        assert not report.exact
        assert str(report) == UNCLEARED


@pytest.mark.parametrize("name", [*RIGHT, "never_cleared", "cleared_within"])
def test_a_check_leaves_weights_and_gradients_as_the_step_does(name):
    loop, checked = Loop(), Loop()
    loop.model[1].p = 0.0
    getattr(loop, name)()
    check_gradient(checked.model, loss_fn, checked.batch, getattr(checked, name))
    for one, other in zip(loop.model.parameters(), checked.model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("raw", [False, True])
def test_each_update_of_the_library_is_exact(raw):
    inputs, targets = torch.randn(200, 6), torch.randn(200, 4)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 4))
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    sampler = vbs.CustomSampler(dataset, [40, 7, 33, 16], minibatch_size=16, max_updates=4)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler)

    def loss_of(net, batch):
        return (net(batch[0]) - batch[1]).square().sum(1).mean()

    for update in vbs.updates(torch.utils.data.DataLoader(dataset, batch_sampler=sampler), optimizer):
        microbatches = list(update)

        def step(microbatches=microbatches):
            for microbatch in microbatches:
                loss = loss_of(model, microbatch)
                loss.backward() if raw else optimizer.backward(loss)
                optimizer.step()

        whole = [torch.cat(rows) for rows in zip(*microbatches, strict=True)]
        assert check_gradient(model, loss_of, whole, step).exact
    assert optimizer.updates == 4


def test_token_means_of_ranks_are_not_those_of_all_tokens():
    report = report_of("token_means_of_ranks", counts=tokens(), parts=parts_of(RANKS))
    first, second = (int(part.sum()) for part in tokens().split(RANKS))
    total = first + second
    assert list(report.parts.values()) == pytest.approx([total / 2 / first, total / 2 / second])
    assert not report.exact
    assert report_of("token_means_of_ranks").weights.std() > 0.1  # nor are they those of rows


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(0, 10**6), st.booleans())
@examples(60)
def test_drawn_weights_are_found(sizes, seed, small):
    """Of rows; or of parts, if the model has fewer parameters than there are rows."""
    rng, number = np.random.default_rng(seed), sum(sizes)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(number, 1, generator=generator, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(5, 1) if small else nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 1)))
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = torch.from_numpy(np.repeat(rng.choice([-1.0, 0.0, 0.5, 1.0, 3.0], len(sizes)), sizes))
    weights = weights if weights.any() else weights + 1

    def step():
        optimizer.zero_grad()
        ((model(x) - y).square()[:, 0] * weights).mean().backward()
        optimizer.step()

    def mean(model, rows):
        return (model(rows[0]) - rows[1]).square().mean()

    report = check_gradient(model, mean, (x, y), step, parts=parts_of(sizes) if small else None)
    factor = float(weights.abs().mean())
    assert report.factor == pytest.approx(factor, rel=1e-6)
    assert report.weights == pytest.approx((weights / factor).numpy(), abs=1e-6)
    assert report.exact == bool((weights == factor).all())
    if small:
        starts = np.cumsum([0, *sizes[:-1]])
        assert [*report.parts.values()] == pytest.approx((weights[starts] / factor).tolist(), abs=1e-6)


@given(st.floats(-9, 9).filter(lambda factor: abs(factor) > 0.01), st.sampled_from(["whole_batch", "all_tokens"]))
@examples(60)
def test_the_common_factor_is_positive(factor, name):
    """A loop that climbs is not exact; it may scale."""
    loop, counts = Loop(), tokens() if name == "all_tokens" else None
    for parameter in loop.model.parameters():
        parameter.register_hook(lambda gradient: factor * gradient)
    report = check_gradient(loop.model, loss_fn, loop.batch, getattr(loop, name), counts=counts)
    assert report.exact == (factor > 0)
    assert report.factor == pytest.approx(abs(factor))
    assert report.weights == pytest.approx(np.full(ROWS, np.sign(factor)), abs=1e-6)
    assert factor > 0 or "rows weigh from -1 to -1 of what they have to" in str(report)


def test_rows_without_counts_are_left_out():
    loop, counts = Loop(), tokens().clone()
    counts[[0, 7]] = 0

    def step():
        loop.optimizer.zero_grad()
        x, labels, _ = loop.batch
        losses = nn.functional.cross_entropy(loop.model(x), labels, reduction="none")
        ((losses * counts).sum() / counts.sum()).backward()
        loop.optimizer.step()

    report = check_gradient(loop.model, loss_fn, loop.batch, step, counts=counts)
    assert report.exact
    assert np.flatnonzero(np.isnan(report.weights)).tolist() == [0, 7]


def test_coordinates_of_a_large_model_are_drawn():
    model = nn.Sequential(nn.Linear(6, 3000), nn.Tanh(), nn.Linear(3000, 4)).double()
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), batch_of()

    def step():
        optimizer.zero_grad()
        for begin, end in ((0, 16), (16, 26)):
            (loss_fn(model, tuple(field[begin:end] for field in batch)) / 2).backward()
        optimizer.step()

    report = check_gradient(model, loss_fn, batch, step)
    assert report.parts == pytest.approx({"rows 0 to 15": 0.8125, "rows 16 to 25": 1.3})


def test_dropout_comes_back():
    loop = Loop()
    check_gradient(loop.model, loss_fn, loop.batch, loop.whole_batch)
    assert [part.p for part in loop.model.modules() if isinstance(part, nn.Dropout)] == [0.5]


@pytest.mark.slow("starts processes")
def test_what_sums_over_processes_is_explained():
    for found in run_job("gloo", run_loops, ranks=2):
        for name in ("ddp", "fsdp2"):
            exact, factor, parts, text = found[name]
            assert (exact, parts) == (False, pytest.approx([0.8125, 1.3])), text
            assert factor == pytest.approx(1)
        for name in ("weighed ddp", "our fsdp2"):
            exact, factor, parts, text = found[name]
            assert (exact, factor, parts) == (True, pytest.approx(1), pytest.approx([1, 1])), text


def test_a_closure_is_called_before_its_gradients_are_read():
    for kind in (torch.optim.SGD, torch.optim.LBFGS):
        loop = Loop()
        optimizer = kind(loop.model.parameters(), lr=0.1)

        def closure(loop=loop, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loop.mean(0, ROWS)
            loss.backward()
            return loss

        report = check_gradient(loop.model, loss_fn, loop.batch, lambda: optimizer.step(closure))  # noqa: B023
        assert report.exact, report


def test_a_small_part_of_another_loss_is_not_explained():
    loop = Loop()

    def step():
        loop.optimizer.zero_grad()
        (loop.mean(0, ROWS) + 1e-4 * sum(p.square().sum() for p in loop.model.parameters())).backward()
        loop.optimizer.step()

    report = check_gradient(loop.model, loss_fn, loop.batch, step)
    assert not report.exact
    assert "is no weighted sum of" in str(report)


def test_only_what_an_optimizer_has_is_compared():
    loop = Loop()
    head = torch.optim.SGD(loop.model[-1].parameters(), lr=0.1)

    def step():
        loop.model.zero_grad()
        loop.mean(0, ROWS).backward()
        head.step()

    assert check_gradient(loop.model, loss_fn, loop.batch, step).exact


class Sequences(nn.Module):
    """A large embedding, of which few rows are used, and attention with dropout of its own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30_000, 16, sparse=False)
        self.layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.3, batch_first=True)

    def forward(self, ids):
        hidden = self.layer(self.embedding(ids))
        return hidden.square().mean()


def test_large_embeddings_and_attention_with_dropout_are_explained():
    torch.manual_seed(0)
    model, ids = Sequences().double(), torch.randint(30_000, (12, 5))
    weight = torch.randn(16, dtype=torch.float64)

    def mean(model, ids):
        return (model.layer(model.embedding(ids)) * weight).square().mean()

    def step():
        model.zero_grad()
        ((mean(model, ids[:8]) + mean(model, ids[8:])) / 2).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    report = check_gradient(model, mean, ids, step)
    assert report.parts == pytest.approx({"rows 0 to 7": 0.75, "rows 8 to 11": 1.5})
    assert model.layer.self_attn.dropout == 0.3


def test_half_precision_is_compared_as_far_as_it_goes():
    loop, rounded = Loop(torch.float32), model_of(torch.bfloat16)
    optimizer = torch.optim.SGD(rounded.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(rounded(loop.batch[0].bfloat16()), loop.batch[1]).backward()
        optimizer.step()

    report = check_gradient(loop.model, loss_fn, loop.batch, step, trained=rounded, parts=parts_of(RANKS))
    assert report.exact, report
    assert str(report) == "exact: each row weighs what it has to"


def test_autocast_is_named_where_it_is_not_explained():
    loop = Loop(torch.float32)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loop.whole_batch()

    report = check_gradient(loop.model, loss_fn, loop.batch, step)
    assert str(report).startswith("not explained: 0.00")
    assert str(report).endswith("or the loop computes in half precision (check it without autocast)")


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("rows", [8, 24])
def test_half_precision_tells_rows_that_are_left_out(rows, named):
    torch.manual_seed(rows)
    trained = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    model.load_state_dict(trained.state_dict())
    x, labels = torch.randn(rows, 6), torch.randint(4, (rows,))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.0)

    def loss(model, batch):
        logits = model(batch[0].to(next(model.parameters()).dtype)).float()
        return nn.functional.cross_entropy(logits, batch[1])

    def report(used):
        def step():
            optimizer.zero_grad()
            loss(trained, (x[:used], labels[:used])).backward()
            optimizer.step()

        parts = parts_of([rows // 2, rows // 2]) if named else None
        return check_gradient(model, loss, (x, labels), step, trained=trained, parts=parts)

    assert report(rows).exact, report(rows)
    wrong = report(rows // 2)
    assert not wrong.exact
    assert named or list(wrong.parts) == [f"rows 0 to {rows // 2 - 1}", f"rows {rows // 2} to {rows - 1}"]
    assert list(wrong.parts.values()) == pytest.approx([2, 0], abs=0.05)


@pytest.mark.parametrize("sparse", [True, False])
def test_a_gradient_where_no_row_has_one_is_not_explained(sparse):
    model = nn.ModuleList([nn.Embedding(50, 8, sparse=sparse), nn.Embedding(50, 8, sparse=sparse)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, pairs):
        products = (model[0](pairs[0]) * model[1](pairs[1])).sum(1)
        return products.sigmoid().mean()

    def report(first):
        optimizer.zero_grad()
        before, batch = torch.arange(first, first + 10), torch.arange(10)
        loss(model, (before, before)).backward()  # no zero_grad() follows

        def step():
            loss(model, (batch, batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return check_gradient(model, loss, (batch, batch), step)

    assert str(report(20)).startswith("not explained: 0.")
    assert report(0).factor == pytest.approx(2)  # the same rows twice


# -------------------------------------------------------------------------------------------------------- wrong usage


def test_a_step_makes_one_update():
    loop = Loop()

    def two():
        loop.whole_batch()
        loop.whole_batch()

    with pytest.raises(RuntimeError, match=r"step must make one update, but it makes several"):
        check_gradient(loop.model, loss_fn, loop.batch, two)
    with pytest.raises(RuntimeError, match=r"of an optimizer that has parameters of the model, but no call was seen"):
        check_gradient(loop.model, loss_fn, loop.batch, lambda: None)
    other = Loop()
    with pytest.raises(RuntimeError, match=r"no call was seen; pass trained="):
        check_gradient(loop.model, loss_fn, loop.batch, other.whole_batch)


def test_what_cannot_be_found_is_refused():
    model, x = nn.Linear(3, 1).double(), torch.randn(8, 3, dtype=torch.float64)

    def mean(model, rows):
        return model(rows).square().mean()

    def step_on(rows):
        model.zero_grad()
        mean(model, rows).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    def step():
        step_on(x)

    with pytest.raises(ValueError, match=r"must be told apart by their gradients, .* pass parts="):
        check_gradient(model, mean, x, step)
    alike = torch.ones(8, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"must be told apart by their gradients, got some that are alike, or 0; pass"):
        check_gradient(model, mean, alike, lambda: step_on(alike), parts=parts_of([4, 4]))
    with pytest.raises(ValueError, match=r"must have rows that count something"):
        check_gradient(model, mean, x, step, counts=[0] * 8)
    with pytest.raises(ValueError, match=r"all gradients must be finite"):
        check_gradient(model, lambda model, rows: mean(model, rows) * torch.nan, x, step)


@given(st.lists(st.lists(st.integers(-2, 7), max_size=4), max_size=4))
@examples(60)
def test_parts_have_each_row_once(drawn):
    loop, parts = Loop(), {f"part {number}": rows for number, rows in enumerate(drawn)}
    batch = batch_of(rows=6)
    if sorted(row for rows in drawn for row in rows) != list(range(6)) and parts:
        with pytest.raises(ValueError, match=r"^parts must have each of 6 rows once, got row -?\d \d times; pass all"):
            check_gradient(loop.model, loss_fn, batch, loop.whole_batch, parts=parts)


@pytest.mark.parametrize("parts", [list(range(ROWS)), {"all": ROWS}, {"all": ["a", "b"]}])
def test_parts_have_names_and_indices(parts):
    loop = Loop()
    with pytest.raises(ValueError, match=r"^parts must have each of 26 rows once, got row 0 0 times; pass all rows by"):
        check_gradient(loop.model, loss_fn, loop.batch, loop.whole_batch, parts=parts)


def test_the_page_shows_what_its_loop_prints(capsys):
    page = DOCS / "gradient_check.md"
    exec(blocks(page, "python")[0], {"vbs": vbs})
    assert capsys.readouterr().out == blocks(page, "text")[0]
