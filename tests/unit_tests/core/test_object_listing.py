"""Listings of an object store that never end, and objects that claim any size."""

from pathlib import Path

import pytest

from megatron.core.object_path import path_of
from tests.fuzz.hostile_object_server import HostileServer
from tests.support.limited_process import run_limited

MEMORY = 2 << 30  # the threads of the client reserve address space
SECONDS = 10


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("obstore")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/file").write_bytes(b"x" * 1000)
    environment = {"AWS_ACCESS_KEY_ID": "t", "AWS_SECRET_ACCESS_KEY": "t", "AWS_REGION": "x"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MEGATRON_STORAGE_DEADLINE", "0.2")
    with HostileServer(tmp_path) as hostile:
        monkeypatch.setenv("AWS_ENDPOINT_URL", hostile.url)
        yield hostile


def list_twice() -> str:
    store = path_of("s3://bucket/run").store
    with pytest.raises(OSError):  # that of the listing or, on a busy machine, of one request
        store.sizes("run")
    with pytest.raises(OSError):  # that of the listing or, on a busy machine, of one request
        store.children("run")
    return "refused"


def read_terabyte() -> str:
    with pytest.raises(OSError, match=r"1099511627776 bytes, at most 1073741824 are read"):
        path_of("s3://bucket/run/file").read_bytes()
    return "refused"


@pytest.mark.parametrize("fault", ["endless", "same page", "empty pages"])
def test_endless_listings_end_with_an_error(fault: str, server: HostileServer) -> None:
    server.fault = fault
    assert run_limited(list_twice, MEMORY, SECONDS, start_method="spawn") == "refused"


def test_object_that_claims_a_terabyte_is_not_read(server: HostileServer) -> None:
    server.fault = "terabyte"
    assert run_limited(read_terabyte, MEMORY, SECONDS, start_method="spawn") == "refused"
