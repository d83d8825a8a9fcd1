"""The command `vbs`: a thin layer over the package, one group of commands a file."""
