"""Which samples make up which update, and which of them are a rank's: pure functions. Begin with `plan.py`."""
