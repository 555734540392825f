"""Write the folders of verl's FSDP workers on a CPU.

    torchrun --nproc-per-node 2 verl_write.py DIRECTORY fsdp2|fsdp1

Runs in an environment with torch, transformers and verl. Two ranks train a Llama for two steps with
the FSDP version and the optimizer of verl's workers, and its checkpoint manager saves it.
`expected.pt` contains weights and moments, gathered, under the names of transformers.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from accelerate_write import CONFIG, gather_state, train_two_steps
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

# Without the workers, which the package imports: they need vLLM and ray.
package = ModuleType("verl.utils.checkpoint")
package.__path__ = [str(Path(find_spec("verl.utils").origin).parent / "checkpoint")]
sys.modules[package.__name__] = package
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager  # noqa: E402

CONTENTS = ["model", "optimizer", "extra"]


def main() -> None:
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    torch.manual_seed(3)
    model = LlamaForCausalLM(CONFIG)
    if sys.argv[2] == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
            device_id=torch.device("cpu"),
            device_mesh=mesh,
            use_orig_params=False,
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    train_two_steps(model, optimizer)

    config = OmegaConf.create({"load_contents": CONTENTS, "save_contents": CONTENTS})
    manager = FSDPCheckpointManager(model, optimizer, checkpoint_config=config)
    folder = directory / "global_step_2" / "actor"
    manager.save_checkpoint(str(folder), global_step=2)
    expected = gather_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, directory / "expected.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
