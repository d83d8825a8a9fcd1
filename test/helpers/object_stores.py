"""A server of S3 on this machine, which tests write to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from moto.server import ThreadedMotoServer

import variable_batch_size.checkpoint.object_store as where

BUCKET = "bucket"


@contextmanager
def s3(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let s3:// be a server of its own, and yield the URL of an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        patch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    try:
        where.path_of(f"s3://{BUCKET}").mkdir()
        yield f"s3://{BUCKET}"
    finally:
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()
