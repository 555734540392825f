#!/usr/bin/env bash
# Optimize a Hugging Face model for preferences (DPO), and write the result in the same format:
#   MODEL=runs/chat/model DATA=pairs.jsonl RUN_DIR=runs/dpo bash examples/finetune/dpo.sh [more flags]
# MODEL is a local directory with a tokenizer. After an interruption the same command continues.
set -euo pipefail
cd "$(dirname "$0")/../.."
MODEL=${MODEL:?set MODEL to the directory of a Hugging Face model}
DATA=${DATA:?set DATA to a .jsonl or .parquet file, or the folder of a data set}
RUN_DIR=${RUN_DIR:?set RUN_DIR to the directory of the run}
exec ${LAUNCH:-torchrun --standalone --nproc-per-node ${GPUS:-1}} pretrain_gpt.py \
  --load "$MODEL" --finetune --use-checkpoint-args --save "$RUN_DIR/checkpoints" --save-interval 200 \
  --save-hf "$RUN_DIR/model" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$MODEL" \
  --sft --dpo --dpo-beta 0.1 --data-path "$DATA" --split 98,2,0 --data-cache-path "$RUN_DIR/cache" \
  --reset-attention-mask --reset-position-ids --seq-length 2048 --calculate-per-token-loss \
  --micro-batch-size 1 --global-batch-size 32 --train-iters 1000 --eval-interval 100 --eval-iters 4 \
  --lr 5e-7 --min-lr 5e-8 --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0 --clip-grad 1.0 \
  --hidden-dropout 0 --attention-dropout 0 --bf16 --use-distributed-optimizer --log-interval 10 "$@"
