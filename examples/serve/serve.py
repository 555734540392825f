"""Serve a Hugging Face directory over HTTP: POST {"prompt": "..."} answers {"text": "..."}. One request at a time."""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Generator:
    """A model and its tokenizer."""

    def __init__(self, model: str, tokenizer: str, device: str) -> None:
        self.device = device
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(device).eval()

    def __call__(self, prompt: str, max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0) -> str:
        """What follows `prompt`; the most likely tokens at temperature 0."""
        torch.manual_seed(seed)
        inputs = torch.tensor([self.tokenizer.encode(prompt)], device=self.device)
        sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
        output = self.model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, **sampling
        )
        return self.tokenizer.decode(output[0, inputs.shape[1] :])


def make_handler(generate: Generator) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                status, answer = 200, {"text": generate(**request)}
            except (ValueError, TypeError) as error:  # not JSON, a missing prompt, an unknown option
                status, answer = 400, {"error": str(error)}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="Hugging Face directory")
    parser.add_argument("--tokenizer", help="directory of its tokenizer; default: the same")
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1: this machine only")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    generate = Generator(args.model, args.tokenizer or args.model, args.device)
    server = HTTPServer((args.host, args.port), make_handler(generate))
    print(f"serving {args.model} at http://{args.host}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
