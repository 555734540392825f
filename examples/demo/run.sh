#!/usr/bin/env bash
# The whole life of a small model on any laptop, under five minutes on two cores:
# corpus -> vocabulary -> .bin/.idx -> train with 2 processes -> checkpoint -> resume at another layout -> Hugging Face.
# Finished steps are kept in $DEMO (default: demo/), so an interrupted run continues where it was; `rm -rf demo` starts over.
set -euo pipefail
cd "$(dirname "$0")/../.."

DEMO=${DEMO:-demo}
PY=${VENV:-.venv}/bin/python
TRAIN_ITERS=${TRAIN_ITERS:-60}    # first leg: data parallel, distributed optimizer
TOTAL_ITERS=${TOTAL_ITERS:-90}    # second leg: tensor parallel, from the same checkpoint
mkdir -p "$DEMO"
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

step "1/6  corpus: the Python standard library"
[ -s "$DEMO/corpus.jsonl" ] || "$PY" examples/demo/build_corpus.py "$DEMO/corpus.jsonl" --megabytes 8

step "2/6  vocabulary: SentencePiece, 4096 pieces"
[ -s "$DEMO/tokenizer.model" ] || "$PY" examples/demo/train_vocabulary.py "$DEMO/corpus.jsonl" "$DEMO/tokenizer.model"

TOKENIZER=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$DEMO/tokenizer.model")

step "3/6  tokens: .bin and .idx"
[ -s "$DEMO/corpus_text_document.idx" ] || "$PY" tools/preprocess_data.py --input "$DEMO/corpus.jsonl" \
  --output-prefix "$DEMO/corpus" "${TOKENIZER[@]}" --append-eod --workers 2

# A Llama-like model of 10M parameters.
MODEL=(--num-layers 6 --hidden-size 320 --ffn-hidden-size 896 --num-attention-heads 8 --group-query-attention --num-query-groups 4
  --seq-length 256 --max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm --swiglu
  --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0)
TRAINING=(--micro-batch-size 8 --global-batch-size 16 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 5
  --lr-decay-iters "$TOTAL_ITERS" --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --seed 1234
  --data-path "$DEMO/corpus_text_document" --split 97,3,0 --data-cache-path "$DEMO/cache"
  --eval-interval 30 --eval-iters 4 --log-interval 5 --save-interval 30 --tensorboard-dir "$DEMO/tensorboard")
RUN=("$PY" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py
  "${MODEL[@]}" "${TRAINING[@]}" "${TOKENIZER[@]}" --save "$DEMO/checkpoints" --load "$DEMO/checkpoints")

step "4/6  train: 2 data-parallel ranks, distributed optimizer, iterations 1 to $TRAIN_ITERS"
reached=$(cat "$DEMO/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
if [ "$reached" -lt "$TRAIN_ITERS" ]; then
  "${RUN[@]}" --train-iters "$TOTAL_ITERS" --exit-interval "$TRAIN_ITERS" \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
fi

step "5/6  resume as 2 tensor-parallel ranks with sequence parallelism, up to iteration $TOTAL_ITERS: the loss goes on"
reached=$(cat "$DEMO/checkpoints/latest_checkpointed_iteration.txt")
if [ "$reached" -lt "$TOTAL_ITERS" ]; then
  "${RUN[@]}" --train-iters "$TOTAL_ITERS" --tensor-model-parallel-size 2 --sequence-parallel
fi

step "6/6  Hugging Face: convert, load with transformers, generate"
[ -s "$DEMO/hf/config.json" ] || "$PY" tools/checkpoint/convert.py --saver hf --load-dir "$DEMO/checkpoints" --save-dir "$DEMO/hf" \
  --tokenizer "$DEMO/tokenizer.model"
"$PY" examples/demo/generate.py "$DEMO/hf" "$DEMO/tokenizer.model"

step "done: checkpoints in $DEMO/checkpoints, model for transformers in $DEMO/hf, curves with 'tensorboard --logdir $DEMO/tensorboard'"
