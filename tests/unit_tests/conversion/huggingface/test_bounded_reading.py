"""config.json files whose numbers are plausible one by one and huge together.

Each is opened in a child process with limits on memory and processor time: it must be compared with
the stored tensors before anything of its size is allocated.
"""

import gc
import json
import os
import resource
import shutil
import traceback
from pathlib import Path

import pytest

from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.model_space.model import model_config, model_tensors
from megatron.conversion.opening import open_checkpoint
from megatron.core.dist_checkpointing import CheckpointError
from tests import GOLDEN
from tests.support.memory_source import LLAMA_ARGS, random_source

MEMORY = 512 << 20  # bytes that a child may add
SECONDS = 20  # of processor time; the slowest case takes 3
MIXTRAL_ARGS = LLAMA_ARGS | {"num_experts": 2, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}


def run_limited(function) -> str:
    """Call `function` in a child with limited memory and processor time.

    Return "accepted", the message of a CheckpointError or ValueError, a traceback, or the signal
    that ended the child.
    """
    reader, writer = os.pipe()
    gc.collect()
    child = os.fork()
    if child == 0:
        answer = "no answer"
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            spent = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
            resource.setrlimit(resource.RLIMIT_CPU, (spent + SECONDS, spent + SECONDS))
            function()
            answer = "accepted"
        except (CheckpointError, ValueError) as error:
            answer = f"refused: {error}"
        except BaseException:
            answer = traceback.format_exc()
        os.write(writer, answer.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return answer if status == 0 else f"killed by signal {status & 127}"


@pytest.fixture
def directory(request, tmp_path: Path) -> Path:
    """A small model of the family that the test names."""
    path = tmp_path / "hf"
    if request.param == "gpt_oss":
        shutil.copytree(GOLDEN / "hf" / "gpt_oss", path)
    else:
        args = LLAMA_ARGS if request.param == "llama" else MIXTRAL_ARGS
        write_huggingface(random_source(args, optimizer=False), path)
    return path


@pytest.mark.parametrize(
    ("directory", "changes"),
    [
        ("llama", {"head_dim": 2**31 - 1}),
        ("llama", {"head_dim": 2**30, "num_hidden_layers": 10_000}),
        ("llama", {"hidden_size": 2**31 - 4}),
        ("llama", {"num_attention_heads": 2**31 - 1, "num_key_value_heads": 2**31 - 1}),
        ("llama", {"num_attention_heads": 2**30, "num_key_value_heads": 2**30, "head_dim": 2}),
        ("llama", {"num_hidden_layers": 10_000, "intermediate_size": 2**31 - 1}),
        ("mixtral", {"num_local_experts": 100_000, "num_hidden_layers": 10_000}),
        ("mixtral", {"num_local_experts": 2**31 - 1}),
        ("gpt_oss", {"num_local_experts": 100_000, "num_hidden_layers": 10_000}),
    ],
    ids=str,
    indirect=["directory"],
)
def test_huge_sizes_are_compared_with_tensors_first(directory: Path, changes) -> None:
    config = directory / "config.json"
    stated = json.loads(config.read_text())
    stated.pop("layer_types", None)
    config.write_text(json.dumps(stated | changes))
    answer = run_limited(lambda: open_checkpoint(directory))
    assert answer.startswith("refused: "), answer
    assert "allocate" not in answer, answer
    assert len(answer) < 1000, answer


@pytest.mark.parametrize(
    "sizes",
    [
        {"kv_channels": 10**9},
        {"kv_channels": 2**31 - 1, "rope_type": "yarn", "rotary_scaling_factor": 2.0},
        {"multi_latent_attention": True, "qk_pos_emb_head_dim": 2**31 - 2},
    ],
    ids=str,
)
def test_shapes_of_wide_heads_need_no_memory(sizes) -> None:
    """Building a model on the meta device allocates no table of rotary frequencies."""

    def compute_shapes() -> None:
        args = LLAMA_ARGS | sizes
        if "multi_latent_attention" in sizes:
            args |= {"group_query_attention": False, "num_query_groups": None}
        model_tensors(model_config(args, 67, "test"))

    assert run_limited(compute_shapes) == "accepted"
