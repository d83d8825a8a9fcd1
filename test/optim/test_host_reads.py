"""An update reads nothing from a device: on the device "meta", whose tensors have no values, each read raises."""

import pytest

from helpers.gpu import VARYING, divided_updates, make, updates
from helpers.reference import OPTIMIZERS


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 1.0}, {"noise": "differenced"}], ids=lambda one: "".join(one)
)
def test_an_update_reads_nothing_from_the_device(kind, options):
    make(updates(kind, VARYING, "meta", **options), 10)


def test_denominators_are_not_read_from_the_device():
    make(divided_updates(VARYING, "meta"), 10)
