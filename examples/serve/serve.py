"""Serve a Hugging Face directory over HTTP: POST {"prompt": "..."} answers {"text": "..."}.

An example for one machine: requests are answered one after the other, by whoever can reach the
port. Idle clients are cut off, bodies and answers are bounded, and a name in `Host` that is not
ours is refused, so that no web page in a browser on this machine can ask. There is no
authentication: what faces a network belongs behind a proxy that has it.
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
SECONDS = 30  # that a client may stay silent


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
        """What follows `prompt`; the most likely tokens at temperature 0."""
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


def checked(body: bytes) -> dict[str, Any]:
    """The arguments of a request. Raises ValueError that says what is wrong with them."""
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
            raise ValueError(f"known are prompt, {', '.join(limits)}")
        kind, low, high = limits[name]
        if type(value) not in (int, kind) or not low <= value <= high:
            raise ValueError(f"{name} must be from {low} to {high}")
    return request


class Server(ThreadingHTTPServer):
    """A thread per connection, of which there are not too many."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], generate: Generator, hosts: list[str]) -> None:
        super().__init__(address, Handler)
        self.generate = generate
        self.hosts = {name.lower() for name in hosts}
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """A client that went away is no news."""


class Handler(BaseHTTPRequestHandler):
    timeout = SECONDS  # of every read and write
    server: Server

    def do_POST(self) -> None:
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        length = self.headers.get("Content-Length", "")
        if name.lower() not in self.server.hosts:
            self._answer(403, {"error": "another Host is asked for"})
        elif not length.isascii() or not length.isdigit() or int(length[:10]) > MAX_BODY:
            self._answer(413, {"error": f"give Content-Length, at most {MAX_BODY}"})
        else:
            try:
                arguments = checked(self.rfile.read(int(length)))
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
    parser.add_argument("--tokenizer", help="directory of its tokenizer; default: the same")
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1: this machine only")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument(
        "--allowed-host", action="append", default=[], help="another name by which clients may ask"
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
