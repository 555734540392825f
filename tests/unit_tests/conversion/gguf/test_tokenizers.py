"""Tokenizers in GGUF files of llama.cpp's converter, read and written."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.gguf.file_format import read_arrays
from megatron.conversion.gguf.gguf_reader import open_gguf
from megatron.conversion.gguf.tokenizer_reading import read_tokenizer
from megatron.conversion.gguf.tokenizer_writing import make_tokenizer_metadata
from megatron.conversion.gguf.writer import write_gguf
from megatron.conversion.options import WriteOptions
from megatron.core.dist_checkpointing.saving.commit import no_progress
from megatron.core.run_checkpoint.tokenizer_files import read_tokenizer_files
from megatron.training.data.tokenizer import TokenizerConfig
from megatron.training.data.tokenizer_libraries import build_huggingface
from tests import ROOT
from tests.support.gguf import TEXTS, VOCAB_SIZE
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.unit_tests.conversion.convert_tool import run_convert

GOLDEN = ROOT / "tests/golden/gguf_tokenizers"
BYTE_LEVEL = sorted(path.parent.name for path in GOLDEN.glob("*/tokenizer.json"))
SENTENCEPIECE = sorted(path.parent.name for path in GOLDEN.glob("*/tokenizer.model"))


def load_written(files: dict[str, bytes], directory: Path) -> PreTrainedTokenizerFast:
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_byte_level_tokenizer_is_the_original(name: str, tmp_path: Path) -> None:
    original = PreTrainedTokenizerFast.from_pretrained(GOLDEN / name)
    stored = read_tokenizer(GOLDEN / name / "vocab.gguf")
    tokenizer = load_written(stored.files, tmp_path)

    assert tokenizer.get_vocab() == original.get_vocab()
    assert stored.num_tokens == len(original)

    for text in TEXTS:
        ids = original.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == original.decode(ids), text

    assert stored.ids["eos_token_id"] == original.eos_token_id
    assert tokenizer.pad_token_id == original.pad_token_id

    messages = [{"role": "user", "content": "hi"}]
    expected = original.apply_chat_template(messages, tokenize=False)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_model_is_the_original(name: str, tmp_path: Path) -> None:
    original = SentencePieceProcessor(str(GOLDEN / name / "tokenizer.model"))
    tokenizer = load_written(read_tokenizer(GOLDEN / name / "vocab.gguf").files, tmp_path)
    model = SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    bos = [original.bos_id()]
    for text in TEXTS:
        expected = original.encode(text)
        if "<|im_start|>" not in text or name == "gemma":  # which is not a piece
            assert model.encode(text) == expected, text
            assert tokenizer.encode(text) == bos + expected, text
        assert model.decode(expected) == original.decode(expected)

    assert tokenizer.eos_token_id == original.eos_id()

    if name == "gemma":
        conversation = "<start_of_turn>user\nhi  there   now"
        expected = original.encode(conversation)
        assert tokenizer.encode(conversation) == bos + expected == bos + model.encode(conversation)
        # The converter makes it a control token, which only tokenizer.json matches.
        assert tokenizer.encode("a<unused0>") == bos + original.encode("a<unused0>")
    else:
        turn = tokenizer.convert_tokens_to_ids("<|im_start|>")
        assert turn == original.vocab_size()
        assert tokenizer.encode("<|im_start|>") == [*bos, turn]


@pytest.mark.parametrize("name", BYTE_LEVEL + SENTENCEPIECE)
def test_written_entries_are_those_of_the_converter(name: str) -> None:
    original = read_arrays(GOLDEN / name / "vocab.gguf")
    config = {"bos_token_id": 1, "eos_token_id": 2}
    if name == "gemma":
        config = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    if name == "qwen2":
        config = {}
    written = make_tokenizer_metadata(GOLDEN / name, VOCAB_SIZE, config)
    # llama.cpp's defaults; infilling for CodeGemma, and pairs of texts
    added = {
        "tokenizer.ggml.add_bos_token",
        "tokenizer.ggml.add_space_prefix",
        "tokenizer.ggml.unknown_token_id",
    }
    missing = {key for key in original if key.startswith("tokenizer.")} - written.keys()

    assert missing <= {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.add_sep_token"}
    for key, value in written.items():
        assert key in added or value == original[key], key
        assert original.get(key, value) == value, key


def write_model(tokenizer: Path, directory: Path, **options: object) -> Path:
    source = random_source(LLAMA_ARGS, VOCAB_SIZE, optimizer=False)
    write_gguf(source, directory, WriteOptions(tokenizer=tokenizer, **options), no_progress)
    return directory / "model.gguf"


@pytest.mark.parametrize("name", ["llama", "llama-bpe"])
def test_tokenizer_of_a_model_survives_every_format(name: str, tmp_path: Path) -> None:
    path = write_model(GOLDEN / name, tmp_path / "gguf")
    convert(path, tmp_path / "run", "torch_dist")
    result = run_convert(
        *("--saver", "gguf", "--load-dir", tmp_path / "run", "--save-dir", tmp_path / "again")
    )

    assert result.returncode == 0, result.stderr
    assert "not carried: the tokenizer" not in result.stdout

    first, second = read_arrays(path), read_arrays(tmp_path / "again/model.gguf")
    assert {key for key in first if key.startswith("tokenizer.")} > {"tokenizer.ggml.tokens"}
    for key, value in first.items():
        assert second[key] == value, key

    # In a run, and as a model of transformers
    convert(tmp_path / "again", tmp_path / "hf", "hf")
    exported = PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")
    args = open_gguf(path).args

    assert (args["tokenizer_type"], args["tokenizer_model"]) == ("HuggingFaceTokenizer", str(path))
    for file, content in read_tokenizer_files(args).items():  # in checkpoints of such a run
        assert (tmp_path / "run/release" / file).read_bytes() == content

    tokenizer = build_huggingface(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path))
    )
    for text in TEXTS:
        assert exported.encode(text, add_special_tokens=False) == tokenizer.tokenize(text), text
    assert tokenizer.vocab_size == len(exported)


def test_tokenizer_next_to_a_file_takes_precedence(tmp_path: Path) -> None:
    write_model(GOLDEN / "llama", tmp_path / "gguf")
    shutil.copy(GOLDEN / "qwen2/tokenizer.json", tmp_path / "gguf")
    assert open_gguf(tmp_path / "gguf").args["tokenizer_model"] == str(tmp_path / "gguf")


def test_unknown_pre_tokenizers_are_reported(tmp_path: Path) -> None:
    path = write_model(GOLDEN / "qwen2", tmp_path / "gguf")
    content = path.read_bytes().replace(b"\5\0\0\0\0\0\0\0qwen2", b"\5\0\0\0\0\0\0\0qwen9")
    path.write_bytes(content)
    (note,) = [note for note in open_gguf(path).unused if "tokenizer" in note]
    assert "tokenizer.ggml.pre = 'qwen9' is not read, only llama-bpe" in note
    with pytest.raises(ValueError, match="qwen9.*use the original tokenizer of transformers"):
        read_tokenizer(path)


def test_pieces_without_an_order_are_refused(tmp_path: Path) -> None:
    """llama.cpp would merge them from left to right, tokenizer.json in the order of their ids."""
    content = bytearray((GOLDEN / "llama/vocab.gguf").read_bytes())
    name = b"tokenizer.ggml.scores"
    # Between the name and the scores: the types of array and elements, and the number of elements
    start = content.index(name) + len(name) + 16
    (num_scores,) = struct.unpack_from("<Q", content, start - 8)
    struct.pack_into(f"<{num_scores}f", content, start, *[-1000.0] * num_scores)
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    with pytest.raises(ValueError, match="all pieces of its tokenizer have the score -1000.*use"):
        read_tokenizer(path)


def test_other_tokenizers_are_left_out_with_a_note(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    content = (GOLDEN / "qwen2/tokenizer.json").read_text()
    assert r"\\p{N}|" in content

    (tokenizer / "tokenizer.json").write_text(content.replace(r"\\p{N}|", r"\\p{N}{1,2}|"))
    source = random_source(LLAMA_ARGS, VOCAB_SIZE, optimizer=False)
    notes = write_gguf(source, tmp_path / "out", WriteOptions(tokenizer=tokenizer), no_progress)

    assert "its pre-tokenizer and normalizer are not those" in notes[0]
    assert read_arrays(tmp_path / "out/model.gguf")["tokenizer.ggml.model"] == "none"
    with pytest.raises(ValueError, match="the file has no tokenizer"):
        read_tokenizer(tmp_path / "out/model.gguf")


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_pieces_without_their_model_are_split_in_the_same_way(name: str, tmp_path: Path) -> None:
    original = write_model(GOLDEN / name, tmp_path / "original")
    files = read_tokenizer(original).files
    assert "tokenizer.model" in files

    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer / file).write_bytes(files[file])
    path = write_model(tokenizer, tmp_path / "written")
    expected, written = read_arrays(original), read_arrays(path)
    for entry in ("model", "tokens", "token_type", "add_space_prefix", "bos_token_id"):
        key = f"tokenizer.ggml.{entry}"
        # Runs of spaces are tokens of users in Gemma's model, pieces in its tokenizer.json.
        assert written[key] == expected[key] or "token" in entry and name == "gemma", key

    assert len(set(written["tokenizer.ggml.scores"])) > 10

    read = Tokenizer.from_str(read_tokenizer(path).files["tokenizer.json"].decode())
    for text in TEXTS:
        ids = Tokenizer.from_str(files["tokenizer.json"].decode()).encode(text).ids
        assert read.encode(text).ids == ids, text


@pytest.mark.parametrize(
    "change",
    [lambda merges: merges.pop(), lambda merges: merges.append(merges[0])],
)
def test_other_merges_of_pieces_are_left_out(
    change: Callable[[list], object], tmp_path: Path
) -> None:
    files = read_tokenizer(GOLDEN / "llama/vocab.gguf").files
    pipeline = json.loads(files["tokenizer.json"])
    change(pipeline["model"]["merges"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(pipeline))

    with pytest.raises(ValueError, match="its merges are not those of a SentencePiece model"):
        make_tokenizer_metadata(tmp_path, VOCAB_SIZE, {})


def test_more_tokens_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="it has 341 tokens, but the model has only 340"):
        make_tokenizer_metadata(GOLDEN / "llama", 340, {})
