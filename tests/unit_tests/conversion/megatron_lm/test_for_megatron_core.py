"""Requirements of Megatron-core and Megatron-Bridge on files besides their tensors."""

import re
from pathlib import Path

import pytest
import torch

from megatron.conversion.checkpoint_conversion import compare, convert
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import WriteOptions
from megatron.core.dist_checkpointing import load_common, read_metadata
from megatron.core.safe_files import safe_load
from megatron.training.checkpoint.contents import make_namespace
from megatron.training.config.parsing import parse_args
from tests import ROOT
from tests.support.memory_source import GPT_ARGS, LLAMA_ARGS, random_source

GOLDEN = ROOT / "tests/golden" / "megatron_lm/mcore_0.19.2/llama_fp32_tp2pp2"

# Arguments of a checkpoint that Megatron-Bridge 0.6.2 uses.
READ_BY_BRIDGE = (
    "multi_latent_attention", "heterogeneous_layers_config_path", "no_persist_layer_norm", "overlap_p2p_comm",
    "num_experts", "rotary_interleaved", "fp8_param_gather", "bias_swiglu_fusion", "bias_gelu_fusion",
    "squared_relu", "init_method_xavier_uniform", "config_logger_dir", "cp_comm_type", "is_hybrid_model",
    "init_model_with_meta_device", "transformer_impl", "moe_grouped_gemm", "mtp_num_layers",
    "fp16_lm_cross_entropy", "params_dtype", "make_vocab_size_divisible_by", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "qk_l2_norm",
)  # fmt: skip


@pytest.mark.parametrize("args", [LLAMA_ARGS | {"bf16": True}, GPT_ARGS], ids=["llama", "gpt2"])
def test_converted_checkpoint_has_the_arguments_that_bridge_reads(
    tmp_path: Path, args: dict
) -> None:
    write_torch_dist(random_source(args), tmp_path / "run")
    stored = vars(load_common(tmp_path / "run")["args"])
    assert [name for name in READ_BY_BRIDGE if name not in stored] == []
    assert stored["params_dtype"] == (torch.bfloat16 if args.get("bf16") else torch.float32)
    assert stored["num_layers"] == 2
    assert stored["num_experts"] is None
    assert stored["cp_comm_type"] == ["p2p"]
    assert not stored["no_persist_layer_norm"]


def test_local_layers_disable_persistent_norms(tmp_path: Path) -> None:
    """Without Apex, Megatron-core's local layers refuse persistent norms."""
    write_torch_dist(random_source(LLAMA_ARGS | {"transformer_impl": "local"}), tmp_path / "run")
    assert vars(load_common(tmp_path / "run")["args"])["no_persist_layer_norm"]


def test_checkpoint_of_a_run_has_the_arguments_that_bridge_reads() -> None:
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 "
        "--max-position-embeddings 8 "
    )
    flags += (
        "--micro-batch-size 1 --lr 1 --train-iters 1 --tokenizer-type NullTokenizer "
        "--vocab-size 60 --mock-data"
    )
    args = vars(
        make_namespace(parse_args(flags.split(), 1).flags(), {"params_dtype": torch.float32})
    )
    assert [name for name in READ_BY_BRIDGE if name not in args] == []


def test_stacked_layers_equal_those_of_megatron_core(tmp_path: Path) -> None:
    """Same keys, shapes and objects as in its own file of this state, except generators."""
    theirs = GOLDEN / "torch_dist_fully_reshardable"
    convert(
        GOLDEN / "legacy",
        tmp_path / "out",
        "torch_dist",
        options=WriteOptions(stacked_layers=True),
        verify=True,
    )
    ours, golden = (read_metadata(root / "iter_0000005") for root in (tmp_path / "out", theirs))
    shapes = [
        {key: tensor.shape for key, tensor in metadata.tensors.items()}
        for metadata in (ours, golden)
    ]
    assert shapes[0] == shapes[1]
    expected = {key for key in golden.objects if "_extra_state" in key}
    assert expected
    assert expected <= ours.objects.keys()
    assert not any(re.search(r"layers\.\d", key) for key in [*ours.tensors, *ours.objects])
    common = load_common(tmp_path / "out/iter_0000005")
    assert "non_homogeneous_layers" not in common["content_metadata"]
    assert compare(open_checkpoint(theirs), open_checkpoint(tmp_path / "out")) == len(
        open_checkpoint(theirs).tensors
    )


def test_legacy_names_follow_the_transformer_implementation(tmp_path: Path) -> None:
    golden = "iter_0000005/mp_rank_01_000/model_optim_rng.pt"
    convert(
        GOLDEN / "legacy",
        tmp_path / "te",
        "legacy",
        options=WriteOptions(target_transformer_impl="transformer_engine"),
    )
    assert (
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
        in safe_load(tmp_path / "te" / golden)["model"]
    )
    convert(
        tmp_path / "te",
        tmp_path / "local",
        "legacy",
        options=WriteOptions(target_transformer_impl="local"),
    )
    back, first = (
        safe_load(root / golden)["model"] for root in (tmp_path / "local", GOLDEN / "legacy")
    )
    assert list(back) == list(first)
    assert all(torch.equal(back[name], first[name]) for name in first if first[name] is not None)
