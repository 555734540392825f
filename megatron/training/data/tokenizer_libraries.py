"""Tokenizers of other libraries: one builder function for each kind of file."""

from __future__ import annotations

import base64
import binascii
import os
import re
import socket
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.run_checkpoint.keys import GGUF_FILES
from megatron.core.run_checkpoint.tokenizer_files import make_tokenizer_path, read_gguf_tokenizer
from megatron.core.safe_files.reading import parse_json, read_regular
from megatron.core.safe_files.schema import limit
from megatron.core.terminal import format_error
from megatron.training.data.tokenizer import Tokenizer, TokenizerConfig
from megatron.training.data.tokenizer_trial import try_to_load

MAX_FILE_BYTES = limit("TOKENIZER_BYTES", 256 << 20)
END_OF_TEXT = "<|endoftext|>"


# Files. A checkpoint can name any path as its tokenizer (--use-checkpoint-args), so only regular
# files of bounded size are read: a pipe would block, /dev/zero would fill the memory.


def _get_path(config: TokenizerConfig, flag_name: str) -> Path:
    value = getattr(config, flag_name.removeprefix("--").replace("-", "_"))
    if value is None:
        raise ValueError(f"--tokenizer-type {config.kind} requires {flag_name}")
    path = make_tokenizer_path(value)
    if not path.exists():
        raise ValueError(f"{flag_name} {value}: no such file or directory")
    return path


def _read_file(path: Path, flag_name: str) -> bytes:
    """Return the content of a regular file. Raises ValueError that names the flag."""
    try:
        return read_regular(path, MAX_FILE_BYTES, follow_links=True)
    except OSError as error:
        raise ValueError(f"{flag_name} {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{flag_name}: {format_error(error)}") from None


def _check_directory(directory: Path) -> None:
    """Raise ValueError if a file that transformers may open there is not a regular, small one."""
    for pattern in ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"):
        for path in directory.glob(pattern):
            _read_file(path, "--tokenizer-model")


def is_rust_panic(error: BaseException) -> bool:
    """Return whether the extension module of `tokenizers` panicked.

    Its exception is not an `Exception`.
    """
    return type(error).__name__ == "PanicException"


# SentencePiece.


def build_sentencepiece(config: TokenizerConfig) -> Tokenizer:
    """Use a SentencePiece model unchanged, as Megatron-LM does since 0.16: no pieces are added, and
    EOD is its end-of-sentence piece. For --legacy-tokenizer see `_add_legacy_pieces`.
    """
    import sentencepiece  # here, so that runs with other tokenizers do not need it

    path = _get_path(config, "--tokenizer-model")
    legacy = config.legacy_tokenizer and config.kind == "SentencePieceTokenizer"
    if config.special_tokens and not legacy:
        raise ValueError(
            f"--tokenizer-special-tokens {' '.join(config.special_tokens)}: tokens cannot be added "
            "to a SentencePiece model; train it with them, or use SentencePieceTokenizer with "
            "--legacy-tokenizer"
        )
    content = _read_file(path, "--tokenizer-model")
    try:
        if not content:
            raise RuntimeError("the file is empty")
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"--tokenizer-model {path} is not a SentencePiece model: {format_error(error)}"
        ) from None
    if processor.eos_id() < 0:
        raise ValueError(
            f"--tokenizer-model {path} has no end-of-sentence piece, which separates documents: "
            "train it with an eos_id (SentencePiece's default)"
        )

    def token_id(token: str) -> int | None:
        # An unknown piece has the id of <unk>.
        piece_id = processor.piece_to_id(token)
        return piece_id if processor.id_to_piece(piece_id) == token else None

    plain = Tokenizer(
        processor.vocab_size(),
        eod=processor.eos_id(),
        pad=None if processor.pad_id() < 0 else processor.pad_id(),
        tokenize=processor.encode,
        detokenize=lambda ids: processor.decode(list(ids)),
        token_id=token_id,
        config=config,
    )
    if config.kind == "Llama2Tokenizer":
        return replace(plain, tokenize=lambda text: [processor.bos_id(), *processor.encode(text)])
    return _add_legacy_pieces(plain) if legacy else plain


def _add_legacy_pieces(plain: Tokenizer) -> Tokenizer:
    """Add the special tokens of --legacy-tokenizer after the pieces of the model.

    They are recognized in text.
    """
    # Special tokens that the model lacks get the next free ids.
    special: dict[str, int] = {}
    vocab_size = plain.vocab_size
    for token in ("<CLS>", "<SEP>", "<EOD>", "<MASK>", *(plain.config.special_tokens or ())):
        model_id = plain.token_id(token)
        if model_id is None:
            special[token] = vocab_size
            vocab_size += 1
        else:
            special[token] = model_id
    names = {token_id: token for token, token_id in special.items()}
    # Alternatives of a pattern are tried in order: a token that begins with another one comes
    # first.
    longest_first = sorted(special, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)))

    def tokenize(text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in pattern.finditer(text):
            ids += plain.tokenize(text[start : match.start()])
            ids.append(special[match[0]])
            start = match.end()
        return ids + plain.tokenize(text[start:])

    def detokenize(ids: Sequence[int]) -> str:
        # Special tokens have a space on either side, as Megatron-LM writes them.
        texts: list[str] = []
        run: list[int] = []
        for token_id in ids:
            if token_id in names:
                texts += [plain.detokenize(run), f" {names[token_id]} "]
                run = []
            else:
                run.append(token_id)
        return "".join([*texts, plain.detokenize(run)])

    return replace(
        plain,
        vocab_size=vocab_size,
        eod=special["<EOD>"],
        tokenize=tokenize,
        detokenize=detokenize,
        token_id=lambda token: special[token] if token in special else plain.token_id(token),
    )


# Hugging Face.

# Names of the end-of-document token in published tokenizers: a tokenizer.json does not specify it.
END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]")


def build_huggingface(config: TokenizerConfig) -> Tokenizer:
    """Use a tokenizer of `transformers`: a directory, a tokenizer.json, or a name on the hub. EOD
    is its EOS token.
    """
    tokenizer = load_huggingface(config)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"--tokenizer-model {config.tokenizer_model} has no EOS token, which separates "
            "documents: set eos_token in its tokenizer_config.json"
        )
    vocab = tokenizer.get_vocab()
    # Ids may have gaps, so that the number of tokens can be smaller than the largest id.
    largest_id = max(vocab.values(), default=-1)
    return Tokenizer(
        max(len(tokenizer), largest_id + 1),
        eod=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
        tokenize=lambda text: tokenizer.encode(text, add_special_tokens=False),
        detokenize=lambda ids: tokenizer.decode(list(ids), clean_up_tokenization_spaces=False),
        token_id=vocab.get,
        config=config,
    )


def load_huggingface(config: TokenizerConfig) -> Any:
    """Load a tokenizer of `transformers`, with the special tokens of the flags."""
    if config.tokenizer_model is None:
        raise ValueError("--tokenizer-type HuggingFaceTokenizer requires --tokenizer-model")
    if Path(config.tokenizer_model).match(GGUF_FILES):
        tokenizer = _load_gguf(Path(config.tokenizer_model))
    else:
        tokenizer = _load_huggingface(config.tokenizer_model, config.trust_remote_code)
    # Documents can be longer than the context of a model: no warning.
    tokenizer.model_max_length = 10**30
    tokenizer.add_tokens(config.special_tokens or [], special_tokens=True)
    return tokenizer


def _load_gguf(path: Path) -> Any:
    """Load the tokenizer in a GGUF file."""
    if not path.is_file():
        raise ValueError(f"--tokenizer-model {path}: no such file")
    with tempfile.TemporaryDirectory() as directory:
        for name, content in read_gguf_tokenizer(path).items():
            (Path(directory) / Path(name).name).write_bytes(content)
        return _load_huggingface(directory, trust_remote_code=False)


def _read_pipeline(path: Path) -> Any:
    """Return the content of a tokenizer.json. Raises ValueError if it is not valid JSON."""
    content = _read_file(path, "--tokenizer-model")
    try:
        return parse_json(content, str(path))
    except ValueError as error:
        raise ValueError(
            f"--tokenizer-model {path} is not a Hugging Face tokenizer: {format_error(error)}"
        ) from None


def _load_huggingface(name: str, trust_remote_code: bool) -> Any:
    """Load a directory, a tokenizer.json (with the tokenizer_config.json next to it, if any), or a
    name on the hub, from the local cache if possible.
    """
    path = Path(name)
    exists = path.exists()
    is_hub_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not name.startswith(".")
    if not exists and not is_hub_name:
        raise ValueError(
            f"--tokenizer-model {name}: no such file or directory, and not a name on the Hugging "
            "Face hub"
        )
    if path.is_dir():
        _check_directory(path)
    elif exists:
        _read_pipeline(path)
        if (path.parent / "tokenizer_config.json").is_file():
            path = path.parent
            _check_directory(path)

    # Without a network the library would try to connect for a minute.
    hub_problem = None if exists else find_hub_problem()

    # Imported here: it takes seconds.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    def load() -> Any:
        if path.is_dir() or not exists:
            return AutoTokenizer.from_pretrained(
                str(path),
                local_files_only=exists or hub_problem is not None,
                trust_remote_code=trust_remote_code,
            )
        return PreTrainedTokenizerFast(tokenizer_file=str(path))

    pipeline_file = path / "tokenizer.json" if path.is_dir() else path
    if pipeline_file.is_file():
        try_to_load(path, _read_pipeline(pipeline_file), load)
    try:
        tokenizer = load()
    except BaseException as error:
        # The network, the hub and the libraries raise bare Exceptions, and panics.
        if not isinstance(error, Exception) and not is_rust_panic(error):
            raise
        if exists:
            raise ValueError(
                f"--tokenizer-model {path} is not a Hugging Face tokenizer: {format_error(error)}"
            ) from error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = hub_problem or reason
        raise ValueError(
            f"--tokenizer-model {name}: no such file or directory, and it could not be loaded from "
            f"the Hugging Face hub ({reason}): download it where there is a network, and give its "
            "directory"
        ) from None
    if path.is_dir() or not exists:
        return tokenizer
    vocabulary = tokenizer.get_vocab()
    tokenizer.eos_token = next((token for token in END_TOKENS if token in vocabulary), None)
    return tokenizer


def find_hub_problem(timeout: float = 5.0) -> str | None:
    """Return why the Hugging Face hub cannot be reached within `timeout` seconds, or None.

    None also behind a proxy, through which only the library connects.
    """
    if urllib.request.getproxies():
        return None
    address = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    host = address.hostname or ""
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((host, port), timeout).close()
    except OSError as error:
        return f"{host} cannot be reached: {error}"
    return None


# GPT-2.


def build_gpt2(config: TokenizerConfig) -> Tokenizer:
    """Build GPT-2's byte-level BPE (Radford et al. 2019).

    EOD is `<|endoftext|>`, which text itself never produces.
    """
    # The same pipeline as transformers' GPT2TokenizerFast; importing transformers takes 4 s more.
    from tokenizers import Tokenizer as Pipeline
    from tokenizers import decoders, models, pre_tokenizers

    vocab_file = _get_path(config, "--vocab-file")
    merge_file = _get_path(config, "--merge-file")
    vocab_content = _read_file(vocab_file, "--vocab-file")
    merge_content = _read_file(merge_file, "--merge-file")
    vocab = parse_json(vocab_content, f"--vocab-file {vocab_file}")
    try:
        # Copies: the library cannot read files in an archive.
        with tempfile.TemporaryDirectory() as directory:
            vocab_copy, merge_copy = Path(directory, "vocab.json"), Path(directory, "merges.txt")
            vocab_copy.write_bytes(vocab_content)
            merge_copy.write_bytes(merge_content)
            pipeline = Pipeline(models.BPE.from_file(str(vocab_copy), str(merge_copy)))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(
            f"--vocab-file {vocab_file}, --merge-file {merge_file}: cannot be read: "
            f"{format_error(error)}"
        ) from None
    # Without a prefix space, text is tokenized as by GPT-2.
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    if END_OF_TEXT not in vocab:
        raise ValueError(
            f"--vocab-file {vocab_file} has no {END_OF_TEXT}, which separates documents"
        )
    missing = [token for token in config.special_tokens or () if token not in vocab]
    pipeline.add_special_tokens(missing)
    return Tokenizer(
        max(pipeline.get_vocab().values()) + 1,
        eod=vocab[END_OF_TEXT],
        pad=None,
        tokenize=lambda text: pipeline.encode(text, add_special_tokens=False).ids,
        detokenize=lambda ids: pipeline.decode(list(ids), skip_special_tokens=False),
        token_id=pipeline.token_to_id,
        config=config,
    )


# tiktoken.

# Patterns that split text into words, whose bytes are then merged. v1 and v2 are Megatron-LM's, the
# third is Llama 3's.
TIKTOKEN_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


TIKTOKEN_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")


TIKTOKEN_VOCAB_SIZE = 2**17


LLAMA3_NUM_SPECIAL = 256


LLAMA3_SPECIAL = {
    0: "begin_of_text",
    1: "end_of_text",
    6: "start_header_id",
    7: "end_header_id",
    9: "eot_id",
}


def _build_tiktoken(
    config: TokenizerConfig,
    ranks: dict[bytes, int],
    special: dict[str, int],
    pattern: str,
    eod: str,
) -> Tokenizer:
    """Build a byte-level BPE via the package tiktoken.

    `ranks` are those of tokens by their bytes. Text never produces `special` tokens.
    """
    try:
        import tiktoken  # here, so that runs with other tokenizers do not need it
    except ImportError:
        raise ValueError(
            "--tokenizer-type TikTokenizer and Llama3Tokenizer need the package tiktoken: "
            "pip install 'tiktoken<1'"
        ) from None
    encoding = tiktoken.Encoding(
        "tokenizer",
        pat_str=TIKTOKEN_PATTERNS[pattern],
        mergeable_ranks=ranks,
        special_tokens=special,
    )

    def token_id(token: str) -> int | None:
        try:
            return encoding.encode_single_token(token)
        except KeyError:
            return None

    return Tokenizer(
        encoding.n_vocab,
        eod=special[eod],
        pad=special.get("<pad>"),
        tokenize=encoding.encode_ordinary,
        detokenize=lambda ids: encoding.decode(list(ids)),
        token_id=token_id,
        config=config,
    )


def build_megatron_tiktoken(config: TokenizerConfig) -> Tokenizer:
    """Build Megatron-LM's variant of a tiktoken tokenizer.

    Special tokens come first, then ranks from a JSON list, up to the size of the vocabulary.
    """
    # Check the flags.
    path = _get_path(config, "--tokenizer-model")
    first = config.tiktoken_num_special_tokens
    special = list(TIKTOKEN_SPECIAL if config.special_tokens is None else config.special_tokens)
    size = config.vocab_size or TIKTOKEN_VOCAB_SIZE
    missing = set(TIKTOKEN_SPECIAL[:3]).difference(special)
    if missing or len(set(special)) < len(special):
        raise ValueError(
            f"--tokenizer-special-tokens {' '.join(special)} must contain <unk>, <s> and </s>, "
            "and no token twice"
        )
    if not len(special) <= first < size:
        raise ValueError(
            f"--tiktoken-num-special-tokens {first} must be at least the {len(special)} special "
            f"tokens, and less than the vocabulary size {size}"
        )

    # Read the ranks.
    content = _read_file(path, "--tokenizer-model")
    try:
        # Megatron-LM cuts a longer file at the size of the vocabulary, too.
        rows = parse_json(content, f"--tokenizer-model {path}")[: size - first]
        ranks = {
            base64.b64decode(row["token_bytes"], validate=True): first + row["rank"] for row in rows
        }
        is_complete = sorted(ranks.values()) == list(range(first, size))
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise ValueError(
            f"--tokenizer-model {path} is not a JSON list of token_bytes and rank: "
            f"{format_error(error)}"
        ) from None
    if not is_complete:
        raise ValueError(
            f"--tokenizer-model {path} has {len(ranks)} ranks, not each of 0 to {size - first - 1} "
            f"once: give --vocab-size {first + len(ranks)}"
        )

    # Name the ids that are left before the first rank.
    special += [f"<SPECIAL_{token_id}>" for token_id in range(len(special), first)]
    numbered = {token: token_id for token_id, token in enumerate(special)}
    return _build_tiktoken(config, ranks, numbered, config.tiktoken_pattern or "v2", "</s>")


def build_llama3(config: TokenizerConfig) -> Tokenizer:
    """Build Llama 3's tokenizer from Meta's file, or from the form of Hugging Face.

    Meta's file has one line `base64 rank` per token; 256 special tokens follow them.
    """
    path = _get_path(config, "--tokenizer-model")
    if path.is_dir() or path.suffix == ".json":  # the form of Hugging Face
        return build_huggingface(config)
    # Not `tiktoken.load`: it caches files by path in the temporary directory, so that it would not
    # notice a new file under the same name, and it has no limit of size.
    content = _read_file(path, "--tokenizer-model")
    try:
        rows = [row.split() for row in content.splitlines() if row]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in rows}
    except (ValueError, binascii.Error) as error:
        raise ValueError(
            f"--tokenizer-model {path} has a line that is not a token and its rank: "
            f"{format_error(error)}"
        ) from None
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(
            f"--tokenizer-model {path}: the ranks of {len(ranks)} tokens must be 0, 1, 2, ..."
        )

    special = {}
    num_reserved = 0
    for index in range(LLAMA3_NUM_SPECIAL):
        name = LLAMA3_SPECIAL.get(index)
        if name is None:
            name = f"reserved_special_token_{num_reserved}"
            num_reserved += 1
        special[f"<|{name}|>"] = len(ranks) + index
    return _build_tiktoken(config, ranks, special, "llama3", "<|end_of_text|>")
