"""Rules of the split of sequences and heads over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.transformer.transformer_config import count_query_groups
from megatron.training.config.arguments import FlagValues
from megatron.training.config.run_config import Config


def find_split_problems(config: Config) -> Iterator[str]:
    """Yield problems of sizes and of attention with the chunks of a sequence or the heads."""
    parallel = config.parallel
    model = config.model
    length = config.data.seq_length
    cp_size = parallel.cp_size
    tp_size = parallel.tp_size
    comm_types = parallel.cp_comm_type
    context = f"--context-parallel-size {cp_size}"
    # Ranks hold chunk i from the start and chunk i from the end of a sequence, because with a
    # causal mask the work of a chunk grows with its position.
    if length % (2 * cp_size):
        yield (
            f"--seq-length {length} is not divisible by 2 x {context} = {2 * cp_size}: a rank "
            "has two chunks of a sequence. Change one of them"
        )
    elif parallel.sequence_parallel and length % (cp_size * tp_size):
        yield (
            f"--seq-length {length} is not divisible by {context} x --tensor-model-parallel-size "
            f"{tp_size} = {cp_size * tp_size}, as --sequence-parallel needs it: change the "
            "length, or leave out --sequence-parallel"
        )
    # Ulysses: every rank computes some of the heads over the whole sequence.
    if "a2a" in comm_types and model.query_groups % (tp_size * cp_size):
        heads_flag = (
            "--num-query-groups" if model.group_query_attention else "--num-attention-heads"
        )
        yield (
            f"--cp-comm-type a2a splits heads: {heads_flag} {model.query_groups} is not divisible "
            f"by --tensor-model-parallel-size {tp_size} x {context} = {tp_size * cp_size}. Use "
            "--cp-comm-type p2p or all_gather, or smaller sizes"
        )
    in_blocks = [comm_type for comm_type in comm_types if comm_type != "a2a"]
    if in_blocks and model.attention_dropout:
        yield (
            f"--attention-dropout {model.attention_dropout} with {context} and --cp-comm-type "
            f"{in_blocks[0]}: attention is computed in blocks, by kernels without dropout. Use "
            "--attention-dropout 0, or --cp-comm-type a2a"
        )


def may_exchange_heads(flag_values: FlagValues) -> bool:
    """Return whether an exchange of heads can replace other kinds of context parallelism.

    Only if attention has dropout, and if the heads are divisible by the ranks that split them.
    """
    cp_size = flag_values.get("context_parallel_size", 1)
    types = flag_values.get("cp_comm_type", ["p2p"])
    if cp_size <= 1 or set(types) <= {"a2a"} or not flag_values.get("attention_dropout", 0.1):
        return False
    # A wrong number of values is reported later.
    if len(types) not in (1, flag_values.get("num_layers")):
        return False
    ranks = flag_values.get("tensor_model_parallel_size", 1) * cp_size
    return count_query_groups(flag_values) % ranks == 0
