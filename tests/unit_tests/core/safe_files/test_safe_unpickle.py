"""Files cannot run code, and the values of honest files are restored."""

import argparse
import collections
import datetime
import enum
import gc
import io
import os
import pathlib
import pickle
import re
import signal
import sys
import types

import numpy as np
import pytest
import torch

from megatron.core.safe_files.errors import CheckpointError, UnsafePickleError
from megatron.core.safe_files.safe_globals import Placeholder
from megatron.core.safe_files.torch_load import safe_load
from megatron.core.safe_files.unpickler import unpickle
from tests.support.compare import assert_same


def saved(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def archive_with(pickled: bytes) -> bytes:
    """Make an archive of torch.save that contains the pickle `pickled`."""
    writer_buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(writer_buffer)
    writer.write_record("data.pkl", pickled, len(pickled))
    writer.write_end_of_file()
    return writer_buffer.getvalue()


HONEST = {
    "tensors": {
        "a": torch.randn(3, 4),
        "t": torch.randn(3, 4).t(),
        "s": torch.tensor(3),
        "e": torch.empty(0, 3),
    },
    "dtypes": [
        torch.bfloat16,
        torch.float32,
        torch.randn(3).bfloat16(),
        torch.zeros(3).to(torch.float8_e4m3fn).float(),
    ],
    "numpy": {
        "rng": np.random.get_state(),
        "scalar": np.float32(2.5),
        "f": np.asfortranarray(np.eye(3)[:2]),
    },
    "plain": [
        1,
        2.5,
        "x",
        b"bytes",
        None,
        True,
        3 + 4j,
        {1, 2},
        frozenset([3]),
        (1, (2,)),
        bytearray(b"ab"),
        slice(1, 2),
    ],
    "namespace": argparse.Namespace(
        lr=0.1, nested=argparse.Namespace(betas=(0.9, 0.95)), dtype=torch.bfloat16
    ),
    "ordered": collections.OrderedDict(b=1, a=collections.OrderedDict(x=torch.ones(2))),
    "signal": signal.SIGTERM,
    "time": datetime.timedelta(minutes=3),
    "sizes": [torch.Size([2, 3]), torch.device("cpu")],
}


@pytest.mark.parametrize("name", HONEST)
def test_intact_values_are_loaded(name, tmp_path):
    content = saved(HONEST[name])
    (tmp_path / "x.pt").write_bytes(content)
    expected = torch.load(io.BytesIO(content), weights_only=False)
    for value in (
        safe_load(content),
        safe_load(tmp_path / "x.pt"),
        safe_load(tmp_path / "x.pt", mmap=False),
    ):
        assert_same(value, expected)


def test_parameters_and_attributes_become_plain_tensors():
    parameter = torch.nn.Parameter(torch.randn(3))
    tensor = torch.randn(2)
    parameter.tensor_model_parallel = True
    tensor.note = "x"
    loaded = safe_load(saved({"p": parameter, "t": tensor}))
    assert torch.equal(loaded["p"], parameter.detach())
    assert torch.equal(loaded["t"], tensor)


def test_views_share_their_storage(tmp_path):
    base = torch.arange(12.0)
    (tmp_path / "x.pt").write_bytes(saved({"a": base, "b": base[3:7], "c": base.view(3, 4).t()}))
    loaded = safe_load(tmp_path / "x.pt")
    loaded["a"][4] = 100
    assert loaded["b"][1] == 100
    assert loaded["c"][0, 1] == 100
    assert safe_load(tmp_path / "x.pt")["a"][4] == 4, (
        "writing to a mapped tensor must not reach the file"
    )


def test_mapped_tensors_cost_no_memory_before_use(tmp_path):
    torch.save({"big": torch.zeros(64 << 20, dtype=torch.uint8)}, tmp_path / "x.pt")

    def resident() -> int:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    if not pathlib.Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    before = resident()
    loaded = safe_load(tmp_path / "x.pt")
    assert loaded["big"].numel() == 64 << 20
    assert resident() - before < 16 << 20


def test_shared_containers_stay_shared_and_cycles_are_refused():
    shared = [torch.ones(2)]
    loaded = safe_load(saved({"x": shared, "y": shared}))
    assert loaded["x"] is loaded["y"]
    assert torch.equal(loaded["x"][0], torch.ones(2))
    shared.append(shared)
    with pytest.raises(CheckpointError, match="a container contains itself"):
        safe_load(saved({"x": shared}))


@pytest.fixture
def foreign_module():
    """Provide a module that exists while pickling, but not while loading."""
    module = types.ModuleType("someproject.enums")

    class Kind(enum.Enum):
        A = 2

    class Config:
        pass

    class Rows(dict):
        pass

    for foreign_class in (Kind, Config, Rows):
        foreign_class.__module__ = "someproject.enums"
        foreign_class.__qualname__ = foreign_class.__name__
        setattr(module, foreign_class.__name__, foreign_class)
    sys.modules["someproject"] = types.ModuleType("someproject")
    sys.modules["someproject.enums"] = module
    yield module
    del sys.modules["someproject"], sys.modules["someproject.enums"]


def test_unknown_classes_become_placeholders(foreign_module):
    config = foreign_module.Config()
    config.width = torch.ones(2)
    content = saved(
        {"kind": foreign_module.Kind.A, "config": config, "rows": foreign_module.Rows(a=1), "ok": 1}
    )
    loaded = safe_load(content)
    assert loaded["ok"] == 1
    assert isinstance(loaded["kind"], Placeholder)
    assert loaded["kind"].args == (2,)
    assert repr(loaded["kind"]) == "<someproject.enums.Kind(2)>"
    assert torch.equal(loaded["config"].state["width"], torch.ones(2))
    assert loaded["rows"].items == [("a", 1)]
    with pytest.raises(UnsafePickleError, match="only plain values"):
        safe_load(content, placeholders=False)


def test_call_of_wrapper_function_makes_a_placeholder():
    call = b"ctorch._utils\n_rebuild_wrapper_subclass\ncsomeproject\nX\nK\x05N\x87R."
    loaded = unpickle(call, "here")
    assert isinstance(loaded, Placeholder)
    assert loaded.args[1:] == (5, None)
    assert repr(loaded).startswith("<torch._utils._rebuild_wrapper_subclass(")


class Reduce:
    """Object that pickles as a call of `function(*args)`."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def in_protocol_2(payload: bytes) -> bytes:
    """Rewrite texts and numbers as torch.save writes them, the only form the unpickler supports."""
    payload = re.sub(rb"S'([^']*)'\n", lambda text: b"U" + bytes([len(text[1])]) + text[1], payload)
    return payload.replace(b"I01\n", b"\x88").replace(b"I00\n", b"\x89").replace(b"I1\n", b"K\x01")


MARK = "/tmp/safe_unpickle_was_executed"
ATTACKS = {
    "os.system": pickle.dumps(Reduce(os.system, f"touch {MARK}"), 2),
    "eval": pickle.dumps(Reduce(eval, f"open({MARK!r}, 'w')"), 2),
    "exec": pickle.dumps(Reduce(exec, f"open({MARK!r}, 'w')"), 4),
    "getattr": pickle.dumps(Reduce(getattr, {}, "get"), 2),
    "open": pickle.dumps(Reduce(open, MARK, "w"), 4),
    "import": pickle.dumps(Reduce(__import__, "os"), 2),
    "nested": pickle.dumps({"a": [({"b": Reduce(os.system, f"touch {MARK}")},)]}, 4),
    "argument": pickle.dumps(
        Reduce(collections.OrderedDict, [("a", Reduce(os.system, f"touch {MARK}"))]), 2
    ),
    "subprocess": b"csubprocess\nPopen\n(S'touch " + MARK.encode() + b"'\ntR.",
    "posix": b"cposix\nsystem\n(S'touch " + MARK.encode() + b"'\ntR.",
    "old builtins": b"c__builtin__\neval\n(S'1'\ntR.",
    "stack global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    "dotted name": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c\x04true\x85R.",
    "dotted allowed": b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93.",
    "inst": b"(S'touch " + MARK.encode() + b"'\niposix\nsystem\n.",
    "obj": b"(cposix\nsystem\nS'true'\no.",
    "torch load": b"ctorch\nload\n(S'/etc/passwd'\ntR.",
    "torch hub": b"ctorch.hub\nload\n(S'x'\ntR.",
    "torch jit": b"ctorch.jit\nload\n(S'x'\ntR.",
    "torch ops": b"ctorch._ops\nops\n.",
    "torch storage load": b"ctorch.storage\n_load_from_bytes\n(S'x'\ntR.",
    "torch rebuild of a function": b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nNNNtR.",
    "functools": b"cfunctools\npartial\n(cos\nsystem\ntR.",
    "numpy exec": b"cnumpy.testing._private.utils\nrunstring\n(S'1'\n}tR.",
    "numpy object dtype": b"cnumpy\ndtype\n(S'O8'\nI00\nI01\ntR.",
    "copyreg real class": b"ccopyreg\n_reconstructor\n(ccollections\nOrderedDict\nc__builtin__\nobject\nNtR.",
    "pickle in pickle": b"cpickle\nloads\n(S'x'\ntR.",
    "marshal": b"cmarshal\nloads\n(S'x'\ntR.",
    "ctypes": b"cctypes\nCDLL\n(S'libc.so.6'\ntR.",
    "webbrowser": b"cwebbrowser\nopen\n(S'x'\ntR.",
    "pip": b"cpip\nmain\n(S'x'\ntR.",
    "extension registry": b"\x80\x02\x82\x01.",
    # BUILD on the result of an allowed global: (state, slot state) sets attributes
    "build on a function": b"ctorch\nSize\n(N}S'_call'\ncsomeproject\nX\nstb.",
    "build on a placeholder class": b"csomeproject\nX\n(N}S'__setstate__'\ncsomeproject\nY\nstb.",
    "build on a placeholder class, dict": b"csomeproject\nX\n}S'a'\nI1\nsb.",
    "build on a namespace class": b"cargparse\nNamespace\n(N}S'resolve'\nI1\nstb.",
    "build on OrderedDict": b"ccollections\nOrderedDict\n(N}S'update'\nI1\nstb.",
    "build on a dtype": b"ctorch\nfloat32\n(N}S'itemsize'\nI1\nstb.",
    "build on a storage class": b"ctorch\nFloatStorage\n(N}S'dtype'\nI1\nstb.",
    "persistent id": b"S'x'\nQ.",
    "no stop": b"}",
    "empty": b"",
    "garbage": b"\xff\xfe\xfd",
    "memo": b"\x80\x02h\x07.",
}
ATTACKS = {name: in_protocol_2(payload) for name, payload in ATTACKS.items()}


@pytest.mark.parametrize("name", ATTACKS)
def test_malicious_pickles_are_refused(name, tmp_path):
    mark = pathlib.Path(MARK)
    mark.unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="here"):
        unpickle(ATTACKS[name], "here")
    content = archive_with(ATTACKS[name])
    with pytest.raises(CheckpointError, match="here"):
        safe_load(content, location="here")
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="x.pt"):
        safe_load(path)
    assert not mark.exists()


def test_tensors_are_bounded_by_their_storage():
    for offset, shape, stride in [
        (0, (5,), (1,)),
        (3, (2,), (1,)),
        (0, (2, 2), (3, 1)),
        (-1, (2,), (1,)),
        (0, (2,), (-1,)),
    ]:
        buffer = io.BytesIO()
        torch.save(torch.zeros(4), buffer)

        class Evil:
            def __init__(self, storage, offset, shape, stride):
                self.args = (storage, offset, shape, stride, False, collections.OrderedDict())

            def __reduce__(self):
                return torch._utils._rebuild_tensor_v2, self.args

        class Pickler(pickle.Pickler):
            def persistent_id(self, obj):
                return (
                    ("storage", torch.FloatStorage, "0", "cpu", 4)
                    if isinstance(obj, torch.Generator)
                    else None
                )

        pickled = io.BytesIO()
        Pickler(pickled, 2).dump(Evil(torch.Generator(), offset, shape, stride))
        out = io.BytesIO()
        writer = torch._C.PyTorchFileWriter(out)
        writer.write_record("data.pkl", pickled.getvalue(), len(pickled.getvalue()))
        writer.write_record("data/0", bytes(16), 16)
        writer.write_end_of_file()
        with pytest.raises(CheckpointError, match="cannot be rebuilt"):
            safe_load(out.getvalue())


def test_errors_name_the_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"nothing.pt: cannot be read: No such file"):
        safe_load(tmp_path / "nothing.pt")
    (tmp_path / "empty.pt").touch()
    with pytest.raises(CheckpointError, match=r"empty.pt: the file is empty"):
        safe_load(tmp_path / "empty.pt")
    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"old.pt: not a torch.save archive"):
        safe_load(tmp_path / "old.pt")


def test_file_is_unmapped_with_its_last_tensor(tmp_path):
    """Not at the next garbage collection: a converter that opens one file after the other would
    keep them all.
    """
    path = tmp_path / "weights.pt"
    torch.save({"w": torch.randn(1000), "nested": [{"b": torch.ones(3)}]}, path)

    def is_mapped():
        return str(path) in pathlib.Path("/proc/self/maps").read_text()

    gc.disable()
    try:
        loaded = safe_load(path)
        assert is_mapped()
        kept = loaded["nested"][0]["b"]
        del loaded
        assert is_mapped()
        assert kept.sum() == 3
        del kept
        assert not is_mapped()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "written", [b"csignal\nSIGTERM\n", b"csignal\nSignals\nK\x0f\x85R"], ids=["3.10", "3.11"]
)
def test_signals_are_loaded(written) -> None:
    """Python 3.10 pickles a member by its name. It is one object for all, on which a pickle sets
    nothing.
    """
    assert safe_load(archive_with(b"\x80\x02" + written + b".")) is signal.SIGTERM
    with pytest.raises(CheckpointError):
        safe_load(archive_with(b"\x80\x02" + written + b"}U\x01xNsb."))
    assert not hasattr(signal.SIGTERM, "x")


def test_paths_of_python_3_13_are_loaded() -> None:
    loaded = unpickle(b"\x80\x02cpathlib._local\nPosixPath\nX\x01\x00\x00\x00a\x85R.", "here")
    assert loaded == pathlib.PurePosixPath("a")
