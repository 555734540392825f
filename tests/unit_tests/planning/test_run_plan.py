"""Parts of a plan computed by hand: passes in flight, bubble, optimizer bytes, traffic."""

import shlex

import pytest

from megatron.core.pipeline_parallel.schedules import list_actions, schedule
from megatron.planning.run_plan import count_distinct_microbatches, plan_run
from megatron.planning.traffic import Traffic, count_sends
from megatron.training.config.parsing import parse_args
from pretrain_gpt import model_provider

COMMON = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--train-iters 1 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--make-vocab-size-divisible-by 128 "
    "--hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights --bf16 "
)
PP4 = "--pipeline-model-parallel-size 4 "


RESIDUAL = 32 * 64 * 2  # bytes of [s, b, h]


def planned(flags, world_size):
    config = parse_args(shlex.split(COMMON + flags), world_size)
    config.set_vocab_size(128)
    return plan_run(config, world_size, model_provider)


@pytest.mark.parametrize("microbatches", [1, 2, 4, 12])
def test_1f1b_passes_in_flight(microbatches):
    """Narayanan et al. 2021: stage r of P has at most P - r micro-batches in flight, or all there
    are.
    """
    plan = planned(PP4 + f"--global-batch-size {microbatches}", 4)
    one_pass = plan.stages[3].memory.activations
    for rank, stage in enumerate(plan.stages):
        assert stage.passes_in_flight == min(4 - rank, microbatches)
        expected = stage.passes_in_flight * one_pass
        assert stage.memory.activations == pytest.approx(expected, abs=1024)  # embedding
        assert bool(stage.memory.loss) == (rank == 3)

    assert plan.bubble == pytest.approx(3 / (microbatches + 3))


SCHEDULES = [(1, 1, 7), (2, 1, 9), (4, 1, 30), (4, 2, 28), (3, 3, 39), (4, 5, 36)]


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), SCHEDULES)
def test_sends_are_those_of_the_schedule(stages, chunks, microbatches):
    for rank in range(stages):
        ticks = schedule(rank, stages, chunks, microbatches)
        sends = sum(tick.send is not None for tick in ticks)
        assert count_sends(rank, stages, chunks, microbatches) == sends


@pytest.mark.parametrize("group", [None, 6])
@pytest.mark.parametrize(("stages", "chunks", "microbatches"), SCHEDULES)
def test_fewer_microbatches_have_the_same_passes_in_flight(stages, chunks, microbatches, group):
    """The set of passes in flight at any backward pass, which determines the peak of memory."""

    def list_moments(rank, count):
        in_flight = [0] * chunks
        moments = set()
        for action in list_actions(rank, stages, chunks, count, group):
            if action.kind == "forward":
                in_flight[action.chunk] += 1
            else:
                moments.add((action.chunk, *in_flight))
                in_flight[action.chunk] -= 1
        return moments

    for rank in range(stages):
        fewer = count_distinct_microbatches(microbatches + 60, group or stages)
        assert fewer < microbatches + 60
        assert list_moments(rank, fewer) == list_moments(rank, microbatches + 60)


def test_more_chunks_reduce_the_bubble_and_increase_memory():
    plain = planned(PP4 + "--global-batch-size 8", 4)
    chunks = planned(PP4 + "--global-batch-size 8 --num-virtual-stages-per-pipeline-rank 2", 4)
    assert chunks.bubble == pytest.approx(3 / (8 * 2 + 3))
    assert chunks.bubble < plain.bubble

    first = chunks.stages[0]
    first_plain = plain.stages[0]
    # Narayanan et al. 2021: warm-up of 2 (P - 1 - r) + (V - 1) P passes, and the one whose backward
    # pass comes next
    assert first.passes_in_flight == 2 * 3 + 4 + 1
    assert first.memory.activations > first_plain.memory.activations
    assert first.traffic["pp"].send > first_plain.traffic["pp"].send


def test_weights_in_fp8():
    """A byte for each in linear layers but those that stay in bf16, in memory and in the gather;
    and their scales.
    """
    flags = "--global-batch-size 4 --use-distributed-optimizer "
    narrow = flags + "--transformer-impl transformer_engine --fp8-format hybrid --fp8-param-gather "
    ends = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 1 "
    layer = 12 * 64**2  # of COMMON's linear layers: 3 + 1 + 4 + 4
    stage = planned(flags, 2).stages[0]
    weights = stage.memory.weights
    gathered = stage.traffic["dp"].all_gather
    plans = [planned(narrow + more, 2).stages[0] for more in ("", ends, "--fp8-recipe blockwise")]

    for plan, layers in zip(plans, (8, 5, 8), strict=True):
        assert plan.memory.weights == pytest.approx(weights - layers * layer, abs=2048)  # padding
        assert plan.traffic["dp"].all_gather == pytest.approx(gathered - layers * layer, abs=2048)
        assert plan.memory.optimizer == pytest.approx(stage.memory.optimizer, rel=0.01)

    # Blocks of 128 of the linear layers, which are 192 x 64, 64 x 64, 256 x 64 and 64 x 256, in
    # place of one of each.
    assert plans[2].memory.weights - plans[0].memory.weights == 4 * 8 * (2 + 1 + 2 + 2 - 4)


def test_bytes_per_parameter():
    """bf16 takes 2 bytes for weights, 4 for gradients, and 12 for main parameters and moments, which
    the distributed optimizer shards over DP.
    """
    alone = planned("--global-batch-size 4", 1)
    copies = planned("--global-batch-size 4", 4)
    shards = planned("--global-batch-size 4 --use-distributed-optimizer", 4)
    numel = alone.stages[0].num_parameters
    memory = alone.stages[0].memory

    assert (memory.weights, memory.gradients, memory.optimizer) == (
        2 * numel,
        4 * numel,
        12 * numel,
    )
    assert copies.stages[0].memory.optimizer == memory.optimizer
    assert shards.stages[0].memory.optimizer == pytest.approx(
        memory.optimizer / 4,
        rel=0.01,
    )  # padding
    assert alone.checkpoint_bytes == 14 * alone.num_parameters == shards.checkpoint_bytes


def test_traffic_of_data_parallelism():
    copies = planned("--global-batch-size 4", 4)
    shards = planned("--global-batch-size 4 --use-distributed-optimizer", 4)
    memory = copies.stages[0].memory
    assert copies.stages[0].traffic["dp"] == Traffic(4, all_reduce=memory.gradients)

    memory = shards.stages[0].memory
    assert shards.stages[0].traffic["dp"] == Traffic(
        4,
        all_gather=memory.weights,
        reduce_scatter=memory.gradients,
    )
    assert shards.stages[0].traffic["tp"].wire == shards.stages[0].traffic["pp"].wire == 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sequence_parallel_traffic(sequence_parallel):
    """Korthikanti et al. 2022: sequence parallelism sends as much, but for the inputs gathered
    again in backward.
    """
    flags = "--tensor-model-parallel-size 2 --global-batch-size 2 "
    plan = planned(flags + "--sequence-parallel" * sequence_parallel, 2)
    tp = plan.stages[0].traffic["tp"]
    again = (2 * 8 + 1) * sequence_parallel
    # Three numbers per token of the loss are reduced, too.
    statistics = 2 * 2 * 3 * 32 * 4 / 2
    # The gradients of 17 norms (weight and bias) and of the positions are parts, in fp32.
    partial_gradients = (2 * (2 * 8 + 1) + 32) * 64 * 4 * sequence_parallel
    expected = 2 * RESIDUAL * (2 * (4 * 8 + 2) + again) / 2
    assert tp.wire == pytest.approx(expected + statistics + partial_gradients)


@pytest.mark.parametrize(
    "recompute",
    ["", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"],
)
def test_first_stage_with_the_embedding_alone(recompute):
    """A stage without layers keeps tokens at most, and sends the output of the embedding."""
    layout = "--pipeline-model-parallel-layout 'E|tttt|tt|ttL' "
    plan = planned(PP4 + layout + "--global-batch-size 4 " + recompute, 4)
    first = plan.stages[0]

    assert first.num_layers == 0
    assert first.num_parameters > 0
    assert first.memory.activations < RESIDUAL / 4
    assert first.memory.loss == 0
    # Messages, the gradient, and an fp32 copy of it for the gradient buffer
    assert first.memory.temporary == pytest.approx((2 + 1 + 2) * RESIDUAL, rel=0.1)
    assert first.traffic["pp"].send == 4 * RESIDUAL
