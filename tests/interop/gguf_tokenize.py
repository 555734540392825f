"""llama.cpp splits texts as the tokenizers that GGUF files were written from.

    python tests/interop/gguf_tokenize.py MODEL TEXTS

TEXTS is a JSON file of pairs: a text and its tokens. Runs in an environment with xllamacpp.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

import xllamacpp


def main() -> None:
    model, path = map(Path, sys.argv[1:])
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.port = 0  # any
    params.n_ctx = 64
    params.n_parallel = 1
    params.warmup = False
    server = xllamacpp.Server(params)
    pairs = json.loads(path.read_text())
    for text, expected in pairs:
        content = {"content": text, "add_special": True, "parse_special": True}
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize",
            json.dumps(content).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            tokens = json.loads(response.read())["tokens"]
        assert tokens == expected, (model.parent.name, text, tokens, expected)
    print(f"{model.parent.name}: llama.cpp has the tokens of {len(pairs)} texts", flush=True)
    os._exit(0)  # threads of the server


if __name__ == "__main__":
    main()
