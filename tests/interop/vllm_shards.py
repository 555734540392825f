"""Record what each rank of vLLM loads, and compare transfers with loads. Needs vLLM and this project.

    python -m tests.interop.vllm_shards MODEL TP [expert-parallel]

MODEL is a Hugging Face model. Starts TP processes, and builds vLLM's model in each.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from megatron.api import open_checkpoint, plan_transfer, view_engine_shards
from megatron.conversion.huggingface.weight_files import open_weights
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS

PORT = "29655"


def check_rank(rank: int, model: str, tp: int, expert_parallel: bool) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT, "VLLM_DIST_IDENT": "shards"}
    torch.set_num_threads(1)
    config = EngineArgs(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        tensor_parallel_size=tp,
        enable_expert_parallel=expert_parallel,
    ).create_engine_config()
    config.parallel_config.rank = rank
    torch.set_default_dtype(torch.float32)
    with set_current_vllm_config(config):
        init_distributed_environment(tp, rank, "env://", rank, backend="gloo")
        initialize_model_parallel(tp)
        engine = initialize_model(config)
        tensors = {name: tensor.read_all() for name, tensor in open_weights(Path(model)).items()}
        loaded = {}
        fill(engine)
        engine.load_weights(iter(tensors.items()))
        for name, parameter in engine.named_parameters():
            loaded[name] = parameter.detach().clone()
        fill(engine)

        # Rank 0 reads the model, and sends each rank its shards.
        source = open_checkpoint(model)
        vocab_size = source.tensors[WORD_EMBEDDINGS].shape[0]
        args = {**source.args, "model_vocab_size": vocab_size}
        target = view_engine_shards(engine.load_weights, args, torch.float32)
        schedule = plan_transfer(model if rank == 0 else None, target)
        schedule.run(model if rank == 0 else None, target)

    num_bytes = 0
    for name, parameter in engine.named_parameters():
        assert torch.equal(parameter, loaded[name]), name
        num_bytes += parameter.nbytes
    print(
        f"rank {rank} of {tp}: {len(loaded)} parameters are vLLM's, bitwise; "
        f"{schedule.bytes_received} bytes received for {num_bytes}",
        flush=True,
    )
    dist.barrier()


def fill(engine: torch.nn.Module) -> None:
    """Overwrite all parameters; loaders keep, e.g., columns that pad a matrix."""
    for parameter in engine.parameters():
        parameter.data.fill_(7)


def main() -> None:
    model, tp = sys.argv[1], int(sys.argv[2])
    expert_parallel = "expert-parallel" in sys.argv[3:]
    torch.multiprocessing.spawn(check_rank, (model, tp, expert_parallel), nprocs=tp)


if __name__ == "__main__":
    main()
