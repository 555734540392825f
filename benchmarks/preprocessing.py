"""Cost of `tools/preprocess_data.py` relative to its tokenizer alone, in processor time.

The text is the source of Python's standard library as JSON lines; the tokenizer is a byte-level BPE
trained on a part of it. Reading, JSON, worker queues and writing add to the tokenizer, so the limit
is 1. Processor time of all processes is independent of other load on the machine.

    python benchmarks/preprocessing.py                      # one process, and two workers
    python benchmarks/preprocessing.py --tool OTHER/tools/preprocess_data.py    # also another commit's tool
    python benchmarks/preprocessing.py --megatron-lm DIRECTORY --megatron-core-python PATH    # also Megatron-LM's tool

Megatron-LM reads GPT-2's tokenizer files in Python, so in the last case all tools use the same
`tokenizer.json` through transformers, and their outputs are compared.
"""

import argparse
import hashlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools/preprocess_data.py"
MEGABYTES = 12
TOKENIZER_ALONE = """
import json, sys
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.data.tokenizer_config import TokenizerConfig
tokenizer = build_tokenizer(TokenizerConfig(**json.loads(sys.argv[1])))
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
if len(sys.argv) > 3:
    sum(len(tokenizer.tokenize(text)) for text in texts)
"""


def make_corpus(directory: Path) -> Path:
    """Write JSON lines, vocab.json, merges.txt, and hf/ for transformers."""
    from tokenizers import ByteLevelBPETokenizer

    library = Path(sysconfig.get_path("stdlib"))
    sources = [*sorted(library.glob("*.py")), *sorted(library.glob("*/*.py"))]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sources]
    corpus = directory / "corpus.jsonl"
    size = 0
    with corpus.open("w", encoding="utf-8") as file:
        while size < MEGABYTES * 1_000_000:
            for text in texts:
                size += file.write(json.dumps({"text": text}) + "\n")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts[:200], vocab_size=8000, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.save_model(str(directory))
    (directory / "hf").mkdir()
    tokenizer.save(str(directory / "hf/tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (directory / "hf/tokenizer_config.json").write_text(json.dumps(config))
    return corpus


def measure_cpu_seconds(root: Path, command: list[str], python: str = sys.executable) -> float:
    """Return the processor seconds of a command and all processes it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run([python, *command], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tool", type=Path, action="append", default=[], help="preprocess_data.py of another tree"
    )
    parser.add_argument(
        "--megatron-lm", type=Path, help="a source tree of Megatron-LM, core_r0.16.0"
    )
    parser.add_argument("--megatron-core-python", help="the interpreter for it")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    tools = {"ours": (TOOL, sys.executable)}
    for other in args.tool:
        tool = other.resolve()
        tools[f"ours of {tool.parents[1].name}"] = (tool, sys.executable)
    if args.megatron_lm is not None:
        tool = (args.megatron_lm / "tools/preprocess_data.py").resolve()
        tools["Megatron-LM's"] = (tool, args.megatron_core_python or sys.executable)
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), tools, args.turns, through_transformers=args.megatron_lm is not None)


def measure(
    directory: Path, tools: dict[str, tuple[Path, str]], turns: int, through_transformers: bool
) -> None:
    """Print a row for the tokenizer alone and for each tool (name, interpreter), with 1 and 2
    workers.
    """
    corpus = make_corpus(directory)
    empty = directory / "empty.jsonl"
    empty.write_text('{"text": "a"}\n')
    if through_transformers:
        options = {
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": str(directory / "hf"),
        }
    else:
        options = {
            "vocab_file": str(directory / "vocab.json"),
            "merge_file": str(directory / "merges.txt"),
        }
    common = ["--append-eod", "--output-prefix", str(directory / "out")]
    for option, value in options.items():
        common += ["--" + option.replace("_", "-"), value]
    seconds: dict[str, list[float]] = {}
    for _ in range(turns):
        alone = ["-c", TOKENIZER_ALONE, json.dumps(options), str(corpus)]
        start = measure_cpu_seconds(TOOL.parents[1], alone)  # imports, and reading the text
        spent = measure_cpu_seconds(TOOL.parents[1], [*alone, "tokenize"]) - start
        seconds.setdefault("tokenizer alone", []).append(spent)
        written = set()
        for (name, (tool, python)), workers in itertools.product(tools.items(), (1, 2)):
            root = tool.parents[1]
            command = [str(tool), *common, "--workers", str(workers), "--input"]
            start = measure_cpu_seconds(root, [*command, str(empty)], python)
            spent = measure_cpu_seconds(root, [*command, str(corpus)], python) - start
            seconds.setdefault(f"{name}, --workers {workers}", []).append(spent)
            tokens = (directory / "out_text_document.bin").read_bytes()
            written.add(hashlib.sha256(tokens).hexdigest())
        assert len(written) == 1, "not the same tokens"
    limit = statistics.median(seconds["tokenizer alone"])
    for label, all_spent in seconds.items():
        median = statistics.median(all_spent)
        rate = corpus.stat().st_size / 1e6 / median
        print(
            f"{median:7.2f} s of a core, {rate:6.2f} MB/s, {limit / median:.2f} of the tokenizer: "
            f"{label}"
        )


if __name__ == "__main__":
    main()
