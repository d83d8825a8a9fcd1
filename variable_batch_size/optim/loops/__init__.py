"""The loops of a training: begin with `updates.py`."""
