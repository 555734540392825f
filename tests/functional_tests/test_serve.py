"""examples/serve: rejected requests, and idle clients that do not block others."""

import importlib.util
import json
import socket
import sys
import threading

import pytest

from tests import ROOT

spec = importlib.util.spec_from_file_location("serve_example", ROOT / "examples/serve/serve.py")
assert spec is not None
assert spec.loader is not None
serve = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = serve
spec.loader.exec_module(serve)


@pytest.fixture
def server():
    """Start a server that responds with the prompt; the tests do not need a model."""
    server = serve.Server(("127.0.0.1", 0), lambda prompt, **options: prompt, ["127.0.0.1"])
    poll_seconds = 0.01  # `shutdown` waits for the end of a poll
    thread = threading.Thread(target=server.serve_forever, args=(poll_seconds,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(
    server, body: bytes, host: str = "127.0.0.1", length: str | None = None
) -> tuple[int, dict]:
    with socket.create_connection(server.server_address) as client:
        length = str(len(body)) if length is None else length
        client.sendall(
            f"POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n".encode() + body
        )
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


def test_idle_client_does_not_block_others(server) -> None:
    with socket.create_connection(server.server_address):
        assert ask(server, b'{"prompt": "x"}') == (200, {"text": "x"})


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"prompt": 1}', b'{"prompt": ""}', b'{"prompt": "x", "seed": '
                                                             b'-1}', b'{"prompt": "x", "y": 1}',
     b'{"prompt": "x", "max_new_tokens": 1e9}', b'{"prompt": "x", "max_new_tokens": 1000000}',
     b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": '
                                             b'true}', b"[" * 100_000],
)  # fmt: skip
def test_bad_requests_get_an_explanation(body: bytes, server) -> None:
    status, answer = ask(server, body)
    assert status == 400
    assert answer["error"]
    assert "0x" not in answer["error"]


def test_request_size_and_host_are_limited(server) -> None:
    assert ask(server, b"", length="99999999999")[0] == 413
    assert ask(server, b"", length="-1")[0] == 413
    assert ask(server, b'{"prompt": "x"}', host="evil.example")[0] == 403
    assert ask(server, b'{"prompt": "x"}', host=f"127.0.0.1:{server.server_port}")[0] == 200
