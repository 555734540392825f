"""Errors that end the program: one message, an exit code, and torchrun's error file."""

import json
from pathlib import Path

import pytest
import torch

from megatron.training import fatal_errors
from megatron.training.fatal_errors import TrainingInterrupted, errors_explained_once
from megatron.training.operations.reexecution import WrongResultError
from megatron.training.operations.rerun import REJECTED


def end_with(error, capsys):
    """Return the exit code and standard error of a program that ends with `error`."""
    with pytest.raises(SystemExit) as ending, errors_explained_once():
        raise error
    return ending.value.code, capsys.readouterr().err


def test_value_error_is_one_line(capsys):
    assert end_with(ValueError("wrong"), capsys) == (1, "error: wrong\n")


def test_error_determines_its_exit_code(capsys):
    assert end_with(WrongResultError("wrong", REJECTED), capsys) == (17, "error: wrong\n")


def test_text_of_files_cannot_control_the_terminal(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    _, output = end_with(ValueError("rope_type: \x1b[2J\u202e\nnext"), capsys)
    assert output == "error: rope_type: \\x1b[2J\\u202e\nnext\n"
    reported = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert reported == output.rstrip("\n")


@pytest.mark.parametrize("shape", [(1 << 50,), (1 << 25, 1 << 25)])
def test_lack_of_memory_is_one_line(capsys, shape):
    with pytest.raises(RuntimeError) as allocation:
        torch.empty(shape, dtype=torch.uint8)
    code, output = end_with(allocation.value, capsys)
    assert code == 1
    assert output.count("\n") == 1
    assert output.startswith("error: out of memory (")
    assert "--micro-batch-size" in output


def test_memory_error_of_python_is_explained(capsys):
    assert end_with(MemoryError(), capsys)[1].startswith("error: out of memory (MemoryError). Use")


def test_other_errors_keep_their_traceback():
    with pytest.raises(RuntimeError, match="shapes"), errors_explained_once():
        raise RuntimeError("shapes do not match")


def test_os_error_of_a_file_is_one_line(capsys, tmp_path):
    with pytest.raises(OSError) as missing:
        (tmp_path / "file").read_bytes()
    code, output = end_with(missing.value, capsys)
    assert code == 1
    assert output.startswith("error: [Errno 2]")
    assert f"{tmp_path}/file" in output
    with pytest.raises(ConnectionError), errors_explained_once():
        raise ConnectionError("reset by peer")


def test_interrupt_ends_with_130(capsys, monkeypatch):
    assert end_with(TrainingInterrupted("saved x"), capsys) == (130, "\nsaved x\n")
    assert end_with(KeyboardInterrupt(), capsys) == (130, "\ninterrupted\n")
    monkeypatch.setenv("RANK", "1")
    assert end_with(KeyboardInterrupt(), capsys) == (130, "")


def test_error_file_appears_as_a_whole(capsys, monkeypatch, tmp_path):
    """torchrun may read it at any time: it must never see a part of it."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    replaced = []
    replace = fatal_errors.os.replace

    def check_before_replacing(source, target):
        replaced.append(json.loads(Path(source).read_text())["message"]["message"])
        assert not path.exists()
        replace(source, target)

    monkeypatch.setattr(fatal_errors.os, "replace", check_before_replacing)
    end_with(ValueError("wrong"), capsys)
    assert replaced == ["error: wrong"]
    assert json.loads(path.read_text())["message"]["message"] == "error: wrong"
    assert list(tmp_path.iterdir()) == [path]
