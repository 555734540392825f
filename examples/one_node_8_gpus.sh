#!/usr/bin/env bash
# An 8B model on one node with 8 GPUs: tensor 2 (with sequence parallelism) x pipeline 2 x data 2.
#   DATA=... TOKENIZER=... RUN_DIR=... bash examples/one_node_8_gpus.sh [more flags]
set -euo pipefail
source "$(dirname "$0")/common.sh"
cd "$ROOT"
exec ${LAUNCH:-torchrun --standalone --nproc-per-node 8} pretrain_gpt.py $(model_flags llama_8b) "${COMMON_FLAGS[@]}" \
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 \
  --micro-batch-size 1 --global-batch-size 256 --train-iters 100000 \
  --recompute-granularity full --recompute-method block --recompute-num-layers 4 "$@"
