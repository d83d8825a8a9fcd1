"""Ctrl-C at any line of the constructor and of a restore: the same cell, run again, resumes."""

from __future__ import annotations

import signal

import pytest

from helpers.checkpoints import checkpoint, updates
from helpers.interrupts import Interrupt
from helpers.reference import assert_equal, training

LINES = [*range(1, 60, 6), *range(60, 800, 31), *range(800, 4000, 173)]  # 52 of them


@pytest.mark.parametrize("also", [False, True])
def test_a_cell_that_is_interrupted_runs_again(also, tmp_path):
    """`also`: with the handler of Ctrl-C, which is put back."""
    options = {"on_interrupt": "save"} if also else {}
    expected = training()
    with checkpoint(tmp_path, expected) as saves:
        for _ in range(2):
            expected.run(1)
            saves.save()
    interrupted, number = 0, 2
    for line in LINES:
        run = training()
        interrupt = Interrupt(line, "checkpoint")
        try:
            with interrupt:
                saves = checkpoint(tmp_path, run, keep=1, **options)
                assert saves.restore()
        except KeyboardInterrupt:
            interrupted += 1
            saves = checkpoint(tmp_path, run, keep=1, **options)
            assert saves.restore()
        assert run.optimizer.updates == number
        assert_equal(run.weights(), expected.weights(), 0)
        if line % 4 == 0:
            run.run(1)
            expected.run(1)
            saves.save()
            number += 1
        saves.close()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print(interrupted, "interrupts")
    assert interrupted > 25
    assert updates(tmp_path)[-1] == number
