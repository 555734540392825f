"""The summary of a run, without a process group."""

import re
import shlex

import pytest

from megatron.planning.run_plan import plan_run
from megatron.planning.summary import summarize
from megatron.training.config.parsing import parse_args
from megatron.training.reporting.console import format_arguments, format_summary
from pretrain_gpt import model_provider

FLAGS = (
    "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 "
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 16 --train-iters 10 --lr 1e-3 --bf16 "
    "--mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 99 "
)


def summary(flags, world_size):
    config = parse_args(shlex.split(FLAGS + flags), world_size)
    config.set_vocab_size(100)
    plan = plan_run(config, world_size, model_provider, "cpu")
    return summarize(config, world_size, plan)


def test_one_stage():
    topics = summary("", 2)
    assert topics["layout"] == "TP 1 x PP 1 x DP 2 on 2 ranks"
    assert "stage 0" not in topics
    assert topics["batch"] == "16 samples of 32 tokens, 4 micro-batches of 2 on each of 2 replicas"
    assert topics["length"] == "10 iterations = 5.12k tokens"
    assert "4 heads in 2 groups" in topics["model"]
    assert "100 tokens" in topics["model"]
    assert topics["precision"] == "bfloat16, with fp32 main parameters and gradients"
    assert topics["checkpoint"].endswith("not saved: no --save")


def test_host_memory_of_asynchronous_saves():
    """Each of two ranks stages half of the checkpoint."""
    text = summary("--save /checkpoints --async-save --use-distributed-optimizer", 2)["checkpoint"]
    whole, staged = re.findall(r"([\d.]+) MB", text)
    assert float(staged) == pytest.approx(float(whole) / 2, rel=0.02)
    assert (
        text
        == f"{whole} MB, saved through {staged} MB of host memory on each rank, to /checkpoints"
    )
    synchronous = summary("--save /checkpoints", 2)["checkpoint"]
    assert synchronous == f"{whole} MB to /checkpoints"


def test_layers_for_multi_token_prediction():
    model = summary("--position-embedding-type rope --mtp-num-layers 2", 1)["model"]
    assert model.startswith("6 layers + 2 for multi-token prediction, hidden size 64")


def test_stages_list_ranks_and_layers():
    layout = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 "
        "--decoder-first-pipeline-num-layers 1 "
    )
    topics = summary(layout + "--decoder-last-pipeline-num-layers 3", 12)
    assert topics["layout"] == "TP 2 x PP 3 x DP 2 on 12 ranks"
    assert topics["stage 0"].startswith("ranks 0-3: layers 0, embedding; ")
    assert topics["stage 1"].startswith("ranks 4-7: layers 1-2; ")
    assert topics["stage 2"].startswith("ranks 8-11: layers 3-5, output layer; ")
    assert format_summary(topics).splitlines()[0].startswith("   model       6 layers")


def test_arguments_as_megatron_lm_prints_them():
    """The form of `print_args` in Megatron-LM's arguments.py: sorted, dots up to column 48."""
    lines = format_arguments({"Zeta": 1, "adam_beta1": 0.9}).splitlines()
    assert lines[0] == "------------------------ arguments ------------------------"
    assert lines[1:3] == [
        "  adam_beta1 ...................................... 0.9",
        "  Zeta ............................................ 1",
    ]
    assert lines[3] == "-------------------- end of arguments ---------------------"
