"""From command lines to configurations: Megatron-LM's are accepted, impossible ones are explained."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from megatron.core.flags import explain_error, list_rules
from megatron.training.config.arguments import flag_fields, flag_type, get_word_type, option_names
from megatron.training.config.flag_help import field_docs, format_help
from megatron.training.config.parsing import make_flag_parser, parse_args
from megatron.training.config.run_config import SECTIONS
from megatron.training.config.run_rules import RULES
from tests import ROOT

GOLDEN = ROOT / "tests/golden/megatron_lm_flags"

BASE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --train-iters 10 --lr "
    "1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 63"
)


def config(more: str = "", world_size: int = 1):
    return parse_args(shlex.split(f"{BASE} {more}"), world_size)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_command_lines_of_megatron_lm_parse_unchanged(path):
    words = shlex.split(path.read_text())
    sizes = {"tp2pp2": 4, "tp2": 2, "dp2": 2, "tp1": 1}
    world_size = next(size for name, size in sizes.items() if name in path.stem)
    parsed = parse_args(words, world_size)
    assert (parsed.model.num_layers, parsed.data.seq_length, parsed.training.global_batch_size) == (
        4,
        64,
        8,
    )
    assert parsed.optimizer.lr == 2e-3
    assert parsed.schedule().lr_warmup_steps == 16
    assert parsed.model.position_embedding_type == (
        "rope" if "llama" in path.stem else "learned_absolute"
    )
    assert parsed.model.bias_gelu_fusion is False
    assert parsed.model.add_bias_linear == ("gpt2" in path.stem)
    assert "--no-masked-softmax-fusion" in parsed.notes[0]


def test_derived_values():
    parsed = config("--micro-batch-size 2 --swiglu --vocab-size 100", world_size=3)
    assert parsed.training.global_batch_size == 6
    assert parsed.model.max_position_embeddings == 16
    assert parsed.set_vocab_size(101) == 101
    assert parsed.model.vocab_size == 101
    assert parsed.flags()["vocab_size"] == 100  # as given: with NullTokenizer it means 101 tokens
    assert parsed.flags()["ffn_hidden_size"] == parsed.model.ffn_size


def test_negative_eval_iters_disable_evaluation():
    """As in Megatron-LM, which evaluates only if eval_iters > 0."""
    parsed = config("--eval-iters -1")
    assert parsed.training.eval_iters == 0
    assert "--eval-iters -1: evaluation is disabled, as with 0" in parsed.notes


CONTEXT = "--context-parallel-size"


def test_dropout_exchanges_heads():
    """Attention in blocks has no dropout, and every exchange gives the same results."""
    parsed = config(f"{CONTEXT} 2 --cp-comm-type p2p --attention-dropout 0.1", 2)
    assert parsed.parallel.cp_comm_type == ["a2a"]
    assert any(note.startswith("--cp-comm-type a2a: ") for note in parsed.notes)
    without = config(f"{CONTEXT} 2 --cp-comm-type p2p --attention-dropout 0", 2)
    assert without.parallel.cp_comm_type == ["p2p"]


@pytest.mark.parametrize(
    "flags,world,message",
    [
        (
            f"{CONTEXT} 2",
            3,
            r"world size 3 is not a multiple of tensor \(1\) x context \(2\) x pipeline \(1\) = 2 "
            r"ranks",
        ),
        (
            f"{CONTEXT} 2 --attention-dropout 0 --seq-length 18",
            2,
            r"--seq-length 18 is not divisible by 2 x .* 2 = 4",
        ),
        (
            f"{CONTEXT} 2 --attention-dropout 0 --seq-length 36 --tensor-model-parallel-size 4 "
            "--sequence-parallel",
            8,
            r"--seq-length 36 is not divisible by .* 2 x --tensor-model-parallel-size 4 = 8.*leave "
            r"out --sequence-par",
        ),
        (
            f"{CONTEXT} 4 --cp-comm-type a2a --group-query-attention --num-query-groups 2",
            4,
            r"--num-query-groups 2 is not divisible by .* 1 x .* 4 = 4. Use --cp-comm-type p2p or "
            r"all_gather",
        ),
        (
            f"{CONTEXT} 2 --cp-comm-type a2a --tensor-model-parallel-size 4",
            8,
            "--num-attention-heads 4 is not divisible by .* 4 x .* 2 = 8",
        ),
        (
            f"{CONTEXT} 2 --tensor-model-parallel-size 4",
            8,
            r"--attention-dropout 0.1 .*Use --attention-dropout 0, or --cp-comm-type a2a",
        ),
        (f"{CONTEXT} 2 --cp-comm-type ring", 2, r"--cp-comm-type.*ring"),
        (f"{CONTEXT} 0", 1, "--context-parallel-size must be positive, got 0"),
    ],
)
def test_impossible_context_parallelism(flags, world, message):
    with pytest.raises(ValueError, match=message):
        config(flags, world)


@pytest.mark.parametrize(
    "flags,message",
    [
        ("--window-attn-skip-freq 2", "--window-attn-skip-freq 2 requires --window-size"),
        (
            "--window-size 4,0 --window-attn-skip-freq 0",
            "--window-attn-skip-freq must be positive, got 0",
        ),
        (
            "--window-size 4,0 --window-attn-skip-freq [1]*2",
            r"\[1, 1\] must have a 0 or a 1 for each of the --num-layers",
        ),
        (
            "--attn-logit-softcapping 50",
            r"requires --attention-dropout 0 \(now 0.1\): the kernels that modify scores do not support",
        ),
        (
            "--softmax-type learnable",
            r"--softmax-type learnable requires --attention-dropout 0 \(now 0.1\): the kernels",
        ),
        (
            "--glu-linear-offset 1 --swiglu",
            "--glu-linear-offset 1.0 requires --quick-geglu: it changes the gate",
        ),
        ("--final-logit-softcapping 0", "--final-logit-softcapping must be positive, got 0"),
        (
            "--qk-layernorm-across-heads --qk-layernorm",
            r"requires --normalization RMSNorm \(now LayerNorm\)",
        ),
        ("--swiglu --geglu", "--swiglu and --geglu are mutually exclusive"),
        # A rule that reads the model is skipped if there is none.
        ("--swiglu --geglu --save-hf y --save-hf-dtype fp16", "--swiglu and --geglu are mutually"),
        (
            f"{CONTEXT} 2 --cp-comm-type p2p a2a a2a",
            r"--cp-comm-type p2p a2a a2a has 3 values, --num-layers is 4",
        ),
    ],
)
def test_impossible_models(flags, message):
    with pytest.raises(ValueError, match=message):
        config(flags, 2)


def test_notes_name_saves_that_do_not_happen():
    assert config("--save-interval 2 --keep-last-n 1").notes == [
        "no checkpoints are saved: --save-interval, --keep-last-n without --save"
    ]
    best = "--save x --keep-best-n 1 --eval-interval 6 --save-interval"
    (note,) = config(f"{best} 4").notes
    assert "every 4 iterations and evaluations every 6, only those every 12" in note
    assert config(f"{best} 6").notes == config(f"{best} 12").notes == []


def test_layers_per_virtual_stage_set_the_number_of_chunks():
    parsed = config(
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--global-batch-size 2",
        2,
    )
    assert parsed.parallel.vpp_size == 2
    assert parsed.layer_ranges() == [[range(0, 1), range(2, 3)], [range(1, 2), range(3, 4)]]


def test_batch_sizes_of_a_ramp_up_must_fit_the_interleaved_schedule():
    """Found at the start, not when the ramp gets there: 4 micro-batches fit 2 stages, 5 do not."""
    interleaved = (
        "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2 "
        "--global-batch-size 8"
    )
    flags = f"{BASE.replace('--train-iters 10', '--train-samples 100')} {interleaved}"
    assert (
        parse_args(shlex.split(f"{flags} --rampup-batch-size 4 2 40"), 2).training.global_batch_size
        == 8
    )
    with pytest.raises(ValueError, match=r"a global batch of 5 or 7 .* has 5 or 7"):
        parse_args(shlex.split(f"{flags} --rampup-batch-size 4 1 40"), 2)
    with pytest.raises(ValueError, match=r"a global batch of 3 .* has 3"):
        parse_args(
            shlex.split(
                f"{flags.replace('--global-batch-size 8', '')} --step-batch-size-schedule 0:4,160:3"
            ),
            2,
        )


def test_step_batch_size_schedule_and_evaluation_batch():
    parsed = config("--step-batch-size-schedule 0:4,160:8 --eval-global-batch-size 2")
    assert [parsed.batch_schedule(1).global_batch_size_at(n) for n in (0, 9, 10)] == [4, 4, 8]
    with pytest.raises(
        ValueError,
        match="--step-batch-size-schedule 0:4 and --global-batch-size 4 are mutually exclusive",
    ):
        config("--step-batch-size-schedule 0:4 --global-batch-size 4")
    with pytest.raises(
        ValueError, match="--eval-global-batch-size 3 is not a multiple of micro-batch size 2"
    ):
        config("--eval-global-batch-size 3 --micro-batch-size 2")


def test_pipeline_layout_sets_the_number_of_chunks():
    parsed = config(
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|tL "
        "--global-batch-size 2",
        2,
    )
    assert parsed.parallel.vpp_size == 2
    assert parsed.layer_ranges() == [[range(0, 1), range(2, 3)], [range(1, 2), range(3, 4)]]
    split = (
        "--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split --num-layers 3"
    )
    assert config(split, 2).layer_ranges() == [[range(0, 1)], [range(1, 3)]]
    with pytest.raises(ValueError, match="has 3 chunks for --pipeline-model-parallel-size 2"):
        config("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|ttL", 2)


def test_all_problems_are_reported_together():
    with pytest.raises(ValueError) as error:
        config(
            "--fp16 --bf16 --num-query-groups 3 --group-query-attention --lr-warmup-fraction 2 "
            "--zzz "
            "--num-experts 8 --moe-router-topk 9"
        )
    assert len(str(error.value).splitlines()) == 5
    explained = explain_error(error.value).splitlines()
    assert explained[0] == "5 problems"
    assert explained[1:] == [f"  - {problem}" for problem in error.value.problems]
    with pytest.raises(ValueError) as error:
        config("--zzz")
    assert explain_error(error.value) == str(error.value)


def test_sequence_parallel_without_tensor_parallel_is_dropped_with_a_note():
    parsed = config("--sequence-parallel")
    assert parsed.parallel.sequence_parallel is False
    assert "--sequence-parallel is off" in parsed.notes[0]


@pytest.mark.parametrize(
    ("more", "world_size", "numbers"),
    [
        ("--tensor-model-parallel-size 2", 3, ["3", "2"]),
        ("--tensor-model-parallel-size 3", 3, ["--num-attention-heads 4", "3"]),
        (
            "--group-query-attention --num-query-groups 1 --tensor-model-parallel-size 2",
            2,
            ["--num-query-groups 1", "2"],
        ),
        ("--pipeline-model-parallel-size 3", 3, ["4 layers", "3 pipeline stages"]),
        ("--global-batch-size 3 --micro-batch-size 2", 1, ["3", "2"]),
        ("--global-batch-size 4 --micro-batch-size 2", 3, ["4", "2", "3"]),
        (
            "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2 "
            "--global-batch-size 3",
            2,
            ["3", "2"],
        ),
        (
            "--virtual-pipeline-model-parallel-size 2",
            1,
            ["--virtual-pipeline-model-parallel-size 2"],
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 2",
            2,
            ["4", "2", "3"],
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 15",
            2,
            ["--seq-length", "15", "2"],
        ),
        ("--seq-length 32 --max-position-embeddings 16", 1, ["32", "16"]),
        ("--train-samples 100", 1, ["--train-iters 10", "--train-samples 100"]),
        ("--lr-decay-samples 100", 1, ["100", "--train-iters"]),
        (
            "--rampup-batch-size 1 1 10 --global-batch-size 2",
            1,
            ["--rampup-batch-size", "--train-samples"],
        ),
        ("--lr-warmup-iters 10", 1, ["10"]),
        ("--save-interval 0", 1, ["--save-interval", "0"]),
        ("--exit-interval 0", 1, ["--exit-interval", "0"]),
        ("--ckpt-convert-format torch_dist", 1, ["--ckpt-convert-save"]),
        ("--ckpt-format torch --save s3://bucket/run", 1, ["--ckpt-format", "--save s3://bucket"]),
        (
            "--load run --ckpt-convert-format torch --ckpt-convert-save s3://bucket/run",
            1,
            ["--ckpt-convert-format torch", "--ckpt-convert-save s3://bucket/run"],
        ),
        ("--ckpt-step 3", 1, ["--ckpt-step 3", "--load"]),
        ("--use-checkpoint-args", 1, ["stored_args=read_checkpoint_args(argv, world_size)"]),
        ("--overlap-param-gather", 1, ["--use-distributed-optimizer"]),
        ("--hang-report-seconds 600", 1, ["600", "--distributed-timeout-minutes 10"]),
        ("--fp16 --bf16", 1, ["--fp16", "--bf16"]),
        ("--main-params-dtype fp16", 1, ["--main-params-dtype fp16 requires --bf16 or --fp16"]),
        *(
            (f"{flag} {value}", 1, [f"{flag} must be", value])
            for flag, value in {
                "--hidden-dropout": "-0.1",
                "--attention-dropout": "1.1",
                "--norm-epsilon": "-1e-5",
                "--rotary-percent": "1.5",
                "--rotary-base": "0",
                "--kv-channels": "-8",
                "--context-parallel-size": "0",
                "--micro-batch-size": "0",
                "--log-interval": "0",
                "--tensorboard-log-interval": "0",
                "--num-threads": "0",
                "--dist-ckpt-workers": "0",
                "--ckpt-staging-mem-limit": "0",
                "--distributed-timeout-minutes": "-1",
                "--make-vocab-size-divisible-by": "0",
            }.items()
        ),
    ],
)
def test_impossible_combinations_name_every_number(more, world_size, numbers):
    with pytest.raises(ValueError) as error:
        config(more, world_size)
    for number in numbers:
        assert number in str(error.value)


def test_ungrouped_heads_are_one_problem():
    with pytest.raises(ValueError) as error:
        config("--tensor-model-parallel-size 3", 3)
    assert str(error.value).splitlines()[0] == (
        "--num-attention-heads 4 is not a multiple of --tensor-model-parallel-size 3: change one of "
        "them"
    )
    assert "--num-query-groups" not in str(error.value)


@pytest.mark.parametrize(
    "missing", ["--num-layers 4", "--train-iters 10", "--lr 1e-3", "--seq-length 16", "--mock-data"]
)
def test_required_flags(missing):
    with pytest.raises(ValueError, match=missing.split()[0]):
        parse_args(shlex.split(BASE.replace(missing, "")), 1)


def test_numbers_must_be_finite():
    """It would pass every comparison of the rules, and train a model of NaNs, or with another
    schedule.
    """
    parse = make_flag_parser().parse
    numbers = [
        name
        for name, spelling in make_flag_parser().spellings.items()
        if spelling.word_type is float
    ]
    accepted = [name for name in numbers if not parse([name, "nan"]).problems]
    assert len(numbers) > 50
    assert accepted == []


def list_invalid_values():
    """Return (section, field, word, value) of a wrong choice, bound or type of each field."""
    cases = []
    for section_name, section in SECTIONS.values():
        for field in flag_fields(section):
            hint = flag_type(field, section)
            word_type = get_word_type(hint)
            words = []
            if field.metadata["choices"]:
                words.append("no-such-choice")
            elif word_type in (int, float) and not field.metadata["parse"]:
                words += ["four", "nan"] if word_type is float else ["four"]
                if field.metadata["positive"]:
                    words.append("0")
                if field.metadata["below"]:
                    words.append("1")
            for word in words:
                value = word
                if word not in ("no-such-choice", "four"):
                    value = word_type(word)
                cases.append(
                    (section_name, field, word, [value] if word_type is not hint else value)
                )
    return cases


def test_python_and_command_line_report_the_same_problem():
    """Both check the metadata of the field."""
    cases = list_invalid_values()
    assert len(cases) > 150
    parser = make_flag_parser()
    valid = config()
    for section_name, field, word, value in cases:
        (problem,) = parser.parse([option_names(field)[0], word]).problems
        with pytest.raises(ValueError) as error:
            dataclasses.replace(getattr(valid, section_name), **{field.name: value})
        lines = [line.replace("got 0.0", "got 0") for line in str(error.value).splitlines()]
        assert problem in [line.replace("got 1.0", "got 1") for line in lines]


def test_vocab_size_must_not_be_less_than_the_tokenizers():
    parsed = config()
    parsed.tokenizer.tokenizer_type = "SentencePieceTokenizer"
    with pytest.raises(ValueError, match=r"--vocab-size 63 is less than the 64 tokens"):
        parsed.set_vocab_size(64)
    assert parsed.set_vocab_size(60) == 63


def test_list_of_flags_is_frozen():
    """A flag is an interface: adding, renaming or removing one shows up here (regenerate the file
    on purpose).
    """
    lines = []
    for title, (_, section) in SECTIONS.items():
        for flag in flag_fields(section):
            lines.append(
                f"{title}: {', '.join(option_names(flag))} [{flag.type}] default {flag.default}"
            )
    expected = (Path(__file__).parent / "flags.txt").read_text().splitlines()
    assert lines == expected


def test_every_flag_has_help_and_shared_ones_agree():
    seen = {}
    for _, section in SECTIONS.values():
        for flag in flag_fields(section):
            assert field_docs(section)[flag.name].endswith("."), flag.name
            assert seen.setdefault(flag.name, (flag.type, flag.default)) == (
                flag.type,
                flag.default,
            ), flag.name
    assert len(format_help(make_flag_parser().sections).splitlines()) > len(seen)


def test_help_describes_flags_as_spelled():
    """The docstring of a field that is on by default describes it when on; --help lists the flag
    that turns it off.
    """
    help_text = " ".join(format_help(make_flag_parser().sections).split())
    on = [
        (section, flag)
        for _, section in SECTIONS.values()
        for flag in flag_fields(section)
        if flag.default is True
    ]
    assert len(on) >= 12
    for section, flag in on:
        name = option_names(flag)[0]
        first_words = " ".join(field_docs(section)[flag.name].split()[:4])
        assert f"{name} Disable this default: {first_words}".lower() in help_text.lower()


SOURCES = [
    path.read_text() for path in [*(ROOT / "megatron").rglob("*.py"), ROOT / "pretrain_gpt.py"]
]
# make_schedule and the checks of options put these names together
COMPOSED = {
    f"lr_{what}_{unit}"
    for what in ("decay", "warmup", "wsd_decay")
    for unit in ("iters", "samples")
}


def is_read(part: str, section: str, name: str) -> bool:
    """Return whether a field is read from its part of `Config`, as `checkpoint.save`, or as
    `config.save` where the part is named. Methods of that name, and attributes of other objects, do
    not count.
    """
    anywhere = re.compile(rf"\b{part}\.{name}\b(?!\()")
    with_class = re.compile(rf"\b(?:config|_config|flags|self|c|stages)\.{name}\b(?!\()")
    named = re.compile(rf"\b{section}\b|\.{part}\b")
    before_parsing = re.compile(rf'flag_values\.get\("{name}"')
    return any(
        anywhere.search(text)
        or before_parsing.search(text)
        or (named.search(text) and with_class.search(text))
        for text in SOURCES
        if name in text
    )


def test_every_flag_is_read_somewhere():
    unread = [
        f"{section_name}.{field.name}"
        for section_name, section in SECTIONS.values()
        for field in flag_fields(section)
        if field.name not in COMPOSED
        and not any(
            is_read(section_name, of.__name__, field.name)
            for of in section.__mro__
            if dataclasses.is_dataclass(of)
        )
    ]
    assert unread == [
        "model.moe_pad_expert_input_to_capacity",  # has no effect, but rules
        "distributed.dry_run",  # pretrain_gpt.py looks for it before parsing
        "distributed.smoke",  # pretrain_gpt.py reads it before parsing
    ]


def test_rules_name_fields_and_properties():
    """A rule with a misspelled name would never be checked."""
    sections = [section for _, section in SECTIONS.values()]
    rules = [*RULES]
    for section in sections:
        rules += list_rules(section)
    assert len(rules) >= 70
    for rule in rules:
        for name in rule.names:
            assert any(hasattr(section, name) for section in sections), name


def test_rules_between_sections():
    """A field of one section requires, excludes and divides fields of others."""
    with pytest.raises(ValueError) as error:
        config(
            "--tensor-model-parallel-size 3 --main-grads-dtype bf16 --keep-best-n 2 --eval-iters 0 "
            "--main-params-dtype fp16 --ema-decay 0.9 --ckpt-format torch --save x --fp16",
            world_size=3,
        )
    assert set(error.value.problems) >= {
        "--num-attention-heads 4 is not a multiple of --tensor-model-parallel-size 3: change one of "
        "them",
        "--main-grads-dtype bf16 requires --bf16: gradients of an fp32 or fp16 model are reduced in "
        "fp32",
        "--keep-best-n 2 requires --eval-iters: it compares validation losses",
        "--keep-best-n 2 and --ckpt-format torch are mutually exclusive: legacy files do not contain "
        "validation losses",
        "--save x with --ckpt-format torch and --ema-decay 0.9 are mutually exclusive: Megatron-LM's "
        "legacy files cannot store the average: use the format torch_dist",
    }


@pytest.mark.parametrize(
    "field",
    [("loader", "DataLoaderConfig", "async_save"), ("model", "TransformerConfig", "write")],
)
def test_attributes_of_other_things_do_not_count_as_read(field):
    assert not is_read(*field)
