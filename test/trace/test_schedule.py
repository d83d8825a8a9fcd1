"""Schedule strings."""

import pytest

from helpers.traces import MAX_BATCH_SIZE
from variable_batch_size.trace import BatchTrace
from variable_batch_size.trace.schedule import is_schedule


@pytest.mark.parametrize(
    ("schedule", "equal"),
    [
        ("0:128 2000:256 10K:1024", [(128, 2000), (256, 8000), (1024, 2000)]),
        ("0:128,2k:256,\n 10k:1K", [(128, 2000), (256, 8000), (1000, 2000)]),
        ("  0:1M, 1:2m", [(10**6, 1), (2 * 10**6, 11999)]),
        ("0:128 5:128 7:128", [(128, 12000)]),
        ("0k:008", [(8, 12000)]),
        ("0:1b 1:2T 1.5K:4.35k 2e3:3.0", [(10**9, 1), (2 * 10**12, 1499), (4350, 500), (3, 10000)]),
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
        ("0:128 1.2345K:1", ["entry 2", "step:batch_size in integers", "T = 10^12", "got '1.2345K:1'"]),
        ("0:128 2KM:256", ["entry 2", "step:batch_size", "got '2KM:256'"]),
        ("0:128 9e99T:1", ["entry 2", "step must be an integer >= 1 and <= 9007199254740992", "got 9000"]),
        ("10:128", ["entry 1 ('10:128')", "start at step 0", "got 10", "0:batch_size"]),
        ("10K:128", ["entry 1 ('10K:128')", "start at step 0", "got 10000"]),
        ("0:128 5:1 5:2", ["entry 3 ('5:2')", ">= 6", "got 5", "order"]),
        ("0:128 7:1 5:2", ["entry 3 ('5:2')", ">= 8", "got 5", "order"]),
        ("0:0", ["entry 1 ('0:0')", "batch_size must be an integer >= 1", "got 0", "correct"]),
        (f"0:{2**53 + 1}", ["entry 1", "batch_size", f"<= {2**53}", f"got {2**53 + 1}"]),
        (f"0:1 {2**60}:2", ["entry 2", "): step must", f"<= {2**53}", f"got {2**60}"]),
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


@pytest.mark.parametrize(
    ("schedule", "unit", "sequence_length", "error", "parts"),
    [
        ("0:1", "token", None, ValueError, ['unit must be "steps", "samples" or "tokens"', "got 'token'", "choose"]),
        ("0:1", None, None, TypeError, ["unit must be", "got None (NoneType)"]),
        (
            "0:1",
            "tokens",
            None,
            TypeError,
            ['sequence_length for unit="tokens" must be', "got None", "tokens in a sample"],
        ),
        ("0:1", "tokens", 4096.0, TypeError, ["sequence_length", "must be an integer >= 1", "got 4096.0"]),
        ("0:1", "tokens", 0, ValueError, ["sequence_length", "must be an integer >= 1", "got 0"]),
        ("0:1", "samples", 4096, ValueError, ['must be None for unit="samples"', "got 4096", 'unit="tokens"']),
        ("0:1", "steps", 4096, ValueError, ['must be None for unit="steps"', "got 4096", "omit it"]),
        ("0:1 5", "samples", None, ValueError, ["entry 2 must be sample:batch_size", "got '5'"]),
        ("5:1", "samples", None, ValueError, ["entry 1 ('5:1') must start at sample 0", "got 5", "0:batch_size"]),
        ("5K:1", "tokens", 4096, ValueError, ["must start at token 0", "got 5000", "0:batch_size"]),
        ("0:1 9:2 5:3", "samples", None, ValueError, ["entry 3 ('5:3'): sample must", ">= 10", "got 5", "order"]),
        ("0:1 5K:2 6K:3", "tokens", 4096, ValueError, ["entry 3", "tokens // sequence_length must", ">= 2", "got 1"]),
    ],
)
def test_rejects_a_unit_or_a_schedule_that_does_not_fit_it(schedule, unit, sequence_length, error, parts):
    with pytest.raises(error, match=r" must .*, got .*; ") as caught:
        BatchTrace.parse(schedule, unit=unit, sequence_length=sequence_length)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, str(caught.value)


@pytest.mark.parametrize(
    "text", ["0:128 1B:256", " 0.0:1", "1T", "1.5K", "2e3:1", "0000000000000000000000000:1", "7b:"]
)
def test_tells_a_schedule_from_a_path(text):
    assert is_schedule(text)
    assert not is_schedule(f"./{text}")
    assert not is_schedule(f"{text[0]}.csv")
