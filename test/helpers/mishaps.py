"""A training in which an exception is raised that the loop survives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

import variable_batch_size as vbs
from helpers.reference import Array, Training, assert_equal, twin

SECONDS = 20  # within which ranks end, or go on


class StopError(Exception):
    """Raised by a loop, which swallows it."""


def _fail(*_: object) -> None:
    raise StopError


class Ended(NamedTuple):
    """How a training has ended on a rank."""

    message: str
    seconds: float
    weights: list[Array]  # none after an error


def discard(run: Training, layer: nn.Module, updates: int, where: str, *, fails: bool) -> Ended:
    """Raise in the last microbatch of the third update, and start the step over.

    Args:
        run: the training.
        layer: one in the middle of the model.
        updates: number of updates.
        where: "forward", "backward" or "between" them and `step()`.
        fails: whether it does so on this rank.
    """
    began = time.monotonic()
    try:
        while run.optimizer.updates < updates:
            run.sampler.set_epoch(run.optimizer.epoch)
            try:
                for indices in run.sampler:
                    due = run.optimizer.microbatch
                    failing = fails and due.ends_step and due.step == 2
                    fails = fails and not failing
                    if failing and where == "forward":
                        layer.register_forward_hook(_fail)
                    if failing and where == "backward":
                        layer.register_full_backward_hook(_fail)
                    run.optimizer.backward(run.loss(indices))
                    if failing and where == "between":
                        raise StopError
                    run.optimizer.step()
            except StopError:
                layer._forward_hooks.clear()
                layer._backward_hooks.clear()
                run.optimizer.discard_step(timeout=3)
    except RuntimeError as error:
        return Ended(str(error), time.monotonic() - began, [])
    return Ended("finished", time.monotonic() - began, run.weights())


def assert_discarded(ranks: Sequence[Ended], who: str, updates: Sequence[int]) -> None:
    """Check that all ranks go on, if all have discarded the step, or that all have ended."""
    messages, seconds, weights = zip(*ranks, strict=True)
    assert max(seconds) < SECONDS
    if who == "one rank":
        assert "every rank must come to discard_step(), but" in messages[-1]
        assert "finished" not in messages
    else:
        assert messages == len(ranks) * ("finished",)
        for own in weights:
            assert_equal(own, twin(vbs.LinearRuleOptimizer, updates))
