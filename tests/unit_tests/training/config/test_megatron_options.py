"""Options, defaults and command lines of Megatron-LM: all are known and describe the same model."""

import pytest

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.arguments import (
    both_spellings,
    flag_fields,
    flag_type,
    option_names,
)
from megatron.training.config.megatron_lm_options import MEGATRON_OPTIONS
from megatron.training.config.parsing import make_flag_parser
from megatron.training.config.run_config import SECTIONS
from tests import GOLDEN
from tests.support.flag_sets import outcome, read

SETS = read(GOLDEN / "flag_sets/flag_sets.jsonl")
FIELDS = {
    field.name: (field, flag_type(field, section))
    for _, section in SECTIONS.values()
    for field in flag_fields(section)
}
BOOLEANS = [field for field, hint in FIELDS.values() if hint is bool]


@pytest.mark.parametrize("field", BOOLEANS, ids=lambda field: field.name)
def test_every_boolean_has_both_spellings(field):
    """Both spellings of every switch, whichever release of Megatron-LM had it; the last one given
    counts.
    """
    on, off = both_spellings(field)
    assert on
    assert off
    parse = make_flag_parser().parse
    for names, value in ((on, True), (off, False)):
        for name in names:
            other = (off if value else on)[0]
            line = parse([other, name])
            assert (line.flag_values, line.problems) == ({field.name: value}, []), name


def test_common_flags():
    line = make_flag_parser().parse(
        ["--use-dist-ckpt", "--async-save", "--ckpt-fully-parallel-save"]
    )
    assert line.problems == []
    assert line.flag_values == {
        "ckpt_format": "torch_dist",
        "async_save": True,
        "ckpt_fully_parallel_save": True,
    }


def test_dispatcher_aliases():
    line = make_flag_parser().parse(
        ["--moe-token-dispatcher-type", "flex", "--moe-enable-deepep", "--moe-deepep-num-sms", "24"]
    )
    assert line.flag_values == {"moe_token_dispatcher_type": "alltoall"}
    assert line.problems == []
    assert line.ignored == ["--moe-enable-deepep", "--moe-deepep-num-sms"]


def test_short_names_of_layout_and_batch():
    words = "--tp=2 --pp=3 --cp=4 --ep=5 --mbs=6 --gbs=7"
    line = make_flag_parser().parse(words.split())
    assert line.problems == []
    assert line.flag_values == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 3,
        "context_parallel_size": 4,
        "expert_model_parallel_size": 5,
        "micro_batch_size": 6,
        "global_batch_size": 7,
    }


def test_values_of_forks_that_disable_a_feature_have_no_effect():
    arguments = ["--train-mode", "pretrain", "--attention-sink-k", "0", "--extra-vocab-size", "0"]
    line = make_flag_parser().parse(arguments)
    assert line.problems == []
    assert line.ignored == arguments[::2]
    assert "fork" in make_flag_parser().parse(["--attention-sink-k", "4"]).problems[0]


def test_equivalent_replacements_are_noted():
    words = "--use-torch-fsdp2 --cp-comm-type a2a+p2p --ckpt-format fsdp_dtensor"
    line = make_flag_parser().parse(words.split())
    assert line.problems == []
    assert line.flag_values == {
        "use_distributed_optimizer": True,
        "cp_comm_type": ["p2p"],
        "ckpt_format": "torch_dist",
    }
    notes = "\n".join(line.notes)
    assert all(text in notes for text in ("replaced by --use-dist", "p2p is used", "torch_dist is"))
    # Data types would change the results.
    line = make_flag_parser().parse(["--megatron-fsdp-main-grads-dtype", "bf16"])
    assert "only fp32 or auto" in line.problems[0]


def test_attention_head_type_of_bigcode():
    """Multi-query attention is grouped-query attention with one group."""
    line = make_flag_parser().parse(["--attention-head-type", "multiquery"])
    assert line.problems == []
    assert line.flag_values == {"group_query_attention": True, "num_query_groups": 1}
    line = make_flag_parser().parse(["--attention-head-type=multihead"])
    assert line.flag_values == {"group_query_attention": False}
    line = make_flag_parser().parse(["--attention-head-type", "multi"])
    assert line.problems == ["--attention-head-type: 'multi' is not one of multihead, multiquery"]


def test_tokenizers_of_pai_megatron_patch():
    """They load the directory --load with AutoTokenizer."""
    arguments = ["--patch-tokenizer-type", "Qwen2Tokenizer", "--load", "base"]
    arguments += ["--extra-vocab-size", "293"]
    line = make_flag_parser().parse(arguments)
    assert line.problems == []
    assert line.flag_values == {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": "base",
        "load": "base",
    }
    assert "--tokenizer-type HuggingFaceTokenizer" in line.notes[0]
    # Explicit flags take precedence, and other kinds of tokenizers are refused.
    line = make_flag_parser().parse([*arguments, "--tokenizer-model", "other"])
    assert line.flag_values["tokenizer_model"] == "other"
    line = make_flag_parser().parse(["--patch-tokenizer-type", "JiebaBPETokenizer"])
    assert line.problems[0].startswith("--patch-tokenizer-type: 'JiebaBPETokenizer' is not one of")


def test_packed_sequences_of_pretraining_reset_the_attention_mask():
    arguments = ["--use-packed-seq-params", "--no-create-attention-mask-in-dataloader"]
    line = make_flag_parser().parse(arguments)
    assert line.problems == []
    assert "--reset-attention-mask" in line.notes[0]
    assert line.flag_values == {
        "reset_attention_mask": True,
        "create_attention_mask_in_dataloader": True,
    }


def test_memory_that_is_not_saved_is_noted():
    words = "--optimizer-cpu-offload --fine-grained-activation-offloading --offload-modules moe_act"
    line = make_flag_parser().parse(words.split())
    assert line.problems == []
    assert len(line.unsaved_memory) == 2
    assert line.unsaved_memory[0] == "--optimizer-cpu-offload (offloading to host memory)"


def test_underscores_of_forks_are_hyphens():
    line = make_flag_parser().parse(
        ["--num_layers", "2", "--mbs=3", "--data_impl", "mmap", "--foo_bar", "1"]
    )
    assert line.flag_values == {"num_layers": 2, "micro_batch_size": 3}
    assert line.ignored == ["--data-impl"]
    assert "--foo_bar" in line.problems[0]


def test_unknown_flags_are_ignored_only_on_request():
    # --train-mode is an option of a fork, --hybrid-context-parallel one of Megatron-LM that is not implemented.
    arguments = [
        "--foo-bar",
        "3",
        "4",
        "--train-mode",
        "7",
        "--lr",
        "0.1",
        "--no-baz",
        "--hybrid-context-parallel",
    ]
    line = make_flag_parser().parse(arguments)
    assert len(line.problems) == 4
    assert not line.dropped
    line = make_flag_parser().parse([*arguments, "--ignore-unknown-flags"])
    assert line.dropped == ["--foo-bar 3 4", "--train-mode 7", "--no-baz"]
    assert line.flag_values["lr"] == 0.1
    assert len(line.problems) == 1
    assert line.problems[0].startswith("--hybrid-context-parallel: ")


def test_no_option_of_megatron_lm_is_unknown():
    parse = make_flag_parser().parse
    words = {"0": [], "2": ["1", "2"], "3": ["1", "2", "3"]}
    for name, option in MEGATRON_OPTIONS.items():
        line = parse([name, *words.get(option.words, ["1"])])
        assert not any(
            problem.startswith(("unknown flag", "unexpected")) for problem in line.problems
        ), name
        # None is dropped in silence.
        assert line.flag_values or line.ignored or line.unsaved_memory or line.problems, name


HANDLING = ("", "no effect", "saves memory", "turns on", "part of", "called", "translated")


def test_rows_of_the_options_table_are_complete():
    """Flags of ours have no row of options without effect; every feature can be turned on."""
    ours = {name for field, _ in FIELDS.values() for name in option_names(field)}
    for name, option in MEGATRON_OPTIONS.items():
        assert option.words in ("0", "1", "2", "3", "+", "*"), name
        assert option.here in HANDLING, name
        assert bool(option.here) == bool(option.why), name
        assert not (name in ours and option.here == "no effect"), name
    turned_on = {
        option.why
        for option in MEGATRON_OPTIONS.values()
        if option.here in ("turns on", "saves memory")
    }
    parts = {option.why for option in MEGATRON_OPTIONS.values() if option.here == "part of"}
    assert parts <= turned_on


# Fields whose default is not Megatron-LM's.
OTHER_DEFAULTS = {
    "num_layers": "both ask for it",
    "hidden_size": "both ask for it",
    "num_attention_heads": "both ask for it",
    "seq_length": "both ask for it",
    "micro_batch_size": "Megatron-LM asks for it",
    "num_query_groups": "1 with --group-query-attention, without effect elsewhere; see below",
    "eval_interval": "1000 until 0.16, later releases ask for it",
    "dataloader_type": "None means single there",
    "no_save_optim": "None means False there",
    "no_save_rng": "None means False there",
    "no_load_optim": "None means False there",
    "no_load_rng": "None means False there",
    "xielu": "None means False in the fork that has it",
    "dist_ckpt_strictness": "decides what is an error, not what is computed",
    "ckpt_fully_parallel_save": "True there, too: the table has the default of its deprecated "
    "positive switch",
    "dist_ckpt_workers": "files per rank",
    "cp_comm_type": "the same as a list",
    "beta_fast": "None means the same number there, as for the three below",
    "beta_slow": "see beta_fast",
    "original_max_position_embeddings": "see beta_fast",
    "yarn_correction_range_round_to_int": "see beta_fast",
    "rerun_mode": "what is checked, not what is computed",
    "transformer_impl": "what computes, not what is computed",
    "distributed_backend": "nccl where there is a GPU",
}


def test_defaults_are_megatron_lms():
    """Defaults that affect the model or the mathematics are the same."""
    different = set()
    for field, hint in FIELDS.values():
        names = (
            [name for pair in both_spellings(field) for name in pair]
            if hint is bool
            else option_names(field)
        )
        rows = [MEGATRON_OPTIONS[name] for name in names if name in MEGATRON_OPTIONS]
        if rows and not _same(field.default, rows[0].defaults[0]):
            different.add(field.name)
    assert different == OTHER_DEFAULTS.keys()


def _same(ours: object, theirs: str) -> bool:
    if isinstance(ours, tuple) and len(ours) == 1:
        ours = ours[0]  # of a list
    try:
        return float(str(ours)) == float(theirs)
    except ValueError:
        return str(ours) == theirs


@pytest.mark.parametrize(
    ("hidden", "expected"), [(4096, 10880), (6144, 16384), (1024, 2688), (64, 128)]
)
def test_ffn_size_of_swiglu_is_rounded_down(hidden, expected):
    """The default is Megatron-LM's since 0.10: int((4 * h * 2 / 3) / 64) * 64."""
    config = TransformerConfig(num_layers=1, hidden_size=hidden, num_attention_heads=4, swiglu=True)
    assert config.ffn_hidden_size == expected == int((4 * hidden * 2 / 3) / 64) * 64


def test_defaults_that_follow_from_other_flags():
    def config(**options):
        return TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, **options)

    assert config().ffn_hidden_size == 128
    assert config().kv_channels == 8
    assert config().query_groups == 4
    assert config(num_query_groups=2).query_groups == 4
    assert config(group_query_attention=True).query_groups == 1
    # The tanh approximation is fused with the bias; without a bias GELU is exact.
    assert config().tanh_gelu
    assert not config(add_bias_linear=False).tanh_gelu
    assert not config(bias_gelu_fusion=False).tanh_gelu
    assert config(openai_gelu=True, add_bias_linear=False).tanh_gelu


@pytest.mark.parametrize("row", SETS, ids=lambda row: row["id"])
def test_real_command_lines(row):
    """Command lines of supported models parse; the others are rejected with one line per reason."""
    result, lines = outcome(row["argv"])
    assert result == row["outcome"], lines
    assert len(lines) == len(row["because"])
    assert all(why in line for why, line in zip(row["because"], lines, strict=True))
