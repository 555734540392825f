"""Options of the training program: batches, length of the run, processes, logging, checkpoints.

Every field is a command-line flag (see `arguments.py`); names and defaults are Megatron-LM's. The
options of the model, data, optimizer and gradient buffers are defined next to the code that uses
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.core.dist_checkpointing.loading.load import STRICTNESS
from megatron.core.flags import FlagSection, flag

# Data types of Hugging Face models.
HF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HF_QUANTIZATIONS = ("fp8-block", "fp8-channel", "mxfp4", "nvfp4")


@dataclass
class TrainingConfig(FlagSection):
    """Batches, length of the run, and how it ends."""

    micro_batch_size: int = flag(1, positive=True)
    """Number of samples per forward and backward pass of a model replica."""
    global_batch_size: int | None = flag(None, positive=True)
    """Number of samples per optimizer step, over all replicas. Default: micro-batch size x
    data-parallel size.
    """
    rampup_batch_size: list[int] | None = flag(
        None, requires={"train_samples": True}, reason="the samples per iteration change"
    )
    """Increase the global batch size linearly. Takes START INCREMENT SAMPLES: from START, in steps
    of INCREMENT, over SAMPLES samples.
    """
    step_batch_size_schedule: str | None = flag(None)
    """Change the global batch size at given numbers of tokens. Takes pairs TOKENS:SIZE, e.g.
    "0:384 200B:768", with the units K, M, B and T. Replaces --global-batch-size.
    """
    eval_global_batch_size: int | None = flag(None, positive=True)
    """Number of samples per batch of an evaluation. Default: --global-batch-size."""
    decrease_batch_size_if_needed: bool = flag(False)
    """Round the global batch size down to a multiple of micro-batch size x data-parallel size
    during a ramp-up, instead of failing.
    """
    train_iters: int | None = flag(None, positive=True)
    """Number of optimizer steps. Mutually exclusive with --train-samples."""
    train_samples: int | None = flag(None, positive=True, excludes={"train_iters": True})
    """Number of training samples. Mutually exclusive with --train-iters."""
    sft_epochs: int | None = flag(
        None,
        positive=True,
        requires={"sft": True},
        excludes={"train_iters": True, "train_samples": True},
    )
    """Number of passes over the training data of --sft. Replaces --train-samples."""
    seed: int = flag(1234)
    """Random seed for initial weights (together with the parameter's name), data order and dropout.
    """
    calculate_per_token_loss: bool = flag(False)
    """Average loss and gradients over all tokens of the global batch instead of over micro-batches.
    """
    check_for_nan_in_loss_and_grad: bool = flag(True, "--no-check-for-nan-in-loss-and-grad")
    """Stop when a loss or gradient is NaN or infinite, and report its rank and iteration."""
    skip_train: bool = flag(False)
    """Evaluate without training."""
    eval_iters: int = flag(100)
    """Number of global batches per evaluation. 0 or a negative number disables evaluation."""
    eval_interval: int | None = flag(1000, positive=True)
    """Number of iterations between evaluations on the validation set."""
    valid_domain: list[str] | None = flag(None, repeatable=True)
    """NAME=PATH of further validation sets. At every evaluation, the loss of each one over its
    first --eval-iters global batches is reported as "validation NAME". May be repeated.
    """
    eval_tasks: list[str] | None = flag(None, repeatable=True)
    """Tasks of lm-eval (hellaswag,arc_easy, or the path of a .yaml file), which are evaluated at
    every evaluation with the model of the run. Requires the package lm-eval.
    """
    eval_tasks_limit: int | None = flag(None, positive=True)
    """Number of documents of each of the --eval-tasks. Default: all."""
    sample_prompts: str | None = flag(None)
    """File with a prompt per line. At every evaluation, the model's most probable continuation of
    each one is logged.
    """
    sample_tokens: int = flag(32, positive=True, requires={"sample_prompts": True})
    """Maximum number of tokens of a continuation."""
    eval_ema: bool = flag(
        False,
        requires={"ema_decay": True},
        reason="it evaluates the average of the weights (e.g. --ema-decay 0.999)",
    )
    """Evaluate the average of --ema-decay instead of the weights that are trained."""
    exit_interval: int | None = flag(None, positive=True)
    """Save and exit when the iteration is a multiple of this number."""
    exit_duration_in_mins: float | None = flag(None, positive=True)
    """Save and exit within this many minutes; the duration of the last save is reserved."""
    exit_signal_handler: bool = flag(False)
    """On SIGTERM or SIGUSR1, finish the iteration, save and exit, on all ranks together."""
    manual_gc: bool = flag(False)
    """Disable automatic garbage collection in Python, and collect every --manual-gc-interval
    iterations, on all ranks at the same time.
    """
    manual_gc_interval: int = flag(0, at_least=0)
    """Number of iterations between garbage collections with --manual-gc; 0: never."""
    ignore_unknown_flags: bool = flag(False)
    """Ignore flags that neither this program nor Megatron-LM has, e.g., those of a fork, with a
    warning that lists them. Options of Megatron-LM that are not implemented remain errors.
    """


@dataclass
class DataLoaderConfig(FlagSection):
    """Transport of samples to the training loop."""

    dataloader_type: str = flag("single", choices=("single", "cyclic"))
    """single: read the dataset once, in its order; cyclic: read it repeatedly, reshuffled for each
    epoch.
    """
    num_workers: int = flag(2, at_least=0)
    """Number of processes per rank and dataset that read ahead; 0: read in the training process."""
    seed: int = flag(1234)
    """Random seed for initial weights (together with the parameter's name), data order and dropout.
    """


@dataclass
class DistributedConfig(FlagSection):
    """Processes, devices and numerics."""

    distributed_backend: str | None = flag(None, choices=("nccl", "gloo"))
    """Communication library. Default: nccl on CUDA devices, gloo on CPU."""
    distributed_timeout_minutes: float = flag(10.0, positive=True)
    """Time that a collective waits for a missing rank before the run stops."""
    device: str | None = flag(None, choices=("cpu", "cuda"))
    """Device to train on. Default: cuda if available."""
    num_threads: int | None = flag(None, positive=True)
    """CPU threads per process. Default: $OMP_NUM_THREADS, or an equal share of the node's cores."""
    deterministic_mode: bool = flag(False)
    """Use deterministic algorithms only; an operation without one is an error."""
    tf32: bool = flag(False)
    """On CUDA, allow TF32 for the inputs of fp32 matrix products."""
    disable_bf16_reduced_precision_matmul: bool = flag(False)
    """On CUDA, accumulate bf16 matrix products in fp32 only, including split reductions."""
    triton_kernels: bool = flag(True, "--no-triton-kernels")
    """On CUDA, use Triton kernels for the loss, AdamW, SwiGLU and rotation."""
    compile: bool = flag(False)
    """Compile every transformer layer with torch.compile."""
    dry_run: bool = flag(False)
    """Check the flags, print a summary and the memory plan of the run, and exit with status 0, or 2
    if the run is impossible. The number of processes is $WORLD_SIZE, or that of one replica.
    """
    smoke: bool = flag(False)
    """Train a tiny model of the same structure for 3 iterations on generated data, at a layout that
    fits the number of processes, and print which flags change.
    """


@dataclass
class RestartConfig(FlagSection):
    """In-process restart after the loss of a rank."""

    inprocess_restart: bool = flag(False)
    """After the loss of a process, replace only that one: the other ranks keep their processes,
    create their process groups again and load the newest checkpoint. Requires a launcher such as
    torchrun.
    """
    inprocess_max_iterations: int | None = flag(None, positive=True)
    """Number of attempts of a launch, including the first one. Afterwards a failure ends the
    processes. Default: no limit, except for five attempts in a row without a training iteration.
    """
    inprocess_barrier_timeout: float = flag(120.0, positive=True)
    """Seconds that an attempt waits for all ranks to arrive before the processes end."""
    inprocess_hard_timeout: float = flag(90.0, positive=True)
    """Seconds after which a rank that has not left a failed attempt gets a new process."""
    inprocess_empty_cuda_cache: bool = flag(False)
    """Release cached memory of the device before every in-process restart."""


@dataclass
class OperationsConfig(FlagSection):
    """Observation of long runs: slow ranks, hangs, and silently wrong results."""

    log_straggler: bool = flag(False)
    """Report the fastest and slowest ranks at every --log-interval and every 15 seconds."""
    disable_straggler_on_startup: bool = flag(False)
    """Start with the reports of --log-straggler turned off, until --straggler-ctrlr-port."""
    straggler_ctrlr_port: int = flag(65535, positive=True, at_most=65535)
    """Port of rank 0 that turns the reports of --log-straggler on and off (curl HOST:PORT)."""
    straggler_minmax_count: int = flag(1, positive=True)
    """Number of ranks with the lowest and the highest throughput in reports of --log-straggler."""
    hang_report_seconds: float | None = flag(None, positive=True)
    """Seconds without an iteration or collective after which every rank prints its last collective
    and its stacks, and one of them names the missing ranks. The run is not ended.
    """
    rerun_mode: str = flag(
        "disabled",
        choices=("disabled", "validate_results", "report_determinism_stats", "report_stats"),
    )
    """validate_results: repeat a step with a rejected loss (NaN, infinite, or spiky) on the same
    rank and on another replica, to distinguish transient and persistent errors from correct
    results; report_determinism_stats (or report_stats): execute every step twice, and report the
    differences.
    """
    check_for_spiky_loss: bool = flag(False)
    """With --rerun-mode validate_results, also repeat steps whose loss is 10 times the maximum of
    the first 100 steps.
    """
    error_injection_rate: int = flag(0, at_least=0)
    """With --rerun-mode validate_results, reject one of this number of losses as a test; 0: none.
    """
    error_injection_type: str = flag(
        "transient_error", choices=("correct_result", "transient_error", "persistent_error")
    )
    """Outcome of the repetition after --error-injection-rate."""
    gradient_check_interval: int | None = flag(
        None,
        positive=True,
        excludes={"num_experts": True, "fp8": True},
        reason="the gradients of a step must depend on its samples and the weights only",
    )
    """Number of iterations between steps that another data-parallel replica repeats. Gradients must
    agree bitwise; otherwise the ranks and parameters are reported.
    """
    check_weight_hash_across_dp_replicas_interval: int | None = flag(None, positive=True)
    """Number of iterations between comparisons of the weights of data-parallel replicas."""

    @property
    def is_enabled(self) -> bool:
        """Return whether any of these flags requires observation."""
        return (
            self.log_straggler
            or self.hang_report_seconds is not None
            or self.rerun_mode != "disabled"
            or self.gradient_check_interval is not None
            or self.check_weight_hash_across_dp_replicas_interval is not None
        )


@dataclass
class ProfilingConfig(FlagSection):
    """Traces of iterations, and memory reports."""

    profile: bool = flag(False)
    """Trace iterations with torch's profiler, for chrome://tracing, Perfetto or TensorBoard."""
    profile_step_start: int = flag(10, at_least=1)
    """First iteration of the trace."""
    profile_step_end: int = flag(12)
    """First iteration after the trace."""
    profile_ranks: list[int] | None = flag(None)
    """Ranks to trace. Default: 0."""
    profile_dir: str | None = flag(None)
    """Directory for traces. Default: --tensorboard-dir, or the directory profile."""
    log_memory_interval: int | None = flag(None, positive=True)
    """Number of iterations between reports of the memory in use, the maximum over ranks."""

    def find_problems(self) -> Iterator[str]:
        if self.profile_step_start >= self.profile_step_end:
            yield (
                f"--profile-step-start {self.profile_step_start} must be less than "
                f"--profile-step-end {self.profile_step_end}"
            )


@dataclass
class PipelineLayoutConfig(FlagSection):
    """Assignment of layers to pipeline stages."""

    num_layers_per_virtual_pipeline_stage: int | None = flag(None)
    """Number of layers per model chunk of the interleaved schedule; an alternative to
    --virtual-pipeline-model-parallel-size.
    """
    decoder_first_pipeline_num_layers: int | None = flag(None)
    """Number of layers of the first stage, if it differs from the other stages."""
    decoder_last_pipeline_num_layers: int | None = flag(None)
    """Number of layers of the last stage, if it differs from the other stages."""
    account_for_embedding_in_pipeline_split: bool = flag(False)
    """Count the embedding as a layer when assigning layers: the first chunk has one layer less."""
    account_for_loss_in_pipeline_split: bool = flag(False)
    """Count the output layer as a layer when assigning layers: the last chunk has one layer less.
    """
    pipeline_model_parallel_layout: str | None = flag(None)
    """Content of each chunk in Megatron-LM's notation, e.g. Et*3|(tt|)*6mL: E embedding, t layer, m
    layer for multi-token prediction, L loss; | ends a chunk and *n repeats.
    """


@dataclass
class LoggingConfig(FlagSection):
    """Metrics to report, and where."""

    log_interval: int = flag(100, positive=True)
    """Number of iterations between log lines."""
    log_format: str = flag("text", choices=("text", "json"))
    """text: Megatron-LM's log lines; json: one JSON object per line."""
    print_args: bool = flag(False)
    """Print all arguments in Megatron-LM's format. <save>/run.json and TensorBoard always contain
    them.
    """
    goodput: bool = flag(False)
    """At the end, report how the time of all launches of the run was spent. Requires --save on a
    file system.
    """
    log_params_norm: bool = flag(False)
    """Report the norm of all parameters."""
    log_num_zeros_in_grad: bool = flag(False)
    """Report the number of zeros in the gradient."""
    timing_log_level: int = flag(0, at_least=0, at_most=2)
    """0: report the iteration time only; 1: also the phases of an iteration; 2: also waiting for
    data and the forward passes.
    """
    timing_log_option: str = flag("minmax", choices=("max", "minmax", "all"))
    """Statistic of the times over ranks: maximum, minimum and maximum, or all."""
    tensorboard_dir: str | None = flag(None)
    """Directory for TensorBoard events."""
    tensorboard_log_interval: int = flag(1, positive=True)
    """Number of iterations between points in TensorBoard and trackers."""
    tensorboard_queue_size: int = flag(1000, positive=True)
    """Number of events that TensorBoard buffers before writing."""
    log_timers_to_tensorboard: bool = flag(False)
    """Write the timers to TensorBoard."""
    log_memory_to_tensorboard: bool = flag(False)
    """Write the memory in use on rank 0 to TensorBoard; on the CPU, the peak of the process."""
    log_validation_ppl_to_tensorboard: bool = flag(False)
    """Write the validation perplexity to TensorBoard."""
    wandb_project: str | None = flag(None)
    """Report to this project of Weights & Biases. Requires the package wandb."""
    wandb_exp_name: str | None = flag(None)
    """Name of the run in Weights & Biases."""
    wandb_entity: str | None = flag(None)
    """User or team that owns the project in Weights & Biases."""
    wandb_save_dir: str | None = flag(None)
    """Directory for the files of Weights & Biases. Default: <save>/wandb."""
    mlflow_experiment: str | None = flag(None)
    """Report to this experiment of MLflow, at MLFLOW_TRACKING_URI. Requires the package mlflow."""
    trackio_project: str | None = flag(None)
    """Report to this project of trackio, on this machine. Requires the package trackio."""

    def dashboards(self) -> list[str]:
        """Return the destinations that the flags request."""
        destinations = (
            self.tensorboard_dir,
            self.wandb_project,
            self.mlflow_experiment,
            self.trackio_project,
        )
        return [name for name in destinations if name is not None]


@dataclass
class CheckpointConfig(FlagSection):
    """Directories, contents and intervals of saved and loaded checkpoints."""

    save: str | None = flag(None)
    """Directory for checkpoints."""
    save_interval: int | None = flag(
        None,
        "--save-interval",
        "--persistent-save-interval",
        positive=True,
        divides="save_hf_interval",
    )
    """Number of iterations between checkpoints; another one is saved at the end of the run."""
    save_interval_secs: float | None = flag(None, positive=True)
    """Number of seconds between checkpoints, in addition to --save-interval or alone. Every save
    restarts the clock.
    """
    keep_last_n: int | None = flag(None, positive=True)
    """Keep the last N checkpoints and delete older ones, unless another rule keeps them. Default:
    1 with another rule, otherwise all.
    """
    save_retain_interval: int | None = flag(None, positive=True)
    """Keep the checkpoints at multiples of this number of iterations, and delete others when there
    is a newer one.
    """
    keep_best_n: int | None = flag(
        None,
        positive=True,
        requires={"eval_iters": True, "eval_interval": True},
        reason="it compares validation losses",
    )
    """Keep the N checkpoints with the lowest validation loss, among those saved at an evaluation.
    """
    save_hf: str | None = flag(None)
    """Directory in which the final model is also saved in Hugging Face format. With
    --save-hf-interval also s3://bucket/prefix.
    """
    save_hf_interval: int | None = flag(
        None,
        positive=True,
        requires={"save": True, "save_hf": True, "save_interval": True},
        reason="models are saved next to checkpoints",
    )
    """Save a Hugging Face model next to every checkpoint whose iteration is a multiple of this
    number, and at the end of the run, as iter_NNNNNNN in --save-hf. All ranks write it while they
    write the checkpoint; with object storage or quantization, rank 0 converts the checkpoint.
    """
    save_hf_keep_last: int | None = flag(None, positive=True, requires={"save_hf_interval": True})
    """Keep the last N models of --save-hf-interval and delete older ones. Default: all."""
    save_hf_dtype: str | None = flag(
        None, choices=(*HF_DTYPES, *HF_QUANTIZATIONS), requires={"save_hf": True}
    )
    """Data type of the matrices in models of --save-hf, cast from the weights, or one of the
    encodings of convert.py --quantize. Default: that of the weights.
    """
    save_tokenizer_assets: bool = flag(
        True, "--no-save-tokenizer-assets", "--disable-save-tokenizer-assets"
    )
    """Copy the tokenizer's files to tokenizer/ in every checkpoint, as Megatron-LM does.
    --no-save-tokenizer-assets leaves them out.
    """
    no_save_optim: bool = flag(False)
    """Do not save the state of the optimizer."""
    no_save_rng: bool = flag(False)
    """Do not save the states of the random number generators."""
    load: str | None = flag(None)
    """Directory to load a checkpoint from. Training starts from random weights if it is empty, or
    if it does not exist yet and is the directory of --save.
    """
    ckpt_step: int | None = flag(None, requires={"load": True})
    """Load the checkpoint of this iteration instead of the newest."""
    finetune: bool = flag(False)
    """Load only the weights and start at iteration 0, without optimizer, schedule, random number
    generators and data position.
    """
    no_load_optim: bool = flag(False)
    """Load weights, iteration and data position, but not the state of the optimizer; the schedules
    continue by samples.
    """
    no_load_rng: bool = flag(False)
    """Do not load the states of the random number generators."""
    dist_ckpt_strictness: str = flag("raise_all", choices=tuple(STRICTNESS))
    """Handling of keys that only the model has (unexpected), or that only one of model and
    checkpoint has (all).
    """
    ckpt_fully_parallel_load: bool = flag(False)
    """Let each replica read an equal share of the common data and exchange the shares, instead of
    reading everything on each.
    """
    ckpt_verify: bool | None = flag(None)
    """Compare loaded data with checksums, and fail if the checkpoint has none. Default: compare if
    it has any; --no-ckpt-verify never compares.
    """
    pretrained_checkpoint: str | None = flag(None)
    """Directory to load weights from, as with --finetune, if --load contains no checkpoint yet."""
    exit_on_missing_checkpoint: bool = flag(False)
    """Fail if --load contains no checkpoint, even if it is empty or the same directory as --save.
    """
    override_existing_run: bool = flag(False)
    """Start from the checkpoint of --load and --ckpt-step, or from random weights, although --save
    contains another run or newer checkpoints of this one. They are replaced by saves of the same
    iteration.
    """
    use_checkpoint_args: bool = flag(False)
    """Take the shape of the model and its tokenizer from the checkpoint, overriding the command
    line.
    """
    ckpt_format: str = flag(
        "torch_dist",
        choices=("torch_dist", "torch"),
        aliases={"fsdp_dtensor": "torch_dist"},
        alias_note="torch_dist is written, which every layout reads",
    )
    """Format of saved checkpoints. torch is Megatron-LM's legacy format, whose files belong to one
    layout.
    """
    async_save: bool = flag(False)
    """Write checkpoints in the background. Training waits at most for the copy to host memory."""
    ckpt_fully_parallel_save: bool = flag(True)
    """Share the writing of replicated weights among all ranks that hold them."""
    ckpt_assume_constant_structure: bool = flag(False)
    """Plan the first save only and skip comparing the structure in later ones; a change is then an
    error.
    """
    dist_ckpt_workers: int | None = flag(None, positive=True)
    """Number of files that each rank writes at the same time. Default: half of the cores per rank
    of the node, at least 1 and at most 8.
    """
    ckpt_staging_mem_limit: float | None = flag(None, positive=True)
    """Host memory for the copies of an asynchronous save, in GiB per rank. Default: the bytes that
    the rank writes.
    """
    ckpt_save_timeout_minutes: float = flag(10.0, positive=True)
    """Time that the process of a rank can be dead or suspended before a save fails."""
    non_persistent_save_interval: int | None = flag(
        None,
        positive=True,
        requires={
            "non_persistent_ckpt_type": True,
            "non_persistent_local_ckpt_dir": True,
            "save": True,
        },
        reason="when more nodes are lost than there are copies, --save is loaded",
    )
    """Number of iterations between node-local checkpoints. When --save is due as well: with
    --async-save it is copied from the local one, otherwise only --save is written.
    """
    non_persistent_ckpt_type: str | None = flag(
        None,
        choices=("local", "global", "in_memory"),
        requires={
            "non_persistent_save_interval": True,
            "non_persistent_local_ckpt_dir": True,
            "save": True,
        },
        excludes={"ckpt_format": "torch"},
        reason="when more nodes are lost than there are copies, --save is loaded",
    )
    """Kind of non-persistent checkpoints; only local is supported."""
    non_persistent_local_ckpt_dir: str | None = flag(None)
    """Directory for local checkpoints on a disk of the node; environment variables are expanded."""
    replication: bool = flag(False, requires={"non_persistent_ckpt_type": "local"})
    """Keep copies of local checkpoints on the disks of other nodes."""
    replication_jump: int | None = flag(None, positive=True)
    """Distance in ranks between a writer and its replicas. Default: the number of ranks per node.
    """
    replication_factor: int = flag(2, positive=True)
    """Number of nodes that store each file of a local checkpoint, with --replication."""
    replication_interval: int = flag(
        1,
        positive=True,
        requires={"replication": True},
        reason="without it, no local checkpoint is stored on other nodes",
    )
    """Number of local checkpoints of which the first one is stored on other nodes, with
    --replication. A larger number costs less training time, and more iterations after the loss of a
    node.
    """
    exit_on_save_failure: bool = flag(False)
    """Stop if a checkpoint cannot be saved, instead of warning."""
    ckpt_convert_format: str | None = flag(
        None,
        choices=("torch_dist", "torch"),
        requires={"load": True, "ckpt_convert_save": True},
        reason="it converts the checkpoint of --load",
    )
    """Save the loaded checkpoint in this format and exit."""
    ckpt_convert_save: str | None = flag(None, requires={"ckpt_convert_format": True})
    """Parent directory for --ckpt-convert-format, which writes to its subdirectory FORMAT."""
