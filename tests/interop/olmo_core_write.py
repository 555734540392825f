"""Write a checkpoint of OLMo-core's trainer on a CPU.

    python olmo_core_write.py DIRECTORY

Runs in an environment with torch and ai2-olmo-core. A small model of the OLMo 2 family is trained
for two steps with the optimizer of its recipes, whose embedding has no weight decay, and saved by
OLMo-core's checkpointer. `expected.pt` contains weights and moments under the names of
transformers, as OLMo-core converts them.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint.state_dict as state_dicts
from olmo_core.nn.hf.convert import convert_state_to_hf
from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig
from olmo_core.optim import OptimGroupOverride, SkipStepAdamWConfig
from olmo_core.train.checkpoint import Checkpointer
from transformers import Olmo2Config

CONFIG = TransformerConfig.llama_like(
    d_model=32,
    hidden_size_multiplier=1.5,
    hidden_size_multiple_of=16,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    vocab_size=67,
    block_name=TransformerBlockType.reordered_norm,
    qk_norm=True,
    rope_theta=500_000,
    layer_norm_eps=1e-6,
    fused_ops=False,
)


def main() -> None:
    directory = Path(sys.argv[1])
    torch.manual_seed(3)
    model = CONFIG.build()
    model.init_weights(device=torch.device("cpu"))
    override = OptimGroupOverride(params=["embeddings.weight"], opts={"weight_decay": 0.0})
    optimizer = SkipStepAdamWConfig(
        lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, group_overrides=[override]
    ).build(model)
    tokens = torch.randint(67, (2, 16))
    for _ in range(2):
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        optimizer.latest_loss = loss.detach()
        optimizer.latest_grad_norm = torch.ones(())
        optimizer.step()
        optimizer.zero_grad()

    # As the trainer: optimizer state by parameter, and the configuration of the experiment
    options = state_dicts.StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
    module = SimpleNamespace(
        state_dict_to_save=lambda: {
            "model": state_dicts.get_model_state_dict(model, options=options),
            "optim": state_dicts.get_optimizer_state_dict(model, optimizer, options=options),
        }
    )
    folder = directory / "step2"
    checkpointer = Checkpointer(work_dir=directory / "work", save_overwrite=True)
    checkpointer.save(folder, module, {"global_step": 2, "epoch": 1})
    content = json.dumps({"model": CONFIG.as_config_dict()})
    checkpointer.write_file(folder, "config.json", content)

    # Weights and moments, with the same conversion
    hf_config = Olmo2Config(num_hidden_layers=2)
    states = {"model": dict(model.named_parameters())}
    for state in ("exp_avg", "exp_avg_sq"):
        states[state] = {}
        for name, parameter in model.named_parameters():
            states[state][name] = optimizer.state[parameter][state]
    for name, tensors in states.items():
        plain = {key: tensor.detach().clone() for key, tensor in tensors.items()}
        states[name] = convert_state_to_hf(hf_config, plain)
    moments = {}
    for name in states["model"]:
        moments[name] = {state: states[state][name] for state in ("exp_avg", "exp_avg_sq")}
    torch.save({"model": states["model"], "optimizer": moments}, directory / "expected.pt")


if __name__ == "__main__":
    main()
