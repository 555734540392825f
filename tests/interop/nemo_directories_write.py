"""Write directories of checkpoints with NeMo 2 on a CPU.

    python tests/interop/nemo_directories_write.py TARGET

Runs in an environment with torch, megatron-core and NeMo. `context/` is what NeMo's TrainerContext
dumps, model and optimizer are those that NeMo builds, and `weights/` contains what
`MegatronStrategy.save_checkpoint` passes to megatron-core: NeMo itself trains on GPUs only. TARGET
gets NAME with `context/` and `weights/`, and NAME.npz with tokens [b, s], logits [b, s, vocab], the
weights, and the moments of the optimizer. Packages that NeMo imports for other models are replaced.
"""

import importlib
import importlib.abc
import importlib.machinery
import re
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.distributed as dist
from megatron_core_load import FusedAdam
from nemo_model import CPU_SETTINGS, compute_logits, perturb, start_process

from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.moe import moe_utils

# Packages that models of language do not use
ABSENT = (
    "braceexpand", "datasets", "einops", "faiss", "ftfy", "h5py", "ijson", "jieba", "joblib",
    "leptonai", "matplotlib", "modelopt", "multistorageclient", "nltk", "nvidia_resiliency_ext",
    "onnx", "opencc", "pandas", "pangu", "rouge_score", "sacrebleu", "sacremoses", "scipy",
    "sklearn", "webdataset", "wget",
)  # fmt: skip
TOKENIZERS = Path(__file__).parents[1] / "golden/nemo_directories"
STATES = ("exp_avg", "exp_avg_sq")
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 12,
    "num_attention_heads": 4,
    "seq_length": 32,
    "make_vocab_size_divisible_by": 8,
}
GROUPS = {"num_query_groups": 2}
SMALL_VOCABULARY = {"vocab_size": 64, "share_embeddings_and_output_weights": True}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 8,
    "moe_permute_fusion": False,
}


class Case(NamedTuple):
    """A model, whose classes are in `nemo.collections.llm.gpt.model.MODULE`."""

    module: str
    model: str
    config: str
    fields: dict[str, Any]
    tokenizer: str = ""  # a file in TOKENIZERS

    def read_class(self, name: str) -> Any:
        return getattr(
            importlib.import_module(f"nemo.collections.llm.gpt.model.{self.module}"), name
        )


MODELS = {
    "llama": Case(
        "llama",
        "LlamaModel",
        "Llama31Config",
        SIZES
        | GROUPS
        | {"old_context_len": 16, "rotary_base": 500_000, "apply_rope_fusion": False},
        "llama/context/nemo_tokenizer",
    ),
    "gpt": Case("base", "GPTModel", "GPTConfig", SIZES, "gpt/context/tokenizer.model"),
    "qwen2": Case("qwen2", "Qwen2Model", "Qwen2Config", SIZES | GROUPS | SMALL_VOCABULARY),
    "qwen3": Case(
        "qwen3", "Qwen3Model", "Qwen3Config", SIZES | GROUPS | SMALL_VOCABULARY | {"kv_channels": 4}
    ),
    "qwen3_moe": Case(
        "qwen3",
        "Qwen3Model",
        "Qwen3MoEConfig",
        SIZES | GROUPS | SMALL_VOCABULARY | EXPERTS | {"kv_channels": 4},
    ),
}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Provide modules without content for packages that are not installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class EmptyModule(ModuleType):
    """Module whose attributes are mocks."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


sys.meta_path.append(StandIns())  # behind those of installed packages
from nemo import lightning as nl  # noqa: E402
from nemo.collections.common.tokenizers import AutoTokenizer, SentencePieceTokenizer  # noqa: E402
from nemo.collections.llm.gpt.model.base import local_layer_spec  # noqa: E402
from nemo.lightning._strategy_lib import setup_megatron_optimizer  # noqa: E402
from nemo.lightning.io.pl import TrainerContext  # noqa: E402


class Adam(FusedAdam):
    """FusedAdam that megatron-core 0.13 may also construct without a mode."""

    def __init__(self, params: list[dict], adam_w_mode: bool = True, **defaults: Any) -> None:
        super().__init__(params, adam_w_mode, **defaults)


class Chunks(list):
    """The chunks of a model, as NeMo's MegatronParallel contains them."""

    ddp_config = None


def write_context(name: str, directory: Path) -> tuple[Any, OptimizerConfig]:
    """Write the context of a model; return its tokenizer, and the configuration of its optimizer."""
    case = MODELS[name]
    config = case.read_class(case.config)(**case.fields)
    tokenizer = None
    if case.tokenizer:
        is_sentencepiece = case.tokenizer.endswith(".model")
        tokenizer_class = SentencePieceTokenizer if is_sentencepiece else AutoTokenizer
        tokenizer = tokenizer_class(str(TOKENIZERS / case.tokenizer))
    optimizer = OptimizerConfig(
        optimizer="adam", lr=1e-3, weight_decay=0.1, adam_beta2=0.95, use_distributed_optimizer=True
    )
    model = case.read_class(case.model)(
        config, optim=nl.MegatronOptimizerModule(config=optimizer), tokenizer=tokenizer
    )
    trainer = nl.Trainer(accelerator="cpu", strategy=nl.MegatronStrategy(), devices=1)
    context = TrainerContext(model=model, trainer=trainer, extra={})
    context.io_dump(directory, yaml_attrs=["model"])
    return tokenizer, optimizer


def build_model(name: str, tokenizer: Any) -> GPTModel:
    """Return the model that NeMo builds, without kernels of a GPU."""
    case = MODELS[name]
    config = case.read_class(case.config)(**case.fields | CPU_SETTINGS, moe_grouped_gemm=False)
    if config.activation_func is torch.nn.functional.silu:
        config.bias_activation_fusion = False
    config.moe_token_dispatcher_type = "allgather"
    spec = local_layer_spec(config)
    if config.num_moe_experts:  # the key that Transformer Engine's layers have
        spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    config.transformer_layer_spec = spec
    model = config.configure_model(tokenizer, pre_process=True, post_process=True)
    perturb(model)
    return model


def build_optimizer(model: DistributedDataParallel, config: OptimizerConfig) -> Any:
    """Return NeMo's optimizer with moments that are random numbers."""
    chunk = MagicMock(module=model)
    optimizer = setup_megatron_optimizer(Chunks([chunk]), config)
    for inner in list_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            group["step"] = 2
            for parameter in group["params"]:
                for state in STATES:
                    inner.optimizer.state[parameter][state] = torch.rand_like(parameter) * 0.01
    return optimizer


def list_optimizers(optimizer: Any) -> list[Any]:
    """Return the distributed optimizers of megatron-core, one for experts."""
    inner = optimizer.mcore_optimizer
    return getattr(inner, "chained_optimizers", [inner])


def collect_outputs(model: GPTModel, optimizer: Any) -> dict[str, np.ndarray]:
    """Return what a reader must read from the checkpoint."""
    outputs = compute_logits(model)
    experts: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        tensors = {name: parameter}
        for inner in list_optimizers(optimizer):
            if parameter in inner.model_param_gbuf_map:
                states = inner._get_main_param_and_optimizer_states(parameter)
                for state in STATES:
                    tensors[f"optimizer.state.{state}.{name}"] = states[state]
        for key, tensor in tensors.items():
            tensor = tensor.view(parameter.shape)
            joined, is_expert = re.subn(r"\.local_experts\.\d+\.", ".experts.", key)
            if is_expert:
                experts.setdefault(joined, []).append(tensor)
            else:
                outputs[key] = tensor
    outputs |= {key: torch.stack(tensors) for key, tensors in experts.items()}
    return {name: value.detach().numpy().copy() for name, value in outputs.items()}


def write_directory(name: str, target: Path) -> None:
    """Write one checkpoint of iteration 2, and the outputs of its model."""
    torch.manual_seed(1)
    tokenizer, optimizer_config = write_context(name, target / name / "context")
    model = build_model(name, tokenizer)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    optimizer = build_optimizer(ddp, optimizer_config)
    np.savez_compressed(target / f"{name}.npz", **collect_outputs(model, optimizer))

    sharding_type = "fully_sharded_model_space"
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
        "optimizer": [optimizer.sharded_state_dict(trainable, sharding_type=sharding_type)],
    }
    weights = target / name / "weights"
    weights.mkdir()
    metadata = {"distrib_optim_sharding_type": sharding_type}
    dist_checkpointing.save(checkpoint, str(weights), content_metadata=metadata)


def main() -> None:
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    start_process(Adam)
    moe_utils.te_general_gemm = None  # a name that exists with Transformer Engine alone
    for name in sys.argv[2:] or MODELS:
        write_directory(name, target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
