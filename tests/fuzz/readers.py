"""The readers under test: a valid input, the files to damage, and the action of each."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import pretrain_gpt
from megatron.checkpointer import Checkpointer
from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.gguf.tokenizer_reading import read_tokenizer
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.options import WriteOptions
from megatron.core.datasets import IndexedDataset
from megatron.core.datasets.index_cache import load_or_build
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.dist_checkpointing.format.checksums import (
    compute_checksums,
    encode_checksum_records,
    seal_checksums,
)
from megatron.core.dist_checkpointing.ownership.lineage import (
    Lineage,
    Origin,
    Segment,
    on_branch,
    read_lineage,
    read_parent,
)
from megatron.core.dist_checkpointing.tiers.local_tier import LocalTier, Replication, marker_name
from megatron.training.data.tokenizer import TokenizerConfig, build_tokenizer
from tests import ROOT
from tests.fuzz.harness import Case, Reader, load_tool, run_main
from tests.fuzz.mutations import (
    damaged_archive,
    damaged_checksums,
    damaged_gguf,
    damaged_index,
    damaged_json,
    damaged_lines,
    damaged_pickle,
    damaged_safetensors,
    damaged_sentencepiece,
    damaged_yaml,
)
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.support.quantized import decode_case

GOLDEN = ROOT / "tests/golden"
TRACKER = "latest_checkpointed_iteration.txt"
CONVERT = load_tool("tools/checkpoint/convert.py")
INSPECT = load_tool("tools/checkpoint/inspect_checkpoint.py")
PREPROCESS = load_tool("tools/preprocess_data.py")
REPORT = load_tool("tools/report.py")
PLAN = load_tool("tools/plan_run.py")

# Actions


def run_inspect(*argv: str) -> int:
    return run_main(["inspect", *argv], lambda: INSPECT.main(list(argv)))


def run_convert(source: Path, case: Case, saver: str, *extra: str) -> int:
    argv = ["convert", "--saver", saver, "--load-dir", str(source)]
    argv += ["--save-dir", str(case.out / "to"), *extra]
    return run_main(argv, CONVERT.main)


def read_checkpoint(case: Case) -> None:
    """Do one of the things that are done with a checkpoint."""
    source = str(case.source)
    action = case.rng.randrange(8)
    if action == 0:
        run_inspect("show", source, *case.rng.choice(([], ["--json"])))
    elif action == 1:
        run_inspect("digest", source, "--quiet")
    elif action == 2:
        run_inspect("diff", source, str(case.original), "--quiet")
    elif action == 3:
        run_inspect("plan", source, "--tensor-model-parallel-size", "2")
    else:
        saver = case.rng.choice(("torch_dist", "legacy", "hf", "universal"))
        with_state = saver == "hf" and case.rng.random() < 0.5
        extra = ["--save-optim-sidecar"] if with_state else []
        run_convert(case.source, case, saver, "--workers", "1", *extra)


def read_experts(case: Case) -> None:
    """Read a checkpoint with experts, which a universal one cannot contain."""
    saver = case.rng.choice(("digest", "torch_dist", "legacy", "hf"))
    if saver == "digest":
        run_inspect("digest", str(case.source), "--quiet")
    else:
        run_convert(case.source, case, saver, "--workers", "1")


def read_folder(folder: str, case: Case) -> None:
    """Read a folder of another trainer, which is in a directory of them."""
    saver = case.rng.choice(("torch_dist", "legacy", "hf"))
    run_convert(case.source / folder, case, saver, "--workers", "1")


def read_vocabularies(case: Case) -> None:
    """Read the tokenizers of GGUF files."""
    for path in case.source.glob("*.gguf"):

        def main(path: Path = path) -> None:
            try:
                read_tokenizer(path)
            except ValueError as error:
                raise SystemExit(f"error: {error}") from error

        run_main(["tokenizer"], main)


def read_hybrid(case: Case) -> None:
    """Read a checkpoint with experts and multi-token prediction, which few formats contain."""
    saver = case.rng.choice(("torch_dist", "legacy"))
    run_convert(case.source, case, saver, "--workers", "1")


def verify_checkpoint(case: Case) -> None:
    """Checksums must find any change, except one of the tracker, which names the directory."""
    status = run_inspect("verify", str(case.source), "--quiet")
    if (case.source / TRACKER).read_bytes() != (case.original / TRACKER).read_bytes():
        return
    is_same = all(
        (case.source / path.relative_to(case.original)).read_bytes() == path.read_bytes()
        for path in case.original.rglob("*")
        if path.is_file() and "iter_" in str(path)
    )
    assert bool(status) != is_same, f"verify returns {status}, the files are the same: {is_same}"


def read_or_verify(case: Case) -> None:
    if case.rng.random() < 0.3:
        verify_checkpoint(case)
    else:
        read_checkpoint(case)


def verify_or_convert(case: Case) -> None:
    """Verify, or convert, which compares checksums, a checkpoint with damaged checksums."""
    if case.rng.random() < 0.5:
        run_inspect("verify", str(case.source), "--quiet")
    else:
        run_convert(case.source, case, "hf", "--workers", "1")


def merge_adapter(case: Case) -> None:
    """Merge a damaged adapter into an intact model."""
    adapter = case.source / case.rng.choice(("lora", "pickle"))
    saver = case.rng.choice(("torch_dist", "hf"))
    run_convert(case.original / "base", case, saver, "--lora", str(adapter), "--workers", "1")


def read_data_set(case: Case) -> None:
    def main() -> None:
        try:
            data = IndexedDataset(case.source / "data", use_mmap=case.rng.random() < 0.5)
            for index in range(min(len(data), 1000)):
                data.read(index)
        except (ValueError, OSError) as error:
            sys.exit(f"error: {error}")

    run_main(["data"], main)


def preprocess(case: Case) -> None:
    argv = ["--input", str(case.source / "text.jsonl"), "--output-prefix", str(case.out / "data")]
    argv += ["--workers", "1", "--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]
    run_main(["preprocess", *argv], lambda: PREPROCESS.main(argv))


def read_index_cache(case: Case) -> None:
    """A damaged cache is rebuilt."""
    arrays = load_or_build(case.source, "test", {"what": "test"}, build_index)
    for key, expected in build_index().items():
        assert np.array_equal(arrays[key], expected)
        assert arrays[key].dtype == expected.dtype


def build_index() -> dict[str, np.ndarray]:
    return {
        "samples": np.arange(40, dtype=np.int32).reshape(20, 2),
        "order": np.arange(20, dtype=np.int64),
    }


RUN = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--ffn-hidden-size 48 --group-query-attention --num-query-groups 2 "
    "--untie-embeddings-and-output-weights --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 12 --lr 3e-3 --eval-iters 0 --skip-train --mock-data "
    "--num-workers 0 --num-threads 1 --tokenizer-type NullTokenizer --vocab-size 66 "
    "--override-opt_param-scheduler --use-distributed-optimizer"
)
LOAD_FLAGS = ("", "", "--finetune", "--use-checkpoint-args", "--no-load-optim", "--ckpt-verify")


def load_run(case: Case) -> None:
    """Run `pretrain_gpt.py --load` as one rank."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} | address)

    def main() -> None:
        try:
            pretrain_gpt.main()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    extra = case.rng.choice(LOAD_FLAGS).split()
    run_main(["pretrain_gpt.py", *RUN.split(), *extra, "--load", str(case.source)], main)


def find_free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def export_with_tokenizer(case: Case) -> None:
    run_convert(case.source / "run", case, "hf", "--tokenizer", str(case.source / "tokenizer"))


def export_sentencepiece(case: Case) -> None:
    """Export with a SentencePiece model, or build the tokenizer of a training run from it."""
    model = case.source / "tokenizer.model"
    if case.rng.random() < 0.5:
        run_convert(case.source / "run", case, "hf", "--tokenizer", str(model))
        return
    piece_type = case.rng.choice(
        ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
    )
    use_tokenizer(TokenizerConfig(piece_type, str(model)))


def use_tiktoken(case: Case) -> None:
    config = TokenizerConfig(
        "TikTokenizer",
        str(case.source / "ranks.json"),
        vocab_size=300,
        tiktoken_num_special_tokens=20,
    )
    use_tokenizer(config)


def use_tokenizer(config: TokenizerConfig) -> None:
    def main() -> None:
        try:
            tokenizer = build_tokenizer(config)
            ids = tokenizer.tokenize("def f(x): return x + 1 \u4e2d")
            tokenizer.detokenize(ids)
        except ValueError as error:
            sys.exit(f"error: {error}")

    run_main(["tokenizer"], main)


def read_lineages(case: Case) -> None:
    """Decide which checkpoints belong to the branch, and which one a run loads."""
    directories = sorted(case.source.glob("iter_*"))
    lineages = {int(path.name[5:]): read_lineage(path) for path in directories}
    branch = on_branch(lineages)
    assert set(branch) <= set(lineages)
    for path in directories:
        lineage = read_lineage(path)
        json.loads(lineage.descend(Segment(5, 10)).encode(read_parent(path)))
    run_inspect("show", str(case.source))


def choose_checkpoint(case: Case) -> None:
    """Print which checkpoint a launch would start from."""
    directory = str(case.source)
    run_inspect("choose", "--load", directory, "--save", directory)


def train_in_plain_pytorch(case: Case) -> None:
    """Load a checkpoint of `Checkpointer`, read an object of it, and continue."""
    model, optimizer, scheduler = build_plain_model()

    def main() -> None:
        try:
            with Checkpointer(case.source, model, optimizer, scheduler=scheduler) as checkpointer:
                checkpointer.read_object("scheduler")
                checkpointer.load()
            optimizer.step()
            scheduler.step()
        except (ValueError, OSError) as error:
            sys.exit(f"error: {error}")

    run_main(["train"], main)


def report_run(case: Case) -> None:
    """Draw the page of a run, or plan with its measured speed."""
    if case.rng.random() < 0.6:
        output = case.out / "report.html"
        argv = [str(case.source), "--output", str(output)]
        run_main(["report", *argv], lambda: run_cli(REPORT, argv))
        return
    argv = [*PLAN_FLAGS.split(), "--measured", str(case.source), "--mtbf-hours", "5"]
    run_main(["plan", *argv], lambda: run_cli(PLAN, argv))


PLAN_FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --vocab-size 66 "
    "--tokenizer-type NullTokenizer --train-iters 12 --lr 1e-3 --world-size 1 --mock-data"
)


def run_cli(module: object, argv: list[str]) -> None:
    sys.argv = ["tool", *argv]
    module.cli()  # type: ignore[attr-defined]


def decode_quantized(case: Case) -> None:
    """Decode quantized matrices, each of which may be damaged."""
    for folder in sorted(path for path in case.source.iterdir() if path.is_dir()):

        def main(folder: Path = folder) -> None:
            try:
                for tensor in decode_case(folder, torch.bfloat16).values():
                    tensor.read_all()
            except ValueError as error:
                raise SystemExit(f"error: {error}") from error

        run_main(["decode"], main)


def read_markers(case: Case) -> None:
    """List the checkpoints on the disk of a node, as at every start."""
    tier = LocalTier(case.source, 0, [0], Replication())
    for name in tier.list_checkpoints():
        with contextlib.suppress(OSError):
            for writer, (size, _) in tier.find_writers(name).items():
                assert 0 <= writer < size


# Valid inputs


def build_plain_model() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def build_plain_run(root: Path) -> None:
    model, optimizer, scheduler = build_plain_model()
    with Checkpointer(root, model, optimizer, scheduler=scheduler, save_interval=1) as checkpointer:
        for step in range(checkpointer.load(), 2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            scheduler.step()
            checkpointer.step(step)
        checkpointer.finish()


def build_unpacked(archive: str) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        with tarfile.open(GOLDEN / f"{archive}.tar.xz") as content:
            content.extractall(root.with_name("unpacked"), filter="data")
        (only,) = root.with_name("unpacked").iterdir()
        only.rename(root)

    return build


def build_golden(path: str) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        (original,) = GOLDEN.glob(path)
        shutil.copytree(original, root)

    return build


def build_gguf(root: Path) -> None:
    root.mkdir()
    shutil.copy(GOLDEN / "gguf/quantized/model.gguf", root)


def build_vocabulary(root: Path) -> None:
    root.mkdir()
    for name in ("llama", "llama-bpe"):
        shutil.copy(GOLDEN / f"gguf_tokenizers/{name}/vocab.gguf", root / f"{name}.gguf")


def build_nemo(root: Path) -> None:
    root.mkdir()
    shutil.copy(GOLDEN / "nemo/gpt.nemo", root / "model.nemo")
    shutil.copytree(GOLDEN / "nemo_directories/llama", root / "directory")


def build_huggingface(root: Path) -> None:
    write_huggingface(build_source(), root, WriteOptions(optim_sidecar=True, max_shard_size=20_000))


def build_adapters(root: Path) -> None:
    """An adapter in both kinds of files, and its base model."""
    root.mkdir()
    write_huggingface(random_source(LLAMA_ARGS, optimizer=False), root / "base")
    module = "base_model.model.model.layers.0.mlp.up_proj"
    tensors = {
        f"{module}.lora_A.weight": torch.ones(3, 32),
        f"{module}.lora_B.weight": torch.ones(48, 3),
        f"{module}.lora_magnitude_vector": torch.ones(48),
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(
            2, 32
        ),
    }
    config = {
        "peft_type": "LORA",
        "r": 3,
        "lora_alpha": 6,
        "use_dora": True,
        "rank_pattern": {"down_proj": 4},
        "alpha_pattern": {"layers.1.*": 3},
        "target_modules": ["up_proj"],
        "trainable_token_indices": {"embed_tokens": [5, 60]},
    }
    for name in ("lora", "pickle"):
        (root / name).mkdir()
        (root / name / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, root / "lora/adapter_model.safetensors")
    torch.save(tensors, root / "pickle/adapter_model.bin")


def build_source():
    return random_source(LLAMA_ARGS | {"consumed_train_samples": 28, "vocab_size": 66})


def build_converted(kind: str) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        write_torch_dist(build_source(), root.with_name("made"))
        convert(root.with_name("made"), root, kind)
        shutil.rmtree(root.with_name("made"))

    return build


def build_hybrid(root: Path) -> None:
    """A checkpoint of HybridModel with experts, windows and multi-token prediction."""
    args = LLAMA_ARGS | {"num_experts": 2, "moe_ffn_hidden_size": 8, "mtp_num_layers": 1}
    args |= {"window_size": (4, 0), "window_attn_skip_freq": [1, 1]}
    write_torch_dist(random_source(args), root.with_name("gpt"))
    options = WriteOptions(hybrid_layers=True)
    convert(root.with_name("gpt"), root, "torch_dist", options=options)


def build_data_set(root: Path) -> None:
    root.mkdir()
    with IndexedDatasetBuilder(root / "data", np.uint16) as builder:
        for length in range(1, 30):
            builder.add(np.arange(length))


def build_text(root: Path) -> None:
    root.mkdir()
    lines = [json.dumps({"text": f"{n} {n + 1}", "id": n}) for n in range(20)]
    (root / "text.jsonl").write_text("\n".join(lines))


def build_index_cache(root: Path) -> None:
    load_or_build(root, "test", {"what": "test"}, build_index)


def build_tokenizer_files(root: Path) -> None:
    write_torch_dist(random_source(LLAMA_ARGS, optimizer=False), root / "run")
    (root / "tokenizer").mkdir()
    for name in ("tokenizer", "tokenizer_config", "generation_config", "config"):
        shutil.copy(GOLDEN / f"hf/llama/{name}.json", root / "tokenizer")


def build_sentencepiece(root: Path) -> None:
    write_torch_dist(random_source(LLAMA_ARGS, optimizer=False), root / "run")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["def f(x): return x + 1", "a small text, a small vocabulary"] * 20),
        model_prefix=str(root / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )


def build_tiktoken(root: Path) -> None:
    root.mkdir()
    tokens = (
        [bytes([n]) for n in range(256)]
        + [b"de", b"def", b"re", b"ret"]
        + [b"x" * n for n in range(2, 22)]
    )
    rows = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": "x"}
        for rank, token in enumerate(tokens)
    ]
    (root / "ranks.json").write_text(json.dumps(rows))


def build_run(root: Path) -> None:
    """A run with its name, two checkpoints, their lineages, and records of two starts."""
    build_converted("torch_dist")(root)
    (only,) = root.glob("iter_*")
    other = root / "iter_0000010"
    shutil.copytree(only, other)
    origin = Origin("abc@3", False, None)
    first = Lineage((Segment(1, 7, "a" * 16),), origin, "job")
    (only / "lineage.json").write_bytes(first.encode(None))
    (other / "lineage.json").write_bytes(first.descend(Segment(2, 10, "b" * 16), "job").encode(7))
    (root / ".run").write_text("0123456789abcdef")
    (root / "runs").mkdir()
    for generation, iteration in ((1, 0), (2, 7)):
        rows = build_records(1000.0 * generation, iteration)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (root / f"runs/2026010{generation}T101500.000000-1.jsonl").write_text(text)


def build_records(began: float, first: int) -> list[dict]:
    summary = {"model": "2 layers", "parameters": "5M"}
    times = ("save-staging-time", "save-writing-time", "save-total-time", "save-blocking-time")
    values = dict.fromkeys(times, 0.5) | {"save-gigabytes": 0.1, "lm loss validation": 4.5}
    rows: list[dict] = [
        {
            "kind": "start", "time": began + 5, "began": began, "iteration": first, "loaded": None,
            "layout": "TP 1", "train_iters": 20, "command": ["pretrain_gpt.py"], "summary": summary,
            "loading": 1.0,
        }
    ]  # fmt: skip
    for step in (1, 2):
        interval = {"iteration": first + 5 * step, "iterations": 5, "seconds": 20.0}
        interval |= {"lm_loss": 4.0, "tokens_per_second": 100.0}
        rows.append({"kind": "interval", "time": began + 5 + 20 * step, **interval})
    rows.append({"kind": "point", "time": began + 46, "iteration": first + 10, "values": values})
    end = {"iteration": first + 10, "reason": "complete", "failed": False}
    rows.append({"kind": "end", "time": began + 47, **end})
    return rows


def build_markers(root: Path) -> None:
    """The directory of a node with two checkpoints that two ranks wrote."""
    for name in ("iter_0000005-0000001.0", "iter_0000010-0000001.1"):
        (root / name).mkdir(parents=True)
        for writer in range(2):
            file = f"__{writer}_0.distcp"
            content = bytes(1000 + writer)
            (root / name / file).write_bytes(content)
            records = encode_checksum_records({file: compute_checksums(content)})
            marker = b"".join(seal_checksums(records))
            (root / name / marker_name(writer, 2)).write_bytes(marker)


MEGATRON = "megatron_lm/mcore_{}/llama_fp32_tp2pp2/{}/iter_*"
BASES: dict[str, Callable[[Path], None]] = {
    "hf": build_huggingface,
    "adapters": build_adapters,
    "torch_dist": build_converted("torch_dist"),
    "legacy": build_converted("legacy"),
    "universal": build_converted("universal"),
    "megatron": build_golden(MEGATRON.format("0.16.1", "torch_dist_dp_reshardable")),
    "megatron 0.12": build_golden(
        MEGATRON.format("0.12.0", "torch_dist_fully_sharded_model_space")
    ),
    "megatron legacy": build_golden(MEGATRON.format("0.16.1", "legacy")),
    "fsdp": build_unpacked("megatron_fsdp/mixtral_fp32"),
    "zero1": build_unpacked("deepspeed_engine/zero1"),
    "zero3": build_unpacked("deepspeed_engine/zero3-frozen"),
    "accelerate": build_unpacked("training_folders/accelerate_fsdp2"),
    "verl": build_unpacked("training_folders/verl_fsdp2"),
    "olmo_core": build_unpacked("training_folders/olmo_core"),
    "automodel": build_unpacked("training_folders/automodel"),
    "torch_checkpointing": build_unpacked("training_folders/torch_checkpointing"),
    "bridge": build_golden("bridge_0.6.2/llama_fp32/checkpoint"),
    "hybrid": build_hybrid,
    "data": build_data_set,
    "text": build_text,
    "index": build_index_cache,
    "tokenizer": build_tokenizer_files,
    "sentencepiece": build_sentencepiece,
    "tiktoken": build_tiktoken,
    "run": build_run,
    "markers": build_markers,
    "quantized": build_golden("quantized"),
    "gguf": build_gguf,
    "vocabulary": build_vocabulary,
    "nemo": build_nemo,
    "plain": build_plain_run,
}
SLOW_BASES = (
    "megatron",
    "megatron 0.12",
    "megatron legacy",
    "fsdp",
    "hybrid",
    "accelerate",
    "verl",
    "olmo_core",
    "automodel",
    "torch_checkpointing",
    "zero1",
    "zero3",
)  # with many tensors

READERS = {
    "hf index": Reader("hf", {"model.safetensors.index.json": damaged_json}, read_checkpoint),
    "hf config": Reader("hf", {"config.json": damaged_json}, read_checkpoint),
    "hf weights": Reader("hf", {"model-*.safetensors": damaged_safetensors}, read_checkpoint),
    "hf sidecar": Reader("hf", {"megatron_state/state.json": damaged_json}, read_checkpoint),
    "hf optimizer": Reader(
        "hf", {"megatron_state/*.safetensors": damaged_safetensors}, read_checkpoint
    ),
    "adapter config": Reader("adapters", {"*/adapter_config.json": damaged_json}, merge_adapter),
    "adapter weights": Reader(
        "adapters",
        {"lora/*.safetensors": damaged_safetensors, "pickle/*.bin": damaged_archive},
        merge_adapter,
    ),
    "torch_dist metadata": Reader(
        "torch_dist", {"iter_*/.metadata": damaged_pickle}, read_or_verify
    ),
    "torch_dist index": Reader("torch_dist", {"iter_*/.metadata": damaged_index}, read_or_verify),
    "torch_dist common": Reader(
        "torch_dist", {"iter_*/common.pt": damaged_archive}, read_or_verify
    ),
    "torch_dist files": Reader(
        "torch_dist",
        {"iter_*/*.distcp": None, "iter_*/*.json": damaged_json, "latest_*": None},
        read_or_verify,
    ),
    "torch_dist checksums": Reader(
        "torch_dist", {"iter_*/checksums.bin": damaged_checksums}, verify_or_convert
    ),
    "load": Reader(
        "torch_dist",
        {"iter_*/.metadata": damaged_pickle, "iter_*/common.pt": damaged_archive},
        load_run,
    ),
    "load files": Reader("torch_dist", {"iter_*/*.distcp": None, "latest_*": None}, load_run),
    "megatron": Reader(
        "megatron", {".metadata": damaged_pickle, "common.pt": damaged_archive}, read_checkpoint
    ),
    "megatron 0.12": Reader(
        "megatron 0.12",
        {".metadata": damaged_pickle, "common.pt": damaged_archive},
        read_checkpoint,
    ),
    "legacy model": Reader(
        "legacy", {"iter_*/mp_rank_0*/model_optim_rng.pt": damaged_archive}, read_checkpoint
    ),
    "legacy optimizer": Reader(
        "megatron legacy", {"mp_rank_0*/*.pt": damaged_archive}, read_checkpoint
    ),
    "universal state": Reader(
        "universal",
        {"*/mp_rank_00_model_states.pt": damaged_archive, "latest_*": None},
        read_checkpoint,
    ),
    "universal files": Reader(
        "universal",
        {"*/zero/*.pt": damaged_archive, "*/zero/*/*.pt": damaged_archive},
        read_checkpoint,
    ),
    "zero1": Reader(
        "zero1", {"global_step3/*.pt": damaged_archive, "latest": None}, read_checkpoint
    ),
    "zero3": Reader(
        "zero3", {"global_step3/*.pt": damaged_archive, "latest": None}, read_checkpoint
    ),
    "fsdp": Reader("fsdp", {"iter_*/.metadata": damaged_pickle, "iter_*/__*": None}, read_experts),
    "accelerate": Reader(
        "accelerate",
        {"*_0/.metadata": damaged_pickle, "config.json": damaged_json, "*_0/__*": None},
        read_experts,
    ),
    "verl": Reader(
        "verl",
        {"*/*/*_rank_*.pt": damaged_archive, "*/*/*/config.json": damaged_json},
        partial(read_folder, "global_step_2/actor"),
    ),
    "olmo_core": Reader(
        "olmo_core",
        {
            "*/config.json": damaged_json,
            "*/*/.metadata": damaged_pickle,
            "*/train/*.pt": damaged_archive,
        },
        partial(read_folder, "step2"),
    ),
    "automodel": Reader(
        "automodel",
        {"*/model/*.safetensors": damaged_safetensors, "*/optim/.metadata": damaged_pickle},
        partial(read_folder, "epoch_0_step_2"),
    ),
    "torch_checkpointing": Reader(
        "torch_checkpointing",
        {"*/*.pt": damaged_archive, "*/metadata.pkl": damaged_pickle},
        partial(read_folder, "step-2"),
    ),
    "hybrid": Reader(
        "hybrid",
        {"iter_*/.metadata": damaged_index, "iter_*/common.pt": damaged_archive},
        read_hybrid,
    ),
    "plain": Reader(
        "plain",
        {
            "iter_*/.metadata": damaged_pickle,
            "iter_*/common.pt": damaged_archive,
            "iter_*/*.distcp": None,
            "latest_*": None,
        },
        train_in_plain_pytorch,
        changes_source=True,  # takes the run over
    ),
    "bridge config": Reader("bridge", {"iter_*/run_config.yaml": damaged_yaml}, read_checkpoint),
    "bridge state": Reader("bridge", {"iter_*/train_state.pt": damaged_archive}, read_checkpoint),
    "lineage": Reader("run", {"iter_*/lineage.json": damaged_json}, read_lineages),
    "choice": Reader(
        "run",
        {"iter_*/lineage.json": damaged_json, ".run": None, "latest_*": None},
        choose_checkpoint,
    ),
    "records": Reader("run", {"runs/*.jsonl": damaged_lines}, report_run),
    "markers": Reader(
        "markers", {"iter_*/.done-*": damaged_checksums, "iter_*/__*": None}, read_markers
    ),
    "quantized": Reader(
        "quantized",
        {
            "*/model.safetensors": damaged_safetensors,
            "*/quantization_config.json": damaged_json,
        },
        decode_quantized,
    ),
    "gguf": Reader("gguf", {"model.gguf": damaged_gguf}, read_checkpoint),
    "gguf tokenizer": Reader("vocabulary", {"*.gguf": damaged_gguf}, read_vocabularies),
    "nemo": Reader("nemo", {"*.nemo": None}, partial(read_folder, "model.nemo")),
    "nemo directory": Reader(
        "nemo",
        {
            "directory/context/model.yaml": damaged_yaml,
            "directory/weights/common.pt": damaged_archive,
            "directory/weights/.metadata": None,
        },
        partial(read_folder, "directory"),
    ),
    "dataset": Reader("data", {"data.idx": None, "data.bin": None}, read_data_set),
    "text": Reader("text", {"text.jsonl": damaged_lines}, preprocess),
    "index cache": Reader(
        "index", {"*.npy": None, "*.json": damaged_json}, read_index_cache, changes_source=True
    ),
    "tokenizer": Reader("tokenizer", {"tokenizer/*": damaged_json}, export_with_tokenizer),
    "sentencepiece": Reader(
        "sentencepiece", {"tokenizer.model": damaged_sentencepiece}, export_sentencepiece
    ),
    "tiktoken": Reader("tiktoken", {"ranks.json": damaged_json}, use_tiktoken),
}
