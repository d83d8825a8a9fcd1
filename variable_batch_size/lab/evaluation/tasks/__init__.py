"""The tasks that come with the package, one a file, named in `table.py`, and the files that they read."""
