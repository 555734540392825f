"""Pretrain a GPT model.

    torchrun --nproc-per-node N pretrain_gpt.py FLAGS

Plain `python` starts one process. Four functions define the model, the data and the loss;
`pretrain` does the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from megatron.core.imports import program_imports

with program_imports():
    import torch.distributed as dist
    from torch import Tensor

    from megatron.core.datasets import build_datasets
    from megatron.core.datasets.indexed_dataset import is_dataset
    from megatron.core.models import ChunkSpec, GPTModel, TokenLosses
    from megatron.core.module import MegatronModule
    from megatron.core.terminal import print_text
    from megatron.core.transformer.placement import ContextParallel
    from megatron.core.wings import resolve
    from megatron.training.config.parsing import (
        find_run_directory,
        parse_args,
        read_restart_config,
        read_stored_args,
    )
    from megatron.training.config.run_config import Config
    from megatron.training.data.tokenizer import Tokenizer
    from megatron.training.fatal_errors import errors_explained_once
    from megatron.training.rendezvous import environment_world_size
    from megatron.training.reporting.run_record import failed_launch_recorded
    from megatron.training.run import Batch, Datasets, Loss
    from megatron.training.training import pretrain

# Imported if a flag requests it
DRY_RUN = "megatron.planning.dry_run:dry_run"
ADAPTERS = "megatron.training.adapters.targets:add_adapters"
FILL_IN_THE_MIDDLE = "megatron.core.datasets.fill_in_the_middle:FillInTheMiddle"
FINE_TUNING = "megatron.training.sft.dataset:build_sft_datasets"
SMOKE = "megatron.planning.smoke:shrink"
TEXT = "megatron.training.data.text_corpus:tokenize_data_paths"
RESTART = "megatron.training.restart.monitor:run_restartable"


def model_provider(config: Config, chunk_spec: ChunkSpec) -> MegatronModule:
    """Build one pipeline chunk of the model."""
    model = GPTModel(
        config.model,
        layers=chunk_spec.layers,
        pre_process=chunk_spec.pre_process,
        post_process=chunk_spec.post_process,
        tp=chunk_spec.ps.tp,
        cp=ContextParallel.from_parallel_state(chunk_spec.ps),
        sequence_parallel=config.parallel.sequence_parallel,
        experts=chunk_spec.ps.expert_axes,
        make_vocab_size_divisible_by=config.tokenizer.make_vocab_size_divisible_by,
        rng=chunk_spec.rng,
        device=chunk_spec.device,
        stage=chunk_spec.ps.stage_group() if config.model.low_precision is not None else None,
    )
    if config.lora.lora_rank is not None:
        resolve(ADAPTERS)(model, config.lora, chunk_spec.rng)
    return model


def datasets_provider(
    config: Config, num_samples: tuple[int, int, int], tokenizer: Tokenizer
) -> Datasets:
    """Build the training, validation and test samples."""
    assert config.model.vocab_size is not None
    if config.data.sft:
        datasets: Datasets = resolve(FINE_TUNING)(config, num_samples, tokenizer)
        return datasets
    fim = None
    if config.data.fim_data and not config.data.mock_data:
        fim = resolve(FILL_IN_THE_MIDDLE)(config.data, tokenizer)
    token_files = None
    if not all(map(is_dataset, config.data.data_paths())):
        token_files = resolve(TEXT)(config.data, tokenizer)
    return build_datasets(
        config.data, num_samples, tokenizer.eod, config.model.vocab_size, fim, token_files
    )


def loss_func(losses: Tensor, loss_mask: Tensor) -> Loss:
    """Return the sum of the losses [b, s] where the mask is 1, and the number of such tokens."""
    return Loss((losses * loss_mask).sum(), loss_mask.sum())


def forward_step(chunk: MegatronModule, batch: Batch, activation: Tensor | None) -> Tensor | Loss:
    """Run one micro-batch through one chunk.

    Returns the next activation [s, b, h], or the loss on the last stage.
    """
    output = chunk(
        batch.get("tokens"),
        batch.get("position_ids"),
        input_tensor=activation,
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
        documents=batch.get("documents"),
    )
    if isinstance(output, TokenLosses):
        loss = loss_func(output.next_token, batch["loss_mask"])
        return loss._replace(
            metric_totals=output.mtp_totals, metric_num_tokens=output.mtp_num_tokens
        )
    return output if output.dim() == 3 else loss_func(output, batch["loss_mask"])


def main() -> None:
    """Parse the command line and train; with --dry-run print a plan of the run instead."""
    # A dry run starts no process group, so it comes before anything else.
    if "--dry-run" in sys.argv:
        with errors_explained_once(status=2):
            print_text(resolve(DRY_RUN)(sys.argv[1:], model_provider))
        return
    argv = sys.argv[1:]
    if "--smoke" in argv:
        argv = resolve(SMOKE)(argv, environment_world_size())
    with errors_explained_once(), failed_launch_recorded(find_run_directory(argv), sys.argv):
        restart, timeout = read_restart_config(argv)
        program = partial(train, argv)
        if restart.inprocess_restart:
            resolve(RESTART)(restart, timeout, program)
        else:
            program(lambda: None)
    dist.destroy_process_group()


def train(argv: Sequence[str], on_iteration: Callable[[], None]) -> None:
    """Train as one rank; `on_iteration` is called after every iteration."""
    world_size = environment_world_size()
    config = parse_args(argv, world_size, read_stored_args(argv, world_size))
    pretrain(config, model_provider, datasets_provider, forward_step, on_iteration=on_iteration)
    # Without torchrun rank 0 hosts the store, from which other ranks may still read the outcome of
    # the last save.
    dist.barrier()


if __name__ == "__main__":
    main()
