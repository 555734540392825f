"""Our GPTModel, filled from a checkpoint box by box, as a rank of any layout does."""

import torch

from megatron.conversion.model_space.model import model_config
from megatron.conversion.model_space.optimizer_states import optimizer_key
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from megatron.core.run_checkpoint.source import Source


def fill(model: GPTModel, source: Source, main: bool = False) -> None:
    """Copy the weights, or with `main` the main parameters, into the model."""
    for param in model.parameters():
        torch.nn.init.zeros_(param)  # rows of padding, which no box covers
    for key, entry in model.sharded_state_dict().items():
        assert isinstance(entry, ShardedTensor)
        assert source.tensors[key].shape == entry.global_shape
        for box in entry.boxes:
            box.tensor.copy_(
                source.tensors[optimizer_key("param", key) if main else key].read(
                    box.offset, box.shape
                )
            )


def chunk(
    source: Source, stage: int = 0, stages: int = 1, tp: Axis | None = None, main: bool = False
) -> GPTModel:
    """Return pipeline stage `stage` of `stages` in fp32."""
    config = model_config(
        source.args | {"bf16": False}, source.tensors[WORD_EMBEDDINGS].shape[0], source.description
    )
    layers = config.num_layers // stages
    model = GPTModel(
        config,
        layers=range(stage * layers, (stage + 1) * layers),
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        tp=tp,
    ).eval()
    fill(model, source, main)
    return model


@torch.no_grad()
def model_logits(
    source: Source, tokens: torch.Tensor, stages: int = 1, main: bool = False
) -> torch.Tensor:
    """Return the logits, computed stage by stage."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    hidden = None
    for stage in range(stages):
        hidden = chunk(source, stage, stages, main=main)(tokens, positions, input_tensor=hidden)
    assert hidden is not None
    return hidden


@torch.no_grad()
def tensor_parallel_logits(
    rank: int, world_size: int, source: Source, tokens: torch.Tensor
) -> torch.Tensor:
    """Return the logits on one of `world_size` tensor-parallel ranks; runs in the pool."""
    state = ParallelState.create(ParallelConfig(tensor_model_parallel_size=world_size))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return chunk(source, tp=state.tp)(tokens, positions)
