# Shared by the launch scripts: where the repository, the data and the checkpoints are, and flags that every run wants.
# LAUNCH replaces torchrun, for example `LAUNCH=echo` prints the command line only.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DATA=${DATA:?set DATA to the prefix of the .bin/.idx files (tools/preprocess_data.py)}
TOKENIZER=${TOKENIZER:?set TOKENIZER to a tokenizer directory or SentencePiece model}
RUN_DIR=${RUN_DIR:?set RUN_DIR to a directory on a file system that all nodes share}

model_flags() { grep -v '^#' "$ROOT/examples/models/$1.args"; }

case "$TOKENIZER" in
  *.model) TOKENIZER_FLAGS=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER") ;;
  *) TOKENIZER_FLAGS=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER") ;;
esac

COMMON_FLAGS=(
  --data-path "$DATA" --split 990,8,2 --data-cache-path "$RUN_DIR/cache" "${TOKENIZER_FLAGS[@]}" --num-workers 2
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 500 --weight-decay 0.1 --clip-grad 1.0
  --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.02 --seed 1234
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --save "$RUN_DIR/checkpoints" --load "$RUN_DIR/checkpoints" --save-interval 500
  --eval-interval 500 --eval-iters 16 --log-interval 10 --tensorboard-dir "$RUN_DIR/tensorboard" --exit-signal-handler
)
