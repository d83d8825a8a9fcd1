"""Many trainings: on one machine, or on a cluster of Ray."""

from typing import TYPE_CHECKING

from variable_batch_size._lazy import lazy_index

if TYPE_CHECKING:
    from variable_batch_size.evaluation.engines.running import run as run
    from variable_batch_size.evaluation.engines.running import without_record as without_record
else:
    __getattr__, __dir__, __all__ = lazy_index(__name__, __file__)
