"""Processes of which one takes a wrong turn: all of them end, with the same sentence, soon."""

import pytest

from helpers.agreement_jobs import PART_AFTER, train
from helpers.processes import run_job

SECONDS = 30  # half of what a rank waits for the others
HYPERPARAMETER = (
    r"same {} of parameter group 0, but it is {} on rank 0 and {} on rank {{}}(?: after update \d+)?; set it to"
)

PASSED = r"every rank must come to {}, but rank {{}} waits there and rank \d makes the next update; load, save, read"


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("size", [3])
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("lr", HYPERPARAMETER.format("lr", r"0\.001", r"0\.0005")),
        ("saves alone", PASSED.format("a save of the Checkpoint")),
        ("loads alone", PASSED.format("the first update .*, of a restored state, .*")),
        ("lr in DDP", HYPERPARAMETER.format("lr", r"0\.001", r"0\.0005")),
        *(
            pytest.param(*case, marks=pytest.mark.nightly("starts processes"))
            for case in [
                ("weight_decay", HYPERPARAMETER.format("weight_decay", r"0\.01", r"0\.005")),
                (
                    "epoch",
                    r"same epoch, but it is 0 on rank 0 and 1 on rank {}; call set_epoch with the same epoch on eve",
                ),
                (
                    "saves",
                    r"same order, but rank 0 is in Accumulator\.read\(\) and rank {} in a save of the Checkpoint; call",
                ),
                ("is signalled", "^143$"),
                ("adds a group alone", PASSED.format("the first update .*, or with other parameters")),
                ("reads metrics alone", PASSED.format(r"Accumulator\.read\(\)")),
                ("before a save", HYPERPARAMETER.format("lr", r"0\.001", r"0\.0001")),
                ("before the end", HYPERPARAMETER.format("lr", r"0\.001", r"0\.0001")),
                ("before an epoch ends", HYPERPARAMETER.format("lr", r"0\.001", r"0\.0001")),
                ("saves alone in DDP", PASSED.format("a save of the Checkpoint")),
                ("loads alone in DDP", PASSED.format("the first update .*, of a restored state, .*")),
                ("adds a group beside a late rank", PASSED.format("the first update .*, or with other parameters")),
            ]
        ),
    ],
    ids=lambda value: value.replace(" ", "_") if len(value) < 30 else "",
)
def test_all_ranks_end_with_one_sentence_soon_after_one_has_parted(how, sentence, size, tmp_path):
    messages, seconds, updates = zip(*run_job("gloo", train, tmp_path, how, ranks=size), strict=True)
    assert messages == size * (messages[0],)
    with pytest.raises(RuntimeError, match=sentence.format(size - 1)):
        raise RuntimeError(messages[0])
    assert max(seconds) < SECONDS
    assert min(updates) >= PART_AFTER - 2 * how.startswith("before")  # the ranks differ two updates earlier then


@pytest.mark.slow("starts processes")
@pytest.mark.torch
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("leaves", "restart all ranks from the last checkpoint"),
        ("leaves in DDP", "[Cc]onnection|closed"),
        ("leaves before a save", r"every rank must come to a save of the Checkpoint, but rank {} has not, and a rank"),
    ],
    ids=lambda value: value.replace(" ", "_") if len(value) < 25 else "",
)
def test_ranks_do_not_wait_long_for_a_process_that_has_left(how, sentence, size, tmp_path):
    *others, _ = run_job("gloo", train, tmp_path, how, ranks=size)
    for message, seconds, updates in others:
        with pytest.raises(RuntimeError, match=sentence.format(size - 1)):
            raise RuntimeError(message)
        assert seconds < SECONDS
        assert updates == PART_AFTER
