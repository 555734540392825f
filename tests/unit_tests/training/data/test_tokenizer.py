"""Tokenizers: ids, EOD and round trips of every kind, and messages for missing files."""

import base64
import json
import os
import sys

import pytest
import sentencepiece
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, pre_tokenizers

from megatron.training.config.checkpoint_args import TOKENIZER_FIELDS
from megatron.training.data import tokenizer_libraries, tokenizer_trial
from megatron.training.data.tokenizer import TokenizerConfig, build_tokenizer
from megatron.training.data.tokenizer_libraries import END_TOKENS

TEXT = "def f(x):\n    return  x + 1  # größer\n"


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's 256 printable substitutes for bytes; EOD is 256."""
    return {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


@pytest.fixture(scope="module")
def sentencepiece_models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sentencepiece")
    for name, ids in {
        "plain": {},
        "with_pad": {"pad_id": 3},
        "without_eos": {"eos_id": -1},
    }.items():
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(
                ["def f(x): return x + 1", "a small text for a small vocabulary"] * 20
            ),
            model_prefix=str(directory / name),
            vocab_size=300,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            hard_vocab_limit=False,
            minloglevel=2,
            **ids,
        )
    return directory


@pytest.fixture
def gpt2_files(tmp_path):
    vocab = byte_alphabet() | {"re": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nr e\n")
    return tmp_path


@pytest.fixture
def tokenizer_json(tmp_path):
    """Return a single byte-level tokenizer.json, whose post-processor would add a BOS."""
    vocab = byte_alphabet() | {"<s>": 256, "</s>": 257}
    pipeline = Pipeline(models.BPE(vocab=vocab, merges=[]))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens(["<s>", "</s>"])
    pipeline.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_null_tokenizer():
    tokenizer = build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=256))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (257, 256, None)
    assert tokenizer.tokenize(" 3 0\n256 ") == [3, 0, 256]
    assert tokenizer.detokenize([3, 0, 256]) == "3 0 256"
    assert tokenizer.tokenize("") == []
    with pytest.raises(ValueError, match="reads decimal ids .* not 'three'"):
        tokenizer.tokenize("three")
    with pytest.raises(ValueError, match=r"id 257 is not in 0\.\.256"):
        tokenizer.tokenize("1 257")
    within = build_tokenizer(
        TokenizerConfig("NullTokenizer", vocab_size=257, null_tokenizer_eod_id=256)
    )
    assert (within.vocab_size, within.eod) == (
        257,
        256,
    )  # the same tokens, as Megatron-LM 0.19 writes it


def test_sentencepiece(sentencepiece_models):
    model = str(sentencepiece_models / "plain.model")
    tokenizer = build_tokenizer(TokenizerConfig("SentencePieceTokenizer", model))
    oracle = sentencepiece.SentencePieceProcessor(model_file=model)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (oracle.vocab_size(), 2, None)
    assert tokenizer.tokenize(TEXT) == oracle.encode(TEXT)
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
    assert tokenizer.detokenize([*tokenizer.tokenize("a text"), tokenizer.eod]) == "a text"
    padded = build_tokenizer(
        TokenizerConfig("SentencePieceTokenizer", str(sentencepiece_models / "with_pad.model"))
    )
    assert padded.pad == 3


def test_gpt_sentencepiece_and_llama2(sentencepiece_models):
    """GPTSentencePieceTokenizer adds no tokens; Llama2Tokenizer begins every text with BOS."""
    model = str(sentencepiece_models / "plain.model")
    oracle = sentencepiece.SentencePieceProcessor(model_file=model)
    plain, llama = (
        build_tokenizer(TokenizerConfig(f"{tokenizer_type}Tokenizer", model))
        for tokenizer_type in ("GPTSentencePiece", "Llama2")
    )
    assert plain.tokenize(TEXT) == oracle.encode(TEXT)
    assert llama.tokenize(TEXT) == [oracle.bos_id(), *oracle.encode(TEXT)]
    assert llama.detokenize(llama.tokenize(TEXT)) == TEXT
    assert (
        (plain.vocab_size, plain.eod)
        == (llama.vocab_size, llama.eod)
        == (oracle.vocab_size(), oracle.eos_id())
    )


def test_legacy_sentencepiece_adds_tokens_that_text_can_name(sentencepiece_models):
    """The tokenizer of Megatron-LM before 0.16, for data and checkpoints of that time."""
    model = str(sentencepiece_models / "plain.model")
    oracle = sentencepiece.SentencePieceProcessor(model_file=model)
    size = oracle.vocab_size()
    config = {"legacy_tokenizer": True, "special_tokens": ["<fim>", "<s>"]}
    tokenizer = build_tokenizer(TokenizerConfig("SentencePieceTokenizer", model, **config))
    assert (tokenizer.vocab_size, tokenizer.eod) == (
        size + 5,
        size + 2,
    )  # CLS, SEP, EOD, MASK, fim; <s> is there
    assert [tokenizer.token_id(name) for name in ("<MASK>", "<fim>", "<s>", "</s>", "<what>")] == [
        size + 3,
        size + 4,
        oracle.bos_id(),
        oracle.eos_id(),
        None,
    ]
    assert tokenizer.tokenize("a<EOD>b<fim>") == [
        *oracle.encode("a"),
        size + 2,
        *oracle.encode("b"),
        size + 4,
    ]
    assert tokenizer.detokenize([*oracle.encode("a"), size + 2, *oracle.encode("b")]) == "a <EOD> b"
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
    with pytest.raises(
        ValueError,
        match="<fim>: tokens cannot be added to a SentencePiece model; train it with them",
    ):
        build_tokenizer(
            TokenizerConfig("GPTSentencePieceTokenizer", model, special_tokens=["<fim>"])
        )


RANKS = [bytes([i]) for i in range(256)] + [b"re", b"et", b"ret"]


def test_megatron_lm_tiktokenizer(tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    rows = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for i, token in enumerate(RANKS)
    ]
    (tmp_path / "vocab.json").write_text(json.dumps(rows))
    config = TokenizerConfig(
        "TikTokenizer", str(tmp_path / "vocab.json"), tiktoken_num_special_tokens=10, vocab_size=269
    )
    tokenizer = build_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (269, 2, 4)
    assert [tokenizer.token_id(name) for name in ("<s>", "<SPECIAL_9>", "ret", "<SPECIAL_10>")] == [
        1,
        9,
        268,
        None,
    ]
    oracle = tiktoken.Encoding(
        "x",
        pat_str=r"\S+|\s+",
        mergeable_ranks=dict(zip(RANKS, range(259), strict=True)),
        special_tokens={},
    )
    assert tokenizer.tokenize("retre") == [10 + i for i in oracle.encode("retre")] == [268, 266]
    assert tokenizer.tokenize("12") == [10 + ord("1"), 10 + ord("2")]  # digits one by one
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT + "<s>")) == TEXT + "<s>"
    assert 1 not in tokenizer.tokenize("<s>")

    for changes, message in [
        ({"vocab_size": 300}, "has 259 ranks, not each of 0 to 289 once: give --vocab-size 269"),
        ({"special_tokens": ["<s>"]}, "must contain <unk>, <s> and </s>"),
        ({"tiktoken_num_special_tokens": 6}, "must be at least the 7 special tokens"),
    ]:
        for name, value in changes.items():
            monkeyed = TokenizerConfig(**vars(config) | {name: value})
            with pytest.raises(ValueError, match=message):
                build_tokenizer(monkeyed)
    (tmp_path / "vocab.json").write_text('[{"rank": 0}]')
    with pytest.raises(ValueError, match="is not a JSON list of token_bytes and rank"):
        build_tokenizer(config)


def test_llama3_tokenizer_of_meta(tmp_path):
    pytest.importorskip("tiktoken")
    model = tmp_path / "tokenizer.model"
    model.write_text(
        "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(RANKS))
    )
    tokenizer = build_tokenizer(TokenizerConfig("Llama3Tokenizer", str(model)))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (259 + 256, 260, None)
    names = {
        "<|begin_of_text|>": 0,
        "<|reserved_special_token_3|>": 5,
        "<|start_header_id|>": 6,
        "<|eot_id|>": 9,
    }
    names |= {"<|reserved_special_token_4|>": 8, "<|reserved_special_token_5|>": 10}
    assert {name: tokenizer.token_id(name) - 259 for name in names} == names
    assert tokenizer.tokenize("ret") == [258]
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
    model.write_text("junk")
    with pytest.raises(ValueError, match="has a line that is not a token and its rank"):
        build_tokenizer(TokenizerConfig("Llama3Tokenizer", str(model)))


def test_missing_tiktoken_package_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    (tmp_path / "tokenizer.model").write_text("AA== 0\n")
    with pytest.raises(ValueError, match="need the package tiktoken: pip install"):
        build_tokenizer(TokenizerConfig("Llama3Tokenizer", str(tmp_path / "tokenizer.model")))


def test_added_tokens(gpt2_files, tokenizer_json):
    added = {"special_tokens": ["<fim_prefix>", "<|endoftext|>"]}
    files = {
        "vocab_file": str(gpt2_files / "vocab.json"),
        "merge_file": str(gpt2_files / "merges.txt"),
    }
    gpt2 = build_tokenizer(TokenizerConfig("GPT2BPETokenizer", **files, **added))
    assert (gpt2.vocab_size, gpt2.eod, gpt2.token_id("<fim_prefix>")) == (259, 257, 258)
    assert gpt2.token_id("<|endoftext|>") == 257
    assert gpt2.token_id("<nothing>") is None
    assert 257 not in gpt2.tokenize("<|endoftext|>")  # text still never becomes EOD
    face = build_tokenizer(
        TokenizerConfig("HuggingFaceTokenizer", str(tokenizer_json), special_tokens=["<fim>"])
    )
    assert (face.vocab_size, face.eod, face.token_id("<fim>"), face.token_id("?!")) == (
        259,
        257,
        258,
        None,
    )
    assert face.tokenize("a<fim>")[-1] == 258


def test_hub_names_require_a_network_or_cache(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError,
        match=r"--tokenizer-model nobody/nothing: .* could not be loaded from the Hugging Face",
    ):
        build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", "nobody/nothing"))


def test_unknown_tokenizer_type_is_an_error():
    with pytest.raises(
        ValueError,
        match="--tokenizer-type: 'BertTokenizer' is not one of SentencePieceTokenizer, GPT",
    ):
        TokenizerConfig("BertTokenizer")


def test_huggingface_file_alone(tokenizer_json):
    other = build_tokenizer(TokenizerConfig("TokenizerFromFile", str(tokenizer_json)))
    assert (other.vocab_size, other.eod) == (258, 257)
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(tokenizer_json)))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (258, 257, None)
    ids = tokenizer.tokenize(TEXT)
    assert ids == Pipeline.from_file(str(tokenizer_json)).encode(TEXT).ids
    assert 256 not in ids
    assert tokenizer.detokenize(ids) == TEXT


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_huggingface_directory(tokenizer_json, name):
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "</s>",
        "eos_token": "<s>",
        "pad_token": "<s>",
    }
    (tokenizer_json.parent / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = build_tokenizer(
        TokenizerConfig("HuggingFaceTokenizer", str(tokenizer_json.parent / name))
    )
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (258, 256, 256)
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT


def test_huggingface_without_eos(tokenizer_json):
    text = tokenizer_json.read_text()
    assert "</s>" in END_TOKENS
    tokenizer_json.write_text(text.replace("</s>", "<the-end>"))
    with pytest.raises(ValueError, match=r"tokenizer.json has no EOS token, .* set eos_token"):
        build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(tokenizer_json)))


def test_gpt2_bpe(gpt2_files):
    config = TokenizerConfig(
        "GPT2BPETokenizer",
        vocab_file=str(gpt2_files / "vocab.json"),
        merge_file=str(gpt2_files / "merges.txt"),
    )
    tokenizer = build_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (258, 257, None)
    ids = tokenizer.tokenize(TEXT + "<|endoftext|>")
    assert ids.count(256) == 1  # "re" is merged; text never becomes EOD
    assert tokenizer.eod not in ids
    assert tokenizer.detokenize(ids) == TEXT + "<|endoftext|>"
    alphabet = byte_alphabet()
    assert tokenizer.tokenize("ab") == [alphabet["a"], alphabet["b"]]

    (gpt2_files / "vocab.json").write_text(json.dumps(byte_alphabet() | {"re": 256}))
    with pytest.raises(ValueError, match=r"vocab.json has no <\|endoftext\|>"):
        build_tokenizer(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            TokenizerConfig(),
            "no tokenizer: give --tokenizer-type, or --vocab-file and --merge-file",
        ),
        (TokenizerConfig(merge_file="m"), "GPT2BPETokenizer requires --vocab-file"),
        (
            TokenizerConfig("NullTokenizer"),
            "NullTokenizer requires a positive --vocab-size, got None",
        ),
        (TokenizerConfig("NullTokenizer", vocab_size=0), "requires a positive --vocab-size, got 0"),
        (
            TokenizerConfig("NullTokenizer", vocab_size=9, null_tokenizer_eod_id=9),
            "9 is not one of the 9 tokens",
        ),
        (
            TokenizerConfig("SentencePieceTokenizer"),
            "SentencePieceTokenizer requires --tokenizer-model",
        ),
        (
            TokenizerConfig("HuggingFaceTokenizer"),
            "HuggingFaceTokenizer requires --tokenizer-model",
        ),
        (
            TokenizerConfig("HuggingFaceTokenizer", "/no/where"),
            "--tokenizer-model /no/where: no such file",
        ),
        (
            TokenizerConfig("Llama2Tokenizer", "no/where"),
            "--tokenizer-model no/where: no such file",
        ),
        (TokenizerConfig("GPT2BPETokenizer", vocab_file="v"), "--vocab-file v: no such file"),
        (
            TokenizerConfig("GPT2BPETokenizer", vocab_file=__file__),
            "GPT2BPETokenizer requires --merge-file",
        ),
    ],
)
def test_missing_flags_and_files(config, message):
    with pytest.raises(ValueError, match=message):
        build_tokenizer(config)


def test_files_of_another_kind(tmp_path, sentencepiece_models):
    junk = tmp_path / "junk"
    junk.write_text("not a tokenizer")
    for tokenizer_type, message in [
        ("SentencePieceTokenizer", "is not a SentencePiece model"),
        ("HuggingFaceTokenizer", "is not a Hugging Face tokenizer"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_tokenizer(TokenizerConfig(tokenizer_type, str(junk)))
    with pytest.raises(ValueError, match="is not a Hugging Face tokenizer"):
        build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(tmp_path)))
    with pytest.raises(ValueError, match="--vocab-file .* is not valid JSON"):
        build_tokenizer(
            TokenizerConfig("GPT2BPETokenizer", vocab_file=str(junk), merge_file=str(junk))
        )
    with pytest.raises(ValueError, match="has no end-of-sentence piece"):
        build_tokenizer(
            TokenizerConfig(
                "SentencePieceTokenizer", str(sentencepiece_models / "without_eos.model")
            )
        )


FILE_FIELDS = [
    ("SentencePieceTokenizer", "tokenizer_model"),
    ("Llama2Tokenizer", "tokenizer_model"),
    ("HuggingFaceTokenizer", "tokenizer_model"),
    ("TikTokenizer", "tokenizer_model"),
    ("Llama3Tokenizer", "tokenizer_model"),
    ("GPT2BPETokenizer", "vocab_file"),
    ("GPT2BPETokenizer", "merge_file"),
]


@pytest.mark.parametrize(("kind", "field"), FILE_FIELDS)
def test_files_must_be_regular_and_of_bounded_size(gpt2_files, monkeypatch, kind, field):
    """A checkpoint can name any path: a pipe would block, and /dev/zero would fill the memory."""
    pipe = gpt2_files / "pipe"
    os.mkfifo(pipe)
    files = {
        "vocab_file": str(gpt2_files / "vocab.json"),
        "merge_file": str(gpt2_files / "merges.txt"),
    }
    dashed = field.replace("_", "-")
    for path in (pipe, "/dev/zero"):
        config = TokenizerConfig(kind, **files | {field: str(path)})
        with pytest.raises(ValueError, match=f"--{dashed}: {path} is not a regular file"):
            build_tokenizer(config)
    large = gpt2_files / "large"
    large.write_bytes(b"[" + b"0" * 5000)
    monkeypatch.setattr(tokenizer_libraries, "MAX_FILE_BYTES", 5000)
    with pytest.raises(ValueError, match=f"--{dashed}: .*large has 5001 bytes, more than the 5000"):
        build_tokenizer(TokenizerConfig(kind, **files | {field: str(large)}))


def test_files_can_be_links(tokenizer_json, tmp_path_factory):
    """The cache of the Hugging Face hub consists of links."""
    link = tmp_path_factory.mktemp("links") / "tokenizer.json"
    link.symlink_to(tokenizer_json)
    for path in (link, link.parent):
        if path == link.parent:
            (path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(path)))
        assert tokenizer.vocab_size == 258


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_files_in_a_directory_must_be_regular(tokenizer_json, name):
    path = tokenizer_json.parent / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(tokenizer_json.parent)))


@pytest.mark.parametrize("kind", ["TikTokenizer", "HuggingFaceTokenizer"])
def test_nested_json_is_an_error(tmp_path, kind):
    path = tmp_path / "tokenizer.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deep"):
        build_tokenizer(TokenizerConfig(kind, str(path)))


def test_tokenizer_code_requires_trust_remote_code(tmp_path):
    """A directory can contain Python code, which is not run without the flag."""
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}})
    )
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n\nclass Evil:\n    pass\n"
    )
    with pytest.raises(ValueError, match="is not a Hugging Face tokenizer"):
        build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(tmp_path)))
    assert not (tmp_path / "ran").exists()
    assert "trust_remote_code" not in TOKENIZER_FIELDS


def write_normalizer(path, pattern, content, repeats, tokens):
    """Write a tokenizer.json whose normalizer is applied to added `tokens` when it is loaded."""
    step = {"type": "Replace", "pattern": pattern, "content": content}
    pipeline = json.loads(Pipeline(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).to_str())
    pipeline["normalizer"] = {"type": "Sequence", "normalizers": [step] * repeats}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    pipeline["added_tokens"] = [
        {"id": 2 + index, "content": token, "normalized": True} | flags
        for index, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(pipeline))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the kernel")
@pytest.mark.parametrize("attack", ["growth", "regular expression"])
@pytest.mark.parametrize("is_directory", [False, True])
def test_normalizer_that_exhausts_the_machine_is_refused(
    tmp_path, monkeypatch, attack, is_directory
):
    """40 bytes would grow to 40 TB; each of 500 searches takes a tenth of a second."""
    monkeypatch.setattr(tokenizer_trial, "SECONDS", 1)
    monkeypatch.setattr(tokenizer_trial, "MEMORY", 1 << 30)
    path = tmp_path / "tokenizer.json"
    if attack == "growth":
        write_normalizer(path, {"String": "a"}, "a" * 1000, 4, ["a" * 40])
    else:
        tokens = [f"{'a' * 20}{index}" for index in range(500)]
        write_normalizer(path, {"Regex": "(a|a)+$y"}, "z", 1, tokens)
    if is_directory:
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        path = tmp_path
    config = TokenizerConfig("HuggingFaceTokenizer", str(path))
    with pytest.raises(ValueError, match="because of its normalizer"):
        build_tokenizer(config)


def test_normalizer_with_a_regular_expression_is_used(tmp_path):
    write_normalizer(tmp_path / "tokenizer.json", {"Regex": " {2,}"}, "a", 1, ["b  b"])
    config = TokenizerConfig("HuggingFaceTokenizer", str(tmp_path / "tokenizer.json"))
    assert build_tokenizer(config).tokenize("b  b") == [2]
