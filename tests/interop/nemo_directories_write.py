"""Write directories of checkpoints as NeMo 2 does, with the model of real megatron-core.

    python tests/interop/nemo_directories_write.py TARGET

NeMo 2 itself requires a GPU to train. Its `context/` in tests/golden/nemo_directories was written by
NeMo; the weights, the optimizer and the common state are what `MegatronStrategy.save_checkpoint`
passes to megatron-core. Runs in an environment with torch and megatron-core. TARGET gets NAME with
`context/` and `weights/`, and NAME.npz with tokens [b, s], logits [b, s, vocab], the weights, and
the moments of the optimizer.
"""

import os
import shutil
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from megatron_core_load import CpuForCuda, FusedAdam, stand_in_for_cuda

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

CONTEXTS = Path(__file__).parents[1] / "golden/nemo_directories"
VOCAB_SIZE = 352  # more than the 345 tokens
FUNCTIONS = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}
STATES = ("exp_avg", "exp_avg_sq")


class Adam(FusedAdam):
    """FusedAdam that megatron-core 0.13 may also construct without a mode."""

    def __init__(self, params: list[dict], adam_w_mode: bool = True, **defaults: Any) -> None:
        super().__init__(params, adam_w_mode, **defaults)


def build_model(config: dict) -> GPTModel:
    """Return the model that NeMo would build from the section `config` of model.yaml."""
    function = FUNCTIONS[config["activation_func"]["_target_"].rpartition(".")[2]]
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    transformer = TransformerConfig(
        **{name: config[name] for name in sizes},
        num_query_groups=config["num_query_groups"],
        normalization=config["normalization"],
        layernorm_epsilon=config["layernorm_epsilon"],
        add_bias_linear=config["add_bias_linear"],
        gated_linear_unit=config["gated_linear_unit"],
        activation_func=function,
        bias_activation_fusion=config["bias_activation_fusion"] and function is FUNCTIONS["gelu"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        attention_softmax_in_fp32=True,
        persist_layer_norm=False,
    )
    model = GPTModel(
        transformer,
        get_gpt_layer_local_spec(normalization=config["normalization"]),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=config["seq_length"],
        share_embeddings_and_output_weights=config["share_embeddings_and_output_weights"],
        position_embedding_type=config["position_embedding_type"],
        rotary_base=config["rotary_base"],
    )
    if "scale_factor" in config:  # of Llama 3.1
        rotary = model.rotary_pos_emb
        rotary.inv_freq = rotary._apply_scaling(
            rotary.inv_freq,
            factor=config["scale_factor"],
            low_freq_factor=config["low_freq_factor"],
            high_freq_factor=config["high_freq_factor"],
            original_max_position_embeddings=config["old_context_len"],
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def build_optimizer(model: DistributedDataParallel) -> Any:
    """Return a distributed optimizer whose moments are random numbers."""
    config = OptimizerConfig(
        optimizer="adam", lr=1e-3, weight_decay=0.1, adam_beta2=0.95, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(config, [model])
    (inner,) = getattr(optimizer, "chained_optimizers", [optimizer])
    for group in inner.optimizer.param_groups:
        group["step"] = 2
        # NeMo replaces the factors of Megatron's scheduler, which it does not use.
        group |= {"pre_mult_lr": group["lr"], "pre_mult_wd": group["weight_decay"]}
        group["pre_lr_mult"] = group.pop("lr_mult")
        group["pre_wd_mult"] = group.pop("wd_mult")
        group["weight_decay"] *= group["pre_wd_mult"]
        for parameter in group["params"]:
            for state in STATES:
                inner.optimizer.state[parameter][state] = torch.rand_like(parameter) * 0.01
    return optimizer


def compute_outputs(model: GPTModel, optimizer: Any) -> dict[str, np.ndarray]:
    """Return the values that a reader must read from the checkpoint."""
    sequence = model.max_sequence_length
    outputs = {"tokens": torch.randint(VOCAB_SIZE, (2, sequence))}
    positions = torch.arange(sequence).expand(2, sequence)
    mask = torch.ones(1, 1, sequence, sequence).tril() < 0.5
    outputs["logits"] = model.eval()(outputs["tokens"], positions, mask)
    (inner,) = getattr(optimizer, "chained_optimizers", [optimizer])
    for name, parameter in model.named_parameters():
        outputs[name] = parameter
        states = inner._get_main_param_and_optimizer_states(parameter)
        for state in STATES:
            outputs[f"optimizer.state.{state}.{name}"] = states[state].view(parameter.shape)
    return {name: value.detach().numpy().copy() for name, value in outputs.items()}


def write_directory(name: str, target: Path) -> None:
    """Write one checkpoint of iteration 2, and the outputs of its model."""
    torch.manual_seed(1)
    shutil.copytree(CONTEXTS / name / "context", target / name / "context")
    config = yaml.safe_load((target / name / "context/model.yaml").read_text())["config"]
    model = build_model(config)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    optimizer = build_optimizer(ddp)
    np.savez_compressed(target / f"{name}.npz", **compute_outputs(model, optimizer))

    metadata = {"distrib_optim_sharding_type": "fully_sharded_model_space"}
    state = ddp.sharded_state_dict()  # with the prefix `module.`
    trainable = {key: value for key, value in state.items() if not key.endswith("_extra_state")}
    checkpoint = {
        "epoch": 0,
        "global_step": 2,
        "pytorch-lightning_version": "2.5.2",
        "state_dict": OrderedDict(),
        "loops": {"fit_loop": {"epoch_loop.batch_progress": {"current": {"ready": 2}}}},
        "callbacks": {},
        "optimizer_states": {},
        "lr_schedulers": [{"last_epoch": 2, "_last_lr": [1e-3, 1e-3]}],
        "PreTrainingDataModule": {"consumed_samples": 16},
        "sharded_state_dict": state,
        "optimizer": [
            optimizer.sharded_state_dict(
                trainable, sharding_type=metadata["distrib_optim_sharding_type"]
            )
        ],
    }
    (target / name / "weights").mkdir()
    dist_checkpointing.save(checkpoint, str(target / name / "weights"), content_metadata=metadata)


def main() -> None:
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29578"}
    dist.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    stand_in_for_cuda(CpuForCuda, Adam)
    torch.cuda.synchronize = lambda *_: None
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for name in ("llama", "gpt"):
        write_directory(name, target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
