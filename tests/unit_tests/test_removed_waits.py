"""The program that removes waits of the product knows all of them."""

from tests import ROOT
from tests.fake_cuda.mutations import NOT_REMOVED, REACHED_BY, UNNEEDED, find_waits


def test_every_wait_is_listed():
    names = {}
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        waits = [wait.name for wait in find_waits(file)]
        if waits:
            names[file] = waits
    assert names.keys() == REACHED_BY.keys() | NOT_REMOVED.keys()
    removable = {name for file in REACHED_BY for name in names[file]}
    assert removable >= UNNEEDED.keys()
