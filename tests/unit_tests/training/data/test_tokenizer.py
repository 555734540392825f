"""Tokenizers: ids and EOD of every kind, text survives the round trip, and what is missing is named."""

import json

import pytest
import sentencepiece
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, pre_tokenizers

from megatron.training.checkpoint.args import ALSO_TAKEN
from megatron.training.data.tokenizer import END_TOKENS, TokenizerConfig, build_tokenizer

TEXT = "def f(x):\n    return  x + 1  # größer\n"


def byte_alphabet() -> dict[str, int]:
    """GPT-2's 256 printable stand-ins for bytes; EOD is 256."""
    return {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


@pytest.fixture(scope="module")
def sentencepiece_models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sentencepiece")
    for name, ids in {"plain": {}, "with_pad": {"pad_id": 3}, "without_eos": {"eos_id": -1}}.items():
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["def f(x): return x + 1", "a small text for a small vocabulary"] * 20),
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
    """A byte-level tokenizer.json alone, with a BOS that its post-processor is not asked for."""
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
    assert tokenizer.tokenize(" 3 0\n256 ") == [3, 0, 256] and tokenizer.detokenize([3, 0, 256]) == "3 0 256"
    assert tokenizer.tokenize("") == []
    with pytest.raises(ValueError, match="reads decimal ids .* not 'three'"):
        tokenizer.tokenize("three")
    with pytest.raises(ValueError, match=r"id 257 is not in 0\.\.256"):
        tokenizer.tokenize("1 257")
    within = build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=257, null_tokenizer_eod_id=256))
    assert (within.vocab_size, within.eod) == (257, 256)  # the same tokens, as Megatron-LM 0.19 writes it


def test_sentencepiece(sentencepiece_models):
    model = str(sentencepiece_models / "plain.model")
    tokenizer = build_tokenizer(TokenizerConfig("SentencePieceTokenizer", model))
    oracle = sentencepiece.SentencePieceProcessor(model_file=model)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (oracle.vocab_size(), 2, None)
    assert tokenizer.tokenize(TEXT) == oracle.encode(TEXT)
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
    assert tokenizer.detokenize([*tokenizer.tokenize("a text"), tokenizer.eod]) == "a text"
    padded = build_tokenizer(TokenizerConfig("SentencePieceTokenizer", str(sentencepiece_models / "with_pad.model")))
    assert padded.pad == 3


def test_gpt_sentencepiece_and_llama2(sentencepiece_models):
    """GPTSentencePieceTokenizer adds nothing; Llama2Tokenizer begins every text with BOS."""
    model = str(sentencepiece_models / "plain.model")
    oracle = sentencepiece.SentencePieceProcessor(model_file=model)
    plain, llama = (
        build_tokenizer(TokenizerConfig(f"{kind}Tokenizer", model)) for kind in ("GPTSentencePiece", "Llama2")
    )
    assert plain.tokenize(TEXT) == oracle.encode(TEXT)
    assert (
        llama.tokenize(TEXT) == [oracle.bos_id(), *oracle.encode(TEXT)]
        and llama.detokenize(llama.tokenize(TEXT)) == TEXT
    )
    assert (plain.vocab_size, plain.eod) == (llama.vocab_size, llama.eod) == (oracle.vocab_size(), oracle.eos_id())


def test_names_of_the_hub_need_a_network_or_its_cache(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"--tokenizer-model nobody/nothing: .* could not be had from the Hugging Face"
    ):
        build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", "nobody/nothing"))


def test_a_type_that_there_is_not():
    with pytest.raises(ValueError, match="--tokenizer-type BertTokenizer: choose one of SentencePieceTokenizer, GPT"):
        TokenizerConfig("BertTokenizer")


def test_huggingface_file_alone(tokenizer_json):
    other = build_tokenizer(TokenizerConfig("TokenizerFromFile", str(tokenizer_json)))
    assert (other.vocab_size, other.eod) == (258, 257)
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(tokenizer_json)))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (258, 257, None)
    ids = tokenizer.tokenize(TEXT)
    assert ids == Pipeline.from_file(str(tokenizer_json)).encode(TEXT).ids and 256 not in ids
    assert tokenizer.detokenize(ids) == TEXT


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_huggingface_directory(tokenizer_json, name):
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "</s>", "eos_token": "<s>", "pad_token": "<s>"}
    (tokenizer_json.parent / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(tokenizer_json.parent / name)))
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
        "GPT2BPETokenizer", vocab_file=str(gpt2_files / "vocab.json"), merge_file=str(gpt2_files / "merges.txt")
    )
    tokenizer = build_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (258, 257, None)
    ids = tokenizer.tokenize(TEXT + "<|endoftext|>")
    assert ids.count(256) == 1 and tokenizer.eod not in ids  # "re" is merged; text never becomes EOD
    assert tokenizer.detokenize(ids) == TEXT + "<|endoftext|>"
    alphabet = byte_alphabet()
    assert tokenizer.tokenize("ab") == [alphabet["a"], alphabet["b"]]

    (gpt2_files / "vocab.json").write_text(json.dumps(byte_alphabet() | {"re": 256}))
    with pytest.raises(ValueError, match=r"vocab.json has no <\|endoftext\|>"):
        build_tokenizer(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TokenizerConfig(), "no tokenizer: give --tokenizer-type, or --vocab-file and --merge-file"),
        (TokenizerConfig(merge_file="m"), "GPT2BPETokenizer needs --vocab-file"),
        (TokenizerConfig("NullTokenizer"), "NullTokenizer needs a positive --vocab-size, got None"),
        (TokenizerConfig("NullTokenizer", vocab_size=0), "needs a positive --vocab-size, got 0"),
        (TokenizerConfig("NullTokenizer", vocab_size=9, null_tokenizer_eod_id=9), "eod-id 9 is none of the 9 tokens"),
        (TokenizerConfig("SentencePieceTokenizer"), "SentencePieceTokenizer needs --tokenizer-model"),
        (TokenizerConfig("HuggingFaceTokenizer"), "HuggingFaceTokenizer needs --tokenizer-model"),
        (TokenizerConfig("HuggingFaceTokenizer", "/no/where"), "--tokenizer-model /no/where: no such file"),
        (TokenizerConfig("Llama2Tokenizer", "no/where"), "--tokenizer-model no/where: no such file"),
        (TokenizerConfig("GPT2BPETokenizer", vocab_file="v"), "--vocab-file v: no such file"),
        (TokenizerConfig("GPT2BPETokenizer", vocab_file=__file__), "GPT2BPETokenizer needs --merge-file"),
    ],
)
def test_missing_flags_and_files(config, message):
    with pytest.raises(ValueError, match=message):
        build_tokenizer(config)


def test_files_of_another_kind(tmp_path, sentencepiece_models):
    junk = tmp_path / "junk"
    junk.write_text("not a tokenizer")
    for kind, message in [
        ("SentencePieceTokenizer", "is not a SentencePiece model"),
        ("HuggingFaceTokenizer", "is not a Hugging Face tokenizer"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_tokenizer(TokenizerConfig(kind, str(junk)))
    with pytest.raises(ValueError, match="is not a Hugging Face tokenizer"):
        build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(tmp_path)))
    with pytest.raises(ValueError, match="cannot be read"):
        build_tokenizer(TokenizerConfig("GPT2BPETokenizer", vocab_file=str(junk), merge_file=str(junk)))
    with pytest.raises(ValueError, match="has no end-of-sentence piece"):
        build_tokenizer(TokenizerConfig("SentencePieceTokenizer", str(sentencepiece_models / "without_eos.model")))


def test_code_of_a_tokenizer_runs_only_if_the_user_says_so(tmp_path):
    """A directory may bring a class along: without a word of the user it is neither run nor asked about."""
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n\nclass Evil:\n    pass\n")
    with pytest.raises(ValueError, match="is not a Hugging Face tokenizer"):
        build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(tmp_path)))
    assert not (tmp_path / "ran").exists()
    assert "trust_remote_code" not in ALSO_TAKEN
