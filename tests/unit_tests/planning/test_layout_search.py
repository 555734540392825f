"""The search's lower bound of a step, compared with the plan of the same layout."""

import shlex

import pytest

from megatron.planning.alternatives import parse_planned_flags
from megatron.planning.layout_search import Hardware, LayoutSearch
from megatron.planning.run_plan import plan_run
from megatron.training.config.parsing import make_config
from pretrain_gpt import model_provider

COMMON = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--untie-embeddings-and-output-weights --bf16 --position-embedding-type rope "
    "--global-batch-size 8 --micro-batch-size 1 "
)
INFINITE = 1e30
NODE_BANDWIDTH = 1e9  # the only finite speed: a step consists of messages over TP
HARDWARE = Hardware(INFINITE, INFINITE, NODE_BANDWIDTH, INFINITE, devices_per_node=8)


@pytest.mark.parametrize("num_mtp_layers", [0, 1, 3])
def test_bound_counts_messages_of_multi_token_prediction(num_mtp_layers):
    flags = "--num-layers 2 "
    if num_mtp_layers:
        flags += f"--mtp-num-layers {num_mtp_layers}"
    given = parse_planned_flags(shlex.split(COMMON + flags))
    layout = {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "micro_batch_size": 1,
        "sequence_parallel": True,
    }
    search = LayoutSearch(given, 4, model_provider, INFINITE, HARDWARE)
    config = make_config(given | layout | {"virtual_pipeline_model_parallel_size": None}, 4)
    config.set_vocab_size(128)
    bound = search.estimate_shortest_step(config, layout)
    (stage,) = plan_run(config, 4, model_provider).stages
    seconds = stage.traffic["tp"].wire / NODE_BANDWIDTH
    assert 0.6 * seconds <= bound <= seconds
