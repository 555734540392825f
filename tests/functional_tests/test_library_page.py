"""The example of docs/library.md runs: saved by some ranks, loaded by others."""

import re

import pytest
import torch

from tests import ROOT


def run_example(rank, world_size, name, *args):
    page = (ROOT / "docs/library.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    namespace: dict = {}
    exec(code, namespace)
    return namespace[name](*args)


@pytest.mark.parametrize(("savers", "loaders"), [(2, 1), (1, 4), (4, 2)])
def test_example_resumes_at_another_number_of_ranks(savers, loaders, pool, tmp_path):
    saved = torch.cat(pool.run(run_example, savers, "train", 3, str(tmp_path)))
    parts = pool.run(run_example, loaders, "resume", str(tmp_path / "step_3"))
    assert torch.equal(torch.cat([weight for weight, _, _ in parts]), saved)
    assert [step for _, _, step in parts] == [3] * loaders
