# Shared by the launch scripts: where the repository, the data and the checkpoints are, and flags that every run wants.
# LAUNCH replaces torchrun, for example `LAUNCH=echo` prints the command line only.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DATA=${DATA:?set DATA to the prefix of the .bin/.idx files (tools/preprocess_data.py)}
TOKENIZER=${TOKENIZER:?set TOKENIZER to a tokenizer directory or SentencePiece model}
RUN_DIR=${RUN_DIR:?set RUN_DIR to a directory on a file system that all nodes share}

# LOCAL_DISK, if set, is a directory on a disk of every node: checkpoints every 50 iterations there, with a copy on
# another node. In Megatron-LM's words these are local, non-persistent checkpoints.
LOCAL_FLAGS=(${LOCAL_DISK:+--non-persistent-ckpt-type local --non-persistent-save-interval 50
  --non-persistent-local-ckpt-dir "$LOCAL_DISK" --replication --async-save --goodput})
# With it any node may be lost and replaced under torchrun's c10d rendezvous: otherwise the ranks would meet in the store
# of the first node's agent, which is lost with that node, and the others end with DistStoreError after a minute.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

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
  "${LOCAL_FLAGS[@]}"
)
