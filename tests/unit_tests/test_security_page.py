"""SECURITY.md names tests and variables that exist."""

import re
import subprocess

import pytest

from tests import ROOT

PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*?) \| (.*?) \|(.*?)\| `(\S+\.py)` \|$", PAGE, re.MULTILINE)


def test_every_limit_is_tested() -> None:
    assert len(ROWS) > 10
    for resource, _, _, test in ROWS:
        directory = ROOT if test.startswith("tests/") else ROOT / "tests/unit_tests"
        assert (directory / test).is_file(), resource


@pytest.mark.parametrize("name", sorted(set(re.findall(r"MEGATRON_[A-Z_]+", PAGE))))
def test_variables_exist(name: str) -> None:
    # Limits are defined as limit("LAYERS", ...) or plausible("LAYERS", ...).
    text = name.removeprefix("MEGATRON_MAX_")
    command = ["grep", "-rqE", f"[\"' ={{(]{text}", ROOT / "megatron", "--include=*.py"]
    assert subprocess.run(command, check=False).returncode == 0


def test_sources_exist() -> None:
    for path in re.findall(r"`(core/\S+\.py)`", PAGE):
        assert (ROOT / "megatron" / path).is_file() or (ROOT / "tests/unit_tests" / path).is_file()
