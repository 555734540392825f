"""Tokens and loss masks of examples, compared with transformers and with TRL."""

import json
import re

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron.training.data.documents import Chunk
from megatron.training.sft.chat_template import ExampleEncoder
from megatron.training.sft.examples import parse_example
from tests.support.sft_runs import GOLDEN, write_tokenizer

LINES = (GOLDEN / "conversations.jsonl").read_bytes().splitlines()
TURNS = {"messages": [
    {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
]}  # fmt: skip


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Return a function from the name of a template to the tokenizer."""
    work = tmp_path_factory.mktemp("tokenizers")

    def load_tokenizer(template):
        return AutoTokenizer.from_pretrained(write_tokenizer(work / str(template), template))

    return load_tokenizer


def trained_texts(encoder, record):
    """Return the text of each run of trained tokens."""
    example = parse_example(json.dumps(record).encode())
    ids, is_trained = encoder.encode(example)
    changes = np.flatnonzero(np.diff(is_trained)) + 1
    texts = []
    for run, is_run_trained in zip(
        np.split(ids, changes), np.split(is_trained, changes), strict=True
    ):
        if is_run_trained[0]:
            texts.append(encoder.tokenizer.decode(run))
    return texts


def test_marked_templates_give_the_masks_of_transformers(load):
    tokenizer = load("markers")
    encoder = ExampleEncoder(tokenizer, "assistant")
    for content in LINES:
        ids, is_trained = encoder.encode(parse_example(content))
        expected = tokenizer.apply_chat_template(
            json.loads(content)["messages"], return_assistant_tokens_mask=True, return_dict=True
        )
        assert ids.tolist() == expected["input_ids"]
        assert is_trained.tolist() == [bool(bit) for bit in expected["assistant_masks"]]


@pytest.mark.parametrize("name", ["conversations", "packed_pairs"])
def test_tokens_and_masks_are_those_of_trl(load, name):
    golden = json.loads((GOLDEN / "trl.json").read_text())[name]["examples"]
    encoder = ExampleEncoder(load("markers"), "assistant")
    lines = (GOLDEN / f"{name.removeprefix('packed_')}.jsonl").read_bytes().splitlines()
    for content, expected in zip(lines, golden, strict=True):
        ids, is_trained = encoder.encode(parse_example(content))
        length = len(expected["input_ids"])  # trl has truncated one example
        assert ids[:length].tolist() == expected["input_ids"]
        labels = np.where(is_trained, ids, -100)
        assert labels[:length].tolist() == expected["labels"]


@pytest.mark.parametrize("template", ["markers", "plain"])
@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_excluded_text_is_not_trained_on(load, template, train_on):
    """Only tokens of the excluded text change; text without its end is trained on."""
    thinking = "<think>hm</think> b <call>f()</call><call>g()</call>!"
    record = {"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": thinking},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d <think>cut"},
    ]}  # fmt: skip
    tokenizer = load(template)
    pairs = ["<think>", "</think>", "<call>", "</call>"]
    expected = []
    for text in trained_texts(ExampleEncoder(tokenizer, train_on), record):
        text = re.sub("<think>[^>]*</think>|(<call>.*?</call>)+", "|", text)
        expected += [run for run in text.split("|") if run]
    assert trained_texts(ExampleEncoder(tokenizer, train_on, pairs), record) == expected
    assert "d <think>cut" in "".join(expected)


def test_excluded_text_of_a_completion(load):
    encoder = ExampleEncoder(load(None), "assistant", ["(", ")"])
    assert trained_texts(encoder, {"prompt": "(a)", "completion": " x(y)z"}) == [" x", "z</s>"]


def test_prefix_differences_train_on_marked_text_and_the_end_of_its_turn(load):
    marked = ExampleEncoder(load("markers"), "assistant")
    plain = ExampleEncoder(load("plain"), "assistant")
    for content in LINES:
        record = json.loads(content)
        expected = [f"{text}\n" for text in trained_texts(marked, record)]
        assert trained_texts(plain, record) == expected


@pytest.mark.parametrize("template", ["markers", "plain"])
def test_train_on_selects_turns(load, template):
    tokenizer = load(template)
    end = "" if template == "markers" else "\n"
    texts = {}
    for train_on in ("assistant", "last", "all"):
        encoder = ExampleEncoder(tokenizer, train_on)
        texts[train_on] = trained_texts(encoder, TURNS)
    assert texts["assistant"] == [f"b</s>{end}", f"d</s>{end}"]
    assert texts["last"] == [f"d</s>{end}"]
    # No position predicts the first token.
    assert texts["all"] == ["user>a</s>\n<assistant>b</s>\n<user>c</s>\n<assistant>d</s>\n"]


THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.thinking and loop.last %}({{ m.thinking }})"
    "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_that_changes_earlier_turns_is_an_error(load):
    """Qwen 3 removes the thinking of all turns but the last one."""
    tokenizer = load("plain")
    tokenizer.chat_template = THINKING
    record = json.loads(json.dumps(TURNS))
    for message in record["messages"][1::2]:
        message["thinking"] = "hm"
    assert trained_texts(ExampleEncoder(tokenizer, "last"), record) == ["(hm)d"]
    with pytest.raises(ValueError, match=r"first 2 messages differently.*\{% generation %\}"):
        trained_texts(ExampleEncoder(tokenizer, "assistant"), record)


def test_a_completion_begins_at_the_token_that_contains_its_first_character(load):
    encoder = ExampleEncoder(load(None), "assistant")
    record = {"prompt": "x y ", "completion": "z"}
    assert trained_texts(encoder, record) == ["z</s>"]


FAILURES = {
    "no_template": (None, TURNS, "has no chat template.*chat_template.jinja"),
    "template_raises": (
        "{{ raise_exception('roles must alternate') }}", TURNS,
        "fails for the roles user, assistant, user, assistant: TemplateError: roles must alternate",
    ),
    "no_assistant": ("plain", {"messages": TURNS["messages"][:1]}, "no token is trained on"),
    "empty_completion": ("plain", {"prompt": "a</s>", "completion": ""}, "no token is trained on"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_errors_name_file_and_line(load, name):
    template, record, message = FAILURES[name]
    if template in (None, "plain"):
        tokenizer = load(template)
    else:
        tokenizer = load("plain")
        tokenizer.chat_template = template
    chunk = Chunk("data.jsonl", True, [(7, json.dumps(record).encode())], [], 1)
    with pytest.raises(ValueError, match=rf"^data\.jsonl:7: .*{message}"):
        ExampleEncoder(tokenizer, "assistant")(chunk)


def test_tokenizers_without_offsets_are_refused(load):
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(ValueError, match="SlowTokenizer does not report"):
        ExampleEncoder(SlowTokenizer(), "assistant")
