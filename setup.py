"""Leaves earlier builds out of the next one; setup.cfg describes the package."""

import tempfile
from pathlib import Path

import setuptools

# The source distribution would get every file that the list of an earlier build names.
Path("variable_batch_size.egg-info", "SOURCES.txt").unlink(missing_ok=True)

# The wheel would get every file of build/, the default folder, also those that an earlier build has left there.
with tempfile.TemporaryDirectory() as folder:
    setuptools.setup(options={"build": {"build_base": folder}})
