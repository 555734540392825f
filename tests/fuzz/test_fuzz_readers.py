"""Whatever the bytes, a reader gives a result or one clean error: no traceback, no hang, no crash,
no file elsewhere.

Every reader runs in a process of its own, whose memory the kernel bounds. `make test` tries 30
damages of every reader, `--run-slow` 1000.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import pretrain_gpt
from megatron.conversion.convert import convert
from megatron.conversion.huggingface.directory import write_huggingface
from megatron.conversion.megatron_lm.torch_dist import write_torch_dist
from megatron.conversion.options import WriteOptions
from megatron.core.datasets import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.index_cache import load_or_build
from tests import ROOT
from tests.fuzz.mutations import (
    damage,
    damaged_archive,
    damaged_index,
    damaged_json,
    damaged_lines,
    damaged_pickle,
    damaged_safetensors,
)
from tests.support.memory_source import LLAMA_ARGS, random_source

SECONDS = 20  # of processor time for one damage, some hundred times what it takes
MEMORY = 1 << 30
TARGETS = ("to", "data_text_document.bin", "data_text_document.idx")


def tool(path: str) -> Any:
    """A program of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(
        path.replace("/", "_").replace(".", "_"), ROOT / path
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CONVERT = tool("tools/checkpoint/convert.py")
INSPECT = tool("tools/checkpoint/inspect_checkpoint.py")
PREPROCESS = tool("tools/preprocess_data.py")


@dataclass
class Case:
    """One damaged copy: `source` is it, `out` is where results may go."""

    source: Path
    original: Path
    out: Path
    rng: random.Random


def run_main(argv: list[str], main: Callable[[], Any]) -> int:
    """Exit status of a tool; its errors are one line that begins with "error: "."""
    out = io.StringIO()
    err = io.StringIO()
    code: Any = 0
    sys.argv = argv
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main()
        except SystemExit as error:
            code = error.code
    message = code if isinstance(code, str) else err.getvalue()
    status = 1 if isinstance(code, str) else int(code or 0)
    text = message if isinstance(code, str) else message[message.rfind("error: ") :]
    if status and (isinstance(code, str) or "error: " in message):
        assert text.startswith("error: ") and len(text) < 6000, (
            f"an error of another form: {text[:500]!r}"
        )
        assert all(line.isprintable() for line in text.rstrip("\n").split("\n")), (
            f"not printable: {text[:500]!r}"
        )
    if not any(flag in argv for flag in ("--json",)):
        assert "\x1b" not in out.getvalue().replace("\x1b[A", ""), "an escape sequence was printed"
    return status


def inspect_tool(case: Case, *argv: str) -> int:
    return run_main(["inspect", *argv], lambda: INSPECT.main(list(argv)))


def read_checkpoint(case: Case) -> None:
    """One of the things that are done with a checkpoint."""
    source = str(case.source)
    kind = case.rng.randrange(8)
    if kind == 0:
        inspect_tool(case, "show", source, *case.rng.choice(([], ["--json"])))
    elif kind == 1:
        inspect_tool(case, "digest", source, "--quiet")
    elif kind == 2:
        inspect_tool(case, "diff", source, str(case.original), "--quiet")
    elif kind == 3:
        inspect_tool(case, "plan", source, "--tensor-model-parallel-size", "2")
    else:
        saver = case.rng.choice(("torch_dist", "legacy", "hf", "universal"))
        extra = ["--save-optim-sidecar"] if saver == "hf" and case.rng.random() < 0.5 else []
        argv = [
            "--saver",
            saver,
            "--load-dir",
            source,
            "--save-dir",
            str(case.out / "to"),
            "--workers",
            "1",
            *extra,
        ]
        run_main(["convert", *argv], CONVERT.main)


def verify_checkpoint(case: Case) -> None:
    """Checksums find any change."""
    tracker = "latest_checkpointed_iteration.txt"
    if (case.source / tracker).read_bytes() != (case.original / tracker).read_bytes():
        inspect_tool(case, "verify", str(case.source), "--quiet")
        return
    same = all(
        (case.source / path.relative_to(case.original)).read_bytes() == path.read_bytes()
        for path in case.original.rglob("*")
        if path.is_file() and "iter_" in str(path)
    )
    status = inspect_tool(case, "verify", str(case.source), "--quiet")
    assert bool(status) != same, f"verify gives {status}, the files are same: {same}"


def read_or_verify(case: Case) -> None:
    (verify_checkpoint if case.rng.random() < 0.3 else read_checkpoint)(case)


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
    argv = [
        "--input",
        str(case.source / "text.jsonl"),
        "--output-prefix",
        str(case.out / "data"),
        "--workers",
        "1",
    ]
    argv += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]
    run_main(["preprocess", *argv], lambda: PREPROCESS.main(argv))


def read_index_cache(case: Case) -> None:
    """Another content is built anew."""
    arrays = load_or_build(case.source, "test", {"what": "test"}, build_index)
    wanted = build_index()
    assert all(
        np.array_equal(arrays[key], wanted[key]) and arrays[key].dtype == wanted[key].dtype
        for key in wanted
    )


def build_index() -> dict[str, np.ndarray]:
    return {
        "samples": np.arange(40, dtype=np.int32).reshape(20, 2),
        "order": np.arange(20, dtype=np.int64),
    }


RUN = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --ffn-hidden-size 48 "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights --num-layers 2 "
    "--hidden-size 32 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 12 --lr 3e-3 --eval-iters 0 --skip-train --mock-data --num-workers 0 "
    "--num-threads 1 --tokenizer-type NullTokenizer --vocab-size 66 --override-opt_param-scheduler "
    "--use-distributed-optimizer"
)


def load_run(case: Case) -> None:
    """`pretrain_gpt.py --load`, as one rank."""
    extra = case.rng.choice(
        ([], [], ["--finetune"], ["--use-checkpoint-args"], ["--no-load-optim"], ["--ckpt-verify"])
    )
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )

    def main() -> None:
        try:
            pretrain_gpt.main()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    run_main(["pretrain_gpt.py", *RUN.split(), *extra, "--load", str(case.source)], main)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def export_with_tokenizer(case: Case) -> None:
    argv = [
        "--saver",
        "hf",
        "--load-dir",
        str(case.source / "run"),
        "--save-dir",
        str(case.out / "to"),
    ]
    run_main(["convert", *argv, "--tokenizer", str(case.source / "tokenizer")], CONVERT.main)


# Reader -> (what is built, the files that are damaged and how else than by bytes, what is done).
Structural = Callable[[bytes, random.Random], bytes] | None
READERS: dict[str, tuple[str, dict[str, Structural], Callable[[Case], None]]] = {
    "hf index": ("hf", {"model.safetensors.index.json": damaged_json}, read_checkpoint),
    "hf config": ("hf", {"config.json": damaged_json}, read_checkpoint),
    "hf weights": ("hf", {"model-*.safetensors": damaged_safetensors}, read_checkpoint),
    "hf sidecar": ("hf", {"megatron_state/state.json": damaged_json}, read_checkpoint),
    "hf optimizer": ("hf", {"megatron_state/*.safetensors": damaged_safetensors}, read_checkpoint),
    "torch_dist metadata": ("torch_dist", {"iter_*/.metadata": damaged_pickle}, read_or_verify),
    "torch_dist index": ("torch_dist", {"iter_*/.metadata": damaged_index}, read_or_verify),
    "torch_dist common": ("torch_dist", {"iter_*/common.pt": damaged_archive}, read_or_verify),
    "torch_dist files": (
        "torch_dist",
        {"iter_*/*.distcp": None, "iter_*/*.json": damaged_json, "latest_*": None},
        read_or_verify,
    ),
    "load": (
        "torch_dist",
        {"iter_*/.metadata": damaged_pickle, "iter_*/common.pt": damaged_archive},
        load_run,
    ),
    "load files": ("torch_dist", {"iter_*/*.distcp": None, "latest_*": None}, load_run),
    "megatron": (
        "megatron",
        {".metadata": damaged_pickle, "common.pt": damaged_archive},
        read_checkpoint,
    ),
    "megatron 0.12": (
        "megatron 0.12",
        {".metadata": damaged_pickle, "common.pt": damaged_archive},
        read_checkpoint,
    ),
    "legacy model": (
        "legacy",
        {"iter_*/mp_rank_0*/model_optim_rng.pt": damaged_archive},
        read_checkpoint,
    ),
    "legacy optimizer": ("megatron legacy", {"mp_rank_0*/*.pt": damaged_archive}, read_checkpoint),
    "universal state": (
        "universal",
        {"*/mp_rank_00_model_states.pt": damaged_archive, "latest_*": None},
        read_checkpoint,
    ),
    "universal files": (
        "universal",
        {"*/zero/*.pt": damaged_archive, "*/zero/*/*.pt": damaged_archive},
        read_checkpoint,
    ),
    "dataset": ("data", {"data.idx": None, "data.bin": None}, read_data_set),
    "text": ("text", {"text.jsonl": damaged_lines}, preprocess),
    "index cache": ("index", {"*.npy": None, "*.json": damaged_json}, read_index_cache),
    "tokenizer": ("tokenizer", {"tokenizer/*": damaged_json}, export_with_tokenizer),
}
GOLDEN = ROOT / "tests/golden/megatron_lm"


def build(kind: str, root: Path) -> None:
    """An intact directory of each kind."""
    source = random_source(LLAMA_ARGS | {"consumed_train_samples": 28, "vocab_size": 66})
    if kind == "hf":
        options = WriteOptions(optim_sidecar=True, max_shard_size=20_000)
        write_huggingface(source, root, options)
    elif kind in ("torch_dist", "legacy", "universal"):
        write_torch_dist(source, root.with_name("made"))
        convert(root.with_name("made"), root, kind)
        shutil.rmtree(root.with_name("made"))
    elif kind.startswith("megatron"):
        version = "mcore_0.12.0" if "0.12" in kind else "mcore_0.16.1"
        form = {"megatron": "torch_dist_dp_reshardable", "megatron legacy": "legacy"}.get(
            kind, "torch_dist_fully_sharded_model_space"
        )
        (found,) = (GOLDEN / version / "llama_fp32_tp2pp2" / form).glob("iter_*")
        shutil.copytree(found, root)
    elif kind == "data":
        root.mkdir()
        with IndexedDatasetBuilder(root / "data", np.uint16) as builder:
            for length in range(1, 30):
                builder.add(np.arange(length))
    elif kind == "text":
        root.mkdir()
        lines = [json.dumps({"text": f"{n} {n + 1}", "id": n}) for n in range(20)]
        (root / "text.jsonl").write_text("\n".join(lines))
    elif kind == "index":
        load_or_build(root, "test", {"what": "test"}, build_index)
    else:
        write_torch_dist(random_source(LLAMA_ARGS, optimizer=False), root / "run")
        (root / "tokenizer").mkdir()
        for name in (
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
            "config.json",
        ):
            found = ROOT / "tests/golden/hf/llama" / name
            shutil.copy(found, root / "tokenizer" / name)


class Hang(BaseException):
    """Too much processor time."""


def too_long(*_: object) -> None:
    raise Hang


def snapshot(root: Path, apart: Path) -> dict[str, tuple[int, int]]:
    """What stands under `root`, but for `apart`."""
    return {
        str(path): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if not path.is_relative_to(apart) and path != root
    }


def try_damages(
    name: str, base: Path, work: Path, numbers: range, report: Callable[[str], None]
) -> None:
    """Damage `numbers` of a reader; `report` is told of every failure."""
    _, files, action = READERS[name]
    signal.signal(signal.SIGPROF, too_long)
    for number in numbers:
        rng = random.Random(f"{name} {number}")
        source = work / "in"
        out = work / "out"
        for path in (source, out):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(base, source, copy_function=os.link)
        out.mkdir()
        pattern, structural = rng.choice(list(files.items()))
        damage(rng.choice(sorted(source.glob(pattern))), structural, rng)
        before = {} if name == "index cache" else snapshot(work, out)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            action(Case(source, base, out, rng))
        except (
            BaseException
        ) as error:  # also KeyboardInterrupt-like ones: nothing but a clean error is allowed
            report(
                f"{name} {number}: {type(error).__name__}: {''.join(traceback.format_exc()[-1500:])}"
            )
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if before and snapshot(work, out) != before:
            report(f"{name} {number}: something changed outside of the target")
        if out.exists() and any(path.name not in TARGETS for path in out.iterdir()):
            report(f"{name} {number}: left behind: {[path.name for path in out.iterdir()]}")


def failures(name: str, base: Path, work: Path, numbers: range) -> list[str]:
    """In a child process: what it could not survive is a failure, too."""
    work.mkdir(exist_ok=True)
    answers = work.with_name("answers")
    answers.write_text("")
    child = os.fork()
    if child == 0:
        with answers.open("a") as file:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))

            def report(text: str) -> None:
                file.write(json.dumps(text) + "\n")
                file.flush()

            try:
                try_damages(name, base, work, numbers, report)
            except BaseException:
                report(f"{name}: the fuzzer itself: {traceback.format_exc()}")
        os._exit(0)
    _, code = os.waitpid(child, 0)
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    return found + ([f"{name}: the process died of signal {code & 127}"] if code else [])


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def check(name: str, bases: Path, tmp_path: Path, numbers: range) -> None:
    kind = READERS[name][0]
    base = bases / kind.replace(" ", "_") / "base"
    if not base.exists():
        base.parent.mkdir()
        build(kind, base)
    found = failures(name, base, tmp_path / "work", numbers)
    assert not found, f"{len(found)} of {len(numbers)}:\n" + "\n".join(found[:5])


@pytest.mark.parametrize("name", READERS)
def test_readers(name: str, bases: Path, tmp_path: Path) -> None:
    """30 of each format, whose files share them; 6 of what four ranks of Megatron-LM have written: it is slow."""
    of_format = [other for other in READERS if other.split()[0] == name.split()[0]]
    slow = READERS[name][0].startswith("megatron")
    check(name, bases, tmp_path, range(6 if slow else 30 // len(of_format)))


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_readers_long(name: str, bases: Path, tmp_path: Path) -> None:
    check(name, bases, tmp_path, range(30, 1030))
