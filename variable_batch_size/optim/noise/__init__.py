"""What is measured of the gradients of microbatches: begin with `estimate.py`, the equations."""
