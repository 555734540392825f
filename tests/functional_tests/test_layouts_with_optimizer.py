"""The losses, norms and optimizer states of every kind of layout equal those of a single process."""

import functools
from contextlib import ExitStack

import pytest
import torch

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel import pipeline_layer_ranges, run_schedule
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.tiny_ddp_model import assemble, boxes_of

SEQ = 16
SEQUENCES = 8
STEPS = 3
VOCAB = 53
SMALL = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": SEQ,
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
MODELS = {
    "gpt2, tied": SMALL,
    "llama, untied": {
        **SMALL,
        "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
        "qk_layernorm": True, "untie_embeddings_and_output_weights": True,
    },
}  # fmt: skip
SHARDED = {"use_distributed_optimizer": True, "ddp_bucket_size": 4000}
OVERLAPPED = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"
LAYOUTS = {
    "TP2": (2, {TP: 2}, {}),
    "TP2 SP": (2, {TP: 2, "sequence_parallel": True}, {}),
    "PP2": (2, {PP: 2}, {"overlap_grad_reduce": True}),
    "PP2 VPP2": (2, {PP: 2, VPP: 2}, {}),
    "DP2": (2, {}, OVERLAPPED),
    "TP2 SP x DP2": (4, {TP: 2, "sequence_parallel": True}, OVERLAPPED),
    "TP2 SP x DP2, replicated": (
        4,
        {TP: 2, "sequence_parallel": True},
        {"overlap_grad_reduce": True},
    ),
    "PP2 x DP2": (4, {PP: 2}, OVERLAPPED),
    "PP2 VPP2 x DP2": (4, {PP: 2, VPP: 2}, OVERLAPPED),
    "TP2 SP x PP2": (4, {TP: 2, PP: 2, "sequence_parallel": True}, SHARDED),
}


def make_chunks(model, ps, ddp):
    """This rank's chunks of the model, each wrapped."""
    config = TransformerConfig(**MODELS[model])
    layers = pipeline_layer_ranges(config.num_layers, ps.pp.size, ps.vpp_size)[ps.pp.rank]
    chunks = []
    for index, chunk_layers in enumerate(layers):
        chunk = GPTModel(
            config,
            layers=chunk_layers,
            pre_process=ps.pp.is_first and index == 0,
            post_process=ps.pp.is_last and index == ps.vpp_size - 1,
            tp=ps.tp,
            sequence_parallel=ps.config.sequence_parallel,
            make_vocab_size_divisible_by=4,
            rng=TensorParallelRng(11, ps.tp.rank),
        )
        chunk.initialize(seed=3)
        chunks.append(DistributedDataParallel(chunk, DistributedDataParallelConfig(**ddp), ps.dp))
    return chunks


def microbatches(step, ps):
    """This replica's sequences of the step, one by one."""
    tokens = torch.randint(
        VOCAB, (SEQUENCES, SEQ + 1), generator=torch.Generator().manual_seed(step)
    )
    return tokens.chunk(ps.dp.size)[ps.dp.rank].split(1)


def train_step(chunks, optimizer, ps, step):
    """(mean loss of this replica on the last stage, the step's result)"""
    data = microbatches(step, ps)
    losses = []

    def forward_step(chunk, microbatch, activation):
        tokens = data[microbatch]
        is_last = chunks[chunk].module.output_layer is not None
        labels = tokens[:, 1:] if is_last else None
        output = chunks[chunk](
            tokens[:, :-1], torch.arange(SEQ)[None], input_tensor=activation, labels=labels
        )
        if not is_last:
            return output
        losses.append(output.mean().item() / len(data))
        return output.mean() / len(data)

    def before_last_backward(chunk):
        chunks[chunk].require_sync = True

    with ExitStack() as stack:
        for chunk in chunks:
            chunk.zero_grad_buffer()
            stack.enter_context(chunk.no_sync())
        run_schedule(
            forward_step,
            len(chunks),
            len(data),
            pp=ps.pp,
            tensor_shape=(
                SEQ // (ps.tp.size if ps.config.sequence_parallel else 1),
                1,
                SMALL["hidden_size"],
            ),
            dtype=torch.float32,
            device=torch.device("cpu"),
            before_last_backward=before_last_backward,
        )
    finalize_model_grads(chunks, ps)
    return sum(losses) if losses else None, optimizer.step()


def train(rank, world_size, model, parallel, ddp):
    config = ParallelConfig(**parallel)
    ps = ParallelState.create(config) if world_size > 1 else ParallelState.for_rank(config)
    chunks = make_chunks(model, ps, ddp)
    optimizer = MegatronOptimizer(
        chunks, OptimizerConfig(lr=1e-3, weight_decay=0.1, adam_eps=1e-5), ps
    )
    results = [train_step(chunks, optimizer, ps, step) for step in range(STEPS)]
    model_state = {
        key: entry for chunk in chunks for key, entry in chunk.sharded_state_dict().items()
    }
    state = boxes_of(optimizer.sharded_state_dict(model_state))
    return (
        [loss for loss, _ in results],
        [result.grad_norm.item() for _, result in results],
        state,
        boxes_of(model_state),
    )


@functools.cache
def one_process(model):
    losses, norms, state, weights = train(0, 1, model, {}, {})
    return losses, norms, assemble([state]), assemble([weights])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_optimizer_state_match_one_process(pool, model, layout):
    world_size, parallel, ddp = LAYOUTS[layout]
    ranks = pool.run(train, world_size, model, parallel, ddp)
    losses, norms, state, weights = one_process(model)
    with_loss = [
        torch.tensor(rank_losses) for rank_losses, *_ in ranks if rank_losses[0] is not None
    ]
    torch.testing.assert_close(
        torch.stack(with_loss).mean(0), torch.tensor(losses), rtol=1e-6, atol=1e-6
    )
    for _, rank_norms, *_ in ranks:
        assert rank_norms == ranks[0][1], "all ranks clip alike"
        assert rank_norms == pytest.approx(norms, rel=1e-5)
    # Copies on several ranks are equal bit for bit (asserted by assemble), the values equal to
    # rounding.
    for expected, ours in (
        (state, [run[2] for run in ranks]),
        (weights, [run[3] for run in ranks]),
    ):
        whole = assemble(ours)
        assert whole.keys() == expected.keys()
        for key, value in whole.items():
            torch.testing.assert_close(
                value, expected[key], rtol=1e-4, atol=2e-6, msg=lambda m, key=key: f"{key}: {m}"
            )
