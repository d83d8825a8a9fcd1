"""One hash of the weights on any number of XLA's cores."""

import pytest

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

from helpers.xla_reproducible import train  # noqa: E402
from variable_batch_size.backend.xla import launch  # noqa: E402


@pytest.mark.parametrize(
    ("rule", "worlds"),
    [
        pytest.param("linear", (1, 2), marks=pytest.mark.slow("compiles")),
        pytest.param("adascale", (1, 2, 4), marks=pytest.mark.nightly("compiles")),
    ],
)
def test_any_number_of_cores_makes_the_same_updates_to_the_last_bit(rule, worlds, tmp_path):
    for cores in worlds:
        launch(train, (tmp_path, rule), cores=cores)
    told = [path.read_text() for path in tmp_path.iterdir()]
    assert len(told) == sum(worlds)
    assert len(set(told)) == 1
