#!/usr/bin/env bash
# From a training checkpoint to an HTTP server: convert to Hugging Face's form, then generate with transformers.
#   CHECKPOINTS=run/checkpoints MODEL=model TOKENIZER=... bash examples/serve/convert_and_serve.sh [flags of serve.py]
#   curl -d '{"prompt": "def main(", "max_new_tokens": 40}' http://127.0.0.1:8000
# MODEL is also what vLLM, transformers and others load; --target-dtype bf16 and others: tools/checkpoint/convert.py --help.
set -euo pipefail
CHECKPOINTS=${CHECKPOINTS:?set CHECKPOINTS to what --save was}
MODEL=${MODEL:?set MODEL to the directory to write}
PY=${PYTHON:-python}
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

[ -s "$MODEL/config.json" ] || "$PY" "$ROOT/tools/checkpoint/convert.py" --saver hf --load-dir "$CHECKPOINTS" --save-dir "$MODEL" \
  ${TOKENIZER:+--tokenizer "$TOKENIZER"}
exec "$PY" "$ROOT/examples/serve/serve.py" "$MODEL" --tokenizer "${TOKENIZER:-$MODEL}" "$@"
