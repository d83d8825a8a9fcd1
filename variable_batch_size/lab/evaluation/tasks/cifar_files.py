"""CIFAR-10 from the archive of its authors, or from its files as torchvision stores them, as tensors."""

from __future__ import annotations

import hashlib
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from variable_batch_size._extras import import_extra

ARCHIVE = "cifar-10-python.tar.gz"
ADDRESS = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"  # as in torchvision
FOLDER = "cifar-10-batches-py"  # in the archive, and where torchvision unpacks it
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
MD5 = {  # of the files in the archive
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


def load(data_dir: str | Path | None = None, *, train: bool) -> TensorDataset:
    """Return the 50,000 training samples or the 10,000 test samples.

    Args:
        data_dir: folder with cifar-10-python.tar.gz, or with its folder cifar-10-batches-py. Default: the cache, to
            which the archive is downloaded if it is not there.
        train: whether to return the training samples.

    Returns:
        A dataset of images, uint8 of shape (n, 3, 32, 32), and labels, int64 of shape (n,).

    Raises:
        ValueError: if a file is not the published one.
        OSError: if a file is missing and cannot be downloaded.
        ModuleNotFoundError: if `data_dir` is None and pooch is not installed.
    """
    folder = fetch() if data_dir is None else Path(data_dir)
    batches = [_read(folder, name) for name in MD5 if (name == "test_batch") is not train]
    pixels = np.concatenate([np.asarray(batch[b"data"], np.uint8) for batch in batches])  # (n, 3072)
    labels = [label for batch in batches for label in batch[b"labels"]]
    return TensorDataset(torch.from_numpy(pixels.reshape(-1, 3, 32, 32)), torch.tensor(labels))


def fetch(folder: Path | None = None) -> Path:
    """Download the archive if `folder` (default: the cache of the user) does not have it, and return the folder.

    Raises:
        ModuleNotFoundError: if pooch is not installed.
        OSError: if the archive cannot be downloaded; the message says what to do.
        ValueError: if what was downloaded is not the published archive.
    """
    pooch = import_extra("pooch", "evaluation")
    target = Path(pooch.os_cache("variable_batch_size")) / "cifar10" if folder is None else folder
    try:
        pooch.retrieve(ADDRESS, f"md5:{ARCHIVE_MD5}", ARCHIVE, target)
    except OSError as error:  # those of requests, too
        raise OSError(
            f"CIFAR-10 must be downloaded from {ADDRESS} to {target}, but {type(error).__name__}: {error}; download "
            f"{ARCHIVE} by other means, and put it there or pass its folder as data_dir= or --data-dir"
        ) from error
    return target


def _read(folder: Path, name: str) -> dict[bytes, Any]:
    """Return one of the files of batches, after comparing its MD5 sum: only what is published is unpickled."""
    path = next((path for path in (folder / FOLDER / name, folder / ARCHIVE) if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"the CIFAR-10 folder must hold {ARCHIVE} or {FOLDER}/{name}, but {folder} does not; correct data_dir= or "
            f"--data-dir, or omit it to download {ADDRESS}"
        )
    try:
        content = _member(path, name) if path.name == ARCHIVE else path.read_bytes()
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != MD5[name]:
            raise ValueError(f"{name} has the MD5 sum {found} instead of {MD5[name]}")
    except (tarfile.TarError, EOFError, KeyError, ValueError, zlib.error) as error:
        requirement = f"{path} must be of the published CIFAR-10"
        raise ValueError(f"{requirement}, but {error}; delete it and download it again") from error
    batch: dict[bytes, Any] = pickle.loads(content, encoding="bytes")
    return batch


def _member(archive: Path, name: str) -> bytes:
    with tarfile.open(archive) as files:
        stream = files.extractfile(f"{FOLDER}/{name}")
        return b"" if stream is None else stream.read()
