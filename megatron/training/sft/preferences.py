"""Direct preference optimization (`--dpo`): the loss, and the log-probabilities of the reference.

For the chosen completion c and the rejected completion r of a pair (Rafailov et al. 2023)

    margin = log p(c) - log p(r),   loss = -log sigmoid(beta (margin - margin of the reference))

The reference is the loaded model. Its margins are computed once, at the layout of the run, and
stored in checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.datasets import Dataset, Sample
from megatron.core.datasets.blend import BlendedDataset
from megatron.core.module import MegatronModule
from megatron.core.parallel_state import Axis
from megatron.core.safe_files.schema import anything, mapping, refuse
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_parallel,
    reduce_from_tensor_parallel,
)
from megatron.core.transformer.placement import ContextParallel
from megatron.training.data.loaders import DataIterator
from megatron.training.run import Batch, Datasets, Loss, Run, evaluating, forward_backward
from megatron.training.sft.dataset import SFTDataset

logger = logging.getLogger(__name__)

METRIC_NAMES = ("rewards/accuracies", "rewards/margins")  # as TRL calls them


@dataclass
class PreferenceStep:
    """`forward_step` of --dpo, which also collects the margins of the micro-batches."""

    beta: float
    cp: Axis
    collects: bool = False
    margins: list[Tensor] = field(default_factory=list)  # [b] each

    def __call__(
        self, chunk: MegatronModule, batch: Batch, activation: Tensor | None
    ) -> Tensor | Loss:
        """Return the next activation [s, b, h], or the loss of the pairs on the last stage."""
        output = chunk(
            batch["tokens"],
            batch["position_ids"],
            input_tensor=activation,
            labels=batch["labels"],
            documents=batch["documents"],
        )
        if output.dim() == 3:
            return output
        # The mask is 1 for tokens of the chosen completion, -1 for those of the rejected one.
        margins = _sum_over_context(-(output * batch["loss_mask"]).sum(dim=1), self.cp)
        if self.collects:
            self.margins.append(margins.detach())
        rewards = self.beta * margins
        if "reference_margins" in batch:
            rewards = self.beta * (margins - batch["reference_margins"][:, 0])
        return self._compute_loss(rewards)

    def _compute_loss(self, rewards: Tensor) -> Loss:
        """Return the loss for the differences of rewards [b]: a share of each context-parallel
        rank.
        """
        share = 1 / self.cp.size
        num_pairs = torch.full_like(rewards[0], len(rewards) * share)
        metrics = torch.stack(((rewards > 0).sum(), rewards.sum())).detach()
        return Loss(
            -torch.nn.functional.logsigmoid(rewards).sum() * share,
            num_pairs,
            metrics * share,
            num_pairs.expand(len(METRIC_NAMES)),
        )


def _sum_over_context(tensor: Tensor, cp: Axis) -> Tensor:
    """Return the sum over the context-parallel ranks; its gradient is also the sum of theirs."""
    return copy_to_tensor_parallel(reduce_from_tensor_parallel(tensor, cp), cp)


def prepare_preferences(run: Run, datasets: Datasets) -> None:
    """Let the run train on preferences, and add the margins of the reference to its samples.

    Margins that the loaded checkpoint lacks are computed with the loaded weights. Raises ValueError
    if these have been trained. Collective.
    """
    run.metric_names = METRIC_NAMES
    location = f"{run.loaded}: the reference of --dpo"
    margins_by_digest = mapping(anything)(run.reference_margins, location)
    for dataset in datasets:
        for member in _list_members(dataset):
            if member.digest not in margins_by_digest:
                _check_is_untrained(run, member)
                margins_by_digest[member.digest] = compute_margins(run, member)
            margins = margins_by_digest[member.digest]
            check_margins(margins, member.num_rows, location)
            member.reference_margins = margins.numpy()
    run.forward_step = PreferenceStep(run.config.data.dpo_beta, run.ps.cp)


def _list_members(dataset: Dataset | None) -> Iterator[SFTDataset]:
    """Yield the data sets of a blend, or the only one."""
    members = dataset.members if isinstance(dataset, BlendedDataset) else [dataset]
    for member in members:
        if member is not None:
            assert isinstance(member, SFTDataset)
            yield member


def check_margins(margins: Any, num_rows: int, location: str) -> None:
    """Raise CheckpointError unless `margins` has a number for each row."""
    is_tensor = isinstance(margins, Tensor) and margins.dtype == torch.float32
    if not is_tensor or margins.shape != (num_rows,):
        refuse(location, margins, f"a tensor of {num_rows} fp32 numbers")


def _check_is_untrained(run: Run, dataset: SFTDataset) -> None:
    if run.state.iteration == 0:
        return
    raise ValueError(
        f"{run.loaded} (iteration {run.state.iteration}) has no log-probabilities of the "
        f"reference for the {dataset.split} data {dataset.corpus.name}: they are those of the "
        "model that --dpo started from. Continue with the same data, --split, --seq-length and "
        "tokenizer, or start from these weights as a new reference with --finetune"
    )


@dataclass(frozen=True)
class RowsInOrder:
    """The rows of a data set as samples, without shuffling; repeated up to `num_samples`."""

    dataset: SFTDataset
    num_samples: int

    @property
    def fingerprint(self) -> str:
        return self.dataset.digest

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        return self.dataset.read_row(index % self.dataset.num_rows)


def compute_margins(run: Run, dataset: SFTDataset) -> Tensor:
    """Return the margin of each row under the weights of the run, fp32 [rows] on the CPU.

    The same on all ranks. Collective.
    """
    logger.info(
        f"computing the log-probabilities of the reference for {dataset.num_rows} pairs of the "
        f"{dataset.split} data"
    )
    micro_batch_size = run.config.training.micro_batch_size
    num_microbatches = run.eval_batch_size // run.batches.samples_per_microbatch
    num_steps = -(-dataset.num_rows // run.eval_batch_size)  # rounded up
    batches = DataIterator(
        RowsInOrder(dataset, num_steps * run.eval_batch_size),
        0,
        micro_batch_size,
        replace(run.config.loader, dataloader_type="single"),
        run.ps.dp.rank,
        run.ps.dp.size,
        ContextParallel.from_parallel_state(run.ps),
        run.device,
    )
    step = PreferenceStep(run.config.data.dpo_beta, run.ps.cp, collects=True)
    run.forward_step = step
    with evaluating(run):
        for _ in range(num_steps):
            forward_backward(run, batches, num_microbatches, forward_only=True)
    batches.close()

    # Micro-batch m of replica r contains the r-th part of the m-th samples. A sum with the zeros of
    # all other ranks is a gather.
    shape = (num_steps * num_microbatches, run.ps.dp.size, micro_batch_size)
    margins = torch.zeros(shape, dtype=torch.float32, device=run.device)
    if run.ps.pp.is_last and run.ps.tp.is_first and run.ps.cp.rank == 0:
        margins[:, run.ps.dp.rank] = torch.stack(step.margins)
    dist.all_reduce(margins)
    return margins.flatten()[: dataset.num_rows].cpu()
