"""Arguments in a checkpoint: Megatron-LM's names, comparison, take-over."""

import shlex

import pytest
import torch

from megatron.training.checkpoint.contents import make_namespace
from megatron.training.checkpoint.resume import check_same_model, list_training_differences
from megatron.training.config.checkpoint_args import merge_stored_args
from megatron.training.config.parsing import make_config, parse_args
from megatron.training.config.stored_args import normalize_stored_args
from megatron.training.data.tokenizer import TokenizerConfig, build_tokenizer
from tests import ROOT

GOLDEN = ROOT / "tests/golden" / "megatron_lm_flags/mcore_0.16.1__llama_fp32_tp1.txt"
EXPERTS = "--num-experts 4 --moe-router-score-function sigmoid"
BIASED_EXPERTS = f"{EXPERTS} --moe-router-enable-expert-bias"


def flags(more="", without=""):
    return parse_args(shlex.split(f"{GOLDEN.read_text().replace(without, '')} {more}"), 1).flags()


def test_names_are_megatron_lms():
    """The values Megatron-LM 0.16.1 stores for this command line."""
    args = make_namespace(flags(), {"padded_vocab_size": 288})
    expected = {
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 80,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "cp_comm_type": ["p2p"],
        "num_query_groups": 2,
        "kv_channels": 8,
        "max_position_embeddings": 64,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-05,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "bias_gelu_fusion": False,
        "untie_embeddings_and_output_weights": True,
        "make_vocab_size_divisible_by": 32,
        "padded_vocab_size": 288,
        "tokenizer_type": "NullTokenizer",
        # Megatron-LM 0.16.1 stores 256, one less than the rows of the model.
        "vocab_size": 257,
        "seq_length": 64,
        "train_iters": 10,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "lr": 0.002,
        "lr_decay_style": "cosine",
        "adam_beta2": 0.95,
        "clip_grad": 1.0,
        "seed": 1234,
        "split": "100,0,0",
        "data_path": ["data/pysrc_a_text_document"],
        "use_distributed_optimizer": True,
        "tensor_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "sequence_parallel": False,
        "ckpt_format": "torch_dist",
        "bf16": False,
    }
    assert {name: getattr(args, name) for name in expected} == expected


def test_megatron_lms_names_are_understood():
    saved_args = normalize_stored_args(
        {"group_query_attention": False, "num_attention_heads": 8, "x": 1}
    )
    assert saved_args["num_query_groups"] == 8  # Megatron-LM stores an unused 1
    assert saved_args["x"] == 1


def test_same_model():
    assert (
        check_same_model(flags(), normalize_stored_args(vars(make_namespace(flags(), {}))), "here")
        == []
    )
    assert check_same_model(flags(), {}, "an old checkpoint that says nothing") == []


@pytest.mark.parametrize("number", [0, 1, None])
def test_dense_models_are_the_same_in_every_spelling(number):
    for more in ("", " --num-experts 1", " --num-experts 0"):
        saved_args = normalize_stored_args(flags() | {"num_experts": number})
        assert check_same_model(flags(more), saved_args, "here") == []


def test_another_model_names_every_difference():
    saved_args = flags() | {"num_layers": 8, "swiglu": False}
    with pytest.raises(
        ValueError, match=r"(?s)here holds another model.*num_layers: 8 in .*, 4 now.*swiglu: False"
    ):
        check_same_model(flags(), saved_args, "here")


@pytest.mark.parametrize(
    ("before", "now", "differences"),
    [
        ("--bf16", "", ["bf16: True in the checkpoint, False now"]),
        (
            "--bf16",
            "--bf16 --main-params-dtype fp16 --exp-avg-dtype bf16",
            [
                "main_params_dtype: fp32 in the checkpoint, fp16 now",
                "exp_avg_dtype: fp32 in the checkpoint, bf16 now",
            ],
        ),
        (
            "--bf16 --main-grads-dtype bf16",
            "--bf16",
            ["main_grads_dtype: bf16 in the checkpoint, fp32 now"],
        ),
        (
            "--bf16",
            "--bf16 --grad-reduce-in-bf16",
            ["main_grads_dtype: fp32 in the checkpoint, bf16 now"],
        ),
        ("--bf16 --grad-reduce-in-bf16", "--bf16 --main-grads-dtype bf16", []),
        ("", "--global-batch-size 4", ["global_batch_size: 8 in the checkpoint, 4 now"]),
        ("", "--clip-grad 0.1", ["clip_grad: 1.0 in the checkpoint, 0.1 now"]),
        ("--ema-decay 0.9", "--ema-decay 0.5", ["ema_decay: 0.9 in the checkpoint, 0.5 now"]),
        ("", "--ema-decay 0.5", []),
        ("", "--muon-nesterov", []),
        (
            "--optimizer muon",
            "--optimizer muon --muon-nesterov",
            ["muon_nesterov: False in the checkpoint, True now"],
        ),
        (
            "",
            "--reset-attention-mask --reset-position-ids --eod-mask-loss",
            [
                "reset_position_ids: False in the checkpoint, True now",
                "reset_attention_mask: False in the checkpoint, True now",
                "eod_mask_loss: False in the checkpoint, True now",
            ],
        ),
        (
            EXPERTS,
            f"{EXPERTS} --moe-router-force-load-balancing --moe-router-bias-update-rate 0.1",
            ["moe_router_force_load_balancing: False in the checkpoint, True now"],
        ),
        (
            BIASED_EXPERTS,
            f"{BIASED_EXPERTS} --moe-router-bias-update-rate 0.1",
            ["moe_router_bias_update_rate: 0.001 in the checkpoint, 0.1 now"],
        ),
        ("", "--log-interval 7", []),
    ],
)
def test_flags_that_change_the_training_are_listed(before, now, differences):
    saved_args = normalize_stored_args(vars(make_namespace(flags(before), {})))
    assert list_training_differences(flags(now), saved_args) == differences
    assert list_training_differences(flags(now), {}) == []


def test_data_types_of_megatron_lm_are_those_of_the_flags():
    """Megatron-LM stores `torch.dtype`s, and fp8 as uint8."""
    now = flags("--bf16 --main-params-dtype fp16 --exp-avg-dtype fp8")
    saved_args = {
        "main_params_dtype": torch.float16,
        "main_grads_dtype": torch.float32,
        "exp_avg_dtype": torch.uint8,
        "exp_avg_sq_dtype": torch.bfloat16,
    }
    assert list_training_differences(now, normalize_stored_args(saved_args)) == [
        "exp_avg_sq_dtype: bf16 in the checkpoint, fp32 now"
    ]


def test_one_auxiliary_loss_may_be_stored_without_a_list():
    experts = flags() | {"num_experts": 4, "moe_aux_loss_coeff": [0.01]}
    for value in (0.01, [0.01]):
        assert list_training_differences(experts, {"moe_aux_loss_coeff": value}) == []
    other = {"moe_aux_loss_coeff": 0.1}
    assert list_training_differences(experts, other) == [
        "moe_aux_loss_coeff: 0.1 in the checkpoint, [0.01] now"
    ]
    assert list_training_differences(flags(), other) == []


def test_positions_matter_only_when_they_are_learned():
    longer = {"max_position_embeddings": 128}
    assert check_same_model(flags(), longer, "here") == []
    with pytest.raises(ValueError, match="max_position_embeddings: 128"):
        learned = flags(
            "--position-embedding-type learned_absolute", without="--use-rotary-position-embeddings"
        )
        check_same_model(learned, longer, "here")


def test_other_mathematics_is_a_note():
    (note,) = check_same_model(flags(), flags() | {"rotary_base": 500000.0}, "here")
    assert "rotary_base: 500000.0" in note
    alibi = flags() | {"position_embedding_type": "alibi"}
    assert (
        check_same_model(
            alibi, alibi | {"rotary_base": 500000.0, "rope_scaling_factor": 3.0}, "here"
        )
        == []
    )


def test_text_of_a_checkpoint_cannot_forge_a_line():
    forged = {"rope_type": "\x1b[2J\n > loaded", "normalization": "\r > loaded"}
    (note,) = check_same_model(flags(), flags() | {"rope_type": forged["rope_type"]}, "here")
    assert note.isprintable()
    assert r"\x1b[2J\n > loaded in the checkpoint" in note
    with pytest.raises(ValueError, match=r"normalization: \\r > loaded in the checkpoint"):
        check_same_model(flags(), flags() | forged, "here")
    _, notes = merge_stored_args(flags(), forged)
    assert len(notes) == 2
    assert all(note.isprintable() for note in notes)
    with pytest.raises(ValueError, match=r"--tokenizer-type: .\\n > loaded. is not one of"):
        TokenizerConfig("\n > loaded")


def test_taking_arguments_over():
    saved_args = normalize_stored_args(vars(make_namespace(flags(), {})))
    given = {
        "num_layers": 12,
        "lr": 1e-4,
        "train_iters": 5,
        "mock_data": True,
        "micro_batch_size": 4,
    }
    merged, notes = merge_stored_args(given, saved_args)
    (note,) = notes
    assert "num_layers is 4 as in the checkpoint, not 12" in note
    config = make_config(merged, 1)
    assert config.model.num_layers == 4
    assert config.model.num_query_groups == 2
    assert config.data.seq_length == 64
    assert config.optimizer.lr == 1e-4
    assert config.training.micro_batch_size == 4
    assert merge_stored_args(given | {"seq_length": 32}, saved_args)[0]["seq_length"] == 32


def test_dropout_and_losses_of_a_checkpoint_are_defaults():
    saved_args = {
        "hidden_dropout": 0.3,
        "attention_dropout": 0.0,
        "init_method_std": 0.006,
        "moe_router_load_balancing_type": ["aux_loss"],
        "moe_aux_loss_coeff": [0.001],
        "bf16": False,
    }
    merged, notes = merge_stored_args({}, saved_args)
    assert merged == {name: value for name, value in saved_args.items() if name != "bf16"}
    assert notes == []
    # Flags take precedence, together with those that belong to them.
    given = {"attention_dropout": 0.2, "hidden_dropout": 0.3, "moe_aux_loss_coeff": [0.1, 0.2]}
    given["moe_router_load_balancing_type"] = ["aux_loss", "seq_aux_loss"]
    merged, notes = merge_stored_args(given, saved_args)
    assert merged == given | {"init_method_std": 0.006}
    first, *losses = notes
    assert first == (
        "--use-checkpoint-args: attention_dropout is 0.2 as on the command line, not 0.0 as in the "
        "checkpoint"
    )
    assert len(losses) == 2


def test_unsupported_load_balancing_of_a_checkpoint_is_reported():
    saved_args = {"moe_router_load_balancing_type": "unheard-of", "moe_aux_loss_coeff": 0.0}
    merged, (note,) = merge_stored_args({}, saved_args)
    assert "moe_router_load_balancing_type" not in merged
    assert "not unheard-of as in" in note


def test_precision_of_a_run_that_differs_from_the_checkpoint_is_reported():
    (note,) = merge_stored_args({}, {"bf16": True, "fp16": False})[1]
    assert "the run trains in fp32, and the checkpoint is in bf16" in note
    assert merge_stored_args({"bf16": True}, {"bf16": True})[1] == []


@pytest.mark.parametrize("more, eod", [("", None), ("--null-tokenizer-eod-id 9", 9)])
def test_end_of_document_token_is_kept(more, eod):
    """Megatron-LM since 0.19 stores None for the last token of --vocab-size; older releases store
    no such argument.
    """
    of_run = flags(more)
    ours = normalize_stored_args(vars(make_namespace(of_run, {})))
    assert ours["null_tokenizer_eod_id"] == (of_run["vocab_size"] if eod is None else eod)
    theirs = {"tokenizer_type": "NullTokenizer", "vocab_size": 257, "null_tokenizer_eod_id": eod}
    taken, notes = merge_stored_args({"vocab_size": 256}, normalize_stored_args(theirs))
    assert (taken["vocab_size"], taken["null_tokenizer_eod_id"]) == (
        257,
        256 if eod is None else eod,
    )
    assert notes == ["--use-checkpoint-args: vocab_size is 257 as in the checkpoint, not 256"]


def test_stored_vocab_size_counts_every_row_of_a_null_tokenizer_run():
    """Converters of other projects keep `vocab_size` rows of the embedding."""
    given = flags()
    tokens = build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=given["vocab_size"]))
    saved_args = vars(make_namespace(given, {"model_vocab_size": tokens.vocab_size}))
    assert saved_args["vocab_size"] == tokens.vocab_size == given["vocab_size"] + 1
    assert saved_args["null_tokenizer_eod_id"] == tokens.eod
    again = TokenizerConfig(
        tokenizer_type="NullTokenizer",
        vocab_size=saved_args["vocab_size"],
        null_tokenizer_eod_id=saved_args["null_tokenizer_eod_id"],
    )
    assert (build_tokenizer(again).vocab_size, build_tokenizer(again).eod) == (
        tokens.vocab_size,
        tokens.eod,
    )


@pytest.mark.parametrize(("given", "eod"), [(None, 96), (96, 96), (97, 96), (60, 60)])
def test_null_tokenizer_with_the_vocabulary_of_a_model_without_tokenizer(given, eod):
    """config.json counts all rows, so the end-of-document token is not added to them again."""
    chosen = {"tokenizer_type": "NullTokenizer"} | ({} if given is None else {"vocab_size": given})
    merged, _ = merge_stored_args(chosen, normalize_stored_args({"vocab_size": 97}))
    taken = TokenizerConfig(
        merged["tokenizer_type"],
        vocab_size=merged["vocab_size"],
        null_tokenizer_eod_id=merged["null_tokenizer_eod_id"],
    )
    tokens = build_tokenizer(taken)
    assert (tokens.vocab_size, tokens.eod) == (97, eod)
