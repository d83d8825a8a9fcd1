"""Readers of capacity traces, one format a file: a new one is a file here, and a line in `../reading.py`.

`base.py` has what they share. `csv_table.py` reads the CSV that `CapacityTrace.to_csv` writes.
"""
