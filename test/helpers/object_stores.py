"""A server of S3 on this machine, which tests write to, and whose connections fail as they choose."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

FAULTS = ("refused", "slow", "broken", "lost")


class Server:
    """An application of WSGI that serves S3 from memory.

    `fault` is called before each request, and returns one of `FAULTS` or "": the request is refused, answered late, not
    received, or carried out without an answer.
    """

    def __init__(self) -> None:
        self._serve: Any = DomainDispatcherApplication(create_backend_app)
        self.fault: Callable[[], str] = str

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        fault = self.fault()
        if fault == "refused":
            answer = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            length = 0 if environ["REQUEST_METHOD"] == "HEAD" else len(answer)
            start_response("403 Forbidden", [("Content-Type", "application/xml"), ("Content-Length", str(length))])
            return [answer[:length]]
        if fault == "slow":
            time.sleep(0.05)
        content = () if fault == "broken" else self._serve(environ, start_response)
        if fault in ("broken", "lost"):
            with suppress(OSError):
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        return list(content)


@contextmanager
def s3(patch: pytest.MonkeyPatch, application: Server | None = None) -> Iterator[str]:
    """Let s3:// be a server of its own, and yield the URL of an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # it logs each request, and each broken connection
    application = application or Server()
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        patch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    url = f"s3://bucket-{uuid4().hex}"  # all servers of a process have the same memory
    try:
        s3fs.S3FileSystem().mkdir(url)
        yield url
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        s3fs.S3FileSystem.clear_instance_cache()
