"""Fashion-MNIST is read from any of the usual folders, and a wrong folder says what to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from variable_batch_size.lab.evaluation import load_task
from variable_batch_size.lab.evaluation.tasks import fashion_cnn, idx_files


def write(folder: Path, number: int) -> idx_files.IdxFiles:
    """Write random images in the form of the files of MNIST, and return their description."""
    folder.mkdir(parents=True)
    draw, sums = np.random.default_rng(number), {}
    for part in ("train", "t10k"):
        for kind, header, shape in (("images-idx3", 16, (number, 28, 28)), ("labels-idx1", 8, (number,))):
            content = bytes(header) + draw.integers(0, 10, shape, np.uint8).tobytes()
            (folder / f"{part}-{kind}-ubyte").write_bytes(content)
            sums[f"{part}-{kind}-ubyte"] = idx_files.hashlib.md5(content).hexdigest()
    return idx_files.IdxFiles("Fashion-MNIST", sums, 0.5, 0.25, fashion_cnn.FILES.subfolders, "omit it")


@pytest.mark.parametrize("place", [".", "FashionMNIST/raw", "fashion-mnist"])
def test_reads_the_images_of_a_folder(tmp_path: Path, place: str) -> None:
    files = write(tmp_path / "data" / place, 7)
    images, labels = idx_files.load(tmp_path / "data", files, train=False).tensors
    raw = (tmp_path / "data" / place / "t10k-images-idx3-ubyte").read_bytes()[16:]
    expected = (torch.tensor(list(raw)).double().reshape(7, 1, 28, 28) / 255 - 0.5) / 0.25
    torch.testing.assert_close(images.double(), expected, atol=1e-6, rtol=0)
    assert (images.dtype, labels.dtype, labels.shape) == (torch.float32, torch.int64, (7,))


def test_other_files_are_not_taken_for_the_published_ones(tmp_path: Path) -> None:
    write(tmp_path / "data", 7)
    task = load_task("fashion-cnn", data_dir=str(tmp_path / "data"))
    with pytest.raises(ValueError, match=r"must be the published Fashion-MNIST file, but .* has the MD5 sum"):
        task.dataset()


def test_a_missing_file_says_where_it_may_be_had(tmp_path: Path) -> None:
    task = load_task("fashion-cnn", data_dir=str(tmp_path / "nothing"))
    message = (
        r"must hold train-images-idx3-ubyte.* correct --data-dir, or install Debian's package dataset-fashion-mnist"
    )
    with pytest.raises(FileNotFoundError, match=message):
        task.dataset()


@pytest.mark.skipif(not fashion_cnn.DEBIAN.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_debians_files_are_the_published_ones() -> None:
    assert len(idx_files.load(fashion_cnn.DEBIAN, fashion_cnn.FILES, train=True)) == 60_000


def test_a_task_may_have_a_part_of_the_images() -> None:
    whole, part = load_task("mnist-cnn").dataset(), load_task("mnist-cnn", {"images": 5}).dataset()
    assert len(part) == 5
    for tensor, first in zip(whole.tensors, part.tensors, strict=True):
        torch.testing.assert_close(first, tensor[:5])
    with pytest.raises(ValueError, match="images must be an integer >= 1, got 0"):
        load_task("mnist-cnn", {"images": 0})
