"""From the factors of a rule to the hyperparameters of a step: begin with `scaling.py`."""
