"""Exact batches and one graph (laws 1 and 6) on PyTorch/XLA: real replicas on several cores of this CPU."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.reference import EQUATIONS, SurgeOptimizer, assert_equal, batches, data, filled, training, twin

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

import variable_batch_size as vbs  # noqa: E402
from helpers.tokens import batches_of, plain  # noqa: E402
from helpers.xla_training import (  # noqa: E402
    SAMPLES,
    Case,
    Rare,
    gains,
    measure,
    overflow,
    rare_loss,
    train,
    train_rare,
    train_tokens,
    unsupported_optimizers,
    watch,
)
from variable_batch_size.backend.xla import launch  # noqa: E402

WARM = 6  # updates after which nothing may compile
CASES = [Case(kind, (20, 7, 1, 33, 12, 50, 3), minibatch_size) for kind in EQUATIONS for minibatch_size in (4, 6)] + [
    Case(next(iter(EQUATIONS)), (20, 1, 49, 5), minibatch_size, torch.float32) for minibatch_size in (4, 6)
]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[list[list[torch.Tensor]]]:
    folder: Path = tmp_path_factory.mktemp("cores")
    launch(train, (folder, CASES), cores=request.param)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(request.param)]


def test_updates_equal_those_of_one_big_batch_on_xla(ranks: list[list[list[torch.Tensor]]]) -> None:
    for case, weights in zip(CASES, ranks[0], strict=True):
        tolerance = 1e-12 if case.dtype is torch.float64 else 1e-5
        expected = twin(
            case.kind,
            case.sizes,
            dataset_size=SAMPLES,
            dtype=case.dtype,
            minibatch_size=case.minibatch_size,
            fixed_shape=True,
        )
        assert_equal([weight.double().numpy() for weight in weights], expected, tolerance)


def test_all_cores_have_identical_weights(ranks: list[list[list[torch.Tensor]]]) -> None:
    for rank in ranks[1:]:
        for weights, first in zip(rank, ranks[0], strict=True):
            assert all(map(torch.equal, weights, first))


@pytest.mark.parametrize(
    ("kind", "cores"),
    [
        (vbs.ConstantOptimizer, 1),
        (vbs.ConstantOptimizer, 3),
        (vbs.SqrtSDERuleOptimizer, 3),
    ],  # the last one scales betas
)
def test_nothing_compiles_and_the_host_reads_nothing_while_batch_size_and_lr_change(
    kind: type[vbs.CustomOptimizer], cores: int, tmp_path: Path
) -> None:
    sizes = tuple(random.Random(0).sample(range(1, SAMPLES + 1), 40))
    assert len(set(sizes)) == len(sizes)
    launch(watch, (tmp_path, Case(kind, sizes, minibatch_size=8), WARM), cores=cores)
    delta = torch.load(tmp_path / "delta.pt")
    assert delta.pop("all_reduce") == ((len(sizes) - WARM) * cores if cores > 1 else 0)  # one per update and rank
    # Several ranks read every 16 updates whether one had other parameters than agreed, of 16 updates ago.
    assert delta.pop("to host") == (cores if cores > 1 else 0)
    assert delta == dict.fromkeys(delta, 0)
    rows = (tmp_path / "log" / "scalars.csv").read_text().splitlines()
    assert len(rows) == 1 + len(sizes) // 5


@pytest.mark.parametrize(
    ("kind", "cores"), [(vbs.ConstantOptimizer, 1), (vbs.LinearRuleOptimizer, 3), (vbs.AdaScaleOptimizer, 2)]
)
def test_logged_values_compile_nothing_and_are_read_later(
    kind: type[vbs.CustomOptimizer], cores: int, tmp_path: Path
) -> None:
    sizes = tuple(random.Random(2).sample(range(1, SAMPLES + 1), 40))
    launch(watch, (tmp_path, Case(kind, sizes, minibatch_size=8), WARM, False, True), cores=cores)
    delta = torch.load(tmp_path / "delta.pt")
    assert delta.pop("all_reduce") == ((len(sizes) - WARM) * cores if cores > 1 else 0)
    rows = range(WARM - 2, len(sizes) - 2)  # those of the last 2 updates are read when the tracker is closed
    numbers = 2 if kind is not vbs.AdaScaleOptimizer else 6  # means, norm; lr, progress (2 reads), noise
    assert delta.pop("to host") <= numbers * len([update for update in rows if update % 5 == 0]) + cores
    assert delta == dict.fromkeys(delta, 0)
    table = (tmp_path / "log" / "scalars.csv").read_text().splitlines()
    assert len(table) == 1 + len(sizes) // 5
    one = table[0].split(",").index("one")
    assert [float(row.split(",")[one]) for row in table[1:]] == pytest.approx([1.0] * 8)


@pytest.mark.parametrize("cores", [1, 3])
def test_token_means_on_xla(cores: int, tmp_path: Path) -> None:
    sizes, lengths = [20, 7, 3], [3, 1, 4, 1, 5, 0, 0, 2, 6, 5] * (SAMPLES // 10)
    launch(train_tokens, (tmp_path, sizes, lengths), cores=cores)
    expected = plain(lengths, batches_of(sizes))
    for rank in range(cores):
        weights = torch.load(tmp_path / f"tokens{rank}.pt")
        assert_equal([weight.double().numpy() for weight in weights], expected, 1e-6)


@pytest.mark.parametrize(
    ("kind", "cores"),
    [(vbs.AdaScaleOptimizer, 1), (vbs.AdaScaleOptimizer, 3), (vbs.AdamScaleOptimizer, 2), (SurgeOptimizer, 2)],
)
def test_the_host_reads_only_the_progress_of_earlier_updates(
    kind: type[vbs.CustomOptimizer], cores: int, tmp_path: Path
) -> None:
    sizes = tuple(random.Random(1).sample(range(1, SAMPLES + 1), 40))
    by_progress = True
    launch(watch, (tmp_path, Case(kind, sizes, minibatch_size=8), WARM, by_progress), cores=cores)
    delta = torch.load(tmp_path / "delta.pt")
    assert delta.pop("all_reduce") == ((len(sizes) - WARM) * cores if cores > 1 else 0)
    reads = len(sizes) - WARM + (cores > 1)  # and once whether one had other parameters than agreed
    assert delta.pop("to host") == reads * cores
    assert delta == dict.fromkeys(delta, 0)


@pytest.mark.parametrize("cores", [1, 2])
def test_a_controller_compiles_nothing_and_reads_noise_and_progress_later(cores: int, tmp_path: Path) -> None:
    sizes, every = tuple(random.Random(4).sample(range(1, SAMPLES + 1), 40)), 5
    launch(watch, (tmp_path, Case(vbs.AdaScaleOptimizer, sizes, 8, every=every), WARM, True), cores=cores)
    delta = torch.load(tmp_path / "delta.pt")
    assert delta.pop("all_reduce") == ((len(sizes) - WARM) * cores if cores > 1 else 0)
    questions = [update for update in range(WARM - 1, len(sizes) - 1) if update % every == 0]
    reads = len(sizes) - WARM + (cores > 1)  # of the progress schedule, as above
    assert delta.pop("to host") == reads * cores + 2 * len(questions)  # on rank 0 only
    assert delta == dict.fromkeys(delta, 0)


@pytest.mark.parametrize(
    ("cores", "noise"), [(1, "microbatches"), (2, "differenced"), (3, "microbatches"), (8, "microbatches")]
)
def test_gains_equal_those_of_one_process_on_the_cpu(cores: int, noise: str, tmp_path: Path) -> None:
    sizes = (20, 7, 1, 33, 12, 50, 3)
    run, expected = training(vbs.AdaScaleOptimizer, sizes, noise=noise, sampling={"fixed_shape": True}), []
    for _ in sizes:
        expected.append(run.run(1).optimizer.lr_factor())
    launch(gains, (tmp_path, Case(vbs.AdaScaleOptimizer, sizes, minibatch_size=4), noise), cores=cores)
    for rank in range(cores):
        found, measured, progress, lr = torch.load(tmp_path / f"gains{rank}.pt", weights_only=False)
        assert found == pytest.approx(expected, rel=1e-12)
        assert dataclasses.astuple(measured) == pytest.approx(dataclasses.astuple(run.optimizer.noise()), rel=1e-12)
        assert progress == pytest.approx(run.optimizer.progress, rel=1e-12)
        assert lr == pytest.approx(run.optimizer.current_lr(), rel=1e-12)


def test_a_nonfinite_gradient_leaves_weights_noise_and_progress_unchanged(tmp_path: Path) -> None:
    case = Case(vbs.AdaScaleOptimizer, (20, 7, 33, 12, 50, 3), minibatch_size=4)
    step = 3
    launch(overflow, (tmp_path, case, step), cores=2)
    for rank in range(2):
        before, skipped, after = torch.load(tmp_path / f"overflow{rank}.pt")
        assert all(map(torch.equal, before[0], skipped[0]))
        assert before[1:3] == skipped[1:3]
        assert not all(map(torch.equal, skipped[0], after[0]))
        assert after[1][2] == before[1][2] + 1
        for weights, *_, seen_by_hook in (before, skipped, after):
            assert all(map(torch.equal, weights, seen_by_hook))


@pytest.mark.parametrize(("cores", "dtype"), [(1, torch.float32), (3, torch.float32), (2, torch.float64)])
def test_means_equal_those_of_one_process_and_add_compiles_and_reads_nothing(
    cores: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    sizes = tuple(random.Random(2).sample(range(1, SAMPLES + 1), 30))
    used, x = list(batches(sizes, SAMPLES)), data(SAMPLES)[0][:, 0]
    launch(measure, (tmp_path, Case(vbs.ConstantOptimizer, sizes, minibatch_size=8, dtype=dtype), WARM), cores=cores)
    for rank in range(cores):
        found, delta = torch.load(tmp_path / f"means{rank}.pt")
        assert delta == dict.fromkeys(delta, 0)
        for means, updates in zip(found, (used[:WARM], used[WARM:]), strict=True):
            samples = np.concatenate(updates)
            assert 0 < means.pop("loss") < 10
            uneven = (len(updates[0]) * 2**30 + 0.5 * (len(samples) - len(updates[0]))) / len(samples)
            assert means.pop("uneven") == pytest.approx(uneven, rel=1e-12)  # a float32 sum would be 1e-8 too small
            expected = {"x": float(x[samples].mean()), "number": 2, "samples": len(samples)}
            assert means == pytest.approx(expected, rel=1e-12 if dtype is torch.float64 else 1e-6)


def test_rejects_optimizers_and_parameters_that_adascale_does_not_support_on_xla(tmp_path: Path) -> None:
    launch(unsupported_optimizers, (tmp_path,), cores=1)
    *kinds, half, timescale = torch.load(tmp_path / "messages.pt")
    for name, text in zip(("Rprop", "ASGD", "Adafactor"), kinds, strict=True):
        assert text.startswith("on xla a learning rate that depends on the noise needs an optimizer whose change is")
        assert f"that of {name} is not; use another" in text
    assert "at least 32 bits" in half
    assert "some are torch.bfloat16; keep the parameters in float32" in half
    assert timescale.endswith("use the rule without ConstantTimescale")


@pytest.mark.parametrize(
    ("cores", "options"), [(1, {}), (1, {"accumulation": "buffered"}), (2, {"find_unused_parameters": True})], ids=str
)
def test_a_parameter_without_a_gradient_does_not_move_on_xla(
    cores: int, options: dict[str, Any], tmp_path: Path
) -> None:
    sizes = (3, 2, 9, 1, 2, 4, 3, 7)
    launch(train_rare, (tmp_path, sizes, options), cores=cores)
    model = filled(Rare())
    inner, used = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for batch in batches(sizes, SAMPLES):
        inner.zero_grad()
        rare_loss(model, batch.tolist(), torch.device("cpu")).backward()
        used.append(model.rare.weight.grad is not None)  # type: ignore[union-attr]
        inner.step()
    assert len(set(used)) == 2
    for rank in range(cores):
        weights, error = torch.load(tmp_path / f"rare{rank}.pt")
        assert error == ""
        assert_equal([weight.numpy() for weight in weights], [p.detach().numpy() for p in model.parameters()])


def test_several_ranks_are_told_of_a_parameter_without_a_gradient_on_xla(tmp_path: Path) -> None:
    launch(train_rare, (tmp_path, (20, 20, 1, 2, 3), {}), cores=2)
    for rank in range(2):
        _, error = torch.load(tmp_path / f"rare{rank}.pt")
        assert "pass find_unused_parameters=True to the optimizer" in error
