"""What every part of an update computes with: begin with `parameters.py`."""
