"""The same bits in any world, `CustomSampler(reproducible=True)`: begin with `integer_sum.py`."""
