"""Batches that arrive while the training runs: begin with `arriving.py`."""
