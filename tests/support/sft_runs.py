"""Fine-tuning runs of the golden model on the golden conversations, for tests and interop."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests import ROOT

GOLDEN = ROOT / "tests/golden/sft"
MODEL = ROOT / "tests/golden/hf/llama"
STEPS = 6
GLOBAL_BATCH = 2
SEQ_LENGTH = 96
PACKED = "--reset-attention-mask --reset-position-ids"
PREFERENCES = f"{PACKED} --dpo"
CASES = {  # name -> (data, packing)
    "conversations": ("conversations.jsonl", ""),
    "packed_conversations": ("conversations.jsonl", PACKED),
    "packed_pairs": ("pairs.jsonl", PACKED),
    "preferences": ("preferences.jsonl", PREFERENCES),
}
# The optimizer of `trl_sft_train.py`
TRAINING = (
    f"--load {MODEL} --finetune --num-layers 2 --hidden-size 64 --ffn-hidden-size 112 "
    "--num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    f"--untie-embeddings-and-output-weights --max-position-embeddings {SEQ_LENGTH} "
    f"--sft --split 1,0,0 --seq-length {SEQ_LENGTH} --calculate-per-token-loss "
    f"--micro-batch-size 1 --global-batch-size {GLOBAL_BATCH} --train-iters {STEPS} "
    "--lr 5e-3 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 "
    "--hidden-dropout 0 --attention-dropout 0 --make-vocab-size-divisible-by 1 "
    "--num-workers 0 --num-threads 1 --log-interval 1 --eval-iters 0 "
)


def write_tokenizer(directory: Path, template: str | None = "markers") -> Path:
    """Write the tokenizer of the golden model with one of the golden chat templates."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, directory)
    if template is not None:
        shutil.copy(GOLDEN / f"{template}.jinja", directory / "chat_template.jinja")
    return directory


def make_flags(tokenizer: Path, work: Path, data: str | Path, packing: str = PACKED) -> str:
    """Return the command line of a run, whose caches are in `work`."""
    return (
        f"{TRAINING} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer} "
        f"--data-path {GOLDEN / data} --data-cache-path {work / 'cache'} {packing} "
    )
