"""Schedule strings."""

import pytest

from helpers.traces import MAX_BATCH_SIZE
from variable_batch_size.trace import BatchTrace


@pytest.mark.parametrize(
    ("schedule", "equal"),
    [
        ("0:128 2000:256 10K:1024", [(128, 2000), (256, 8000), (1024, 2000)]),
        ("0:128,2k:256,\n 10k:1K", [(128, 2000), (256, 8000), (1000, 2000)]),
        ("  0:1M, 1:2m", [(10**6, 1), (2 * 10**6, 11999)]),
        ("0:128 5:128 7:128", [(128, 12000)]),
        ("0k:008", [(8, 12000)]),
    ],
)
def test_a_schedule_equals_the_list_that_it_describes(schedule, equal):
    listed = BatchTrace.from_sizes(size for size, count in equal for _ in range(count))
    assert BatchTrace.parse(schedule, steps=12000) == listed
    assert BatchTrace.of(schedule, on_end="hold").batch_size(10**30) == equal[-1][0]


@pytest.mark.parametrize(
    ("schedule", "parts"),
    [
        ("", ["must have at least one entry", "got ''", "0:128"]),
        (" , ", ["must have at least one entry", "0:128"]),
        ("0:128 2000", ["entry 2", "step:batch_size", "got '2000'", "0:128"]),
        ("0:128 2000:x", ["entry 2", "step:batch_size", "got '2000:x'"]),
        ("0:1.5", ["entry 1", "step:batch_size", "got '0:1.5'"]),
        ("0:-5", ["entry 1", "step:batch_size", "got '0:-5'"]),
        ("0:128 2G:256", ["entry 2", "step:batch_size", "got '2G:256'"]),
        ("0 : 128", ["entry 1", "step:batch_size", "got '0'"]),
        ("10:128", ["entry 1 ('10:128')", "start at step 0", "got 10", "0:batch_size"]),
        ("10K:128", ["entry 1 ('10K:128')", "start at step 0", "got 10000"]),
        ("0:128 5:1 5:2", ["entry 3 ('5:2')", ">= 6", "got 5", "order"]),
        ("0:128 7:1 5:2", ["entry 3 ('5:2')", ">= 8", "got 5", "order"]),
        ("0:0", ["entry 1 ('0:0')", "batch_size must be an integer >= 1", "got 0", "correct"]),
        (f"0:{2**53 + 1}", ["entry 1", "batch_size", "<= 2**53", f"got {2**53 + 1}"]),
        (f"0:1 {2**60}:2", ["entry 2", "): step must", "<= 2**53", f"got {2**60}"]),
        (f"0:{2**53} {2**53}:2", ["<= 2**63 - 1", "run from step 0", "shorten"]),
    ],
)
def test_rejects_a_malformed_schedule_with_the_entry(schedule, parts):
    with pytest.raises(ValueError, match=r" must .*, got .*; ") as caught:
        BatchTrace.parse(schedule)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, str(caught.value)


@pytest.mark.parametrize("schedule", [None, 5, 1.5, True, b"0:128", ["0:128"]])
def test_rejects_a_schedule_that_is_not_a_string(schedule):
    with pytest.raises(TypeError, match=r'^a schedule must be a string, got .* \(\w+\); write it like "0:128'):
        BatchTrace.parse(schedule)


@pytest.mark.parametrize(
    ("steps", "error"),
    [*((steps, ValueError) for steps in (0, -1, 2000, MAX_BATCH_SIZE + 1)), (2.5, TypeError), (True, TypeError)],
)
def test_rejects_steps_that_do_not_reach_the_last_entry(steps, error):
    with pytest.raises(error, match=r"^steps must be .*, got .*; "):
        BatchTrace.parse("0:128 2000:256", steps=steps)
    assert len(BatchTrace.parse("0:128 2000:256", steps=2001)) == 2001
