"""Let Megatron-DeepSpeed train and save, and continue its runs with our model.

    python -m tests.interop.megatron_deepspeed_check PYTHON SOURCE DIRECTORY

PYTHON is that of an environment with deepspeed, SOURCE a checkout of Megatron-DeepSpeed.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

from tests.unit_tests.conversion.deepspeed import test_engine

HERE = Path(__file__).parent
CONVERT = HERE.parents[1] / "tools/checkpoint/convert.py"
DATA = HERE.parents[1] / "tests/golden/megatron_lm/data/pysrc_a_text_document"
FLAGS = shlex.split(
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 "
    "--min-lr 1e-3 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 "
    "--init-method-std 0.1 --hidden-dropout 0 --attention-dropout 0 "
    "--tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 1 "
    f"--data-impl mmap --data-path {DATA} --split 100,0,0 --num-workers 0 --eval-iters 0 "
    "--eval-interval 1000 --log-interval 1 --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --no-gradient-accumulation-fusion "
    "--deepspeed --distributed-backend gloo --zero-stage 1"
)
GATED = (
    "--ffn-hidden-size 24 --swiglu --normalization rmsnorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
# name -> processes, flags. Positions are learned: with rotary embeddings, this version cannot build
# a pipeline, and computes the cosine of cosines unless it uses the flash attention of a GPU.
RUNS = {
    "gpt-tp2-pp2": (4, f"{TP2} {PP2}"),
    "gpt-pp2": (2, PP2),
    "gated-tp2-pp2": (4, f"{GATED} {TP2} {PP2}"),
    "gated-no-pipeline-tp2": (2, f"{GATED} {TP2} --no-pipeline-parallel"),
}


def write(python: str, source: str, root: Path, name: str) -> None:
    """Train with Megatron-DeepSpeed."""
    ranks, flags = RUNS[name]
    (root / name).mkdir(parents=True)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    config = root / f"{name}.json"
    config.write_text(json.dumps(settings))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command = [python, *torchrun, HERE / "megatron_deepspeed_train.py", source, root / name]
    command += [*FLAGS, *flags.split(), "--deepspeed_config", config]
    command += ["--data-cache-path", root / "cache"]
    subprocess.run([str(word) for word in command], check=True)


def check(root: Path, name: str) -> None:
    """Continue the run of a checkpoint, and of its conversion."""
    for tracker, tag in (("latest", "global_step3"), ("latest_checkpointed_iteration.txt", "3")):
        (root / name / tracker).write_text(tag)
    test_engine.test_training_continues_as_in_deepspeed(name, root)
    command = [CONVERT, "--saver", "torch_dist", "--verify-target"]
    command += ["--load-dir", root / name, "--save-dir", root / f"{name}-converted"]
    subprocess.run([str(word) for word in (sys.executable, *command)], check=True)
    (root / f"{name}-converted/oracle.json").write_text((root / name / "oracle.json").read_text())
    test_engine.test_training_continues_as_in_deepspeed(f"{name}-converted", root)


def main() -> None:
    python, source, directory = sys.argv[1:4]
    for name in RUNS:
        write(python, source, Path(directory), name)
        check(Path(directory), name)
    print(f"{', '.join(RUNS)}: losses of 3 iterations continued, also after conversion: ok")


if __name__ == "__main__":
    main()
