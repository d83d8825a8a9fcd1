"""The tasks that come with the package, one a file; `table.py` names them. The files of data sets are read here, too."""
