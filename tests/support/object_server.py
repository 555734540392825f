"""A local S3 server (moto: real HTTP, exact conditional requests) for tests of object storage."""

import atexit
import contextlib
import functools
import http.client
import http.server
import os
import subprocess
import sys
import threading
import urllib.request
from unittest import mock

# The S3 part of moto. Its own server closes every connection, and looks for the service of a
# request in 200 directories: 7 ms per request instead of 2. Objects are read without its
# dispatcher, in 0.3 ms; all that changes, lists or compares them is moto's.
SERVER = """
import io
import re
import sys
import threading
from urllib.parse import unquote
from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from moto.s3.models import FakeKey, s3_backends
from werkzeug.serving import make_server
from werkzeug.test import run_wsgi_app

class Handler(MotoRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def run_wsgi(self):
        if not self.read_object():
            self.run_moto()

    def read_object(self):
        \"\"\"Answer a plain request for an object or a range of it; return whether it was one.\"\"\"
        if self.command not in ("GET", "HEAD") or "?" in self.path:
            return False
        if any(name.lower().startswith("if-") for name in self.headers):
            return False
        _, bucket, *key = unquote(self.path).split("/", 2)
        backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        if bucket not in backend.buckets:
            return False
        stored = backend.get_object(bucket, "/".join(key))
        if not isinstance(stored, FakeKey):
            return False
        content = stored.value
        size = len(content)
        requested = self.headers.get("Range", f"bytes=0-{size - 1}")
        limits = re.fullmatch(r"bytes=(\\d+)-(\\d+)", requested)
        if limits is None or int(limits[1]) >= size or int(limits[2]) < int(limits[1]):
            return False
        start = int(limits[1])
        end = min(int(limits[2]) + 1, size)
        is_range = "Range" in self.headers
        self.send_response(206 if is_range else 200)
        if is_range:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.send_header("Last-Modified", stored.last_modified_RFC1123)
        self.send_header("ETag", stored.etag)
        self.send_header("Content-Length", str(end - start))
        self._headers_buffer.append(b"\\r\\n")
        if self.command == "GET":
            self._headers_buffer.append(content[start:end])
        self.flush_headers()
        return True

    def run_moto(self):
        environ = self.make_environ()
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        environ["wsgi.input"] = io.BytesIO(content)
        chunks, status, headers = run_wsgi_app(self.server.app, environ, buffered=True)
        body = b"".join(chunks)
        code, _, reason = status.partition(" ")
        self.send_response(int(code), reason)
        for name, value in headers:
            if self.command == "HEAD" or name.lower() != "content-length":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
            self._headers_buffer.append(b"\\r\\n" + body)  # one system call for both
            self.flush_headers()
        else:
            self.end_headers()

    def log_request(self, *_):
        pass

server = make_server("127.0.0.1", 0, create_backend_app("s3"), True, request_handler=Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.port, flush=True)
for _ in sys.stdin:
    s3_backends.reset()
    print("empty", flush=True)
"""


@functools.cache
def start_server() -> tuple[subprocess.Popen[str], str]:
    """Start the server of this process, which ends with it; return it and its address."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(server.kill)
    assert server.stdout is not None
    return server, f"http://127.0.0.1:{int(server.stdout.readline())}"


@contextlib.contextmanager
def object_server(bucket="bucket"):
    """Yield the address of a server of which `s3://bucket` is an empty bucket.

    The environment names the server and its credentials.
    """
    server, url = start_server()
    server.stdin.write("reset\n")
    server.stdin.flush()
    assert server.stdout.readline() == "empty\n"
    urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT")).close()
    keys = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
    with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": url, **keys}):
        yield url


class FaultyProxy:
    """Proxy to `url` that injects the fault named by `fault(method, path, headers)`.

    "refuse": 503 without forwarding; "drop": the request is forwarded, its response lost; "strip":
    conditions are removed, as by a store that ignores them; "quotes": If-Match is compared with the
    tag without quotes, as Ceph's gateway does.
    """

    def __init__(self, url, fault):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # The body follows the headers without waiting for the client.
            disable_nagle_algorithm = True

            def log_message(self, *_):
                pass

            def forward(self):
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = dict(self.headers)
                fault_type = fault(self.command, self.path, headers)
                if fault_type == "refuse":
                    self.send_response(503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                if fault_type == "quotes" and any(
                    name.lower() == "if-match" and value.startswith('"')
                    for name, value in headers.items()
                ):
                    self.send_response(412)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                if fault_type == "strip":
                    headers = {
                        name: value
                        for name, value in headers.items()
                        if not name.lower().startswith("if-")
                    }
                connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
                connection.request(self.command, self.path, content, headers)
                answer = connection.getresponse()
                body = answer.read()
                connection.close()
                if fault_type == "drop":
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in (
                        "transfer-encoding",
                        "connection",
                        "content-length",
                        "server",
                        "date",
                    ):
                        self.send_header(name, value)
                if self.command != "HEAD":
                    self.send_header("Content-Length", str(len(body)))
                else:
                    self.send_header("Content-Length", answer.getheader("Content-Length") or "0")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        # `shutdown` waits for the end of a poll.
        poll_seconds = 0.01
        threading.Thread(
            target=self._server.serve_forever, args=(poll_seconds,), daemon=True
        ).start()
        self._environment = mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": self.url})
        self._environment.start()
        return self

    def __exit__(self, *_):
        self._environment.stop()
        self._server.shutdown()
        self._server.server_close()
