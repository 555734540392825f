"""Cost of `tools/preprocess_data.py`, and of text as --data-path, relative to the tokenizer alone, in
processor time.

The text is 10 MB of the source of Python's standard library as JSON lines; the tokenizer is a
byte-level BPE trained on a part of it. Reading, JSON, worker queues and writing add to the tokenizer, so the limit
is 1. Processor time of all processes is independent of other load on the machine.

    python benchmarks/preprocessing.py                      # one process, and two workers; 4 minutes
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
import random
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from scratch import create_scratch_directory

MEGABYTES = 10
ALONE = "tokenizer alone"
TOKENIZER_ALONE = """
import json, sys
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.data.tokenizer import TokenizerConfig
tokenizer = build_tokenizer(TokenizerConfig(**json.loads(sys.argv[1])))
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
if len(sys.argv) > 3:
    sum(len(tokenizer.tokenize(text)) for text in texts)
"""
TEXT_AS_DATA_PATH = """
import json, sys
from megatron.core.datasets import GPTDatasetConfig
from megatron.training.data.text_corpus import tokenize_data_paths
from megatron.training.data.tokenizer import TokenizerConfig, build_tokenizer
tokenizer = build_tokenizer(TokenizerConfig(**json.loads(sys.argv[1])))
config = GPTDatasetConfig(
    seq_length=1, data_path=[sys.argv[4]], data_cache_path=sys.argv[2],
    tokenization_workers=int(sys.argv[3]),
)
tokenize_data_paths(config, tokenizer)
"""


@dataclass
class Tool:
    """A `preprocess_data.py` and the interpreter that runs it."""

    name: str
    path: Path
    python: str = sys.executable

    @property
    def root(self) -> Path:
        """Return the tree of the tool, which it imports from."""
        return self.path.parents[1]


OURS = Tool("ours", Path(__file__).parents[1] / "tools/preprocess_data.py")


def read_sources() -> list[str]:
    """Return the source files of Python's standard library, in a fixed random order."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(library.glob("*.py"))
    paths += sorted(library.glob("*/*.py"))
    random.Random(0).shuffle(paths)
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def write_corpus(path: Path, texts: list[str]) -> None:
    """Write texts as JSON lines, repeated or cut to the size of the benchmark."""
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for text in itertools.cycle(texts):
            if size >= MEGABYTES * 1_000_000:
                break
            line = json.dumps({"text": text})
            size += file.write(line + "\n")


def write_tokenizer(directory: Path, texts: list[str]) -> None:
    """Train a tokenizer, and write vocab.json, merges.txt, and hf/ for transformers."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts,
        vocab_size=8000,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.save_model(str(directory))

    hf = directory / "hf"
    hf.mkdir()
    tokenizer.save(str(hf / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (hf / "tokenizer_config.json").write_text(json.dumps(config))


def measure_cpu_seconds(root: Path, command: list[str], python: str = sys.executable) -> float:
    """Return the processor seconds of a command and all processes it starts."""
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([python, *command], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user = after.ru_utime - before.ru_utime
    system = after.ru_stime - before.ru_stime
    return user + system


class Benchmark:
    """Corpus, tokenizer and measurements, all in one directory."""

    def __init__(self, directory: Path, through_transformers: bool) -> None:
        self.corpus = directory / "corpus.jsonl"
        self._output = directory / "out"
        self._cache = directory / "cache"
        texts = read_sources()
        write_corpus(self.corpus, texts)
        write_tokenizer(directory, texts[:200])
        # A tool's start-up is its time for one short document.
        self._small_corpus = directory / "small.jsonl"
        self._small_corpus.write_text('{"text": "a"}\n')
        if through_transformers:
            self._tokenizer = {
                "tokenizer_type": "HuggingFaceTokenizer",
                "tokenizer_model": str(directory / "hf"),
            }
        else:
            self._tokenizer = {
                "vocab_file": str(directory / "vocab.json"),
                "merge_file": str(directory / "merges.txt"),
            }

    def measure_tokenizer(self) -> float:
        """Return the seconds of the tokenizer, without imports and reading the text."""
        config = json.dumps(self._tokenizer)
        command = ["-c", TOKENIZER_ALONE, config, str(self.corpus)]
        start_up = measure_cpu_seconds(OURS.root, command)
        whole = measure_cpu_seconds(OURS.root, [*command, "tokenize"])
        return whole - start_up

    def measure_tool(self, tool: Tool, workers: int) -> float:
        """Return the seconds of a tool for the corpus, without its start-up."""
        command = [str(tool.path), "--append-eod", "--output-prefix", str(self._output)]
        for option, value in self._tokenizer.items():
            flag = option.replace("_", "-")
            command += [f"--{flag}", value]
        command += ["--workers", str(workers), "--input"]
        start_up = measure_cpu_seconds(tool.root, [*command, str(self._small_corpus)], tool.python)
        whole = measure_cpu_seconds(tool.root, [*command, str(self.corpus)], tool.python)
        return whole - start_up

    def measure_text(self, workers: int) -> float:
        """Return the seconds until text as --data-path is tokenized, without start-up."""
        shutil.rmtree(self._cache, ignore_errors=True)
        config = json.dumps(self._tokenizer)
        command = ["-c", TEXT_AS_DATA_PATH, config, str(self._cache), str(workers)]
        start_up = measure_cpu_seconds(OURS.root, [*command, str(self._small_corpus)])
        shutil.rmtree(self._cache)
        return measure_cpu_seconds(OURS.root, [*command, str(self.corpus)]) - start_up

    def hash_output(self) -> str:
        """Return the digest of the tokens that the last tool has written."""
        return _hash_file(self._output.with_name("out_text_document.bin"))

    def hash_cache(self) -> str:
        """Return the digest of the tokens in the cache."""
        (path,) = self._cache.glob("*.bin")
        return _hash_file(path)


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def measure_turns(benchmark: Benchmark, tools: list[Tool], turns: int) -> dict[str, list[float]]:
    """Return the seconds of each turn of the tokenizer alone and of each tool."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(turns):
        seconds[ALONE].append(benchmark.measure_tokenizer())
        digests = set()
        for tool in tools:
            for workers in (1, 2):
                label = f"{tool.name}, --workers {workers}"
                seconds[label].append(benchmark.measure_tool(tool, workers))
                digests.add(benchmark.hash_output())
        for workers in (1, 2):
            label = f"text as --data-path, --tokenization-workers {workers}"
            seconds[label].append(benchmark.measure_text(workers))
            digests.add(benchmark.hash_cache())
        assert len(digests) == 1, "not the same tokens"
    return seconds


def print_medians(seconds: dict[str, list[float]], megabytes: float) -> None:
    """Print the medians, also relative to the tokenizer alone."""
    limit = statistics.median(seconds[ALONE])
    for label, times in seconds.items():
        median = statistics.median(times)
        print(
            f"{median:7.2f} s of a core, {megabytes / median:6.2f} MB/s, "
            f"{limit / median:.2f} of the tokenizer: {label}"
        )


def parse_arguments() -> argparse.Namespace:
    """Return the flags of the command line."""
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
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    tools = [OURS]
    for path in args.tool:
        other = Tool("ours", path.resolve())
        other.name = f"ours of {other.root.name}"
        tools.append(other)
    if args.megatron_lm is not None:
        path = args.megatron_lm / "tools/preprocess_data.py"
        python = args.megatron_core_python or sys.executable
        tools.append(Tool("Megatron-LM's", path.resolve(), python))

    with create_scratch_directory("preprocessing") as directory:
        benchmark = Benchmark(directory, through_transformers=args.megatron_lm is not None)
        seconds = measure_turns(benchmark, tools, args.turns)
        megabytes = benchmark.corpus.stat().st_size / 1e6
    print_medians(seconds, megabytes)


if __name__ == "__main__":
    main()
