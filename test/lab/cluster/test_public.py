"""Public capacity traces: the table, and downloads from a server on this machine."""

import hashlib
import http.server
import os
import re
import shutil
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import pytest

from variable_batch_size.lab import cluster
from variable_batch_size.lab.cluster import PUBLIC, CapacityTrace, public
from variable_batch_size.lab.cluster.public import PublicTrace
from variable_batch_size.lab.cluster.reading import READERS

ROOT = Path(__file__).parents[3]
SHARED = Path(os.environ.get("CAPACITY_TRACES", ROOT.parent / "shared" / "traces"))
CONTENT = b"seconds,nodes\n0,4\n60,2\n90,2\n"
TRACE = CapacityTrace([0, 60], [4, 2], end=90)
every_entry = pytest.mark.parametrize("entry", PUBLIC.values(), ids=PUBLIC)


class Server(http.server.ThreadingHTTPServer):
    """Serves CONTENT, as /nodes.csv and as the page that says that nothing else is found, and counts the requests."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = 0

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests += 1
        self.send_response(200 if self.path == "/nodes.csv" else 404)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def entry_at(address, content=CONTENT):
    sha256 = hashlib.sha256(content).hexdigest()
    return PublicTrace("ours/four", address, sha256, "csv", license="MIT", citation="none")


@pytest.fixture
def closed():
    """The address of a server that has gone."""
    with Server() as gone:
        return f"{gone.address}/nodes.csv"


def sentence(error):
    """Return the message of an error, which is one sentence in three parts."""
    message = str(error.value)
    assert "\n" not in message
    assert message.count(", got ") == message.count("; ") == 1
    return message


def test_a_trace_is_downloaded_once(server, tmp_path, monkeypatch):
    monkeypatch.setattr(public, "PUBLIC", MappingProxyType({"ours/four": entry_at(f"{server.address}/nodes.csv")}))
    assert cluster.fetch("ours/four", cache=tmp_path) == TRACE
    assert (tmp_path / "ours" / "four.csv").read_bytes() == CONTENT
    assert cluster.fetch("ours/four", cache=str(tmp_path)) == TRACE
    assert server.requests == 1


def test_by_default_files_are_kept_in_the_cache_of_the_user(server, tmp_path, monkeypatch):
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / project)
    entry = entry_at(f"{server.address}/nodes.csv")
    assert entry.download() == entry.path() == tmp_path / "variable_batch_size" / "capacity" / "ours" / "four.csv"


def test_many_can_download_at_the_same_time(server, tmp_path):
    entry = entry_at(f"{server.address}/nodes.csv")
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: entry.download(tmp_path), range(8)))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert [path.name for path in paths[0].parent.iterdir()] == ["four.csv"]


def test_a_file_that_is_another_one_is_downloaded_again(server, tmp_path):
    entry = entry_at(f"{server.address}/nodes.csv")
    path = entry.download(tmp_path)
    path.write_bytes(b"damaged")
    assert entry.download(tmp_path).read_bytes() == CONTENT
    assert server.requests == 2


def test_without_a_network_the_error_says_what_to_download_and_where_to_put_it(closed, tmp_path):
    entry = entry_at(closed)
    with pytest.raises(OSError, match=r"^ours/four must be downloaded") as error:
        entry.download(tmp_path)
    target = tmp_path / "ours" / "four.csv"
    expected = f"ours/four must be downloaded from {closed} to {target}, got ConnectionError; download it by other "
    assert sentence(error) == f"{expected}means and put it there"
    target.write_bytes(b"wrong")
    with pytest.raises(OSError, match="got ConnectionError and the file there has another SHA-256; ") as error:
        entry.download(tmp_path)
    assert sentence(error)
    target.write_bytes(CONTENT)
    assert entry.download(tmp_path) == target


def test_an_address_that_is_not_found_is_an_error(server, tmp_path):
    with pytest.raises(OSError, match=r"nodes\.txt to .*, got HTTP status 404; ") as error:
        entry_at(f"{server.address}/nodes.txt").download(tmp_path)
    assert sentence(error)
    assert error.value.__cause__.response.raw.closed


def test_a_download_with_another_hash_is_an_error_and_is_not_kept(server, tmp_path):
    entry = entry_at(f"{server.address}/nodes.csv", b"what was published")
    with pytest.raises(ValueError, match=r"^ours/four ") as error:
        entry.download(tmp_path)
    target = tmp_path / "ours" / "four.csv"
    assert sentence(error).endswith(f"{entry.sha256}, got another file; put the right one at {target}")
    assert not list(target.parent.iterdir())


def test_without_pooch_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'variable_batch_size[cluster]'")):
        cluster.fetch("parcae/bert-hl", cache=tmp_path)


@every_entry
def test_an_entry_of_the_table_is_well_formed(entry):
    assert PUBLIC[entry.name] is entry
    assert re.fullmatch(r"[a-z]+/[a-z0-9-]+", entry.name)
    assert re.fullmatch(
        r"https://raw\.githubusercontent\.com/[\w-]+/[\w-]+/[0-9a-f]{40}/[\w/.-]+\.(json|csv|txt)", entry.address
    )
    assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
    assert entry.format in READERS
    assert entry.license
    assert re.search(r" et al\. 20\d\d, ", entry.citation)


@every_entry
def test_a_file_put_by_hand_is_read_without_a_download(entry, tmp_path):
    files = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in SHARED.glob("*.*")}
    if not files:
        pytest.skip(f"needs the public files, in {SHARED}")
    target = entry.path(tmp_path)
    target.parent.mkdir(parents=True)
    shutil.copy(files[entry.sha256], target)
    fetched = cluster.fetch(entry.name, cache=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fetched == cluster.read(target)  # recognized, too
