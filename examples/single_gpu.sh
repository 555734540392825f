#!/usr/bin/env bash
# A 1B model on one GPU:   DATA=... TOKENIZER=... RUN_DIR=... bash examples/single_gpu.sh [more flags]
set -euo pipefail
source "$(dirname "$0")/common.sh"
cd "$ROOT"
exec ${LAUNCH:-torchrun --standalone --nproc-per-node 1} pretrain_gpt.py $(model_flags llama_1b) "${COMMON_FLAGS[@]}" \
  --micro-batch-size 4 --global-batch-size 128 --train-iters 50000 "$@"
