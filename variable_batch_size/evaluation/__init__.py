"""Which rule, under which trace? Trainings with traces, rules, learning rates and seeds, and a report of them."""

from typing import TYPE_CHECKING

from variable_batch_size._lazy import lazy_index

if TYPE_CHECKING:
    from variable_batch_size.evaluation.analysis import Analysis as Analysis
    from variable_batch_size.evaluation.branching.branch import Branching as Branching
    from variable_batch_size.evaluation.branching.branch import branch as branch
    from variable_batch_size.evaluation.branching.candidate import Candidate as Candidate
    from variable_batch_size.evaluation.branching.critical import CriticalBatchSize as CriticalBatchSize
    from variable_batch_size.evaluation.branching.critical import critical_batch_size as critical_batch_size
    from variable_batch_size.evaluation.cell import Cell as Cell
    from variable_batch_size.evaluation.courses import TraceOptions as TraceOptions
    from variable_batch_size.evaluation.courses import UnderCapacity as UnderCapacity
    from variable_batch_size.evaluation.engines import run as run
    from variable_batch_size.evaluation.experiment import Experiment as Experiment
    from variable_batch_size.evaluation.plan import Plan as Plan
    from variable_batch_size.evaluation.recommendation import recommend as recommend
    from variable_batch_size.evaluation.record import Record as Record
    from variable_batch_size.evaluation.record import read_records as read_records
    from variable_batch_size.evaluation.record import write_records as write_records
    from variable_batch_size.evaluation.report import write_report as write_report
    from variable_batch_size.evaluation.simulated_time import ModelTime as ModelTime
    from variable_batch_size.evaluation.task import Task as Task
    from variable_batch_size.evaluation.task import load_task as load_task
else:
    __getattr__, __dir__, __all__ = lazy_index(__name__, __file__)
