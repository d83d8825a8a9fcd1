"""An update on a GPU makes the host neither wait nor start many kernels: one process, without a GradScaler."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import pytest
import torch

import variable_batch_size as vbs
from helpers.gpu import (
    MARKS,
    ON_GPU,
    ROWS,
    VARYING,
    divided_updates,
    launches,
    make,
    updates,
    updates_by_hand,
)
from helpers.reference import OPTIMIZERS

pytestmark = [*MARKS, pytest.mark.skipif(not ON_GPU, reason="a CPU neither synchronizes nor launches kernels")]

WARM_UP = 8  # updates: hooks watch the first ones, and memory is allocated


def set_mode(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def synchronizing_raises():
    torch.cuda.synchronize()
    set_mode("error")
    try:
        yield
    finally:
        set_mode("default")


def test_a_read_of_the_gpu_raises_in_this_mode():
    norm = torch.ones(3, device="cuda").sum()
    with synchronizing_raises(), pytest.raises(RuntimeError, match="synchron"):
        norm.item()


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 1.0}, {"noise": "differenced"}], ids=lambda one: "".join(one)
)
def test_the_host_does_not_wait_within_an_update(kind, options):
    """Also if the noise is measured: only `noise()`, `progress`, a tracker's rows, a controller and a state read it."""
    each = updates(kind, VARYING, **options)
    make(each, WARM_UP)
    with synchronizing_raises():
        make(each, 2 * len(VARYING))


@pytest.mark.parametrize("kind", [vbs.LinearRuleOptimizer, vbs.AdaScaleOptimizer])
def test_the_host_does_not_wait_for_the_rows_of_a_log(kind, tmp_path):
    with vbs.Tracker(tmp_path) as tracker:
        each = updates(kind, VARYING, logs=True, tracker=tracker, log_steps=1, grad_norm=True)
        make(each, WARM_UP)
        with synchronizing_raises():
            make(each, 4 * len(VARYING))
    assert (tmp_path / "scalars.csv").read_text().count("\n") > WARM_UP


def test_the_host_does_not_wait_for_denominators():
    each = divided_updates(VARYING)
    make(each, WARM_UP)
    with synchronizing_raises():
        make(each, 2 * len(VARYING))


MICROBATCHES = 4


@pytest.mark.parametrize(
    ("kind", "options", "of_update", "of_microbatch"),
    [
        # A kernel multiplies all gradients by the weight of the microbatches. By hand each loss is divided, which takes
        # two kernels for each microbatch.
        (vbs.ConstantOptimizer, {}, 2, 1),
        (vbs.LinearRuleOptimizer, {}, 2, 1),
        # About 15 more: the norms, which are stacked, squared and summed, the coefficient, and two products.
        (vbs.LinearRuleOptimizer, {"max_grad_norm": 1.0}, 30, 1),
        # About 10 of a microbatch: its norm and its sum with the others. Of an update: about 35 of single numbers, and
        # of all parameters a copy, a product in case of a non-finite gradient, and the change.
        (vbs.AdaScaleOptimizer, {}, 60, 12),
    ],
    ids=["constant", "linear", "linear, clipped", "AdaScale"],
)
def test_an_update_launches_few_kernels_more_than_a_loop_by_hand(kind, options, of_update, of_microbatch):
    sizes = [MICROBATCHES * ROWS]
    by_hand = launches(updates_by_hand(sizes))
    assert by_hand > 4 * MICROBATCHES  # a forward and a backward are more
    assert launches(updates(kind, sizes, **options)) <= by_hand + of_update + MICROBATCHES * of_microbatch
