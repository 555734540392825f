#!/usr/bin/env bash
# Train LoRA adapters of a Hugging Face model on conversations, and write them as files of PEFT:
#   MODEL=Qwen3-0.6B DATA=chats.jsonl RUN_DIR=runs/lora bash examples/finetune/lora.sh [more flags]
# MODEL is a local directory with a tokenizer. After an interruption the same command continues.
set -euo pipefail
exec bash "$(dirname "$0")/sft.sh" --save-hf "${RUN_DIR:?set RUN_DIR to the directory of the run}/adapter" \
  --lora-rank 16 --lora-alpha 32 --lr 2e-4 --min-lr 2e-5 "$@"
