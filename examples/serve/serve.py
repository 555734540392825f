"""Serve a Hugging Face model directory over HTTP: POST {"prompt": "..."} returns {"text": "..."}.

An example for one machine. Requests are handled one at a time. Idle clients are disconnected, and
the sizes of requests and answers are bounded. Requests with an unknown `Host` are rejected, so that
web pages in a browser on this machine cannot send any. There is no authentication: use a proxy
with authentication to serve a network.
"""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_BODY = 1 << 20  # bytes
MAX_NEW_TOKENS = 4096
MAX_CONNECTIONS = 32
IDLE_SECONDS = 30  # after which a client is disconnected


class Generator:
    """A model and its tokenizer."""

    def __init__(self, model: str, tokenizer: str, device: str) -> None:
        self.device = device
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto", trust_remote_code=False)
        self.model = loaded.to(device).eval()
        self._one_at_a_time = threading.Lock()

    def __call__(
        self, prompt: str, max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0
    ) -> str:
        """Return the continuation of `prompt`; greedy at temperature 0."""
        inputs = torch.tensor([self.tokenizer.encode(prompt)], device=self.device)
        sampling: dict[str, Any] = (
            {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
        )
        with self._one_at_a_time:
            torch.manual_seed(seed)
            output = self.model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=max_new_tokens,
                **sampling,
            )
        return self.tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)


def check_request(body: bytes) -> dict[str, Any]:
    """Return the arguments of a request. Raises ValueError that explains invalid ones."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the body is not JSON") from None
    limits = {
        "max_new_tokens": (int, 1, MAX_NEW_TOKENS),
        "temperature": (float, 0, 100),
        "seed": (int, 0, 2**63 - 1),
    }
    if (
        not isinstance(request, dict)
        or not isinstance(request.get("prompt"), str)
        or not request["prompt"]
    ):
        raise ValueError('give an object with a "prompt"')
    for name, value in request.items():
        if name == "prompt":
            continue
        if name not in limits:
            raise ValueError(f"{name} is not one of prompt, {', '.join(limits)}")
        kind, low, high = limits[name]
        if type(value) not in (int, kind) or not low <= value <= high:
            raise ValueError(f"{name} must be from {low} to {high}")
    return request


class Server(ThreadingHTTPServer):
    """HTTP server with one thread per connection, for at most `MAX_CONNECTIONS`."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], generate: Generator, hosts: list[str]) -> None:
        super().__init__(address, Handler)
        self.generate = generate
        self.hosts = {name.lower() for name in hosts}
        self._free_connections = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free_connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_connections.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """Ignore clients that disconnect."""


class Handler(BaseHTTPRequestHandler):
    timeout = IDLE_SECONDS  # of every read and write
    server: Server

    def do_POST(self) -> None:
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        length = self.headers.get("Content-Length", "")
        if name.lower() not in self.server.hosts:
            self._answer(403, {"error": "unknown Host"})
        elif not length.isascii() or not length.isdigit() or int(length[:10]) > MAX_BODY:
            self._answer(413, {"error": f"give Content-Length, at most {MAX_BODY}"})
        else:
            try:
                arguments = check_request(self.rfile.read(int(length)))
            except ValueError as error:
                self._answer(400, {"error": str(error)})
                return
            self._answer(200, {"text": self.server.generate(**arguments)})

    def _answer(self, status: int, answer: dict[str, str]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="Hugging Face directory")
    parser.add_argument("--tokenizer", help="directory of the tokenizer (default: the model)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine only)",
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free one")
    parser.add_argument(
        "--allowed-host", action="append", default=[], help="additional Host name to accept"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    generate = Generator(args.model, args.tokenizer or args.model, args.device)
    server = Server(
        (args.host, args.port), generate, [args.host, "127.0.0.1", "localhost", *args.allowed_host]
    )
    print(f"serving {args.model} at http://{args.host}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
