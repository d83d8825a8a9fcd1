"""The tasks that come with the package, one a file, named in `../task.py`, and the files that they read."""
