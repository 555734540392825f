"""Check the features of an object store: conditions, uploads, ranges, fencing, removal.

    python -m tests.interop.object_store_check s3://box/run http://127.0.0.1:9106/box

The second address is that of the bucket or container, which is made first: obstore has no request
for that.
"""

import base64
import hmac
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from email.utils import formatdate

import torch

from megatron.core.dist_checkpointing import (
    AsyncSaver,
    ShardedTensor,
    is_complete,
    load,
    take_generation,
)
from megatron.core.dist_checkpointing.verification import verify
from megatron.core.object_files import check_conditional_requests
from megatron.core.object_path import path_of

# its fixed key
AZURITE = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def create(bucket: str) -> None:
    """Create the bucket (S3) or container (Azure) once the server responds."""
    path = urllib.parse.urlparse(bucket).path
    date = formatdate(usegmt=True)
    if "devstoreaccount1" in bucket:
        headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
        signed = [f"{name}:{value}" for name, value in headers.items()]
        text = "\n".join(
            ["PUT", *[""] * 11, *signed, f"/devstoreaccount1{path}", "restype:container"]
        )
        who = "SharedKey devstoreaccount1"
        key = base64.b64decode(AZURITE)
        digest = "sha256"
        bucket += "?restype=container"
    else:
        headers = {"Date": date}
        text = f"PUT\n\n\n{date}\n{path}"
        who = f"AWS {os.environ['AWS_ACCESS_KEY_ID']}"
        key = os.environ["AWS_SECRET_ACCESS_KEY"].encode()
        digest = "sha1"
    headers["Authorization"] = (
        f"{who}:{base64.b64encode(hmac.new(key, text.encode(), digest).digest()).decode()}"
    )
    request = urllib.request.Request(
        bucket, method="PUT", headers=headers | {"Content-Length": "0"}
    )
    for _ in range(60):
        try:
            urllib.request.urlopen(request).close()
            return
        except urllib.error.HTTPError:
            raise
        except OSError:  # it has not started yet
            time.sleep(1)
    raise AssertionError(f"{bucket} does not answer")


def save(directory, value, generation):
    state = {"weight": ShardedTensor.replicated("weight", torch.full((3_000_000, 4), float(value)))}
    with AsyncSaver() as saver:
        return saver.save(
            state, directory, common={"iteration": value}, generation=generation
        ).wait()


def main(url: str, bucket: str) -> None:
    create(bucket)
    root = path_of(url)
    check_conditional_requests(root)
    first = take_generation(root, {"host": "first"})
    assert save(root / "iter_0000001", 1, first).error is None
    second = take_generation(root, {"host": "second"})
    report = save(root / "iter_0000002", 2, first)
    assert report.superseded, report
    assert "another launch has taken over" in report.error, report
    assert not is_complete(root / "iter_0000002")
    for value in (2, 3):
        report = save(root / f"iter_{value:07d}", value, second)
        assert report.error is None, report
    for value in (1, 2, 3):
        directory = root / f"iter_{value:07d}"
        weight = torch.zeros(3_000_000, 4)
        assert verify(directory).ok
        load({"weight": ShardedTensor.replicated("weight", weight)}, directory, verify=True)
        assert (weight == value).all()
    for aside in second.put_aside([root / "iter_0000001"]):
        second.remove(aside)
    assert [path.name for path in root.glob("iter_*") if is_complete(path)] == [
        "iter_0000002",
        "iter_0000003",
    ]
    print(f"{url}: conditions, uploads, ranges, fencing and removal hold")


if __name__ == "__main__":
    main(*sys.argv[1:])
