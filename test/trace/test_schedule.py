"""Schedule strings."""

import pytest

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


def test_the_last_entry_may_have_one_step():
    assert len(BatchTrace.parse("0:128 2000:256", steps=2001)) == 2001


@pytest.mark.parametrize(
    "text", ["0:128 1B:256", " 0.0:1", "1T", "1.5K", "2e3:1", "0000000000000000000000000:1", "7b:"]
)
def test_tells_a_schedule_from_a_path(text):
    assert is_schedule(text)
    assert not is_schedule(f"./{text}")
    assert not is_schedule(f"{text[0]}.csv")
