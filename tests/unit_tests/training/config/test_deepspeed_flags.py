"""Command lines of Megatron-DeepSpeed: translation of each option and each field of its file."""

import json
import shlex

import pytest

from megatron.planning.dry_run import compute_replica_size
from megatron.planning.smoke import list_options, reduce_flags
from megatron.training.config import deepspeed_flags
from megatron.training.config.megatron_lm_options import MEGATRON_OPTIONS
from megatron.training.config.parsing import make_flag_parser, parse_args
from tests import GOLDEN
from tests.support.flag_sets import read

SETS = read(GOLDEN / "flag_sets/megatron_deepspeed.jsonl")
MODEL = (
    "--num-layers 24 --hidden-size 64 --num-attention-heads 4 --seq-length 100 --lr 1e-3 "
    "--micro-batch-size 2 --global-batch-size 20 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 60 "
)
BLOOM = {
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 2048,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
    "bf16": {"enabled": True},
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
"""The file of BLOOM's training."""


def parse(flags, config=None, directory=None):
    """Return the configuration of a model with `flags` and a file of --deepspeed_config."""
    argv = shlex.split(MODEL + flags)
    if config is not None:
        path = directory / "ds_config.json"
        path.write_text(json.dumps(config))
        argv += ["--deepspeed", "--deepspeed_config", str(path)]
    return parse_args(argv, compute_replica_size(argv))


def write_files(argv, directory, config):
    """Return `argv` with files that exist: DeepSpeed's configuration, and groups of data sets."""
    (directory / "ds.json").write_text(json.dumps(config))
    groups = {"train": "0:0.950", "valid": "0.950:1.0"}
    for split, documents in groups.items():
        text = f'"{split}: 0.3 {documents} /data/a, 0.7 {documents} /data/b"\n'
        (directory / f"{split}.txt").write_text(text)
    words = []
    for word in argv:
        name = words[-1] if words else ""
        if name == "--deepspeed_config":
            word = str(directory / "ds.json")
        elif word.startswith("--deepspeed_config="):
            word = f"--deepspeed_config={directory / 'ds.json'}"
        elif name.endswith("-weighted-split-paths-path"):
            word = str(directory / f"{name.removeprefix('--').partition('-')[0]}.txt")
        words.append(word)
    return words


@pytest.mark.parametrize("row", SETS, ids=lambda row: row["id"])
def test_published_command_lines(row, tmp_path):
    argv = write_files(row["argv"], tmp_path, {"gradient_clipping": 1.0})
    if row["because"] is None:
        assert parse_args(argv, compute_replica_size(argv)).training.micro_batch_size
        return
    with pytest.raises(ValueError) as error:
        parse_args(argv, compute_replica_size(argv))
    assert str(error.value).startswith(row["because"])


def test_bloom(tmp_path):
    (row,) = [row for row in SETS if row["id"].endswith("-tr11-176B-ml.slurm")]
    argv = write_files(row["argv"], tmp_path, BLOOM)
    config = parse_args(argv, 384)
    assert config.model.bf16
    assert config.tokenizer.vocab_size == 250880
    # 70 layers and two embeddings are 72 of 12 stages.
    assert config.pipeline_layout.account_for_embedding_in_pipeline_split
    assert config.pipeline_layout.account_for_loss_in_pipeline_split
    assert config.data.data_path == ["0.3", "/data/a", "0.7", "/data/b"]
    assert config.data.split == "95,5,0"
    notes = "\n".join(config.notes)
    assert "--pad-vocab-size-to 250880: replaced by --vocab-size 250880" in notes
    assert "--kill-switch-path" in notes  # without effect


def test_smoke_reduces_the_flags_that_replace_options(tmp_path):
    (row,) = [row for row in SETS if row["id"].endswith("-tr11-176B-ml.slurm")]
    argv = write_files(row["argv"], tmp_path, BLOOM)
    config = parse_args(reduce_flags(list_options(argv), 1), 1)
    assert config.model.bf16
    assert config.data.mock_data
    assert config.training.train_iters == 3
    # A file that is missing is an error, not a run without it.
    (tmp_path / "ds.json").unlink()
    with pytest.raises(ValueError, match="--deepspeed_config .*ds.json: cannot be read"):
        parse_args(reduce_flags(list_options(argv), 1), 1)


def test_every_translated_option_has_a_translation():
    listed = {name for name, option in MEGATRON_OPTIONS.items() if option.here == "translated"}
    translated = {
        *deepspeed_flags._TRANSLATIONS,
        *deepspeed_flags._EXPERTS,
        *deepspeed_flags._DATA,
    }
    assert listed == translated


@pytest.mark.parametrize(
    ("flags", "train_samples", "train_iters"),
    [
        ("--train-tokens 1001", 11, None),
        ("--train-tokens 1001 --train-samples 500", 11, None),
        ("--train-tokens 1_000_000 --train-samples 500", 500, None),
        ("--train-tokens 4001 --train-iters 50", None, 3),
        ("--train-tokens 400_000 --train-iters 50", None, 50),
    ],
)
def test_training_ends_at_the_first_limit(flags, train_samples, train_iters):
    training = parse(flags).training
    assert (training.train_samples, training.train_iters) == (train_samples, train_iters)


def test_schedules_in_tokens():
    scheduler = parse(
        "--train-samples 500 --lr-decay-tokens 40_000 --lr-warmup-tokens 1000"
    ).scheduler
    assert (scheduler.lr_decay_samples, scheduler.lr_warmup_samples) == (400, 10)
    scheduler = parse("--train-iters 50 --lr-decay-tokens 40_000 --lr-warmup-tokens 4000").scheduler
    assert (scheduler.lr_decay_iters, scheduler.lr_warmup_iters) == (20, 2)
    line = make_flag_parser().parse(["--train-tokens", "1000"])
    assert line.problems == ["--train-tokens 1000: needs --seq-length to convert tokens"]


def test_options_of_the_model():
    config = parse(
        "--train-iters 5 --num-key-value-heads 2 --glu-activation geglu --no-bias-gelu-fusion "
        "--position-embedding-type rotary --rotary-position-embeddings-theta 5000 "
        "--ds-sequence-parallel-size 2 --attention-dropout 0 --eval-only True"
    )
    assert config.model.group_query_attention
    assert config.model.num_query_groups == 2
    # Without --ffn-hidden-size the gate does not make the layer narrower.
    assert config.model.geglu
    assert config.model.ffn_hidden_size == 256
    assert config.model.rotary_base == 5000
    assert config.training.skip_train
    assert config.parallel.context_parallel_size == 2
    assert config.parallel.cp_comm_type == ["a2a"]


def test_experts_of_deepspeed_are_refused():
    experts = "--train-iters 5 --moe-expert-parallel-size 1 --moe-loss-coeff 0.01"
    assert "--moe-loss-coeff" in parse(experts).notes[0]  # a dense model: without effect
    with pytest.raises(ValueError, match="--moe-expert-parallel-size, --moe-loss-coeff: layers"):
        parse(f"{experts} --num-experts 4")


def read_field(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"zero_optimization": {"stage": 1}}, {"ddp.use_distributed_optimizer": True}),
        ({"zero_optimization": {"stage": 3}}, {"ddp.use_distributed_optimizer": True}),
        ({"zero_optimization": {"stage": 0}}, {"ddp.use_distributed_optimizer": False}),
        ({"gradient_clipping": 0.5}, {"optimizer.clip_grad": 0.5}),
        ({"bfloat16": {"enabled": True}}, {"model.bf16": True}),
        (
            {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}},
            {
                "model.fp16": True,
                "optimizer.loss_scale": None,
                "optimizer.initial_loss_scale": 4096,
            },
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 64, "hysteresis": 4, "min_loss_scale": 2}},
            {"optimizer.loss_scale": 64, "optimizer.hysteresis": 4, "optimizer.min_loss_scale": 2},
        ),
        (
            {"train_batch_size": 20, "train_micro_batch_size_per_gpu": "auto"},
            {"training.global_batch_size": 20, "training.micro_batch_size": 2},
        ),
        ({"curriculum_learning": {"enabled": False}, "wandb": {"enabled": True}}, {}),
    ],
    ids=str,
)
def test_fields_of_the_file(fields, expected, tmp_path):
    config = parse("--train-iters 5", fields, tmp_path)
    assert {path: read_field(config, path) for path in expected} == expected


def test_values_of_the_file_replace_flags(tmp_path):
    """DeepSpeed clips and scales by its file only."""
    fields = {"gradient_clipping": 0.5, "fp16": {"enabled": True, "loss_scale": 0}}
    flags = "--train-iters 5 --clip-grad 2 --fp16 --loss-scale 12"
    config = parse(flags, fields, tmp_path)
    assert config.optimizer.clip_grad == 0.5
    assert config.optimizer.loss_scale is None
    assert "--loss-scale 12.0: not used" in "\n".join(config.notes)
    config = parse(flags, {"fp16": {"enabled": True}}, tmp_path)
    assert config.optimizer.clip_grad == 2
    assert "has no gradient_clipping" in "\n".join(config.notes)


def test_memory_that_is_not_saved_is_listed(tmp_path):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True}
    notes = "\n".join(parse("--train-iters 5", {"zero_optimization": zero}, tmp_path).notes)
    assert "ZeRO stage 3" in notes
    assert "zero_optimization.offload_optimizer (to cpu)" in notes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train_batch_size": 64}, "64 contradicts --global-batch-size 20: make them equal"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning: this feature"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention: this feature"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler: DeepSpeed's learning rate schedules"),
        ({"zero_optimization": {"stage": 4}}, "the stage of ZeRO is 0, 1, 2 or 3, got 4"),
        ({"zero_optimization": {"offload_param": True}}, "offload_param: True is not an object"),
        ({"fp16": {"enabled": True, "initial_scale_power": 10**9}}, "is not an integer from 0"),
        ({"fp16": {"enabled": True, "initial_scale_power": "12"}}, "'12' is not an integer from 0"),
        ({"zero_optimization": True}, "zero_optimization: True is not an object"),
        ({"bf16": {"enabled": False}}, "bf16: is not enabled, which contradicts --bf16"),
        ({"gradient_cliping": 1}, "gradient_cliping: this field is not supported; remove it"),
        ([], "is not a JSON object"),
    ],
    ids=str,
)
def test_fields_that_are_refused(fields, message, tmp_path):
    with pytest.raises(ValueError) as error:
        parse("--train-iters 5 --bf16", fields, tmp_path)
    assert message in str(error.value)


def test_accumulation_steps_need_a_batch_size(tmp_path):
    fields = {"gradient_accumulation_steps": 4}
    assert parse("--train-iters 5", fields, tmp_path).training.global_batch_size == 20
    path = str(tmp_path / "ds_config.json")
    (problem,) = make_flag_parser().parse(["--deepspeed_config", path]).problems
    assert problem.endswith("gradient_accumulation_steps: give --global-batch-size instead")


def parse_data(**groups):
    arguments = ["--seq-length", "100"]
    for split, group in groups.items():
        arguments += [f"--{split}-weighted-split-paths", *group]
    return make_flag_parser().parse(arguments)


def test_data_sets_with_ranges():
    whole = parse_data(train=["T: 0.3 0:1 /a, 0.7 0:1 /b"], valid=["V: 1 0:1.0 /c"])
    assert whole.problems == []
    assert whole.flag_values["valid_data_path"] == ["1", "/c"]
    assert whole.flag_values["train_data_path"] == ["0.3", "/a", "0.7", "/b"]
    ranges = parse_data(train=["T: 1 0:0.6 /a"], valid=["V: 1 0.6:0.8 /a"], test=["X: 1 0.8:1 /a"])
    assert ranges.problems == []
    assert ranges.flag_values["split"] == "60,20,20"
    assert ranges.flag_values["data_path"] == ["1", "/a"]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"train": ["T: 1 0:0.6 /a"], "valid": ["V: 1 0.7:1 /a"]}, "ranges of documents"),
        ({"train": ["T: 1 0:0.6 /a"], "valid": ["V: 1 0.6:1 /b"]}, "ranges of documents"),
        ({"train": ["T: 1 0:0.6 /a, 1 0:0.5 /b"]}, "ranges of documents"),
        ({"train": ["T: 1 0:1 /a"], "valid": ["V: 1 0:1 /a", "W: 1 0:1 /b"]}, "2 groups"),
        ({"train": ["T: 1 /a"]}, "'1 /a' is not WEIGHT START:END PATH"),
        ({"train": ["T: 1 a:b /a"]}, "'1 a:b /a' is not WEIGHT START:END PATH"),
    ],
    ids=str,
)
def test_data_sets_that_are_refused(groups, message):
    (problem,) = parse_data(**groups).problems
    assert message in problem
    line = make_flag_parser().parse(["--train-weighted-split-paths-path", "/absent/train.txt"])
    assert "No such file" in line.problems[0]
