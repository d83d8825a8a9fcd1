"""Batch traces: the global batch size of every step of a training.

`batch_trace.py` is the value, in runs of equal sizes (`runs.py`); `csv_file.py` and `schedule.py` read and write it.
"""

from variable_batch_size.trace.batch_trace import BatchTrace, OnEnd
from variable_batch_size.trace.runs import TraceEndError

__all__ = ["BatchTrace", "OnEnd", "TraceEndError"]
