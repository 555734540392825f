"""What `tools/preprocess_data.py` costs beside its tokenizer alone, in processor time on the same text.

The text is the source of Python's standard library as JSON lines, the tokenizer a byte-level BPE trained on a part of
it. Reading, JSON, the workers' queues and writing come on top of the tokenizer; the limit is 1. Processor time, of all
processes together, says how much of a core is left for tokenizing whatever else the machine does.

    python benchmarks/preprocessing.py                      # one process, and two workers
    python benchmarks/preprocessing.py --tool OTHER/tools/preprocess_data.py    # of another commit, taking turns
"""

import argparse
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
from megatron.training.data.tokenizer import TokenizerConfig, build_tokenizer
tokenizer = build_tokenizer(TokenizerConfig(vocab_file=sys.argv[1], merge_file=sys.argv[2]))
texts = [json.loads(line)["text"] for line in open(sys.argv[3], encoding="utf-8")]
if len(sys.argv) > 4:
    sum(len(tokenizer.tokenize(text)) for text in texts)
"""


def make_corpus(directory: Path) -> tuple[Path, Path, Path]:
    """(vocabulary, merges, JSON lines)."""
    from tokenizers import ByteLevelBPETokenizer

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) + sorted(
        Path(sysconfig.get_path("stdlib")).glob("*/*.py")
    )
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sources]
    corpus, size = directory / "corpus.jsonl", 0
    with corpus.open("w", encoding="utf-8") as file:
        while size < MEGABYTES * 1_000_000:
            for text in texts:
                size += file.write(json.dumps({"text": text}) + "\n")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts[:200], vocab_size=8000, special_tokens=["<|endoftext|>"], show_progress=False)
    vocab, merges = tokenizer.save_model(str(directory))
    return Path(vocab), Path(merges), corpus


def cpu_seconds(root: Path, command: list[str]) -> float:
    """Of a command and all processes that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(root), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *command], env=environment, check=True, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", type=Path, action="append", default=[], help="preprocess_data.py of another tree")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        vocab, merges, corpus = make_corpus(directory)
        empty = directory / "empty.jsonl"
        empty.write_text('{"text": "a"}\n')
        seconds: dict[str, list[float]] = {}
        for _ in range(args.turns):
            alone = ["-c", TOKENIZER_ALONE, str(vocab), str(merges), str(corpus)]
            own_root = TOOL.parents[1]
            start = cpu_seconds(own_root, alone)  # imports, and reading the text
            seconds.setdefault("tokenizer alone", []).append(cpu_seconds(own_root, [*alone, "tokenize"]) - start)
            for tool in [TOOL, *args.tool]:
                for workers in (1, 2):
                    flags = ["--vocab-file", str(vocab), "--merge-file", str(merges), "--workers", str(workers)]
                    flags += ["--output-prefix", str(directory / "out"), "--append-eod"]
                    root = tool.resolve().parents[1]
                    start = cpu_seconds(root, [str(tool), "--input", str(empty), *flags])
                    spent = cpu_seconds(root, [str(tool), "--input", str(corpus), *flags]) - start
                    seconds.setdefault(f"{tool.resolve()} --workers {workers}", []).append(spent)
        limit = statistics.median(seconds["tokenizer alone"])
        for what, spent in seconds.items():
            median = statistics.median(spent)
            rate = corpus.stat().st_size / 1e6 / median
            print(f"{median:7.2f} s of a core, {rate:6.2f} MB/s, {limit / median:.2f} of the tokenizer: {what}")


if __name__ == "__main__":
    main()
