"""Write archives as NeMo's `NLPSaveRestoreConnector` does, with the model of real megatron-core.

    python tests/interop/nemo_write.py TARGET

NeMo 2.0 itself requires Apex and a GPU to build a model; its files are those of megatron-core's
`dist_checkpointing` with keys under `model.`, its resolved configuration, and artifacts, in an
uncompressed archive. Runs in an environment with torch and megatron-core. TARGET gets NAME.nemo,
and NAME.npz with tokens [b, s], logits [b, s, vocab] and the weights of the model.
"""

import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import yaml
from nemo_model import CPU_SETTINGS, compute_logits, perturb, start_process

from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

TOKENIZERS = Path(__file__).parents[1] / "golden/gguf_tokenizers"
VOCAB_SIZE = 344  # of the tokenizers, padded to a multiple of 8
SEQ = 32
# Fields of examples/nlp/language_modeling/conf/megatron_gpt_config.yaml and
# megatron_llama_config.yaml
COMMON = dict(
    mcore_gpt=True,
    micro_batch_size=4,
    global_batch_size=8,
    rampup_batch_size=None,
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None,
    encoder_seq_length=SEQ,
    max_position_embeddings=SEQ,
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    init_method_std=0.02,
    use_scaled_init_method=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    ffn_dropout=0.0,
    kv_channels=None,
    apply_query_key_layer_scaling=False,
    layernorm_epsilon=1e-05,
    do_layer_norm_weight_decay=False,
    make_vocab_size_divisible_by=8,
    headscale=False,
    transformer_block_type="pre_ln",
    openai_gelu=False,
    normalize_attention_scores=True,
    attention_type="multihead",
    rotary_percentage=1.0,
    seq_len_interpolation_factor=None,
    scale_positional_embedding=False,
    megatron_amp_O2=True,
    fp32_residual_connection=False,
    precision="bf16-mixed",
    seed=1234,
    data=dict(data_prefix=[], splits_string="900,50,50"),
    optim=dict(name="distributed_fused_adam", lr=0.0001, betas=[0.9, 0.98]),
    target="nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel",
    nemo_version="2.0.0",
)
MODELS = {
    "llama": dict(
        ffn_hidden_size=24,
        num_query_groups=2,
        normalization="rmsnorm",
        bias=False,
        activation="fast-swiglu",
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        bias_activation_fusion=False,
        tokenizer=dict(
            library="sentencepiece",
            type=None,
            model="nemo:0123_tokenizer.model",
            vocab_file=None,
            merge_file=None,
            sentencepiece_legacy=False,
        ),
    ),
    "gpt": dict(
        ffn_hidden_size=64,
        num_query_groups=None,
        normalization="layernorm",
        bias=True,
        activation="gelu",
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
        bias_activation_fusion=True,
        tokenizer=dict(
            library="megatron",
            type="GPT2BPETokenizer",
            model=None,
            vocab_file="nemo:4567_vocab.json",
            merge_file="nemo:89ab_merges.txt",
        ),
    ),
}


def build_model(config: dict) -> GPTModel:
    """Return the model that NeMo would build from its configuration."""
    is_gated = config["activation"].endswith("glu")
    function = torch.nn.functional.silu if is_gated else torch.nn.functional.gelu
    normalization = "RMSNorm" if config["normalization"] == "rmsnorm" else "LayerNorm"
    transformer = TransformerConfig(
        num_layers=config["num_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["ffn_hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_query_groups"],
        normalization=normalization,
        layernorm_epsilon=config["layernorm_epsilon"],
        add_bias_linear=config["bias"],
        gated_linear_unit=is_gated,
        activation_func=function,
        bias_activation_fusion=config["bias_activation_fusion"],
        **CPU_SETTINGS,
    )
    spec = get_gpt_layer_local_spec(normalization=normalization)
    return GPTModel(
        transformer,
        spec,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=config["encoder_seq_length"],
        share_embeddings_and_output_weights=config["share_embeddings_and_output_weights"],
        position_embedding_type=config["position_embedding_type"],
        rotary_percent=config["rotary_percentage"],
    )


def write_tokenizer(name: str, directory: Path) -> None:
    """Write the files of the tokenizer under the names in the configuration."""
    if name == "llama":
        shutil.copy(TOKENIZERS / "llama/tokenizer.model", directory / "0123_tokenizer.model")
        return
    pipeline = json.loads((TOKENIZERS / "gpt-2/tokenizer.json").read_text())["model"]
    vocabulary = pipeline["vocab"] | {"<|endoftext|>": len(pipeline["vocab"])}
    (directory / "4567_vocab.json").write_text(json.dumps(vocabulary))
    merges = [" ".join(merge) for merge in pipeline["merges"]]
    (directory / "89ab_merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))


def write_archive(name: str, target: Path) -> None:
    """Write one archive, and the logits of its model."""
    config = COMMON | MODELS[name]
    torch.manual_seed(1)
    model = build_model(config)
    perturb(model)
    outputs = compute_logits(model)
    for key, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            outputs[key] = value
    arrays = {key: value.numpy() for key, value in outputs.items()}
    np.savez_compressed(target / f"{name}.npz", **arrays)

    with tempfile.TemporaryDirectory() as work:
        directory = Path(work)
        (directory / "model_weights").mkdir()
        state = model.sharded_state_dict(prefix="model.")
        dist_checkpointing.save(state, str(directory / "model_weights"))
        (directory / "model_config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        write_tokenizer(name, directory)
        with tarfile.open(target / f"{name}.nemo", "w:") as archive:
            archive.add(directory, arcname=".")


def main() -> None:
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    start_process()
    for name in MODELS:
        write_archive(name, target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
