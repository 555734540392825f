"""The state of a run, how it is built, and one global batch through it, to train or to evaluate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.datasets import Dataset
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.saving.run_saver import RunSaver
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models import make_chunk_specs
from megatron.core.module import MegatronModule
from megatron.core.optimizer import MegatronOptimizer, OptimizerParamScheduler
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel import run_schedule
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.layer_spec import select_layer_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.wings import resolve
from megatron.training.checkpoint.save_options import SaveLog, make_saver
from megatron.training.config.batch_schedule import BatchSchedule
from megatron.training.config.run_config import Config, ModelProvider
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.initialize import seed_everything
from megatron.training.reporting.intervals import reduce_losses
from megatron.training.reporting.measurements import Timers, compute_flops_per_token
from megatron.training.reporting.writers import Writer

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.saving.pending_export import ExportTarget

# Imported for --compile
_CHECK_COMPILER = "megatron.training.compilation:check_compiler"
_COMPILE_LAYERS = "megatron.training.compilation:compile_layers"
# Imported if the model has experts
_START_EXPERTS = "megatron.core.transformer.moe.router:start_step"
_MEASURE_EXPERTS = "megatron.core.transformer.moe.router:measure_step"


class Loss(NamedTuple):
    """The loss of a micro-batch, from the last pipeline stage."""

    total: Tensor
    """Sum of the losses of all tokens that count; differentiable, fp32 scalar."""
    num_tokens: Tensor
    """Number of these tokens; scalar."""
    metric_totals: Tensor | None = None
    """The same for each of `Run.metric_names`, e.g. the depths of multi-token prediction,
    `[metrics]`; None without them."""
    metric_num_tokens: Tensor | None = None

    def stack(self) -> tuple[Tensor, Tensor]:
        """Return all sums and numbers of tokens, `[1 + metrics]` each."""
        totals = self.total.unsqueeze(0)
        num_tokens = self.num_tokens.unsqueeze(0)
        if self.metric_totals is None or self.metric_num_tokens is None:
            return totals, num_tokens
        totals = torch.cat((totals, self.metric_totals))
        return totals, torch.cat((num_tokens, self.metric_num_tokens))


Batch = dict[str, Tensor]

ForwardStep = Callable[[MegatronModule, Batch, Tensor | None], Tensor | Loss]
"""(model chunk, micro-batch, activation of the previous stage) -> activation, or `Loss` on the
last.

The micro-batch is empty on chunks that need no data.
"""


Datasets = tuple[Dataset | None, Dataset | None, Dataset | None]  # train, valid, test

DatasetsProvider = Callable[[Config, tuple[int, int, int], Tokenizer], Datasets]
"""(config, minimum numbers of samples, tokenizer) -> splits; None for a split without samples."""


@dataclass
class TrainState:
    """The position of the run in its training schedule."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    num_floating_point_operations_so_far: float = 0.0


ComputeGradients = Callable[["Run", Iterator[Batch] | None, int], Tensor]
"""(run, micro-batches, their number) -> losses, as `forward_backward` returns them."""


class KnownState(NamedTuple):
    """Entries of a checkpoint that are the same for every save."""

    addresses: list[int]
    """Addresses of the tensors."""
    model: ShardedStateDict
    """The weights of all chunks."""
    entries: ShardedStateDict


class BaseModel(NamedTuple):
    """The frozen model that adapters belong to (--lora-rank)."""

    directory: str
    identity: str
    """Depends on the values of all weights, in the dtype of the run, but not on the layout."""
    model_type: str
    """Family in transformers if the model was read from its files, otherwise empty."""


@dataclass
class Run:
    """Model, optimizer, schedules and position: the objects that every part of training uses."""

    config: Config
    ps: ParallelState
    device: torch.device
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    batches: BatchSchedule
    forward_step: ForwardStep
    timers: Timers
    rng: TensorParallelRng
    vocab_size: int  # of the model, without padding
    flops_per_token: float
    saver: RunSaver
    saves: SaveLog  # of committed checkpoints
    # The clock of --save-interval-secs and --exit-duration-in-mins.
    clock: Callable[[], float] = time.monotonic
    started: float = field(default_factory=time.monotonic)  # when the program began, by `clock`
    on_iteration: Callable[[], None] = lambda: None  # called after every iteration
    # Called by every training step; see `forward_backward`.
    compute_gradients: ComputeGradients = field(default_factory=lambda: forward_backward)
    base_model: BaseModel | None = None  # that the adapters of --lora-rank belong to
    metric_names: tuple[str, ...] = ()  # what `Loss` has in addition to the loss
    loaded: str | None = None  # the checkpoint that it continues from
    loading_seconds: float = 0.0
    exit_reason: str | None = None  # why it ended early
    # Evaluates in addition to the validation split, on all ranks.
    evaluate_further: Callable[[], None] = lambda: None
    validated: tuple[int, float] | None = None  # iteration and loss of the last validation
    hf_exports: ExportTarget | None = None  # models next to checkpoints (--save-hf-interval)
    # Identifies the order of samples; None until the data is built or a checkpoint is loaded.
    train_data_fingerprint: str | None = None
    train_token_digest: str | None = None  # of blocks of the token files
    # Differences between the flags of the data and those of the loaded checkpoint.
    changed_data_flags: list[str] = field(default_factory=list)
    end_of_document: int | None = None  # token that ends documents in the data
    # With --dpo: of each row of a data set, by the digest of its rows
    reference_margins: dict[str, Tensor] = field(default_factory=dict)
    state: TrainState = field(default_factory=TrainState)
    known_state: KnownState | None = None  # of the last save
    # Destinations of metrics in addition to the log; empty except on rank 0.
    writers: list[Writer] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.state.iteration >= self.train_iters

    @property
    def train_iters(self) -> int:
        """The iteration at which the run is complete."""
        training = self.config.training
        if training.train_samples is not None:
            state = self.state  # earlier iterations may have had another batch size
            return state.iteration + self.batches.iterations_for(
                training.train_samples, state.consumed_train_samples
            )
        return training.train_iters or 0

    @property
    def is_export_due(self) -> bool:
        """Return whether --save-hf-interval exports the model of this iteration."""
        interval = self.config.checkpoint.save_hf_interval
        return interval is not None and (self.state.iteration % interval == 0 or self.is_complete)

    @property
    def eval_batch_size(self) -> int:
        """Samples of all replicas per batch of an evaluation."""
        return self.config.training.eval_global_batch_size or self.batches.global_batch_size

    @property
    def learning_rate(self) -> float:
        """The learning rate of the parameters without a decoupled or scaled one (muP)."""
        for group in self.optimizer.param_groups:
            if not group["is_decoupled_lr"] and group["lr_scale"] == 1.0:
                return float(group["lr"])
        raise AssertionError("every optimizer has a group with the learning rate of --lr")

    def needs_batch(self, chunk: int) -> bool:
        """Return whether a chunk needs the data of a micro-batch.

        The first chunk needs tokens, the last one labels; with --reset-attention-mask every chunk
        needs the positions of documents.
        """
        at_an_end = self.ps.is_first_chunk(chunk) or self.ps.is_last_chunk(chunk)
        return at_an_end or self.config.data.reset_attention_mask


def build_run(
    config: Config,
    ps: ParallelState,
    device: torch.device,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    *,
    random_weights: bool = True,
) -> Run:
    """Build the model (of `config.model.vocab_size` tokens), optimizer and schedules, without data.

    Weights are initialized from the seed. Without `random_weights` they are zero: the caller loads
    a checkpoint that contains all of them.
    """
    vocab_size = config.model.vocab_size
    assert vocab_size is not None
    # Weights depend only on the seed and their names; these generators are for dropout, for
    # example.
    rng = TensorParallelRng(0, ps.tp.rank, device)
    seed_everything(config.training.seed, ps, rng)
    tokens = config.data.seq_length // config.parallel.cp_size * config.training.micro_batch_size
    select_layer_spec(config.model).set_up(config.model, tokens, ps.tp.size)
    weights_seed = config.training.seed if random_weights else None
    chunks = build_chunks(config, ps, rng, model_provider, weights_seed)
    optimizer = MegatronOptimizer(chunks, config.optimizer, ps)
    depths = range(1, config.model.num_mtp_layers + 1)
    saves = SaveLog()
    return Run(
        config=config,
        ps=ps,
        device=device,
        chunks=chunks,
        optimizer=optimizer,
        scheduler=OptimizerParamScheduler(
            optimizer.param_groups,
            config.schedule(),
            override=config.scheduler.override_opt_param_scheduler,
            use_checkpoint=config.scheduler.use_checkpoint_opt_param_scheduler,
        ),
        batches=config.batch_schedule(ps.dp.size),
        forward_step=forward_step,
        metric_names=tuple(f"mtp_{depth} loss" for depth in depths),
        rng=rng,
        # Rank 0 writes the tokenizer into checkpoints.
        saver=make_saver(
            config.checkpoint, saves, vars(config.tokenizer) if ps.rank == 0 else None
        ),
        saves=saves,
        timers=Timers(config.logging.timing_log_level, config.logging.timing_log_option, device),
        vocab_size=vocab_size,
        flops_per_token=compute_flops_per_token(config.model, config.data.seq_length, vocab_size),
    )


def build_chunks(
    config: Config,
    ps: ParallelState,
    rng: TensorParallelRng,
    model_provider: ModelProvider,
    seed: int | None,
) -> list[DistributedDataParallel]:
    """Build this rank's pipeline chunks on the device, wrapped for data parallelism.

    Weights are initialized from `seed`, and are zero if it is None.
    """
    if config.distributed.compile:
        resolve(_CHECK_COMPILER)(rng.device)
    # With encoded weights, the decoded ones never use memory of the device.
    device = torch.device("cpu") if config.lora.lora_base_encoding else rng.device
    chunks = []
    for chunk_spec in make_chunk_specs(config.layer_ranges(), ps, rng, device):
        chunk = model_provider(config, chunk_spec)
        # Move the parameters into one buffer before anything writes to them: on a CPU, the first
        # write to a page costs several times the write. Compilation needs their final places.
        wrapped = DistributedDataParallel(chunk, config.ddp, ps.dp_cp, ps.edp, keep_values=False)
        chunk.initialize(seed)
        if config.distributed.compile:
            resolve(_COMPILE_LAYERS)(wrapped, config.data.seq_length)
        chunks.append(wrapped)
    return chunks


class MicrobatchFeed:
    """The micro-batches of one iteration: each is fetched once and kept until its last chunk has
    used it.
    """

    def __init__(self, batches: Iterator[Batch] | None, users: Sequence[int]) -> None:
        """`users` are the chunks that need data of a micro-batch, in order."""
        self._batches = batches
        self._users = users
        self._held: dict[int, Batch] = {}

    def __call__(self, chunk: int, microbatch: int) -> Batch:
        if chunk not in self._users:
            return {}
        # All chunks process micro-batches in the same order, the first chunk before the others.
        if chunk == self._users[0]:
            assert self._batches is not None
            self._held[microbatch] = next(self._batches)
        if chunk == self._users[-1]:
            return self._held.pop(microbatch)
        return self._held[microbatch]


def forward_backward(
    run: Run, batches: Iterator[Batch] | None, num_microbatches: int, forward_only: bool = False
) -> Tensor:
    """Run `num_microbatches` micro-batches forward and backward; gradients accumulate in buffers.

    Returns fp32 [numerator, denominator] of this rank's losses, zeros except on the last stage: the
    sum over micro-batches of their mean loss and the number of micro-batches, or with
    --calculate-per-token-loss the sum over tokens and their number. The first row is the loss of
    the next token, followed by a row for each of `metric_names`, [1 + metrics, 2]. The
    context-parallel ranks of a micro-batch have shares of its mean, which is over all of its
    tokens. The host does not wait for the device.
    """
    num_losses = 1 + len(run.metric_names)
    totals = torch.zeros(num_losses, 2, dtype=torch.float32, device=run.device)
    users = [chunk for chunk in range(len(run.chunks)) if run.needs_batch(chunk)]
    feed = MicrobatchFeed(batches, users)
    forward_step = _make_forward_step(run, feed, num_microbatches, totals)
    # Gradients accumulate locally; only the last backward pass of each chunk starts their
    # reduction.
    for chunk in run.chunks:
        chunk.require_sync = False
    select_layer_spec(run.config.model).start_step()
    if run.config.model.has_experts and not forward_only:
        start_step(run, num_microbatches)

    def before_last_backward(chunk: int) -> None:
        run.chunks[chunk].require_sync = True

    run_schedule(
        forward_step,
        len(run.chunks),
        num_microbatches,
        pp=run.ps.pp,
        tensor_shape=activation_shape(run),
        dtype=run.config.model.params_dtype,
        device=run.device,
        forward_only=forward_only,
        before_last_backward=None if forward_only else before_last_backward,
        group_size=run.config.parallel.microbatch_group_size_per_vp_stage,
    )
    return totals


def start_step(run: Run, num_microbatches: int) -> None:
    """Set the scale of the experts' auxiliary losses for one iteration.

    They are means over micro-batches and replicas, like the loss; ranks of CP compute shares.
    """
    per_token = run.config.training.calculate_per_token_loss
    scale = run.optimizer.loss_scale
    if not per_token:
        scale *= run.ps.cp.size / num_microbatches
    resolve(_START_EXPERTS)(run.chunks, scale, per_token)


def measure_experts(run: Run, num_microbatches: int) -> Tensor | None:
    """Update the expert biases, and return this rank's share of the auxiliary losses by layer.

    Call it after the reductions. None for a model without experts.
    """
    if not run.config.model.has_experts:
        return None
    measure: Callable[..., Tensor] = resolve(_MEASURE_EXPERTS)
    return measure(run.chunks, run.config.model, num_microbatches, run.device) / run.ps.dp.size


def activation_shape(run: Run) -> tuple[int, int, int]:
    """Return the shape of activations between stages.

    [s / cp, b, h], under sequence parallelism [s / (cp tp), b, h].
    """
    sequence = run.config.data.seq_length // run.ps.cp.size
    if run.config.parallel.sequence_parallel:
        sequence //= run.ps.tp.size
    return sequence, run.config.training.micro_batch_size, run.config.model.hidden_size


def _make_forward_step(
    run: Run, feed: MicrobatchFeed, num_microbatches: int, totals: Tensor
) -> Callable[[int, int, Tensor | None], Tensor]:
    per_token = run.config.training.calculate_per_token_loss
    cp_size = run.ps.cp.size
    loss_scale = run.optimizer.loss_scale

    def forward_step(chunk: int, microbatch: int, activation: Tensor | None) -> Tensor:
        with run.timers("batch-generator", level=2):
            batch = feed(chunk, microbatch)
        with run.timers("forward-compute", level=2):
            output = run.forward_step(run.chunks[chunk], batch, activation)
        if not isinstance(output, Loss):
            return output
        sums, num_tokens = output.stack()
        # [1 + metrics]; the report divides sums over all ranks by their numbers
        # The scale keeps small fp16 gradients from underflow; the optimizer divides by it.
        if per_token:
            totals.add_(torch.stack((sums, num_tokens.float()), dim=1).detach())
            # The gradients are divided by the number of tokens of the global batch at the end.
            return compute_objective(sums, run.config.model) * loss_scale
        shares = sums / _sum_over_context(num_tokens, run.ps).clamp(min=1)
        weights = torch.full_like(shares, 1 / cp_size)
        totals.add_(torch.stack((shares, weights), dim=1).detach())
        # Gradients are averaged over the context-parallel ranks, whose shares are to be added.
        objective = compute_objective(shares, run.config.model)
        return objective * (loss_scale * cp_size / num_microbatches)

    return forward_step


def _sum_over_context(num_tokens: Tensor, ps: ParallelState) -> Tensor:
    """Return the numbers of tokens of whole sequences.

    A mean over the tokens of one rank would weight them differently from those of other ranks.
    """
    if ps.cp.size > 1:
        # A copy: the tensor may be the batch's.
        num_tokens = num_tokens.detach().float().clone()
        dist.all_reduce(num_tokens, group=ps.cp.group)
    return num_tokens


def compute_objective(losses: Tensor, config: TransformerConfig) -> Tensor:
    """Return the loss of the next token plus the scaled mean of those of further tokens.

    `losses` are `[1 + metrics]`, as in `Loss.stack`.
    """
    if config.num_mtp_layers == 0:
        return losses[0]
    return losses[0] + config.mtp_loss_scaling_factor * losses[1:].mean()


def evaluate(run: Run, batches: Iterator[Batch] | None) -> float:
    """Return the mean loss over --eval-iters global batches, the same on every rank. Collective.

    Training is not affected.
    """
    num_microbatches = run.eval_batch_size // run.batches.samples_per_microbatch
    totals = torch.zeros(1 + len(run.metric_names), 2, device=run.device)
    with run.timers("evaluate"), evaluating(run):
        for _ in range(run.config.training.eval_iters):
            totals += forward_backward(run, batches, num_microbatches, forward_only=True)
    losses, _ = reduce_losses([totals], run.ps)
    return losses[0][0]


@contextmanager
def evaluating(run: Run) -> Iterator[None]:
    """Disable dropout, which draws no random numbers then; use the average with --eval-ema."""
    weights: AbstractContextManager[None] = nullcontext()
    if run.config.training.eval_ema:
        run.saver.before_update()  # a save in progress still copies the weights
        weights = run.optimizer.averaged_weights()
    for chunk in run.chunks:
        chunk.eval()
    with weights:
        yield
    for chunk in run.chunks:
        chunk.train()
