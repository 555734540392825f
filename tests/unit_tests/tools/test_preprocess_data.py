"""tools/preprocess_data.py: the bytes of Megatron-LM, document order, complete files, line numbers
in errors.
"""

import gzip
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from megatron.core.datasets import IndexedDataset
from megatron.training.data import documents
from tests import ROOT
from tests.support.processes import children_of, heed_interrupts, is_running, wait_until
from tools.preprocess_data import main

GOLDEN = ROOT / "tests" / "golden" / "megatron_lm" / "data"
NUMBERS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "256"]


def run(*arguments, workers=1):
    main([*map(str, arguments), *NUMBERS, "--workers", str(workers)])


def documents_of(prefix):
    dataset = IndexedDataset(prefix)
    bounds = dataset.documents.tolist()
    return [
        [dataset[i].tolist() for i in range(a, b)] for a, b in zip(bounds, bounds[1:], strict=False)
    ]


def write_json(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["pysrc_a", "pysrc_b"])
def test_files_equal_megatrons(tmp_path, name, workers):
    run(
        "--input",
        GOLDEN / f"{name}.jsonl",
        "--output-prefix",
        tmp_path / name,
        "--append-eod",
        workers=workers,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{name}_text_document.bin",
        f"{name}_text_document.idx",
    ]
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (GOLDEN / path.name).read_bytes()


def test_order_does_not_depend_on_the_number_of_workers(tmp_path, capsys):
    words = [
        [i % 256] * (i * 7919 % 3000 + 1) for i in range(400)
    ]  # 1.2 MB of text: several chunks per worker
    path = write_json(
        tmp_path / "in.jsonl",
        [{"text": " ".join(map(str, document))} for document in words],
    )
    for workers in (1, 3):
        run(
            "--input",
            path,
            "--output-prefix",
            tmp_path / f"w{workers}",
            "--log-interval",
            100,
            workers=workers,
        )

    assert documents_of(tmp_path / "w1_text_document") == [[document] for document in words]

    for suffix in ("bin", "idx"):
        one, three = (
            (tmp_path / f"w{workers}_text_document.{suffix}").read_bytes() for workers in (1, 3)
        )
        assert one == three
    lines = capsys.readouterr().err.splitlines()
    assert sum("docs/s" in line and "B/s" in line and "%" in line for line in lines) >= 4
    assert lines[-1].endswith(f"w3_text_document: 400 documents, {sum(map(len, words))} tokens")


def test_several_inputs_patterns_and_compression(tmp_path):
    for name, first_token in [("b2", 12), ("b1", 11), ("a", 10)]:
        write_json(tmp_path / f"{name}.jsonl", [{"text": str(first_token)}])
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"text": "13"}\n\n{"text": "14 15"}\n')
    inputs = [
        tmp_path / "c.jsonl.gz",
        tmp_path / "b*.jsonl",
        tmp_path / "a.jsonl",
        tmp_path / "b1.jsonl",
    ]
    run("--input", *inputs, "--output-prefix", tmp_path / "out")
    assert documents_of(tmp_path / "out_text_document") == [
        [[13]],
        [[14, 15]],
        [[11]],
        [[12]],
        [[10]],
    ]


def test_keys_sequences_and_empty_documents(tmp_path, capsys):
    records = [
        {"text": "1 2", "title": "7"},
        {"text": "", "title": "8"},
        {"text": ["3", "", "4 5"], "title": ["9", "10"]},
        {"text": [], "title": "11"},
    ]
    path = write_json(tmp_path / "in.jsonl", records)
    run(
        "--input",
        path,
        "--output-prefix",
        tmp_path / "out",
        "--json-keys",
        "text",
        "title",
        "--append-eod",
    )

    assert documents_of(tmp_path / "out_text_document") == [[[1, 2, 256]], [[3], [4, 5, 256]]]
    assert documents_of(tmp_path / "out_title_document") == [
        [[7, 256]],
        [[8, 256]],
        [[9], [10, 256]],
        [[11, 256]],
    ]
    assert (
        "out_text_document: 2 documents (2 empty ones left out), 7 tokens"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("file", [[[1, 2, 3, 4, 5]], [[6]]]),
        ("block", [[[1, 2]], [[3]], [[4, 5]], [[6]]]),
        ("line", [[[1]], [[2]], [[3]], [[4]], [[5]], [[6]]]),
    ],
)
def test_plain_text(tmp_path, kind, expected):
    (tmp_path / "a.txt").write_text("\n1\n2\n\n3\n \n\n4\r\n5")
    (tmp_path / "b.txt").write_text("6\n")
    (tmp_path / "c.txt").write_text("\n \n")
    run(
        "--input",
        tmp_path / "*.txt",
        "--output-prefix",
        tmp_path / "out",
        "--text-documents",
        kind,
    )
    assert documents_of(tmp_path / "out_text_document") == expected


def test_whitespace_of_documents_is_kept(tmp_path):
    """Newlines and indentation within a document belong to it."""
    import sentencepiece

    text = "def f():\n    return  1\n"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["def f ( ) : return 1"] * 50),
        model_prefix=str(tmp_path / "m"),
        vocab_size=280,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "f.py").write_text(text)
    tokenizer = [
        "--tokenizer-type",
        "SentencePieceTokenizer",
        "--tokenizer-model",
        str(tmp_path / "m.model"),
    ]
    main(
        [
            "--input",
            str(tmp_path / "f.py"),
            "--output-prefix",
            str(tmp_path / "out"),
            *tokenizer,
            "--workers",
            "2",
        ]
    )
    ids = IndexedDataset(tmp_path / "out_text_document")[0].tolist()
    assert (
        sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model")).decode(ids)
        == text
    )


BAD_LINES = {
    "cut": (b'{"text": "1"', r"in.jsonl:3: not JSON: Expecting ',' delimiter at column 13"),
    "no key": (
        b'{"body": "1", "n": 2}',
        r"in.jsonl:3: no field 'text', only 'body', 'n': see --json-keys",
    ),
    "number": (b'{"text": 5}', r"in.jsonl:3: field 'text' is 5, expected a string"),
    "array": (b'["1"]', r"in.jsonl:3: expected a JSON object, got list"),
    "encoding": (b'{"text": "\xff"}', r"in.jsonl:3: not UTF-8"),
    "tokens": (b'{"text": "1 x"}', r"in.jsonl:3: NullTokenizer reads decimal ids"),
    "range": (b'{"text": "1 300"}', r"in.jsonl:3: id 300 is not in 0..256"),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", BAD_LINES)
def test_errors_name_file_and_line_and_leave_no_files(tmp_path, name, workers):
    line, message = BAD_LINES[name]
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "1"}\n\n' + line + b"\n")
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        run("--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "out", workers=workers)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def hostile_tokenizer(path, normalizer=None, pre_tokenizer=None, first_id=0):
    """A tokenizer.json of the words a, b and </s>, with a component that attacks its reader."""
    pipeline = Pipeline(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    if normalizer is not None:
        pipeline.normalizer = normalizer
    pipeline.pre_tokenizer = pre_tokenizer or pre_tokenizers.WhitespaceSplit()
    path.write_text(pipeline.to_str().replace('"a":0', f'"a":{first_id}'))
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(path)]


GOOD = b'{"text": "1"}\n'
NESTED = b'{"text": "1", "x": ' + b"[" * 100_000 + b"\n"
SURROGATE = b'{"text": "\\ud800 1"}\n'
LONG = b'{"text": "' + b"1 " * 600_000 + b'"}\n'
MANY_KEYS = json.dumps({f"k{i}\x1b[2J": 1 for i in range(10_000)}).encode() + b"\n"
HOSTILE_LINES = {
    "nested": (NESTED, "not JSON: nested too deep"),
    "nested value": (b'{"text": ' + b"[" * 900 + b"]" * 900 + b"}\n", "field 'text' is a list"),
    "surrogate": (SURROGATE, r"field 'text' has a lone surrogate '\\ud800' at character 0"),
    "long": (LONG, "the document is larger than 1 MB: raise --max-document-mb"),
    "keys": (MANY_KEYS, r"no field 'text', only 'k0\\x1b\[2J', .*'k7\\x1b\[2J', \.\.\.: see"),
    "number": (b'{"text": ' + b"1" * 5000 + b"}\n", "in.jsonl:2: "),
}


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
@pytest.mark.parametrize("name", HOSTILE_LINES)
def test_hostile_lines_are_errors_or_skipped(tmp_path, capsys, name, suffix):
    line, message = HOSTILE_LINES[name]
    path = tmp_path / f"in.{suffix}"
    content = GOOD + line + GOOD + line + GOOD
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    arguments = ["--input", path, "--output-prefix", tmp_path / "out", "--max-document-mb", 1]

    with pytest.raises(SystemExit, match=f"error: .*in.{suffix}:2: .*") as error:
        run(*arguments)
    assert re.search(message.replace("in.jsonl", f"in.{suffix}"), str(error.value))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 2000
    with pytest.raises(SystemExit, match=r":4: .*bad line 2; --skip-bad-lines 1 allows 1"):
        run(*arguments, "--skip-bad-lines", 1)

    run(*arguments, "--skip-bad-lines", 2, workers=2)
    assert documents_of(tmp_path / "out_text_document") == [[[1]]] * 3
    lines = capsys.readouterr().err.splitlines()

    assert "2 bad lines skipped:" in lines
    assert lines[-1].endswith(": 3 documents, 3 tokens")


@pytest.mark.parametrize("kind", ["file", "block"])
def test_large_documents_of_plain_text(tmp_path, kind):
    """Their size is bounded although each line is short."""
    (tmp_path / "large.txt").write_text("1 2 3\n" * 200_000 + "\n4\n")
    (tmp_path / "small.txt").write_text("5\n")
    arguments = ["--input", tmp_path / "*.txt", "--output-prefix", tmp_path / "out"]
    arguments += ["--text-documents", kind, "--max-document-mb", 1]

    with pytest.raises(SystemExit, match="large.txt:1: the document is larger than 1 MB"):
        run(*arguments)

    run(*arguments, "--skip-bad-lines", 1)
    kept = [[[4]], [[5]]] if kind == "block" else [[[5]]]
    assert documents_of(tmp_path / "out_text_document") == kept


HOSTILE_TOKENIZERS = {
    # 25 captures of anything, then a word that is not there: exponential, or more than the regular
    # expression library accepts.
    "regular expression": (
        {
            "pre_tokenizer": pre_tokenizers.Sequence(
                [
                    pre_tokenizers.WhitespaceSplit(),
                    pre_tokenizers.Split(Regex("(.*a){25}x"), "isolated"),
                ]
            )
        },
        "the tokenizer (takes more than 1 s of processor time|failed: PanicException)",
    ),
    "expansion": (
        {"normalizer": normalizers.Sequence([normalizers.Replace("a", "a" * 1000)] * 4)},
        "the tokenizer (aborted, or takes too much memory|takes more than 1 s)",
    ),
    "ids": ({"first_id": 2**32 - 1}, "the tokenizer gives id 4294967295, which int32 cannot"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the kernel")
@pytest.mark.parametrize("name", HOSTILE_TOKENIZERS)
def test_hostile_tokenizers_cost_a_line_each(tmp_path, capsys, monkeypatch, name):
    """The workers that they kill are replaced, and no other document is lost or duplicated."""
    components, message = HOSTILE_TOKENIZERS[name]
    monkeypatch.setattr(documents, "CHUNK_BYTES", 2000)  # several chunks
    tokenizer = hostile_tokenizer(tmp_path / "tokenizer.json", **components)
    good = ["b " * (1 + i % 7) for i in range(400)]
    texts = list(good)
    texts[300] = texts[100] = "a" * 40
    path = write_json(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    arguments = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), *tokenizer]
    arguments += ["--workers", "2", "--document-cpu-seconds", "1"]

    with pytest.raises(SystemExit, match=f"in.jsonl:101: {message}"):
        main(arguments)

    main([*arguments, "--skip-bad-lines", "2"])
    assert "2 bad lines skipped:" in capsys.readouterr().err

    del texts[300], texts[100]
    expected = [[[1] * (len(text) // 2)] for text in texts]
    assert documents_of(tmp_path / "out_text_document") == expected


def test_invalid_arguments(tmp_path):
    path = write_json(tmp_path / "in.jsonl", [{"text": ""}])
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"1 2 3" * 1000)[:-20])
    cases = [
        (["--input", path], "--input and --output-prefix are required"),
        (["--input", tmp_path / "none", "--output-prefix", "x"], "--input .*none: no such file"),
        (["--input", tmp_path, "--output-prefix", "x"], "it is a directory, give a pattern"),
        (
            ["--input", path, "--output-prefix", tmp_path / "x"],
            "no document of 1 files has any token of 'text'",
        ),
        (
            ["--input", path, "--output-prefix", "x", "--log-interval", 0],
            "--log-interval must be positive",
        ),
        (
            ["--input", path, "--output-prefix", "x", "--append_eos"],
            "unknown flag --append_eos: did you mean --append-eod",
        ),
        (
            ["--input", tmp_path / "cut.gz", "--output-prefix", tmp_path / "x"],
            "cut.gz: cannot be read",
        ),
        (["--input", path, "--output-prefix", path / "x"], "Not a directory|File exists"),
    ]

    for arguments, message in cases:
        with pytest.raises(SystemExit, match=message):
            run(*arguments)
    with pytest.raises(SystemExit, match="--workers must be positive, got 0"):
        run("--input", path, "--output-prefix", "x", workers=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gz", "in.jsonl"]


@pytest.mark.parametrize("workers", [1, 2])
def test_regular_expression_of_a_tokenizer_that_takes_too_long_is_an_error(tmp_path, workers):
    """Its library, in Rust, gives up after ten million steps, with an error of its own kind."""
    pipeline = Pipeline(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    pipeline.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    pipeline.save(str(tmp_path / "tokenizer.json"))
    texts = [{"text": text} for text in ("a a", "a" * 40 + "!", "a")]
    path = write_json(tmp_path / "in.jsonl", texts)
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    flags += [tmp_path / "tokenizer.json", "--input", path, "--output-prefix", tmp_path / "out"]

    with pytest.raises(
        SystemExit,
        match=r"in\.jsonl:2: the tokenizer failed: PanicException: Onig",
    ):
        main([*map(str, flags), "--workers", str(workers)])

    assert not list(tmp_path.glob("out*"))


# Documents of a token and much text: a unit of work is `documents.CHUNK_BYTES` of text.
LINES = ('{"text": "1' + " " * 1000 + '"}\n') * 500


def start(tmp_path):
    """A run in a process of its own that reads from a pipe which never ends."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    command = [
        sys.executable,
        str(ROOT / "tools" / "preprocess_data.py"),
        *NUMBERS,
        "--workers",
        "2",
        "--log-interval",
        "1",
    ]
    command += ["--input", str(tmp_path / "pipe.jsonl"), "--output-prefix", str(tmp_path / "out")]
    with open(tmp_path / "log", "w") as log:  # a full pipe would block the run
        return subprocess.Popen(command, stderr=log, preexec_fn=heed_interrupts)


def wait_for_progress(tmp_path):
    wait_until(lambda: "docs/s" in (tmp_path / "log").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_interrupted_run_leaves_no_files_and_no_processes(tmp_path, number):
    process = start(tmp_path)
    with open(tmp_path / "pipe.jsonl", "w") as pipe:
        pipe.write(LINES * 12)
        pipe.flush()
        wait_for_progress(tmp_path)
        workers = children_of(process.pid)
        assert len(workers) == 2
        assert all(map(is_running, workers))
        process.send_signal(number)
        assert (
            process.wait(timeout=300)
            == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
        )

    left = [path for path in tmp_path.iterdir() if path.name.startswith("out")]
    assert not [path for path in left if path.suffix in (".bin", ".idx")]
    assert number == signal.SIGKILL or not left

    wait_until(lambda: not any(map(is_running, workers)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_worker_stops_the_run(tmp_path):
    process = start(tmp_path)
    with open(tmp_path / "pipe.jsonl", "w") as pipe:
        pipe.write(LINES * 12)
        pipe.flush()
        wait_for_progress(tmp_path)
        os.kill(children_of(process.pid)[0], signal.SIGKILL)
        with pytest.raises(BrokenPipeError):  # the run ends although its input does not
            while True:
                pipe.write(LINES)
                pipe.flush()

    assert process.wait(timeout=300) == 1
    assert "a worker process was killed (out of memory?)" in (tmp_path / "log").read_text()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]
