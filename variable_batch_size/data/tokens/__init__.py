"""Batches in tokens, of a dataset whose samples have lengths, `CustomSampler(lengths=)`: begin with `budget.py`."""
