"""Readers of capacity traces: one format a file; `table.py` names them all."""
