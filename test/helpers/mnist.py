"""The MNIST images, for tests and benchmarks: `python test/helpers/mnist.py` fills the cache and prints its path."""

from __future__ import annotations

import sys

from variable_batch_size.lab.evaluation.tasks.mnist_files import MD5, fetch, load, read

__all__ = ["MD5", "fetch", "load", "read"]

if __name__ == "__main__":
    try:
        cache = fetch()
        for file in MD5:
            read(cache, file)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    print(f"MNIST: {cache}")
