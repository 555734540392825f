#!/usr/bin/env bash
# Optimize a Hugging Face model for preferences (DPO), and write the result in the same format:
#   MODEL=runs/chat/model DATA=pairs.jsonl RUN_DIR=runs/dpo bash examples/finetune/dpo.sh [more flags]
# MODEL is a local directory with a tokenizer. After an interruption the same command continues.
set -euo pipefail
exec bash "$(dirname "$0")/sft.sh" --dpo --dpo-beta 0.1 --global-batch-size 32 --lr 5e-7 --min-lr 5e-8 \
  --lr-warmup-fraction 0.1 "$@"
