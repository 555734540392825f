"""What a run is: batches (and how their size grows) and length, processes, logging, checkpoints.

Every field is a flag of the command line (`arguments.py`); names and defaults are Megatron-LM's.
The configurations of the model, the data, the optimizer and the data-parallel buffers stand beside
the code that reads them.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from megatron.core.dist_checkpointing.loading.load import STRICTNESS
from megatron.core.flags import flag


@dataclass
class TrainingConfig:
    """Batches, length of the run, and how it ends."""

    micro_batch_size: int = flag(1, positive=True)
    """Samples that one model replica takes through a forward and backward pass at a time."""
    global_batch_size: int | None = flag(None, positive=True)
    """Samples per optimizer step, over all replicas. Default: micro-batch size x data-parallel
    size.
    """
    rampup_batch_size: list[int] | None = flag(None)
    """Three numbers START INCREMENT SAMPLES: the global batch grows from START by INCREMENT over
    SAMPLES samples.
    """
    step_batch_size_schedule: str | None = flag(None)
    """Pairs TOKENS:SIZE (0:384 200B:768): the global batch has SIZE from that number of tokens on;
    K, M, B, T multiply. Replaces --global-batch-size.
    """
    eval_global_batch_size: int | None = flag(None, positive=True)
    """Samples per batch of an evaluation. Default: --global-batch-size."""
    decrease_batch_size_if_needed: bool = flag(False)
    """Round a ramping global batch down to a multiple of micro-batch x data-parallel size instead
    of failing.
    """
    train_iters: int | None = flag(None, positive=True)
    """Number of optimizer steps; exclusive with --train-samples."""
    train_samples: int | None = flag(None, positive=True)
    """Number of training samples; exclusive with --train-iters."""
    seed: int = flag(1234)
    """Seed of everything: initial weights (with the parameter's name), data order, dropout."""
    calculate_per_token_loss: bool = flag(False)
    """Average loss and gradients over all tokens of the global batch, not per micro-batch first."""
    check_for_nan_in_loss_and_grad: bool = flag(True, "--no-check-for-nan-in-loss-and-grad")
    """Continue when a loss or gradient is NaN or infinite instead of stopping with its rank and
    iteration.
    """
    skip_train: bool = flag(False)
    """Only evaluate, do not train."""
    eval_iters: int = flag(100)
    """Number of global batches per evaluation. 0 or a negative number disables evaluation."""
    eval_interval: int | None = flag(1000, positive=True)
    """Iterations between evaluations on the validation set."""
    exit_interval: int | None = flag(None, positive=True)
    """Save and end the process when the iteration is a multiple of this."""
    exit_duration_in_mins: float | None = flag(None, positive=True)
    """Save and end the process within this many minutes: in time for a save that takes as long as
    the last one did.
    """
    exit_signal_handler: bool = flag(False)
    """On SIGTERM or SIGUSR1 finish the iteration, save and end, on all ranks together."""
    manual_gc: bool = flag(False)
    """Run Python's garbage collector only at --manual-gc-interval, at the same iterations on all
    ranks.
    """
    manual_gc_interval: int = flag(0, at_least=0)
    """Iterations between garbage collections with --manual-gc; 0: none."""


Step = tuple[int, int]  # (consumed samples, global batch size from there on)


@dataclass(frozen=True)
class BatchSchedule:
    """Global batch size and number of micro-batches at any point of a run; nothing is counted here.

    With `decrease_if_needed`, a global batch that is no multiple of micro-batch x replicas is
    rounded down to one; otherwise it is a ValueError when the schedule is made, for every size that
    the run passes through.
    """

    steps: tuple[Step, ...]  # in order; the first is at 0
    micro_batch_size: int
    data_parallel_size: int
    decrease_if_needed: bool = False

    def __post_init__(self) -> None:
        product = f"micro-batch size {self.micro_batch_size} x data-parallel size {self.data_parallel_size}"
        for _, size in self.steps:
            if size < self.samples_per_microbatch:
                raise ValueError(
                    f"global batch size {size} is less than {product} = {self.samples_per_microbatch}: increase "
                    "--global-batch-size, or reduce --micro-batch-size or the number of processes"
                )
            if size % self.samples_per_microbatch and not self.decrease_if_needed:
                raise ValueError(
                    f"global batch size {size} is not a multiple of {product} = {self.samples_per_microbatch}: change "
                    "one of them, or give --decrease-batch-size-if-needed"
                )

    @property
    def global_batch_size(self) -> int:
        """That of the end."""
        return self.steps[-1][1]

    @property
    def samples_per_microbatch(self) -> int:
        """Samples that all replicas together take per micro-batch."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per replica at the end."""
        return self.global_batch_size // self.samples_per_microbatch

    def sizes(self) -> list[int]:
        """Every global batch size that the run passes through."""
        return [size - size % self.samples_per_microbatch for _, size in self.steps]

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Samples of the iteration that starts after `consumed_samples`."""
        _, size = self.steps[
            bisect.bisect_right(self.steps, consumed_samples, key=itemgetter(0)) - 1
        ]
        return size - size % self.samples_per_microbatch

    def num_microbatches_at(self, consumed_samples: int) -> int:
        """Micro-batches per replica of the iteration that starts after `consumed_samples`."""
        return self.global_batch_size_at(consumed_samples) // self.samples_per_microbatch

    def consumed_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Samples consumed when `iterations` more iterations are done."""
        for size, within in self._stretches(consumed_samples):
            if within is None or iterations < within:
                break
            consumed_samples += within * size
            iterations -= within
        return consumed_samples + iterations * size

    def iterations_for(self, samples: int, consumed_samples: int = 0) -> int:
        """Whole iterations from `consumed_samples` on until `samples` samples in all are used up."""
        iterations = 0
        for size, within in self._stretches(consumed_samples):
            fitting = max(0, samples - consumed_samples) // size
            if within is None or fitting < within:
                break
            consumed_samples += within * size
            iterations += within
        return iterations + fitting

    def _stretches(self, consumed_samples: int) -> Iterator[tuple[int, int | None]]:
        """(global batch size, number of iterations that have it) from there on; None: all that follow.

        A ramp-up can last for 10,000 iterations, and how many are left is asked in each of them.
        """
        while consumed_samples < self.steps[-1][0]:
            size = self.global_batch_size_at(consumed_samples)
            ahead = self.steps[
                bisect.bisect_right(self.steps, consumed_samples, key=itemgetter(0))
            ][0]
            within = -(-(ahead - consumed_samples) // size)
            yield size, within
            consumed_samples += within * size
        yield self.global_batch_size_at(consumed_samples), None


def rampup_steps(rampup_batch_size: Sequence[int], global_batch_size: int) -> tuple[Step, ...]:
    """--rampup-batch-size START INCREMENT SAMPLES: the global batch grows in equal steps over SAMPLES samples."""
    name = f"--rampup-batch-size {' '.join(map(str, rampup_batch_size))}"
    if len(rampup_batch_size) != 3:
        raise ValueError(f"{name}: it takes START INCREMENT SAMPLES")
    start, increment, samples = rampup_batch_size
    if start < 1 or increment < 1 or samples < 0:
        raise ValueError(f"{name}: START and INCREMENT must be positive, SAMPLES not negative")
    if start > global_batch_size:
        raise ValueError(f"{name}: START is larger than --global-batch-size {global_batch_size}")
    count, rest = divmod(global_batch_size - start, increment)
    if rest:
        raise ValueError(
            f"{name}: steps of {increment} do not lead from {start} to --global-batch-size {global_batch_size}"
        )
    if samples == 0 or count == 0:
        return ((0, global_batch_size),)
    return tuple(
        (-(-step * samples // count), start + step * increment) for step in range(count + 1)
    )


_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def token_steps(text: str, seq_length: int) -> tuple[Step, ...]:
    """--step-batch-size-schedule, such as 0:384 1.5B:768, which counts in tokens; ValueError otherwise."""
    steps = []
    for entry in text.replace(",", " ").split():
        match = re.fullmatch(r"([\d.]+)([KMBT]?):(\d+)", entry.upper())
        if match is None:
            raise ValueError(
                f"--step-batch-size-schedule: {entry!r} is not TOKENS:SIZE, such as 0:384 or 1.5B:768"
            )
        number, unit, size = match.groups()
        steps.append((int(float(number) * _UNITS.get(unit, 1)) // seq_length, int(size)))
    starts = [start for start, _ in steps]
    if not steps or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ValueError(
            f"--step-batch-size-schedule {text}: the first step must begin at 0, every other after it"
        )
    return tuple(steps)


@dataclass
class DataLoaderConfig:
    """How samples reach the training loop. Field names are Megatron-LM's argument names."""

    dataloader_type: str = flag("single", choices=("single", "cyclic"))
    """single: read a dataset once, in its order; cyclic: read it repeatedly, reshuffled every time.
    """
    num_workers: int = flag(2, at_least=0)
    """Processes per rank and dataset that read ahead; 0 reads in the training process."""
    seed: int = flag(1234)
    """Seed of everything: initial weights (with the parameter's name), data order, dropout."""


@dataclass
class DistributedConfig:
    """Processes, devices and their arithmetic."""

    distributed_backend: str | None = flag(None, choices=("nccl", "gloo"))
    """Communication library. Default: nccl on CUDA devices, gloo on CPU."""
    distributed_timeout_minutes: float = flag(10.0, positive=True)
    """How long a collective waits for a missing rank before the run stops."""
    device: str | None = flag(None, choices=("cpu", "cuda"))
    """Where to train. Default: cuda if there is one."""
    num_threads: int | None = flag(None, positive=True)
    """CPU threads per process. Default: $OMP_NUM_THREADS, else an equal share of this node's cores.
    """
    deterministic_mode: bool = flag(False)
    """Only algorithms that give the same bits every time; an operation without one is an error."""
    tf32: bool = flag(False)
    """On CUDA, let fp32 matrix products round their inputs to TF32."""
    disable_bf16_reduced_precision_matmul: bool = flag(False)
    """On CUDA, let bf16 matrix products add up in fp32 throughout, also where a product is split.
    """
    compile: bool = flag(False)
    """Compile every transformer layer with torch.compile."""
    dry_run: bool = flag(False)
    """Check the flags, print what the run would be and need, and exit: status 0, or 2 if it is
    impossible. The run has $WORLD_SIZE processes, else those of one replica.
    """


@dataclass
class ProfilingConfig:
    """Traces of some iterations, and memory."""

    profile: bool = flag(False)
    """Trace iterations with torch's profiler, for chrome://tracing, Perfetto or TensorBoard."""
    profile_step_start: int = flag(10)
    """First iteration in the trace."""
    profile_step_end: int = flag(12)
    """First iteration that is no longer in the trace."""
    profile_ranks: list[int] | None = flag(None)
    """Ranks that are traced. Default: 0."""
    profile_dir: str | None = flag(None)
    """Where traces are written. Default: --tensorboard-dir, else the directory profile."""
    log_memory_interval: int | None = flag(None, positive=True)
    """Iterations between reports of the memory in use, the maximum over ranks."""

    def __post_init__(self) -> None:
        if not 1 <= self.profile_step_start < self.profile_step_end:
            raise ValueError(
                f"--profile-step-start {self.profile_step_start} must be at least 1 and less than --profile-step-end "
                f"{self.profile_step_end}"
            )


@dataclass
class PipelineLayoutConfig:
    """How layers are assigned to pipeline stages."""

    num_layers_per_virtual_pipeline_stage: int | None = flag(None)
    """Layers per model chunk of the interleaved schedule; another way to say
    --virtual-pipeline-model-parallel-size.
    """
    decoder_first_pipeline_num_layers: int | None = flag(None)
    """Number of layers of the first stage, when it differs from the others."""
    decoder_last_pipeline_num_layers: int | None = flag(None)
    """Number of layers of the last stage, when it differs from the others."""
    account_for_embedding_in_pipeline_split: bool = flag(False)
    """Count the embedding as a layer when layers are assigned: the first chunk has one layer less.
    """
    account_for_loss_in_pipeline_split: bool = flag(False)
    """Count the output layer as a layer when layers are assigned: the last chunk has one layer
    less.
    """
    pipeline_model_parallel_layout: str | None = flag(None)
    """What stands on every chunk, in Megatron-LM's notation, such as Et*3|(tt|)*6L: E embedding, t
    layer, L loss; | ends a chunk, and *n repeats.
    """


@dataclass
class LoggingConfig:
    """What is reported, and where."""

    log_interval: int = flag(100, positive=True)
    """Iterations between lines in the log."""
    log_format: str = flag("text", choices=("text", "json"))
    """Print Megatron-LM's lines, or one JSON object per line."""
    print_args: bool = flag(False)
    """Print all arguments in Megatron-LM's form; <save>/run.json and TensorBoard always have them.
    """
    goodput: bool = flag(False)
    """At the end, report where the time of all starts since the first went; needs a --save on a
    file system.
    """
    log_params_norm: bool = flag(False)
    """Report the norm of all parameters."""
    log_num_zeros_in_grad: bool = flag(False)
    """Report the number of zeros in the gradient."""
    timing_log_level: int = flag(0, at_least=0, at_most=2)
    """0: iteration time only; 1: the phases of an iteration; 2: also waiting for data and the forward passes.
    """
    timing_log_option: str = flag("minmax", choices=("max", "minmax", "all"))
    """Over ranks, report the slowest, the slowest and fastest, or all."""
    tensorboard_dir: str | None = flag(None)
    """Write TensorBoard events here."""
    tensorboard_log_interval: int = flag(1, positive=True)
    """Iterations between TensorBoard (and Weights & Biases) points."""
    tensorboard_queue_size: int = flag(1000, positive=True)
    """Events that TensorBoard keeps in memory before it writes."""
    log_timers_to_tensorboard: bool = flag(False)
    """Also write the timers to TensorBoard."""
    log_memory_to_tensorboard: bool = flag(False)
    """Also write the memory in use to TensorBoard (of rank 0; on the CPU the peak of the process).
    """
    log_validation_ppl_to_tensorboard: bool = flag(False)
    """Also write the validation perplexity to TensorBoard."""
    wandb_project: str | None = flag(None)
    """Report to this project of Weights & Biases (needs the package wandb)."""
    wandb_exp_name: str | None = flag(None)
    """Name of the run there."""
    wandb_entity: str | None = flag(None)
    """User or team it belongs to."""
    wandb_save_dir: str | None = flag(None)
    """Where Weights & Biases keeps its files. Default: <save>/wandb."""


@dataclass
class CheckpointConfig:
    """What is saved and loaded, where, and when."""

    save: str | None = flag(None)
    """Directory to save checkpoints to."""
    save_interval: int | None = flag(
        None, "--save-interval", "--persistent-save-interval", positive=True
    )
    """Iterations between checkpoints; one more is written at the end of the run."""
    save_interval_secs: float | None = flag(None, positive=True)
    """Seconds between checkpoints, besides or instead of --save-interval; every save resets the
    clock.
    """
    keep_last_n: int | None = flag(None, positive=True)
    """Keep the last N checkpoints and remove older ones, unless another rule keeps them. With a
    rule alone: 1.
    """
    save_retain_interval: int | None = flag(None, positive=True)
    """Keep the checkpoints of all multiples of this iteration, and remove others when they are
    superseded.
    """
    keep_best_n: int | None = flag(None, positive=True)
    """Keep the N checkpoints with the lowest validation loss, of those at whose iteration it was
    measured.
    """
    save_hf: str | None = flag(None)
    """When the run is complete, also write the model there in Hugging Face's form."""
    no_save_optim: bool = flag(False)
    """Leave the optimizer out of checkpoints."""
    no_save_rng: bool = flag(False)
    """Leave the random number generators out of checkpoints."""
    load: str | None = flag(None)
    """Directory to load a checkpoint from. If it is empty or absent: start from random weights,
    with a warning.
    """
    ckpt_step: int | None = flag(None)
    """Load the checkpoint of this iteration instead of the newest."""
    finetune: bool = flag(False)
    """Load the weights only and start at iteration 0: no optimizer, schedule, generators or data
    position.
    """
    no_load_optim: bool = flag(False)
    """Load weights, iteration and data position, but no optimizer state; the schedules continue by
    samples.
    """
    no_load_rng: bool = flag(False)
    """Do not load the random number generators."""
    dist_ckpt_strictness: str = flag("raise_all", choices=tuple(STRICTNESS))
    """What to do about keys that only the model has (unexpected), or that only the checkpoint has
    as well (all).
    """
    ckpt_fully_parallel_load: bool = flag(False)
    """Replicas read equal shares of what they all need and exchange them, instead of each reading
    everything.
    """
    ckpt_verify: bool | None = flag(None)
    """Require checksums in the loaded checkpoint and compare them with what is read; by default they
    are compared if the checkpoint has any, with --no-ckpt-verify never.
    """
    pretrained_checkpoint: str | None = flag(None)
    """Where to take the weights from, as with --finetune, when --load holds no checkpoint yet."""
    exit_on_missing_checkpoint: bool = flag(False)
    """A --load without a checkpoint is an error even if it is empty or the same directory as
    --save.
    """
    override_existing_run: bool = flag(False)
    """Start from what --load and --ckpt-step name, or from random weights, although --save contains
    another run or newer checkpoints of this one. They are replaced by saves of the same iteration.
    """
    use_checkpoint_args: bool = flag(False)
    """Take the shape of the model and its tokenizer from the checkpoint, whatever the command line
    says of them.
    """
    ckpt_format: str = flag("torch_dist", choices=("torch_dist", "torch"))
    """Format of saved checkpoints; torch is Megatron-LM's legacy one, whose files belong to a
    layout.
    """
    async_save: bool = flag(False)
    """Write checkpoints in the background: training waits for the copy to host memory at most."""
    ckpt_fully_parallel_save: bool = flag(True)
    """Let the first of the ranks that hold the same weights write all of them instead of sharing
    the work.
    """
    ckpt_assume_constant_structure: bool = flag(False)
    """Plan once without comparing between saves; a change of structure is an error then."""
    dist_ckpt_workers: int = flag(2, positive=True)
    """Files that each rank writes at once."""
    ckpt_staging_mem_limit: float | None = flag(None, positive=True)
    """Host memory for the copies of an asynchronous save, in GiB per rank. Default: as much as a
    rank writes.
    """
    ckpt_save_timeout_minutes: float = flag(10.0, positive=True)
    """A save fails when the process of a rank has been dead or suspended for this long."""
    non_persistent_save_interval: int | None = flag(None, positive=True)
    """Iterations between checkpoints that the nodes keep on their own disks. Where --save is due,
    with --async-save its checkpoint is copied from there, and without it is the only one.
    """
    non_persistent_ckpt_type: str | None = flag(None, choices=("local", "global", "in_memory"))
    """What these are; only local is supported."""
    non_persistent_local_ckpt_dir: str | None = flag(None)
    """A directory on a disk of the node. Environment variables in it are expanded."""
    replication: bool = flag(False)
    """Keep copies of local checkpoints on the disks of other nodes."""
    replication_jump: int | None = flag(None, positive=True)
    """Copies of what a rank writes go to the ranks so far apart. Default: the number of ranks of a
    node.
    """
    replication_factor: int = flag(2, positive=True)
    """Nodes that have a file of a local checkpoint, with --replication."""
    exit_on_save_failure: bool = flag(False)
    """Stop when a checkpoint cannot be saved, instead of warning."""
    ckpt_convert_format: str | None = flag(None, choices=("torch_dist", "torch"))
    """Write what was loaded in this format, and exit."""
    ckpt_convert_save: str | None = flag(None)
    """Where --ckpt-convert-format writes: to the directory FORMAT in this one."""

    @property
    def removes_checkpoints(self) -> bool:
        """One is kept if any rule keeps it; the newest always is, and without a rule all are."""
        return any(
            rule is not None
            for rule in (self.keep_last_n, self.save_retain_interval, self.keep_best_n)
        )
