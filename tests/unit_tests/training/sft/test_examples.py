"""Files and records of fine-tuning data."""

import gzip
import json

import pytest

from megatron.training.data.data_files import find_data_files
from megatron.training.sft.examples import (
    Conversation,
    TextPair,
    parse_example,
    parse_preference,
    read_example_chunks,
)
from tests.support.sft_runs import GOLDEN

USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
LINES = (GOLDEN / "conversations.jsonl").read_bytes()


def parse(record):
    return parse_example(json.dumps(record).encode())


def read_records(path):
    """Return the examples of the files of a path, and their line numbers."""
    documents = []
    for chunk in read_example_chunks(find_data_files(str(path))):
        documents += chunk.documents
    return [parse_example(content) for _, content in documents], [line for line, _ in documents]


def test_records_of_each_form():
    assert parse({"messages": [USER, ANSWER]}) == Conversation([USER, ANSWER])
    assert parse({"prompt": "a", "completion": "b"}) == TextPair("a", "b")
    pair = parse({"prompt": [USER], "completion": [ANSWER], "tools": '[{"name": "f"}]'})
    assert pair == Conversation([USER, ANSWER], [{"name": "f"}], num_context=1)


def test_null_fields_of_messages_are_dropped():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "thinking": None}
    expected = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    assert parse({"messages": [call]}) == Conversation([expected])


@pytest.mark.parametrize(
    "content, message",
    [
        (b"{", "not JSON: .*one JSON object per line"),
        (b"[" * 100_000, "nested too deep"),
        (b"[1]", "expected a JSON object, got list"),
        (b"\xff", "not JSON"),
        (b'{"text": "a"}', "the fields are 'text': expected messages, or prompt and completion"),
        (b'{"prompt": "a", "completion": []}', "both strings or both lists"),
        (b'{"messages": [], "tools": "x"}', "tools is not JSON"),
        (b'{"messages": []}', r"messages is \[\]: expected a list of at least one"),
        (b'{"messages": [3]}', r"messages\[0\] is 3: expected"),
        (b'{"messages": [{"from": "human"}]}', r"messages\[0\] has the role None: expected system"),
        (b'{"messages": [{"role": "bot", "content": "a"}]}', "role 'bot': .*rename the role"),
        (b'{"messages": [{"role": "user"}]}', r"messages\[0\] \(user\) has the content None"),
        (b'{"messages": [{"role": "user", "content": [1]}]}', r"content \[1\]: expected a string"),
    ],
)
def test_malformed_records_are_errors_with_a_fix(content, message):
    with pytest.raises(ValueError, match=message):
        parse_example(content)


def test_json_lines_are_read_plain_and_compressed(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES.replace(b"\n", b"\n\n"))
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write(LINES)
    plain, plain_lines = read_records(tmp_path / "a.jsonl")
    compressed, _ = read_records(tmp_path / "b.jsonl.gz")
    assert plain == compressed
    assert len(plain) == 12
    assert plain_lines == list(range(1, 25, 2))


def test_tables_are_read_as_json_lines_are(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    rows = [json.loads(line) for line in LINES.splitlines()]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    with ipc.new_stream(str(tmp_path / "b.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    (tmp_path / "c.jsonl").write_bytes(LINES)
    expected, _ = read_records(tmp_path / "c.jsonl")
    row_numbers = list(range(1, 13))
    for name in ("a.parquet", "b.arrow"):
        records = read_records(tmp_path / name)
        assert records == (expected, row_numbers)
    damaged = tmp_path / "d.parquet"
    damaged.write_bytes(b"no table")
    with pytest.raises(ValueError, match=r"d\.parquet: cannot be read"):
        read_records(damaged)


def test_folders_and_patterns(tmp_path):
    names = ("data/test-0.parquet", "data/train-0.jsonl", "data/train-1.jsonl.gz", "info.json")
    for name in (*names, "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    test_file, *train_files = [str(tmp_path / name) for name in names[:3]]
    assert find_data_files(str(tmp_path)) == train_files
    assert find_data_files(str(tmp_path / "data/train-*")) == train_files
    assert find_data_files(test_file) == [test_file]

    (tmp_path / "empty").mkdir()
    problems = {
        "absent": r"absent: no such file or folder",
        "notes.txt": r"notes\.txt: its name does not end with \.jsonl",
        "empty": r"empty: the folder has no \.jsonl",
    }
    for name, message in problems.items():
        with pytest.raises(ValueError, match=message):
            find_data_files(str(tmp_path / name))


def test_damaged_files_are_errors(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES)[:-20])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: cannot be read"):
        read_records(tmp_path / "a.jsonl.gz")


def parse_pair(**record):
    return parse_preference(json.dumps(record).encode())


def test_preferences_of_each_form():
    other = {"role": "assistant", "content": "c"}
    expected = (
        Conversation([USER, ANSWER], num_context=1),
        Conversation([USER, other], num_context=1),
    )
    assert parse_pair(prompt="a", chosen="b", rejected="c") == (
        TextPair("a", "b"),
        TextPair("a", "c"),
    )
    assert parse_pair(prompt=[USER], chosen=[ANSWER], rejected=[other]) == expected
    # The prompt is in both conversations, and may also be a column of text.
    assert parse_pair(chosen=[USER, ANSWER], rejected=[USER, other]) == expected
    assert parse_pair(prompt="a", chosen=[USER, ANSWER], rejected=[USER, other]) == expected
    chosen, rejected = parse_pair(chosen=[USER, ANSWER], rejected=[USER, ANSWER, USER, other])
    assert chosen.num_context == rejected.num_context == 1


@pytest.mark.parametrize(
    "record, message",
    [
        ({"messages": [USER, ANSWER]}, "'messages': --dpo expects prompt, chosen and rejected"),
        ({"chosen": "a", "rejected": "b"}, "--dpo expects prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "--dpo expects prompt"),
        (
            {"chosen": [ANSWER], "rejected": [ANSWER]},
            "or have one message: .* give these as prompt",
        ),
        ({"chosen": [USER, ANSWER], "rejected": [ANSWER, USER]}, "begin with different messages"),
        ({"chosen": [USER, ANSWER], "rejected": []}, r"rejected is \[\]: expected a list"),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [3]}, r"rejected\[0\] is 3"),
    ],
)
def test_malformed_preferences_are_explained(record, message):
    with pytest.raises(ValueError, match=message):
        parse_pair(**record)
