"""Object storage as paths and requests, against a real server over HTTP."""

import http.server
import json
import pickle
import re
import sys
import threading
from pathlib import Path

import obstore
import pytest

from megatron.core import object_storage
from megatron.core.object_files import check_conditional_requests
from megatron.core.object_path import ObjectPath, path_of
from megatron.core.object_storage import ConflictError
from tests import ROOT
from tests.support.object_server import FaultyProxy, object_server


@pytest.fixture(scope="module")
def server():
    with object_server() as url:
        yield url


@pytest.fixture(autouse=True)
def fresh_stores(monkeypatch):
    """A store keeps the endpoint that it was opened with."""
    monkeypatch.setenv("MEGATRON_STORAGE_DEADLINE", "30")
    object_storage.open_store.cache_clear()
    yield
    object_storage.open_store.cache_clear()


def test_paths_compare_and_pickle_like_values():
    path = path_of("s3://bucket/run")
    assert isinstance(path, ObjectPath)
    assert str(path) == "s3://bucket/run"
    below = path / "iter_0000001" / ".metadata"
    assert str(below) == "s3://bucket/run/iter_0000001/.metadata"
    assert below.key == "run/iter_0000001/.metadata"
    assert below.parent.parent == path
    assert below.name == ".metadata"
    assert below.bucket == "s3://bucket"
    assert pickle.loads(pickle.dumps(below)) == below
    assert {path: 1}[path_of("s3://bucket/run/")] == 1
    assert path_of("a/b").name == "b"
    assert not isinstance(path_of("a/b"), ObjectPath)
    assert below.is_relative_to(path)
    assert not below.is_relative_to(Path("/home"))
    assert Path("/home") not in below.parents


@pytest.mark.parametrize("name", ["http://bucket/run", "s3://", "s3:///"])
def test_other_addresses_are_errors(name):
    with pytest.raises(ValueError, match="s3://bucket/prefix"):
        path_of(name)


def test_missing_package_is_named_with_the_versions_that_work(monkeypatch):
    # The name of this project belongs to another package in the index of pip.
    monkeypatch.setitem(sys.modules, "obstore", None)
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    (requirement,) = re.findall(r'"object-storage": \["(.+)"\]', setup)
    with pytest.raises(ValueError, match=re.escape(f"pip install '{requirement}'")):
        path_of("s3://bucket/x").exists()


def test_file_system_functions_raise_an_error(server):
    with pytest.raises(
        ValueError, match="s3://bucket/x: this requires a directory of a file system"
    ):
        path_of("s3://bucket/x").open()


def test_conditional_requests_and_listings(server):
    root = path_of("s3://bucket/requests")
    store = root.store
    assert not root.exists()
    assert list(root.iterdir()) == []
    first = store.create("requests/a/x", b"1")
    with pytest.raises(ConflictError):
        store.create("requests/a/x", b"2")
    second = store.replace("requests/a/x", b"3", first)
    with pytest.raises(ConflictError):
        store.replace("requests/a/x", b"4", first)
    assert store.read("requests/a/x") == (b"3", second)
    store.put("requests/a/y", b"0123456789")
    assert bytes(store.get_range("requests/a/y", 3, 4)) == b"3456"
    assert (root / "a/y").stat().st_size == 10
    assert store.sizes("requests") == {"requests/a/x": 1, "requests/a/y": 10}
    assert [path.name for path in root.iterdir()] == ["a"]
    assert root.is_dir()
    assert not root.is_file()
    assert sorted(path.name for path in root.glob("a/*")) == ["x", "y"]
    assert (root / "a/x").is_file()
    with pytest.raises(FileNotFoundError, match="s3://bucket/requests/none"):
        store.read("requests/none")
    with pytest.raises(OSError, match=r"s3://nowhere/x"):
        path_of("s3://nowhere/x").read_bytes()
    store.delete(["requests/a/x", "requests/none"])
    assert store.sizes("requests") == {"requests/a/y": 10}


def test_upload_appears_when_it_is_closed(server):
    path = path_of("s3://bucket/upload")
    content = bytes(range(256)) * 50_000
    upload = path.store.upload(path.key, len(content))
    upload.write(memoryview(content)[: 9 << 20])
    upload.write(content[9 << 20 :])
    assert not path.exists()
    upload.close()
    assert path.read_bytes() == content
    dropped = path.store.upload("dropped", 10)
    dropped.write(b"1")
    del dropped
    assert not path_of("s3://bucket/dropped").exists()


def test_lost_answer_does_not_lose_the_write(server):
    """The request is repeated and meets the object that it has made itself."""
    lost = []

    def fault(method, path, headers):
        if method == "PUT" and not lost:
            lost.append(path)
            return "drop"
        return None

    with FaultyProxy(server, fault):
        store = path_of("s3://bucket/x").store
        e_tag = store.create("lost", b"mine")
        assert lost
        assert store.read("lost") == (b"mine", e_tag)
        lost.clear()
        store.replace("lost", b"mine again", e_tag)
        assert lost
        assert store.read("lost").content == b"mine again"


def test_requests_are_repeated_after_server_errors(server):
    refused = []

    def fault(method, path, headers):
        refused.append(method)
        return "refuse" if len(refused) % 3 else None

    with FaultyProxy(server, fault):
        store = path_of("s3://bucket/x").store
        store.put("repeated", b"1")
        assert store.read("repeated").content == b"1"
        assert len(refused) == 6


def test_store_that_ignores_conditions_is_an_error(server):
    with (
        FaultyProxy(server, lambda *request: "strip"),
        pytest.raises(ValueError, match=r"127\.0\.0\.1:\d+ ignores"),
    ):
        check_conditional_requests(path_of("s3://bucket/probe"))
    object_storage.open_store.cache_clear()
    root = path_of("s3://bucket/probe")
    check_conditional_requests(root)
    assert root.store.sizes("probe") == {}, "nothing is left"


def test_store_that_compares_tags_without_quotes(server):
    with FaultyProxy(server, lambda *request: "quotes"):
        root = path_of("s3://bucket/quotes")
        check_conditional_requests(root)
        e_tag = root.store.create("quotes/a", b"1")
        second = root.store.replace("quotes/a", b"2", e_tag)
        with pytest.raises(ConflictError):
            root.store.replace("quotes/a", b"3", e_tag)
        assert root.store.read("quotes/a") == (b"2", second)


def test_missing_bucket_is_one_error(server):
    with pytest.raises(ValueError, match="checkpoints cannot be saved to s3://nowhere/run"):
        check_conditional_requests(path_of("s3://nowhere/run"))


def test_missing_object_does_not_stop_deletion(monkeypatch):
    """Google's protocol has a request for each, and its client stops at the first 404."""
    names = {"a", "b", "d"}

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_DELETE(self):
            key = self.path.rpartition("/")[2]
            self.send_response(204 if key in names else 404)
            names.discard(key)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        account = {
            "gcs_base_url": f"http://127.0.0.1:{server.server_address[1]}",
            "disable_oauth": True,
        }
        account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
        path_of("gs://bucket/x").store.delete(["none", "a", "no", "b", "d", "one"])
        server.shutdown()
    assert names == set()


@pytest.mark.parametrize(
    ("environment", "ours"),
    [
        ({"AWS_ENDPOINT_URL": None}, True),
        ({"AWS_ENDPOINT_URL": "https://ceph.cluster"}, True),
        ({}, False),
        ({"AWS_ENDPOINT_URL": None, "AWS_UNSIGNED_PAYLOAD": "true"}, False),
        ({"AWS_ENDPOINT_URL": "https://ceph.cluster", "AWS_UNSIGNED_PAYLOAD": "false"}, False),
    ],
)
def test_payload_is_signed_without_https(server, monkeypatch, environment, ours):
    """Variables of the environment are not overridden."""
    for name, value in environment.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    opened = []
    from_url = obstore.store.from_url
    monkeypatch.setattr(
        obstore.store,
        "from_url",
        lambda *args, **options: opened.append(from_url(*args, **options)),
    )
    object_storage.ObjectStore("s3://bucket")
    assert (opened[0].config.get("unsigned_payload") == "true") is ours


def test_unsigned_upload_is_accepted(server, monkeypatch):
    monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", "true")
    hashes = set()
    with FaultyProxy(
        server, lambda method, path, headers: hashes.add(headers.get("x-amz-content-sha256"))
    ):
        path = path_of("s3://bucket/unsigned")
        path.store.put(path.key, b"content")
        assert path.read_bytes() == b"content"
        assert "UNSIGNED-PAYLOAD" in hashes
