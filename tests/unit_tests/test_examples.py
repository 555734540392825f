"""Every example's command line is understood by the real parser, at the world size it is
made for.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from megatron.training.config.parsing import parse_args
from tests.support.launch_scripts import ROOT, launched, pod_command, read_resources

SCRIPTS = {
    "examples/single_gpu.sh": 1,
    "examples/one_node_8_gpus.sh": 8,
    "examples/slurm/pretrain.sbatch": 128,
}
KUBERNETES = [
    "examples/kubernetes/pytorchjob.yaml",
    "examples/kubernetes/trainjob.yaml",
    "examples/kubernetes/jobset.yaml",
]
MODELS = {"llama_1b": 1.24e9, "llama_8b": 8.03e9, "llama_70b": 70.6e9}


def slurm(directory: Path) -> dict[str, str]:
    return {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_NNODES": "16",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
    }


@pytest.mark.parametrize("script", SCRIPTS)
def test_parser_accepts_every_flag_of_the_examples(script, tmp_path):
    launch = launched(["bash", script], tmp_path, **slurm(tmp_path))
    assert launch.world_size == SCRIPTS[script]
    config = parse_args(launch.flags, launch.world_size)
    assert config.model.bf16
    assert config.ddp.use_distributed_optimizer
    assert config.checkpoint.save == config.checkpoint.load == str(tmp_path / "run/checkpoints")


def test_local_disk_adds_a_checkpoint_tier(tmp_path):
    launch = launched(
        ["bash", "examples/slurm/pretrain.sbatch"],
        tmp_path,
        LOCAL_DISK="/nvme/a b",
        **slurm(tmp_path),
    )
    checkpoint = parse_args(launch.flags, launch.world_size).checkpoint
    assert checkpoint.non_persistent_local_ckpt_dir == "/nvme/a b"
    assert checkpoint.replication
    assert checkpoint.async_save
    assert checkpoint.non_persistent_save_interval == 50


@pytest.mark.parametrize("path", KUBERNETES)
def test_kubernetes(path, tmp_path):
    pod = pod_command(path)
    launch = launched(pod.command, tmp_path, **pod.variables)
    assert (launch.option("--nnodes"), launch.option("--node-rank")) == (str(pod.num_pods), "0")
    assert launch.option("--master-addr").startswith("llama-8b-")
    assert launch.option("--nproc-per-node") == "8"

    config = parse_args(launch.flags, launch.world_size)
    assert config.parallel.dp_size(launch.world_size) == 4
    assert config.checkpoint.save == "/data/run/checkpoints"
    if "LOCAL_DISK" in pod.variables:
        assert config.checkpoint.non_persistent_local_ckpt_dir == "/local"

    # torchrun ends the ranks before Kubernetes ends the pod.
    grace = pod.pod["terminationGracePeriodSeconds"]
    assert config.training.exit_signal_handler
    assert 30 < int(pod.variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace


def test_skypilot(tmp_path):
    task = yaml.safe_load((ROOT / "examples/skypilot/pretrain.yaml").read_text())
    script = task["run"].replace("source .venv/bin/activate\n", "")
    variables = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2],
    }
    launch = launched(["bash", "-c", script], tmp_path, **task["envs"], **variables)

    assert launch.option("--master-addr") == "10.0.0.1"
    assert launch.option("--node-rank") == "1"

    checkpoint = parse_args(launch.flags, launch.world_size).checkpoint
    assert str(checkpoint.save) == str(checkpoint.load) == "s3://training-data/run"


def close_objects(schema):
    """Return a schema that rejects fields which it does not list."""
    if isinstance(schema, list):
        return [close_objects(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: close_objects(value) for name, value in schema.items()}
    fields = schema.get("properties")
    keeps_unknown = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if isinstance(fields, dict) and schema.get("type") == "object" and not keeps_unknown:
        closed["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        closed["type"] = ["integer", "string"]
    return closed


def make_validator(kind):
    crd = json.loads((ROOT / f"tests/golden/kubernetes/{kind.lower()}.json").read_text())
    schema = close_objects(crd["openAPIV3Schema"])
    # The metadata of a resource is checked by Kubernetes itself.
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return f"{crd['group']}/{crd['version']}", jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", KUBERNETES)
def test_kubernetes_resources_have_the_schema_of_their_crds(path):
    for resource in read_resources(path):
        api_version, validator = make_validator(resource["kind"])
        assert resource["apiVersion"] == api_version
        errors = [
            f"{error.json_path}: {error.message}" for error in validator.iter_errors(resource)
        ]
        # The metadata of templates is open in all CRDs.
        assert not errors


def test_misspelled_kubernetes_fields_are_errors():
    (job,) = read_resources("examples/kubernetes/jobset.yaml")
    _, validator = make_validator("JobSet")
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["terminationGracePeriod"] = pod.pop("terminationGracePeriodSeconds")
    pod["containers"][0]["ports"][0]["containerPort"] = "29500"
    messages = [error.message for error in validator.iter_errors(job)]

    assert any("terminationGracePeriod" in message for message in messages)
    assert any("'29500' is not of type 'integer'" in message for message in messages)


@pytest.mark.parametrize(("reached", "requeued"), [(None, True), ("100", True), ("200000", False)])
def test_slurm_requeues_incomplete_runs(tmp_path, reached, requeued):
    if reached is not None:
        (tmp_path / "run/checkpoints").mkdir(parents=True)
        (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").write_text(reached)
    launch = launched(["bash", "examples/slurm/pretrain.sbatch"], tmp_path, **slurm(tmp_path))
    assert launch.option("--rdzv-endpoint") == "node1:29500"

    config = parse_args(launch.flags, launch.world_size)
    assert config.training.exit_signal_handler
    assert config.training.train_iters == 200000

    log = tmp_path / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == ("requeue 7\n" if requeued else "")


@pytest.mark.parametrize(("saves", "requeued"), [(True, True), (False, False)])
def test_slurm_requeues_failed_runs_only_after_progress(tmp_path, saves, requeued):
    tracker = tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt"
    tracker.parent.mkdir(parents=True)
    tracker.write_text("100")
    program = tmp_path / "launch"
    program.write_text(f"#!/bin/sh\necho {200 if saves else 100} > {tracker}\nexit 3\n")
    program.chmod(0o755)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$1" = show ] || echo "$@" >> "$RUN_DIR/scontrol.log"\n')
    scontrol.chmod(0o755)
    done = subprocess.run(
        ["bash", "examples/slurm/pretrain.sbatch"],
        cwd=ROOT,
        env={
            **os.environ,
            **slurm(tmp_path),
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "LAUNCH": str(program),
            "DATA": "/data/text",
            "TOKENIZER": "/data/tokenizer",
            "RUN_DIR": str(tmp_path / "run"),
        },
        capture_output=True,
        text=True,
    )
    log = tmp_path / "run/scontrol.log"

    assert (log.read_text() if log.exists() else "") == ("requeue 7\n" if requeued else "")
    assert done.returncode == (0 if requeued else 3), done.stderr


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_documented_size(name):
    lines = (ROOT / f"examples/models/{name}.args").read_text().splitlines()
    flags = [word for line in lines if not line.startswith("#") for word in line.split()]
    model = parse_args([*flags, "--lr", "1", "--train-iters", "1", "--mock-data"], 1).model
    heads = model.head_dim * (2 * model.num_attention_heads + 2 * model.query_groups)
    layer = model.hidden_size * (heads + 3 * model.ffn_size + 2)
    matrices = 2 if model.untie_embeddings_and_output_weights else 1
    total = model.num_layers * layer + model.hidden_size * (matrices * 128256 + 1)
    assert total == pytest.approx(MODELS[name], rel=0.005)

    billions = float(re.search(r"([\d.]+)B parameters", lines[0])[1])
    assert total / 1e9 == pytest.approx(billions, rel=0.005)


def run_demo(script, tmp_path):
    """Run a script of the demo with a Python that prints its arguments.

    Questions wait until the server, which runs in the background, has printed its arguments.
    Returns the output, and the flags of each training.
    """
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"""#!/bin/sh
echo "COMMAND $*"
case "$*" in
  *serve.py*) touch {tmp_path}/served ;;
  *ask.py*) until [ -e {tmp_path}/served ]; do sleep 0.01; done ;;
esac
"""
    )
    python.chmod(0o755)
    variables = {"DEMO": str(tmp_path / "demo"), "VENV": str(tmp_path / "venv")}
    result = subprocess.run(
        ["bash", f"examples/demo/{script}"],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr

    lines = [line.split() for line in result.stdout.splitlines() if " pretrain_gpt.py " in line]
    return result.stdout, [line[line.index("pretrain_gpt.py") + 1 :] for line in lines]


def test_demo(tmp_path):
    """Both legs, as the demo starts them when the first has got to iteration 80 of 160."""
    (tmp_path / "demo/checkpoints").mkdir(parents=True)
    (tmp_path / "demo/checkpoints/latest_checkpointed_iteration.txt").write_text("80")
    output, trainings = run_demo("run.sh", tmp_path)
    configs = [parse_args(flags, 2) for flags in trainings]

    assert [config.parallel.tp_size for config in configs] == [1, 2]
    assert "tools/report.py" in output
    assert "report.html" in output.splitlines()[-1]
    assert {config.training.train_iters for config in configs} == {240}


def test_demo_of_fine_tuning(tmp_path):
    """All weights at DP 2, then adapters at TP 2, which are merged into the model that is served."""
    (tmp_path / "demo/hf").mkdir(parents=True)
    (tmp_path / "demo/hf/config.json").write_text("{}")
    (tmp_path / "demo/finetune/chats").mkdir(parents=True)
    (tmp_path / "demo/finetune/chats/chat_template.jinja").write_text("")
    output, trainings = run_demo("finetune.sh", tmp_path)
    small = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --max-position-embeddings 128"
    configs = []
    for flags in trainings:
        flags.remove("--use-checkpoint-args")
        configs.append(parse_args([*flags, *small.split()], 2))

    assert [config.parallel.tp_size for config in configs] == [1, 2]
    assert [config.lora.lora_rank for config in configs] == [None, 16]
    for command in ("convert.py --saver hf", "serve.py", "ask.py"):
        assert f"/{command}" in output


def test_every_script_is_tested():
    launching = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "examples").rglob("*")
        if path.suffix in (".sh", ".sbatch") and "pretrain_gpt.py" in path.read_text()
    }
    tested_elsewhere = {
        "examples/finetune/sft.sh",
        "examples/models/run.sh",
        "examples/demo/finetune.sh",
    }
    assert launching == {*SCRIPTS, "examples/demo/run.sh", *tested_elsewhere}
