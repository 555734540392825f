#!/usr/bin/env bash
# Run a recipe:   MODEL=... DATA=... RUN_DIR=... GPUS=8 bash examples/models/run.sh qwen3_0_6b sft [more flags]
# NAME is that of a .recipe file; README.md describes the recipes. The modes:
#   scratch   pre-train random weights. MODEL is the directory of a tokenizer, DATA the prefix of .bin/.idx files
#   continue  continue the pre-training of the Hugging Face model MODEL for 1000 iterations, on the same kind of data
#   sft       fine-tune MODEL for two epochs on conversations, e.g. DATA=chats.jsonl
#   lora      the same with LoRA adapters, which are written as files of PEFT
# GPUS is 1, 8 or 64: the layout for as many GPUs of 80 GB, those of 8 nodes with LAUNCH="srun ... torchrun ...". After an
# interruption the same command continues.
set -euo pipefail
NAME=${1:?give the name of a recipe, e.g. qwen3_0_6b}
MODE=${2:?give a mode: scratch, continue, sft or lora}
shift 2
MODEL=${MODEL:?set MODEL to the directory of a Hugging Face model or tokenizer}
DATA=${DATA:?set DATA to the training data}
RUN_DIR=${RUN_DIR:?set RUN_DIR to the directory of the run}
GPUS=${GPUS:-1}
cd "$(dirname "$0")/../.."
RECIPE=examples/models/$NAME.recipe

read_flags() {
  grep "^$1 " "$RECIPE" | cut -d ' ' -f 2- || { echo "$RECIPE has no line $1" >&2; exit 2; }
}

case "$MODE" in
  scratch) START=($(grep -v '^#' "examples/models/$NAME.args")) ;;
  continue) START=(--load "$MODEL" --finetune --use-checkpoint-args --train-iters 1000) ;;
  sft | lora) START=(--load "$MODEL" --finetune --use-checkpoint-args --sft --sft-epochs 2 --reset-attention-mask
    --reset-position-ids --calculate-per-token-loss) ;;
  *) echo "the mode $MODE is not scratch, continue, sft or lora" >&2; exit 2 ;;
esac
if [ "$MODE" = scratch ]; then
  START+=(--load "$RUN_DIR/checkpoints")
else
  START+=(--lr-decay-style cosine --lr-warmup-fraction 0.03 --save-hf "$RUN_DIR/model")
fi
# Assigned first: a missing line ends the script.
MODE_FLAGS=$(read_flags "$MODE")
LAYOUT_FLAGS=$(read_flags "gpus_$GPUS")
exec ${LAUNCH:-torchrun --standalone --nproc-per-node "$GPUS"} pretrain_gpt.py "${START[@]}" \
  $MODE_FLAGS $LAYOUT_FLAGS --save "$RUN_DIR/checkpoints" --save-interval 500 \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$MODEL" \
  --data-path "$DATA" --split 99,1,0 --data-cache-path "$RUN_DIR/cache" --eval-interval 500 --eval-iters 4 \
  --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --use-distributed-optimizer \
  --overlap-grad-reduce --overlap-param-gather --hidden-dropout 0 --attention-dropout 0 --log-interval 10 \
  --tensorboard-dir "$RUN_DIR/tensorboard" "$@"
