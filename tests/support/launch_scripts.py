"""Launch scripts with stand-ins for their launchers: the commands they would start, in order."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests import ROOT

PRINT = '#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n'
# options of its own, then the command
SRUN = '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'
SCONTROL = (
    '#!/bin/sh\n[ "$1" = show ] && printf "node1\\nnode2\\n" || echo "$@" >> "$SCONTROL_LOG"\n'
)


@dataclass(frozen=True)
class Launch:
    """`torchrun OPTIONS pretrain_gpt.py FLAGS`."""

    options: list[str]
    flags: list[str]

    def option(self, name: str) -> str:
        return self.options[self.options.index(name) + 1]

    @property
    def world_size(self) -> int:
        nodes = int(self.option("--nnodes")) if "--nnodes" in self.options else 1
        return nodes * int(self.option("--nproc-per-node"))


def launched(command: list[str], directory: Path, **variables: str) -> Launch:
    """Return the torchrun commands of `command`, run in the repository."""
    binaries = directory / "bin"
    binaries.mkdir(parents=True, exist_ok=True)
    for name, text in {"torchrun": PRINT, "srun": SRUN, "scontrol": SCONTROL}.items():
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "DATA": "/data/corpus_text_document",
        "TOKENIZER": "/data/tokenizer",
        "RUN_DIR": str(directory / "run"),
        "SCONTROL_LOG": str(directory / "scontrol.log"),
        **variables,
    }
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    words = result.stdout.splitlines()
    program = words.index("pretrain_gpt.py")
    return Launch(
        words[:program],
        [word for word in words[program + 1 :] if not word.startswith("stopped at ")],
    )


def pod_command(path: str) -> tuple[list[str], dict[str, str], int]:
    """Return command, environment (with the operator's variables, first pod) and number of pods of
    a PyTorchJob.
    """
    job = yaml.safe_load((ROOT / path).read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    pods = sum(spec["replicas"] for spec in replicas.values())
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"  # the operator looks for this name
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    operator = {
        "MASTER_ADDR": "llama-8b-master-0",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": str(pods),
        "RANK": "0",
    }
    return container["command"] + container["args"], variables | operator, pods
