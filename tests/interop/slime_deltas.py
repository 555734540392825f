"""slime's engines pull our deltas, and we apply those that slime's trainer publishes.

    python tests/interop/slime_deltas.py WORK SOURCE

WORK is an empty directory, and SOURCE a checkout of slime. Requires numpy, safetensors, torch,
transformers, xxhash and zstandard.
"""

import filecmp
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))

import megatron.core  # noqa: E402
from megatron.conversion.huggingface.directory_writer import write_huggingface  # noqa: E402
from megatron.transfer.deltas import apply_delta  # noqa: E402
from megatron.transfer.slime_deltas import ENCODINGS, write_slime_delta  # noqa: E402
from tests.support.memory_source import LLAMA_ARGS, random_source  # noqa: E402

PATCH = "docker/patch/latest/sglang-pull_weights.patch"
PULL = "python/sglang/srt/weight_sync/local_checkpoint.py"
PUBLISH = "slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py"
FC2 = "decoder.layers.1.mlp.linear_fc2.weight"
NORM = "decoder.final_layernorm.weight"


def main() -> None:
    work, slime = Path(sys.argv[1]), Path(sys.argv[2])
    models = write_models(work)
    pull = load_pull(work, slime)
    trainer = load_trainer(slime)
    dist.init_process_group("gloo", init_method=f"file://{work}/store", rank=0, world_size=1)
    for encoding in ENCODINGS:
        ours = work / f"ours-{encoding}"
        theirs = work / f"theirs-{encoding}"
        ours.mkdir()
        for version in (1, 2):
            write_slime_delta(
                models[version - 1],
                models[version],
                ours / f"weight_v{version:06d}",
                version=version,
                encoding=encoding,
            )
        publish(trainer, models, theirs, encoding)
        for source in (ours, theirs):
            local = work / f"local-{source.name}"
            pull.pull(str(local), str(models[0]), str(source), 2)
            check_equal(local, models[2])
            applied = models[0]
            for version in (1, 2):
                result = work / f"applied-{source.name}-{version}"
                apply_delta(applied, source / f"weight_v{version:06d}", result)
                check_equal(result, models[version])
                applied = result
        print(f"{encoding}: deltas of both programs, read by both: bitwise", flush=True)


def write_models(work: Path) -> list[Path]:
    """Write three states of a model."""
    source = random_source(LLAMA_ARGS | {"bf16": True}, vocab_size=53, optimizer=False)
    models = []
    for version in range(3):
        models.append(work / f"model-{version}")
        write_huggingface(source, models[-1])
        source.values[FC2] = source.values[FC2].clone()
        source.values[FC2][version, 5] += 1
        source.values[NORM] = source.values[NORM] + 1
    return models


def load_pull(work: Path, slime: Path) -> ModuleType:
    """Import what slime's patch adds to SGLang."""
    directory = work / "sglang"
    directory.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=directory, check=True)
    only = f"--include={PULL}"
    patch = (slime / PATCH).resolve()
    subprocess.run(["git", "apply", only, str(patch)], cwd=directory, check=True)
    return load_module("local_checkpoint", directory / PULL)


def load_module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_trainer(slime: Path) -> ModuleType:
    """Import slime's publisher, without Ray and megatron-core, which other methods need."""
    sys.path.insert(0, str(slime))
    stubs = {
        "ray": {},
        "ray.actor": {"ActorHandle": object},
        "slime.utils.distributed_utils": {"get_gloo_group": lambda: None},
        "update_weight": {"__path__": []},
        "update_weight.update_weight_from_distributed": {"UpdateWeightFromDistributed": object},
    }
    for name, attributes in stubs.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module
    vars(megatron.core)["mpu"] = ModuleType("mpu")
    return load_module("update_weight.update_weight_from_disk_delta", slime / PUBLISH)


def publish(trainer: ModuleType, models: list[Path], directory: Path, encoding: str) -> None:
    """Let slime's trainer write a delta of each model from the one before."""
    tensors: dict[str, torch.Tensor] = {}

    class Publisher(trainer.UpdateWeightFromDiskDelta):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.delta_dir = str(directory)
            self.delta_encoding = encoding
            self.checksum_algorithm = "xxh3-128"
            self._is_pp_src_rank = True
            self._snapshot = {}
            read = trainer.make_tensor_reader(str(models[0]))
            for name in load_file(models[0] / "model.safetensors"):
                self._snapshot[name] = read(name)

        def _iter_hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from tensors.items()

    publisher = Publisher()
    for version in (1, 2):
        tensors = load_file(models[version] / "model.safetensors")
        publisher.weight_version = version
        publisher._publish()


def check_equal(directory: Path, expected: Path) -> None:
    """Assert that the files of two models are equal."""
    names = [path.name for path in expected.iterdir()]
    equal, _, _ = filecmp.cmpfiles(directory, expected, names, shallow=False)
    assert sorted(equal) == sorted(names), (directory, expected)


if __name__ == "__main__":
    main()
