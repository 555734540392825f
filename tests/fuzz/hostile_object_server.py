"""An S3 server on 127.0.0.1 that answers honestly, or with a fault chosen by the name of the
bucket.
"""

from __future__ import annotations

import http.server
import random
import threading
import urllib.parse
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

SIZES = ("0", "1", "-1", "x", "", str(2**31), str(2**40), str(2**62), str(2**64), "9" * 40)
STATUSES = (200, 204, 206, 301, 304, 400, 401, 403, 404, 409, 412, 416, 429, 500, 503)
NAMES = ("../../x", "a\nb\x1b[31m", "/dev/zero", "", "x" * 2000, "iter_99999999999999999999")
BODY_FAULTS = (
    "truncate",
    "extend",
    "flip",
    "empty",
    "endless",
    "wrong size",
    "wrong range",
    "terabyte",
)
LIST_FAULTS = ("endless", "same page", "empty pages", "sizes", "names", "cut", "entities", "deep")


class HostileServer:
    """Serves the files under `root` from any bucket. Bucket `honest` has no faults."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fault: str | None = None  # if set, the fault of every request
        self.redirected = 0  # requests that followed a redirect
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()

        class Handler(_Handler):
            server_state = self

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> HostileServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def choose_fault(self, bucket: str, request: str, is_list: bool) -> tuple[str, random.Random]:
        """Return the fault of this request, and a generator for its details."""
        with self._lock:
            self._requests[bucket + request] += 1
            count = self._requests[bucket + request]
        rng = random.Random(f"{bucket} {request} {count}")
        chance = random.Random(bucket).choice((0.05, 0.2, 0.5, 1.0))
        if self.fault is not None:
            return self.fault, rng
        if bucket == "honest" or rng.random() > chance:
            return "", rng
        common = ("status", "redirect", "drop", "garbage")
        return rng.choice(common + (LIST_FAULTS if is_list else BODY_FAULTS)), rng


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers of one connection. Path-style requests: /bucket/key."""

    server_state: HostileServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # the body follows the headers without waiting for the client

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        try:
            self._answer()
        except OSError:  # the client has closed the connection
            self.close_connection = True

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _, query = self.path.partition("?")
        bucket, _, key = urllib.parse.unquote(path).strip("/").partition("/")
        if bucket == "elsewhere":
            self.server_state.redirected += 1
        options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        is_list = "list-type" in options
        fault, rng = self.server_state.choose_fault(bucket, f"{self.command} {self.path}", is_list)
        if fault == "status":
            self._send(rng.choice(STATUSES), b"<Error><Code>Fault</Code></Error>")
        elif fault == "redirect":
            target = rng.choice(
                (f"{self.server_state.url}/elsewhere/{key}", self.path, "file:///x")
            )
            self._send(rng.choice((301, 302, 303, 307, 308)), b"", {"Location": target})
        elif fault == "drop":
            self.close_connection = True
        elif fault == "garbage":
            self.wfile.write(rng.randbytes(rng.choice((1, 100, 100_000))))
            self.close_connection = True
        elif is_list:
            self._list(options, fault, rng)
        elif self.command in ("GET", "HEAD"):
            self._send_object(key, fault, rng)
        else:
            self._send(200, b"", {"ETag": '"0"'})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Length": str(len(body))} | (headers or {})
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_object(self, key: str, fault: str, rng: random.Random) -> None:
        path = self.server_state.root / key
        if not path.is_file():
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        content = path.read_bytes()
        headers = {"ETag": '"1"', "Last-Modified": "Sun, 01 Nov 2026 00:00:00 GMT"}
        status = 200
        total = len(content)
        if "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            stop = min(int(last or total - 1), total - 1)
            headers["Content-Range"] = f"bytes {first}-{stop}/{total}"
            content = content[int(first) : stop + 1]
            status = 206

        headers["Content-Length"] = str(len(content))
        if fault == "truncate":
            content = content[: rng.randrange(len(content) + 1)]
            self.close_connection = True
        elif fault == "extend":
            content += bytes(rng.choice((1, 1000)))
            if rng.random() < 0.5:
                headers["Content-Length"] = str(len(content))
            self.close_connection = True
        elif fault == "flip" and content:
            changed = bytearray(content)
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            content = bytes(changed)
        elif fault == "empty":
            content = b""
            headers["Content-Length"] = "0"
        elif fault == "terabyte":
            headers["Content-Length"] = str(1 << 40)
            self.close_connection = True
        elif fault == "wrong size":
            headers["Content-Length"] = rng.choice(SIZES)
            self.close_connection = True
        elif fault == "wrong range":
            headers["Content-Range"] = rng.choice(
                ("bytes 0-0/1", "bytes */x", f"bytes 0-{2**62}/9")
            )
        elif fault == "endless":
            self._send_endless(status, headers)
            return

        self._send(status, content, headers)

    def _send_endless(self, status: int, headers: dict[str, str]) -> None:
        """Send chunks until the client closes the connection, at most 2 GiB."""
        del headers["Content-Length"]
        self.send_response(status)
        for name, value in (headers | {"Transfer-Encoding": "chunked"}).items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        if self.command == "HEAD":
            return
        chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
        for _ in range(2048):
            self.wfile.write(chunk)

    def _list(self, options: dict[str, str], fault: str, rng: random.Random) -> None:
        prefix = options.get("prefix", "")
        root = self.server_state.root
        files = {
            str(path.relative_to(root)): path.stat().st_size
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }
        files = {key: size for key, size in files.items() if key.startswith(prefix)}
        folders: set[str] = set()
        if "delimiter" in options:
            below = {key: key[len(prefix) :].partition("/") for key in files}
            folders = {prefix + first + "/" for first, slash, _ in below.values() if slash}
            files = {key: size for key, size in files.items() if not below[key][1]}

        sizes = {key: str(size) for key, size in files.items()}
        if fault == "sizes":
            sizes = {key: rng.choice((*SIZES, size)) for key, size in sizes.items()}
        elif fault == "names":
            sizes |= dict.fromkeys((prefix + name for name in NAMES), "1")
            folders |= {prefix + name + "/" for name in NAMES}
        elif fault in ("empty pages", "deep"):
            sizes = {}
            folders = set()

        more = ""
        if fault in ("endless", "same page", "empty pages"):
            token = "same" if fault == "same page" else str(rng.random())
            more = f"<NextContinuationToken>{token}</NextContinuationToken>"
        body = self._format_page(sizes, folders, more, fault)
        self._send(200, body[: len(body) // 2] if fault == "cut" else body)

    def _format_page(
        self, sizes: dict[str, str], folders: set[str], more: str, fault: str
    ) -> bytes:
        when = "<LastModified>2026-11-01T00:00:00.000Z</LastModified>"
        contents = "".join(
            f'<Contents><Key>{escape(key)}</Key>{when}<ETag>"1"</ETag><Size>{size}</Size></Contents>'
            for key, size in sizes.items()
        )
        contents += "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            for name in sorted(folders)
        )
        if fault == "deep":
            contents = "<a>" * 100_000
        head = '<?xml version="1.0"?>'
        if fault == "entities":
            head += '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
            contents = contents.replace("<Key>", "<Key>&b;")
        truncated = str(bool(more)).lower()
        page = f"<IsTruncated>{truncated}</IsTruncated>{more}{contents}"
        return f"{head}<ListBucketResult><Name>b</Name>{page}</ListBucketResult>".encode()
