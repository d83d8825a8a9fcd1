"""The task `cifar10-resnet`, on an archive of a few random images in the form of the published one."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from variable_batch_size.lab.evaluation import Experiment, engines, load_task
from variable_batch_size.lab.evaluation.tasks import cifar_files
from variable_batch_size.lab.evaluation.tasks.cifar10_resnet import PADDING, augmented
from variable_batch_size.lab.evaluation.tasks.resnet import ResNet18

ROWS = 16  # of each file


def contents() -> dict[str, bytes]:
    """Return files of random images by their names: pickled as Python 2 has pickled those of CIFAR-10, with bytes."""
    draw = np.random.default_rng(0)
    return {
        name: pickle.dumps(
            {b"data": draw.integers(0, 256, (ROWS, 3072), np.uint8), b"labels": draw.integers(0, 10, ROWS).tolist()}
        )
        for name in cifar_files.MD5
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an archive whose MD5 sums are those of the published one, as far as the reader knows."""
    path = tmp_path / "data" / cifar_files.ARCHIVE
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as archive:
        for name, content in contents().items():
            entry = tarfile.TarInfo(f"{cifar_files.FOLDER}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    sums = {name: hashlib.md5(content).hexdigest() for name, content in contents().items()}
    monkeypatch.setattr(cifar_files, "MD5", sums)
    monkeypatch.setattr(cifar_files, "ARCHIVE_MD5", hashlib.md5(path.read_bytes()).hexdigest())
    return path.parent


def unpack(folder: Path) -> None:
    (folder / cifar_files.ARCHIVE).unlink()
    (folder / cifar_files.FOLDER).mkdir()
    for name, content in contents().items():
        (folder / cifar_files.FOLDER / name).write_bytes(content)


@pytest.mark.parametrize("prepare", [lambda folder: None, unpack], ids=["archive", "unpacked"])
def test_reads_the_images(folder: Path, prepare: Callable[[Path], None]) -> None:
    prepare(folder)
    images, labels = cifar_files.load(folder, train=True).tensors
    assert (images.shape, images.dtype, labels.shape) == ((5 * ROWS, 3, 32, 32), torch.uint8, (5 * ROWS,))
    batch = pickle.loads(contents()["data_batch_3"])
    pixel = batch[b"data"][7, 1024 + 32 * 5 + 9]  # red, then green, then blue; row by row
    assert images[2 * ROWS + 7, 1, 5, 9] == pixel
    assert labels[2 * ROWS : 3 * ROWS].tolist() == batch[b"labels"]
    assert len(cifar_files.load(folder, train=False)) == ROWS


def test_only_the_published_files_are_unpickled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack(folder)
    harm = pickle.dumps(pytest.fail)  # would be found by its sum, whatever it holds
    (folder / cifar_files.FOLDER / "test_batch").write_bytes(harm)
    monkeypatch.setattr(pickle, "loads", lambda *_, **__: pytest.fail("unpickled"))
    with pytest.raises(ValueError, match=r"test_batch must be of the published CIFAR-10, but .* has the MD5 sum"):
        cifar_files.load(folder, train=False)


def test_a_damaged_archive_is_named(folder: Path) -> None:
    archive = folder / cifar_files.ARCHIVE
    archive.write_bytes(archive.read_bytes()[:2000])
    with pytest.raises(
        ValueError, match=r"cifar-10-python.tar.gz must be of the published CIFAR-10.*download it again"
    ):
        cifar_files.load(folder, train=True)


def test_a_missing_file_says_where_it_may_be_had(tmp_path: Path) -> None:
    task = load_task("cifar10-resnet", data_dir=str(tmp_path))
    message = r"must hold cifar-10-python.tar.gz or cifar-10-batches-py/data_batch_1, but .*; correct data_dir= or"
    with pytest.raises(FileNotFoundError, match=message):
        task.dataset()


def test_the_archive_is_downloaded_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pooch = pytest.importorskip("pooch")
    given, cache = (folder / cifar_files.ARCHIVE).read_bytes(), tmp_path / "cache"
    downloads: list[str] = []

    def downloader(url: str, output_file: Any, pooch: Any) -> None:
        downloads.append(url)
        Path(output_file).write_bytes(given)

    monkeypatch.setattr(pooch.core, "choose_downloader", lambda *_, **__: downloader)
    for _ in range(2):
        assert len(cifar_files.load(cifar_files.fetch(cache), train=False)) == ROWS
    assert downloads == [cifar_files.ADDRESS]


def test_without_a_network_the_error_names_the_file_and_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pooch = pytest.importorskip("pooch")

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(pooch, "retrieve", unreachable)
    message = rf"from {cifar_files.ADDRESS} to {tmp_path}, but OSError: no route.*pass its folder as data_dir="
    with pytest.raises(OSError, match=message):
        cifar_files.fetch(tmp_path)


def test_the_model_is_resnet_18() -> None:
    """The number of parameters is that of torchvision's with a first layer of 3 x 3, 11,181,642 - 9,408 + 1,728."""
    model = ResNet18()
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962
    convolutions = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convolutions) == 1 + 16 + 3
    assert model.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 12), st.integers(1, 12))
def test_augmented_images_are_crops_of_the_padded_ones(seed: int, n: int, height: int, width: int) -> None:
    torch.manual_seed(seed)
    images = torch.randint(1, 256, (n, 3, height, width), dtype=torch.uint8)
    torch.manual_seed(seed)
    found = augmented(images)
    torch.manual_seed(seed)
    assert torch.equal(found, augmented(images))  # a function of torch's state, which checkpoints save
    assert (found.shape, found.dtype) == (images.shape, torch.uint8)
    padded = torch.nn.functional.pad(images, (PADDING,) * 4)
    for before, after in zip(padded, found, strict=True):
        crops = [
            before[:, top : top + height, left : left + width]
            for top in range(2 * PADDING + 1)
            for left in range(2 * PADDING + 1)
        ]
        assert any(torch.equal(after, crop) or torch.equal(after, crop.flip(2)) for crop in crops)


def test_all_places_are_drawn_and_half_of_the_images_are_flipped() -> None:
    torch.manual_seed(0)
    n = 4000
    image = torch.arange(1, 82, dtype=torch.uint8).reshape(1, 1, 9, 9).expand(n, 3, 9, 9)
    middles = augmented(image)[:, 0, 4, 4].long()  # which pixel has come to the middle: its row and column
    assert middles.unique().tolist() == list(range(1, 82))
    found = augmented(image)[:, 0]
    flipped = (found[:, 4, 3].long() - found[:, 4, 5].long()) > 0  # of a row of rising numbers
    inside = (found[:, 4, 3] > 0) & (found[:, 4, 5] > 0)
    assert abs(float(flipped[inside].double().mean()) - 0.5) < 0.04


def test_only_training_crops_and_evaluation_repeats(folder: Path) -> None:
    task: Any = load_task("cifar10-resnet", {"width": 4}, data_dir=str(folder))
    model, batch = task.model(0), task.dataset()[:8]
    with torch.no_grad():
        model.eval()
        assert task.loss(model, batch) == task.loss(model, batch)
        assert task.evaluate(model) == task.evaluate(model)
        model.train()
        assert task.loss(model, batch) != task.loss(copy.deepcopy(model), batch)
    assert [task.schedule(round(at * 1000), 1000) for at in (0, 0.49, 0.5, 0.74, 0.75, 1)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01]
    )


@pytest.mark.slow("trains")
def test_a_training_that_resumes_sees_the_same_crops(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 24 and 40 in microbatches of 8, batch normalization, and a kill in the middle."""
    options: dict[str, Any] = {"seeds": 1, "samples": 300, "between": 100, "ref_batchsize": 24, "minibatch_size": 8}
    experiment = Experiment(
        {"cifar10-resnet": {"width": 4}}, ["0:24 5:40"], ["adascale"], lr=0.01, data_dir=str(folder), **options
    )
    (cell, _) = experiment.cells()
    (whole,) = engines.run([cell], tmp_path / "whole", progress=False)
    assert whole.status == "finished"
    task: Any = load_task("cifar10-resnet", {"width": 4}, data_dir=str(folder))
    losses, kill_after = 0, 21  # microbatches: three an update, then five

    def killed(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        nonlocal losses
        losses += 1
        if losses > kill_after:
            raise KeyboardInterrupt
        return type(task).loss(task, model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(task, "loss", killed, raising=False)
        with pytest.raises(KeyboardInterrupt):
            engines.run([cell], tmp_path / "killed", progress=False, save_every=1)
    (resumed,) = engines.run([cell], tmp_path / "killed", progress=False, save_every=1)
    assert resumed.curve == whole.curve
