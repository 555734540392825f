#!/usr/bin/env bash
# Convert a training checkpoint to a Hugging Face model directory, then serve it over HTTP via transformers.
#   CHECKPOINTS=run/checkpoints MODEL=model TOKENIZER=tokenizer.model bash examples/serve/convert_and_serve.sh [FLAGS]
#   curl -d '{"prompt": "def main(", "max_new_tokens": 40}' http://127.0.0.1:8000
# TOKENIZER is what training had as --tokenizer-model; the conversion writes it into MODEL. FLAGS are those of serve.py.
# transformers, vLLM and others also load MODEL. To choose its dtype or shard size run tools/checkpoint/convert.py
# yourself: its --help lists --dtype and the other options.
set -euo pipefail
CHECKPOINTS=${CHECKPOINTS:?set CHECKPOINTS to the --save directory of the run}
MODEL=${MODEL:?set MODEL to the directory to write}
PY=${PYTHON:-python}
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

[ -s "$MODEL/config.json" ] || "$PY" "$ROOT/tools/checkpoint/convert.py" --saver hf --load-dir "$CHECKPOINTS" --save-dir "$MODEL" \
  ${TOKENIZER:+--tokenizer "$TOKENIZER"}
exec "$PY" "$ROOT/examples/serve/serve.py" "$MODEL" "$@"
