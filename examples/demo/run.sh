#!/usr/bin/env bash
# The whole life of a small model on any laptop, three to four minutes on two cores:
# corpus -> vocabulary -> .bin/.idx -> train with 2 processes -> checkpoint -> resume at another layout -> Hugging Face
# -> a page with the whole run as one curve.
# Finished steps are kept in $DEMO (default: demo/), so an interrupted run continues where it was; `rm -rf demo` starts over.
set -euo pipefail
cd "$(dirname "$0")/../.."

DEMO=${DEMO:-demo}
PY=${VENV:-.venv}/bin/python
TRAIN_ITERS=${TRAIN_ITERS:-160}   # first leg: data parallel, distributed optimizer
TOTAL_ITERS=${TOTAL_ITERS:-240}   # second leg: tensor parallel, from the same checkpoint
mkdir -p "$DEMO"
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

step "1/7  corpus: the docstrings of Python and of what is installed"
[ -s "$DEMO/corpus.jsonl" ] || "$PY" examples/demo/build_corpus.py "$DEMO/corpus.jsonl" --megabytes 3

step "2/7  vocabulary: SentencePiece, 1024 pieces"
[ -s "$DEMO/tokenizer.model" ] || "$PY" examples/demo/train_vocabulary.py "$DEMO/corpus.jsonl" "$DEMO/tokenizer.model" --vocab-size 1024

TOKENIZER=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$DEMO/tokenizer.model")

step "3/7  tokens: .bin and .idx"
[ -s "$DEMO/corpus_text_document.idx" ] || "$PY" tools/preprocess_data.py --input "$DEMO/corpus.jsonl" \
  --output-prefix "$DEMO/corpus" "${TOKENIZER[@]}" --append-eod --workers 2

# A Llama-like model of 2.0M parameters.
MODEL=(--num-layers 4 --hidden-size 192 --ffn-hidden-size 512 --num-attention-heads 8 --group-query-attention --num-query-groups 4
  --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope --normalization RMSNorm --swiglu
  --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0)
TRAINING=(--micro-batch-size 16 --global-batch-size 32 --lr 4e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 20
  --lr-decay-iters "$TOTAL_ITERS" --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --seed 1234
  --data-path "$DEMO/corpus_text_document" --split 97,3,0 --data-cache-path "$DEMO/cache"
  --eval-interval 40 --eval-iters 4 --log-interval 10 --save-interval 80 --async-save --tensorboard-dir "$DEMO/tensorboard")
RUN=("$PY" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py
  "${MODEL[@]}" "${TRAINING[@]}" "${TOKENIZER[@]}" --save "$DEMO/checkpoints" --load "$DEMO/checkpoints")

step "4/7  train: 2 data-parallel ranks, distributed optimizer, iterations 1 to $TRAIN_ITERS"
reached=$(cat "$DEMO/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
if [ "$reached" -lt "$TRAIN_ITERS" ]; then
  "${RUN[@]}" --train-iters "$TOTAL_ITERS" --exit-interval "$TRAIN_ITERS" \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
fi

step "5/7  resume as 2 tensor-parallel ranks with sequence parallelism, up to iteration $TOTAL_ITERS: the loss goes on"
reached=$(cat "$DEMO/checkpoints/latest_checkpointed_iteration.txt")
if [ "$reached" -lt "$TOTAL_ITERS" ]; then
  "${RUN[@]}" --train-iters "$TOTAL_ITERS" --tensor-model-parallel-size 2 --sequence-parallel
fi

step "6/7  Hugging Face: convert, load with transformers, generate"
[ -s "$DEMO/hf/config.json" ] || "$PY" tools/checkpoint/convert.py --saver hf --load-dir "$DEMO/checkpoints" --save-dir "$DEMO/hf" \
  --tokenizer "$DEMO/tokenizer.model"
"$PY" examples/demo/generate.py "$DEMO/hf" "$DEMO/tokenizer.model"

step "7/7  report: both starts as one curve, saves, checkpoints"
"$PY" tools/report.py "$DEMO/checkpoints" --output "$DEMO/report.html"

step "done: open $DEMO/report.html; checkpoints in $DEMO/checkpoints, model for transformers in $DEMO/hf"
