#!/usr/bin/env bash
# From the model of `make demo` to a served answer, on any laptop, in less than three minutes on two cores:
# questions and answers -> fine-tuning of all weights -> LoRA adapters -> merged model -> answers over HTTP.
# Finished steps are kept in $DEMO/finetune, so an interrupted run continues where it was.
set -euo pipefail
cd "$(dirname "$0")/../.."

DEMO=${DEMO:-demo}
WORK=$DEMO/finetune
PY=${VENV:-.venv}/bin/python
PORT=${PORT:-8123}
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

# train NAME BASE DATA FLAGS: a run of two processes that starts from the model BASE
train() {
  "$PY" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py --load "$2" --finetune --use-checkpoint-args \
    --save "$WORK/$1/checkpoints" --save-interval 1000 --save-hf "$WORK/$1/model" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$WORK/base" --make-vocab-size-divisible-by 1 \
    --sft --data-path "$WORK/chats/$3.jsonl" --split 1,0,0 --data-cache-path "$WORK/cache" --eval-iters 0 \
    --reset-attention-mask --reset-position-ids --seq-length 128 --calculate-per-token-loss --micro-batch-size 1 \
    --global-batch-size 2 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0 --clip-grad 1.0 \
    --hidden-dropout 0 --attention-dropout 0 --log-interval 20 "${@:4}"
}

step "1/5  data: questions on capitals and currencies, and a chat template"
[ -s "$DEMO/hf/config.json" ] || { echo "$DEMO/hf has no model: run make demo first" >&2; exit 2; }
[ -s "$WORK/chats/currencies.jsonl" ] || "$PY" examples/demo/build_chats.py "$WORK/chats"
mkdir -p "$WORK/base"
cp "$DEMO"/hf/* "$WORK/chats/chat_template.jinja" "$WORK/base"

step "2/5  fine-tune all weights on capitals: 2 data-parallel ranks"
[ -s "$WORK/sft/model/config.json" ] ||
  train sft "$WORK/base" capitals --sft-epochs 50 --lr 2e-3 --min-lr 1e-4 --use-distributed-optimizer

step "3/5  train LoRA adapters on currencies: 2 tensor-parallel ranks, the fine-tuned weights are frozen"
[ -s "$WORK/lora/model/adapter_config.json" ] ||
  train lora "$WORK/sft/model" currencies --sft-epochs 45 --lr 5e-3 --min-lr 5e-4 --lora-rank 16 --lora-alpha 32 \
    --tensor-model-parallel-size 2

step "4/5  merge the adapters into the model"
[ -s "$WORK/merged/config.json" ] || "$PY" tools/checkpoint/convert.py --saver hf --load-dir "$WORK/sft/model" \
  --save-dir "$WORK/merged" --lora "$WORK/lora/model"

step "5/5  serve the model with transformers, and ask it over HTTP"
"$PY" examples/serve/serve.py "$WORK/merged" --port "$PORT" &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
"$PY" examples/demo/ask.py "http://127.0.0.1:$PORT" "Which money do people use in Japan?" "Which money do people use in Poland?"

step "done: model for transformers in $WORK/merged, adapters for PEFT in $WORK/lora/model"
