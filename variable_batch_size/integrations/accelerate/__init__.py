"""Accelerate: `prepare` in the place of `accelerator.prepare`; the loop stays as it is."""

from variable_batch_size.integrations.accelerate.prepare import prepare

__all__ = ["prepare"]
