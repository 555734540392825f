"""The tokenizer that Megatron-LM stores in a checkpoint is copied to an export."""

import shutil

import pytest

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.opening import open_checkpoint
from tests import GOLDEN
from tests.support.memory_source import LLAMA_ARGS, random_source

HF_TOKENIZER = GOLDEN / "hf/llama"
NAMES = ("tokenizer.json", "tokenizer_config.json")


def save_with_tokenizer(directory, tokenizer_type, files):
    args = LLAMA_ARGS | {"tokenizer_type": tokenizer_type, "tokenizer_model": "/gone/model"}
    iteration = directory / "iter_0000000"
    write_torch_dist(random_source(args, vocab_size=259, optimizer=False), iteration)
    (iteration / "tokenizer").mkdir()
    for name, source in files.items():
        shutil.copyfile(source, iteration / "tokenizer" / name)
    (directory / "latest_checkpointed_iteration.txt").write_text("0")


def test_export_contains_the_stored_tokenizer(tmp_path):
    files = {name: HF_TOKENIZER / name for name in NAMES}
    save_with_tokenizer(tmp_path / "run", "HuggingFaceTokenizer", files)
    report = convert(tmp_path / "run", tmp_path / "hf", "hf")
    assert not [text for text in report.not_carried if "tokenizer" in text]
    for name in NAMES:
        assert (tmp_path / "hf" / name).read_bytes() == files[name].read_bytes()


@pytest.mark.parametrize(
    ("tokenizer_type", "names", "expected"),
    [
        ("Llama2Tokenizer", ["tokenizer.model"], {"tokenizer_model": "tokenizer.model"}),
        ("TikTokenizer", ["tokenizer.json"], {"tokenizer_model": "tokenizer.json"}),
        (
            "GPT2BPETokenizer",
            ["vocab.json", "merges.txt"],
            {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
        ),
        ("GPT2BPETokenizer", ["vocab.json"], {}),
        ("NullTokenizer", [], {}),
    ],
)
def test_arguments_name_the_stored_files(tmp_path, tokenizer_type, names, expected):
    files = {name: HF_TOKENIZER / "tokenizer.json" for name in names}
    save_with_tokenizer(tmp_path / "run", tokenizer_type, files)
    args = open_checkpoint(tmp_path / "run").args
    folder = tmp_path / "run/iter_0000000/tokenizer"
    for argument in ("tokenizer_model", "vocab_file", "merge_file"):
        if argument in expected:
            assert args[argument] == str(folder / expected[argument])
        else:
            assert args.get(argument) in (None, "/gone/model")
