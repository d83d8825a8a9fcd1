"""Schedules whose length was counted in batches."""

from __future__ import annotations

import warnings

import torch

import variable_batch_size as vbs
from helpers.yardstick import MICROBATCH, TRACE, Samples
from variable_batch_size.testing import check_schedule


def warned(schedule, batches=13, **options):
    """Whether a schedule of a training with 26 updates in 3 epochs is said to count batches."""
    sampler = vbs.CustomSampler(Samples(), TRACE, minibatch_size=MICROBATCH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_schedule(schedule, sampler, batches, **options)
    return bool(caught)


def test_schedules_that_count_batches():
    inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    cosine, sequence = torch.optim.lr_scheduler.CosineAnnealingLR, torch.optim.lr_scheduler.SequentialLR

    def after_warm_up(steps):
        warm_up = torch.optim.lr_scheduler.LinearLR(inner, total_iters=3)
        return sequence(inner, [warm_up, cosine(inner, T_max=steps - 3)], [3])

    assert warned(cosine(inner, T_max=39))
    assert warned(torch.optim.lr_scheduler.OneCycleLR(inner, 0.1, epochs=3, steps_per_epoch=13))
    assert warned(after_warm_up(39))
    assert warned(cosine(inner, T_max=2 * 39))
    for right in cosine(inner, T_max=26), cosine(inner, T_max=21), after_warm_up(26), cosine(inner, T_max=38):
        assert not warned(right)
    assert not warned(cosine(inner, T_max=39), updates=39)
    assert not warned(cosine(inner, T_max=40), batches=5)  # any number may be a multiple of few batches
    assert not warned(torch.optim.lr_scheduler.LinearLR(inner), batches=1)
