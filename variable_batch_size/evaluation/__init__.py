"""Which rule, under which trace? Trainings of rules x traces x seeds, their statistics and a report."""

from typing import TYPE_CHECKING

from variable_batch_size._lazy import lazy_index

if TYPE_CHECKING:
    from variable_batch_size.evaluation.analysis import Analysis as Analysis
    from variable_batch_size.evaluation.recommendation import recommend as recommend
    from variable_batch_size.evaluation.record import Record as Record
    from variable_batch_size.evaluation.record import read_records as read_records
    from variable_batch_size.evaluation.report import write_report as write_report
else:
    __getattr__, __dir__, __all__ = lazy_index(__name__, __file__)
