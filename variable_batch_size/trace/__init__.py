"""Batch traces: the global batch size of every step of a training."""

from variable_batch_size.trace.batch_trace import BatchTrace, OnEnd
from variable_batch_size.trace.runs import TraceEndError

__all__ = ["BatchTrace", "OnEnd", "TraceEndError"]
