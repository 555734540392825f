"""Launch scripts with stand-ins for their launchers: the commands they would start, in order."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    variables: dict[str, str]

    def option(self, name: str, default: str = "") -> str:
        """Return the value of an option of torchrun, which may be a variable instead."""
        if name in self.options:
            return self.options[self.options.index(name) + 1]
        variable = "PET_" + name.removeprefix("--").replace("-", "_").upper()
        return self.variables.get(variable, default)

    @property
    def world_size(self) -> int:
        return int(self.option("--nnodes", "1")) * int(self.option("--nproc-per-node"))


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
        variables,
    )


@dataclass(frozen=True)
class PodCommand:
    """Container of the first pod of a Kubernetes resource."""

    command: list[str]
    variables: dict[str, str]
    """Those of the resource, and those that its controller adds."""
    num_pods: int
    pod: dict[str, Any]
    """The specification of the pod."""


def read_resources(path: str) -> list[dict[str, Any]]:
    """Return the resources of a YAML file of examples/kubernetes."""
    return list(yaml.safe_load_all((ROOT / path).read_text()))


def pod_command(path: str) -> PodCommand:
    """Return the command of a PyTorchJob, of a TrainJob with its runtime, or of a JobSet."""
    resources = {resource["kind"]: resource["spec"] for resource in read_resources(path)}
    if "PyTorchJob" in resources:
        return _read_pytorch_job(resources["PyTorchJob"])
    if "TrainJob" in resources:
        return _read_train_job(resources["TrainJob"], resources["TrainingRuntime"])
    (replicated,) = resources["JobSet"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    variables = _read_variables(container) | {"JOB_COMPLETION_INDEX": "0"}
    words = container["command"] + container["args"]
    return PodCommand(words, variables, job["completions"], pod)


def _read_pytorch_job(spec: dict[str, Any]) -> PodCommand:
    replicas = spec["pytorchReplicaSpecs"]
    num_pods = sum(replica["replicas"] for replica in replicas.values())
    pod = replicas["Master"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # the operator looks for this name
    operator = {
        "MASTER_ADDR": "llama-8b-master-0",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": str(num_pods),
        "RANK": "0",
    }
    variables = _read_variables(container) | operator
    return PodCommand(container["command"] + container["args"], variables, num_pods, pod)


def _read_train_job(spec: dict[str, Any], runtime: dict[str, Any]) -> PodCommand:
    (replicated,) = runtime["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    trainer = spec["trainer"]
    # torchrun reads every option --x-y from PET_X_Y.
    operator = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "llama-8b-node-0-0.llama-8b",
        "PET_MASTER_PORT": "29400",
    }
    variables = _read_variables(trainer) | operator
    return PodCommand(trainer["command"] + trainer["args"], variables, trainer["numNodes"], pod)


def _read_variables(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"]}
