"""Carries out a stage of the Dockerfile without Docker, step by step, in an empty directory and a bare environment.

    python tools/docker_dry_run.py                                          the stage cpu, up to and without its CMD
    python tools/docker_dry_run.py --command "make test PYTEST_ARGS=tests/unit_tests/core"
    python tools/docker_dry_run.py --build-arg CPU_INDEX="--no-index --find-links wheels"

What only root of an image can do (apt-get, useradd, chown) is left out; the tools that apt-get would install must be
here. Copies heed .dockerignore.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ONLY_ROOT = ("apt-get", "useradd", "chown", "rm -rf /var/lib/apt/lists/")
TOOLS = {"g++": "g++", "make": "make", "git": "git", "python3": "python3"}  # package -> what it must have brought
PASSED_ON = re.compile(r"(PIP_\w+|\w+_PROXY|\w+_proxy|SSL_CERT_FILE|REQUESTS_CA_BUNDLE)")


@dataclass(frozen=True)
class Instruction:
    """A line of a Dockerfile: `RUN`, and the rest."""

    name: str
    text: str


def parse(dockerfile: str) -> list[Instruction]:
    """The instructions, lines joined, comments left out."""
    lines = [line for line in dockerfile.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Instruction(name.upper(), text.strip()) for name, text in re.findall(r"^(\w+)\s+(.*)$", joined, re.M)]


def stage(instructions: Sequence[Instruction], name: str) -> list[Instruction]:
    """Those after `FROM ... AS name`, up to the next FROM."""
    starts = [i for i, step in enumerate(instructions) if step.name == "FROM"]
    for start, stop in zip(starts, [*starts[1:], len(instructions)], strict=True):
        if instructions[start].text.split()[-1] == name:
            return list(instructions[start + 1 : stop])
    names = ", ".join(instructions[i].text.split()[-1] for i in starts)
    raise ValueError(f"the Dockerfile has no stage {name}, only {names}")


def ignore_pattern(dockerignore: str) -> re.Pattern[str]:
    """Matches paths, relative to the context, that are not sent to the builder."""
    expressions = []
    for line in dockerignore.splitlines():
        if line.strip() and not line.startswith("#"):
            escaped = re.escape(line.strip().strip("/")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
            expressions.append(escaped)
    return re.compile(rf"({'|'.join(expressions) or '(?!)'})(/.*)?")


class DryRun:
    """A root directory that the instructions of a stage are carried out in."""

    def __init__(self, context: Path, root: Path, build_args: dict[str, str]) -> None:
        self.context, self.root, self._build_args = context, root, build_args
        self.directory = root
        self._environment = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
        self._environment |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(root), "LANG": "C.UTF-8"}
        ignore_file = context / ".dockerignore"
        self._ignored = ignore_pattern(ignore_file.read_text() if ignore_file.exists() else "")

    def carry_out(self, step: Instruction) -> None:
        """One instruction. Raises ValueError when it fails or is not known."""
        handlers = {
            "ARG": self._arg,
            "ENV": self._env,
            "WORKDIR": self._workdir,
            "COPY": self._copy,
            "RUN": self._run,
        }
        if step.name in ("USER", "CMD"):
            return
        if step.name not in handlers:
            raise ValueError(f"{step.name} {step.text}: not known to the dry run")
        handlers[step.name](step.text)

    def shell(self, command: str) -> None:
        print(f"   $ {command}", flush=True)
        began = time.monotonic()
        result = subprocess.run(["bash", "-c", command], cwd=self.directory, env=self._environment)
        if result.returncode != 0:
            raise ValueError(f"exit status {result.returncode} of: {command}")
        print(f"   {time.monotonic() - began:.1f} s", flush=True)

    def _arg(self, text: str) -> None:
        name, _, default = text.partition("=")
        self._environment[name] = self._build_args.get(name, shlex.split(default)[0] if default else "")

    def _env(self, text: str) -> None:
        """Absolute paths of the image are below the root, those of this machine (in $PATH) are not."""
        name, _, value = text.partition("=")
        words = (f"{self.root}{word}" if word.startswith("/") else word for word in value.split(":"))
        self._environment[name] = ":".join(self._environment.get(word[1:], word) for word in words)

    def _workdir(self, text: str) -> None:
        self.directory = self._inside(text)
        self.directory.mkdir(parents=True, exist_ok=True)

    def _inside(self, path: str) -> Path:
        return self.root / path.lstrip("/") if path.startswith("/") else self.directory / path

    def _copy(self, text: str) -> None:
        *sources, target = [word for word in text.split() if not word.startswith("--")]
        count = 0
        for source in sources:
            for path in self._files(self.context / source):
                place = self._inside(target)
                if (self.context / source).is_dir() or not target.endswith("/"):
                    place = place / path.relative_to(self.context / source)
                else:
                    place = place / path.name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, place)
                count += 1
        if count == 0:
            raise ValueError(f"COPY {text}: there is no such file, or .dockerignore excludes it")

    def _files(self, source: Path) -> Iterator[Path]:
        if self._ignored.fullmatch(str(source.relative_to(self.context))):
            return
        if source.is_dir():
            for child in sorted(source.iterdir()):
                yield from self._files(child)
        elif source.is_file():
            yield source

    def _run(self, text: str) -> None:
        for command in re.split(r"\s*&&\s*", text):
            if not command.startswith(ONLY_ROOT):
                self.shell(command)
                continue
            print(f"   left out (root of the image): {command}", flush=True)
            missing = [p for p in command.split() if p in TOOLS and shutil.which(TOOLS[p]) is None]
            if command.startswith("apt-get install") and missing:
                raise ValueError(f"the dry run needs {', '.join(missing)} on this machine")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", default="cpu")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--command", help="run this at the end, as `docker run IMAGE COMMAND` would")
    parser.add_argument("--keep", metavar="DIR", help="use this directory, and leave it; default: a temporary one")
    options = parser.parse_args(argv)
    build_args = dict(word.partition("=")[::2] for word in options.build_arg)
    steps = stage(parse((ROOT / "Dockerfile").read_text()), options.stage)
    with tempfile.TemporaryDirectory(prefix="docker_dry_run_") as scratch:
        root = Path(options.keep or scratch).resolve()
        root.mkdir(parents=True, exist_ok=True)
        dry_run = DryRun(ROOT, root, build_args)
        for number, step in enumerate(steps, 1):
            print(f"== {number}/{len(steps)} {step.name} {step.text}", flush=True)
            dry_run.carry_out(step)
        if options.command:
            print(f"== {options.command}", flush=True)
            dry_run.shell(options.command)
    print("== done", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
