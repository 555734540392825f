"""Load a checkpoint into a run, and check that it fits."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.loading.load import RAISE, STRICTNESS
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.policy import ChosenCheckpoint
from megatron.core.optimizer import AVERAGE_PREFIX, OptimizerConfig, get_update_rule
from megatron.core.run_checkpoint.keys import is_extra_state
from megatron.core.run_checkpoint.native_reader import RunCheckpoint, load_from_source
from megatron.core.run_checkpoint.source import Source, TrainingState
from megatron.core.terminal import escape_control_chars
from megatron.core.transformer.transformer_config import (
    find_conditions,
    is_used,
    select_architecture_fields,
)
from megatron.core.wings import resolve
from megatron.training.checkpoint.contents import (
    REFERENCE_MARGINS,
    find_rng_key,
    get_model_state,
    set_rng_state,
    unpack_own_state,
)
from megatron.training.checkpoint.launch import damage_explained
from megatron.training.config.run_options import CheckpointConfig
from megatron.training.config.stored_args import normalize_stored_args, unpack_single
from megatron.training.initialize import seed_everything
from megatron.training.run import Run, TrainState

logger = logging.getLogger(__name__)

_LOAD_BASE_MODEL = "megatron.training.adapters.base_model:load_base_model"
_FP8_STATE_TO_LOAD = "megatron.training.checkpoint.fp8_state:fp8_state_to_load"
_RESTORE_FP8_STATE = "megatron.training.checkpoint.fp8_state:restore_fp8_state"

# Flags whose effect depends on the token at the end of a document.
_DOCUMENT_FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
# Flags that determine the training samples and their order.
_DATA_FLAGS = (
    "mock_data",
    "data_path",
    "train_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "split",
    "seq_length",
    "seed",
    "dataloader_type",
    "fim_data",
    "fim_rate",
    "json_keys",
    "append_eod",
    "sft",
    "sft_train_on",
    "sft_too_long",
    "sft_exclude",
    "dpo",
)
_MAX_VALUE = 300  # characters of a value in a warning: a blend may have thousands of members
# Flags that change the training of a run, besides its model, data and schedule. Learning rate,
# weight decay and the hyperparameters in parameter groups are compared where they are restored.
_TRAINING_FLAGS = (
    "bf16",
    "fp16",
    "fp8",
    "fp4",
    "main_params_dtype",
    "main_grads_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "global_batch_size",
    "hidden_dropout",
    "attention_dropout",
    "calculate_per_token_loss",
    *_DOCUMENT_FLAGS,
    "clip_grad",
    "ema_decay",
    "apply_wd_to_qk_layernorm",
    "mtp_loss_scaling_factor",
    "dpo_beta",
)
_EXPERT_FLAGS = (
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_load_balancing_type",
    "moe_router_force_load_balancing",
)
_EXPERT_BIAS_FLAGS = ("moe_router_bias_update_rate",)
_FP8_FLAGS = ("fp8_recipe",)
_FP4_FLAGS = ("fp4_recipe",)
_OPTIMIZER_FLAGS = {
    "ademamix": ("ademamix_alpha", "ademamix_alpha_warmup", "ademamix_beta3_warmup"),
    "muon": (
        "muon_nesterov",
        "muon_split_qkv",
        "muon_scale_mode",
        "muon_extra_scale_factor",
        "muon_num_ns_steps",
        "muon_coefficient_type",
    ),
}


def may_leave_weights(config: CheckpointConfig) -> bool:
    """Return whether weights that the checkpoint lacks may keep their initial values."""
    unexpected, _ = STRICTNESS[config.dist_ckpt_strictness]
    return unexpected != RAISE


class _Selection(NamedTuple):
    """The parts of a checkpoint that a run loads, besides the weights."""

    training: TrainingState | None
    with_optimizer: bool
    with_average: bool  # of the weights
    generators: str | None  # key of the states of this rank


def load_checkpoint(run: Run, checkpoint: ChosenCheckpoint[Source]) -> None:
    """Load a checkpoint of any layout and program. Collective.

    Every rank reads the boxes that it needs. From a checkpoint without training state (Hugging
    Face) a run takes the weights and starts at iteration 0.
    """
    config = run.config.checkpoint
    source = checkpoint.source
    began = time.perf_counter()
    if run.config.lora.lora_rank is not None:
        if not resolve(_LOAD_BASE_MODEL)(run, checkpoint):
            return  # the checkpoint is the base model, without adapters
    elif source.args.get("lora_base_model") is not None:
        raise ValueError(
            f"{source.description} contains adapters, not a model: train them further with "
            f"--lora-rank {source.args.get('lora_rank')}, or merge them first (convert.py --lora)"
        )
    # Select the parts to load, and check that they fit before anything changes.
    selection = _select_parts(run, checkpoint)
    training = selection.training
    with_optimizer = selection.with_optimizer

    # Read into the live tensors.
    model = get_model_state(run)
    with damage_explained(checkpoint.directory):
        report = load_from_source(
            _request_state(run, model, source, selection),
            source,
            strictness=config.dist_ckpt_strictness,
            skip=lambda key: is_skipped(key, with_optimizer, source.tensors),
            # Optionally, each replica reads a part of the common data, and sends it to the others.
            parallelization_group=run.ps.dp_cp.group if config.ckpt_fully_parallel_load else None,
        )

    # Restore everything that is not a tensor.
    _restore_optimizer(run, model, selection)
    _restore_average(run, source, selection)
    if training is not None:
        _restore_position(run, training, with_optimizer)
        run.train_data_fingerprint = source.args.get("train_data_fingerprint")
        run.train_token_digest = source.args.get("train_token_digest")
        stored_args = normalize_stored_args(source.args)
        run.changed_data_flags = list_data_differences(run.config.flags(), stored_args)
        stored_state = None
        if selection.generators is not None:
            stored_state = report.objects.get(selection.generators)
        _restore_generators(run, unpack_own_state(stored_state, run.ps))
        _restore_fp8(run, model, report.objects, had_fp8=bool(source.args.get("fp8")))
        run.reference_margins = report.objects.get(REFERENCE_MARGINS, {})

    run.loaded = source.description
    run.loading_seconds = time.perf_counter() - began
    loaded = "weights"
    if with_optimizer:
        loaded = "weights and optimizer"
    logger.info(
        f"loaded {loaded} of {source.description} at iteration {run.state.iteration} in "
        f"{run.loading_seconds:.2f} s"
    )


def _select_parts(run: Run, checkpoint: ChosenCheckpoint[Source]) -> _Selection:
    """Return the parts to load; check that they fit, and log how the runs differ."""
    config = run.config.checkpoint
    source = checkpoint.source
    choice = checkpoint.choice
    # Other programs and versions spell some arguments differently.
    stored_args = normalize_stored_args(source.args)
    for warning in check_same_model(run.config.flags(), stored_args, source.description):
        logger.warning(warning)
    training = None if choice.weights_only else source.training
    # --no-load-optim applies to the checkpoint that the flags name. A run that continues its own
    # checkpoint needs its optimizer, unless it never saves one.
    skips_optimizer = config.no_load_optim and (not choice.continues or config.no_save_optim)
    with_optimizer = training is not None and not skips_optimizer
    if with_optimizer:
        _check_optimizer(run.config.optimizer, source)
        values = run.config.flags() | {"end_of_document": run.end_of_document}
        differences = list_training_differences(values, stored_args)
        if differences:
            logger.warning(
                f"{source.description} was trained with other flags: {'; '.join(differences)}. The "
                "run continues with the flags of this launch"
            )
    # The average of the weights (--ema-decay) continues only with the training state of its run.
    with_average = run.optimizer.has_average and _has_average(source) and training is not None
    generators = None
    if training is not None and not config.no_load_rng:
        generators = find_rng_key(run.ps, run.config.parallel, training.rng)
    return _Selection(training, with_optimizer, with_average, generators)


def _has_average(source: Source) -> bool:
    return any(key.startswith(AVERAGE_PREFIX) for key in source.tensors)


def _request_state(
    run: Run, model: ShardedStateDict, source: Source, selection: _Selection
) -> ShardedStateDict:
    """Return the live tensors to fill, and the objects to read, by key."""
    # With an optimizer the weights follow from its main parameters, which are more precise.
    if selection.with_optimizer:
        requested_state = run.optimizer.state_to_load(model)
    else:
        requested_state = run.optimizer.weights(model, live=True)
    if selection.with_average:
        requested_state |= run.optimizer.average_state(model)
    # Request objects only where the checkpoint has them: other layouts and programs do not.
    generators = selection.generators
    if generators is not None:
        requested_state[generators] = ShardedObject(generators, None)
    if selection.training is not None and isinstance(source, RunCheckpoint):
        stored_objects = source.reader.metadata.objects
        if run.config.model.fp8 is not None:
            requested_state |= resolve(_FP8_STATE_TO_LOAD)(
                run.chunks, run.ps.ep, model, stored_objects
            )
        if REFERENCE_MARGINS in stored_objects:
            requested_state[REFERENCE_MARGINS] = ShardedObject(REFERENCE_MARGINS, None)
    return requested_state


def _restore_optimizer(run: Run, model: ShardedStateDict, selection: _Selection) -> None:
    """Restore parameter groups and loss scale, and make weights and main parameters agree."""
    training = selection.training
    if not selection.with_optimizer or training is None:
        # Main parameters start as copies of the weights.
        run.optimizer.reload_model_params(model)
        return
    state = {
        "optimizer": {"param_groups": training.param_groups},
        "grad_scaler": training.grad_scaler or {},
    }
    # Casts the main parameters that were just read to the dtype of the weights.
    run.optimizer.load_state_dict(state, model)


def _restore_average(run: Run, source: Source, selection: _Selection) -> None:
    """Begin the average of the weights where none is loaded, or log that one is not used."""
    if selection.with_average:
        return
    # Without a stored average, the loaded weights are the first ones to average.
    if run.optimizer.has_average:
        run.optimizer.reset_average()
        logger.info("the average of --ema-decay starts from the loaded weights")
    elif _has_average(source):
        logger.warning(
            f"the average of the weights in {source.description} is not used, and later "
            "checkpoints will not contain one: give --ema-decay to continue it"
        )


def check_same_model(
    flags: Mapping[str, Any], stored_args: Mapping[str, Any], source: str
) -> list[str]:
    """Return warnings about arguments by which the computation differs.

    Raises ValueError that names every argument by which the shape of the model differs.
    """
    # Compare both sides in one spelling, e.g. of a default of RoPE.
    flags = normalize_stored_args(flags)
    wrong = _list_differences("shapes", flags, stored_args)
    if wrong:
        listed = "\n  ".join(wrong)
        raise ValueError(
            f"{source} holds another model:\n  {listed}\nchange these flags, or take them from the "
            "checkpoint with --use-checkpoint-args"
        )
    differences = _list_differences("mathematics", flags, stored_args)
    return [
        f"{source} was trained with other mathematics: {difference}" for difference in differences
    ]


def _list_differences(
    aspect: str, flags: Mapping[str, Any], stored_args: Mapping[str, Any]
) -> list[str]:
    """Return a line for each architecture field of `aspect` whose stored value differs."""
    differences = []
    conditions = find_conditions(flags)
    for field in select_architecture_fields(aspect):
        name = field.name
        if name in stored_args and is_used(field, conditions) and stored_args[name] != flags[name]:
            value = escape_control_chars(str(stored_args[name]))
            differences.append(f"{name}: {value} in the checkpoint, {flags[name]} now")
    return differences


def list_training_differences(
    flags: Mapping[str, Any], stored_args: Mapping[str, Any]
) -> list[str]:
    """Return a text for each flag that changes the training and differs from the stored one."""
    # Compare both sides in one spelling, e.g. of --grad-reduce-in-bf16.
    flags = normalize_stored_args(flags)
    names = _TRAINING_FLAGS + _OPTIMIZER_FLAGS.get(flags["optimizer"], ())
    if (flags["num_experts"] or 0) > 1:
        names += _EXPERT_FLAGS
        if flags["moe_router_enable_expert_bias"]:
            names += _EXPERT_BIAS_FLAGS
    if any(flags[name] for name in _DOCUMENT_FLAGS):
        names += ("end_of_document",)
    if flags["fp8"] is not None:
        names += _FP8_FLAGS
    if flags["fp4"] is not None:
        names += _FP4_FLAGS
    # An average that begins or ends is reported where it is loaded.
    if None in (stored_args.get("ema_decay"), flags["ema_decay"]):
        names = tuple(name for name in names if name != "ema_decay")
    return _describe_differences(names, flags, stored_args)


def list_data_differences(flags: Mapping[str, Any], stored_args: Mapping[str, Any]) -> list[str]:
    """Return a text for each flag of the training data that differs from the stored one."""
    return _describe_differences(_DATA_FLAGS, normalize_stored_args(flags), stored_args)


def _describe_differences(
    names: Iterable[str], flags: Mapping[str, Any], stored_args: Mapping[str, Any]
) -> list[str]:
    texts = []
    for name in names:
        # Megatron-LM stores a list of one value as the value.
        if name not in stored_args or stored_args[name] in (
            flags[name],
            unpack_single(flags[name]),
        ):
            continue
        value = escape_control_chars(_shorten(stored_args[name]))
        texts.append(f"{name}: {value} in the checkpoint, {_shorten(flags[name])} now")
    return texts


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."


def _check_optimizer(config: OptimizerConfig, source: Source) -> None:
    """Raise ValueError unless the checkpoint has the state of this optimizer."""
    ways_out = (
        "continue with a fresh one (--no-load-optim), or start a new run from its weights "
        "(--finetune)"
    )
    if source.training is None or source.training.param_groups is None:
        raise ValueError(f"{source.description} holds no optimizer: {ways_out}")
    stored_optimizer = source.args.get("optimizer", config.optimizer)
    if stored_optimizer != config.optimizer:
        raise ValueError(
            f"{source.description} holds the optimizer state of --optimizer {stored_optimizer}, "
            f"which --optimizer {config.optimizer} cannot use: {ways_out}, or continue with "
            f"--optimizer {stored_optimizer}"
        )
    # The same optimizer may still have other states, e.g., without momentum.
    conflict = get_update_rule(stored_optimizer).find_conflict(config, source.training.param_groups)
    if conflict is not None:
        flag, old, new = conflict
        raise ValueError(
            f"{source.description} holds the state of {flag} {old}, which {flag} {new} cannot use: "
            f"{ways_out}, or continue with {flag} {old}"
        )


def is_skipped(key: str, with_optimizer: bool, stored_keys: Collection[str]) -> bool:
    """Return whether a load skips a key of the checkpoint that no rank has requested.

    It skips weights that have a main parameter in `stored_keys`, the state of an optimizer that is
    not loaded, an average likewise, generators of other ranks and layouts, the reference of --dpo,
    and the extra states of Megatron-core.
    """
    if key.startswith("optimizer."):
        return not with_optimizer
    if key.startswith(AVERAGE_PREFIX):
        return True
    if with_optimizer and f"optimizer.state.param.{key}" in stored_keys:
        return True
    return key.startswith("rng_state/") or key == REFERENCE_MARGINS or is_extra_state(key)


def _restore_position(run: Run, training: TrainingState, with_optimizer: bool) -> None:
    """Restore iteration and consumed samples, which determine the next data, and the schedule."""
    run.state = TrainState(
        training.iteration,
        training.consumed_train_samples,
        training.consumed_valid_samples,
        training.num_floating_point_operations_so_far,
    )
    if with_optimizer and training.scheduler is not None:
        run.scheduler.load_state_dict(training.scheduler, training.param_groups or ())
    else:
        # Learning rate and weight decay follow from the flags and the position alone.
        run.scheduler.step(run.state.consumed_train_samples)


def _restore_generators(run: Run, state: Any) -> None:
    """Restore the generators that fit.

    Those of another layout, device or program are seeded again, so that the run can be repeated.
    """
    # Seed in any case: of the stored states only some may fit.
    seed_everything(run.config.training.seed, run.ps, run.rng, run.state.iteration)
    unfit = ["of this layout"] if state is None else set_rng_state(state, run.rng)
    if unfit and not run.config.checkpoint.no_load_rng:
        logger.info(
            f"the checkpoint has no random number generators {' and '.join(unfit)}: they are "
            "seeded again from --seed and the iteration"
        )


def _restore_fp8(
    run: Run, model: ShardedStateDict, objects: Mapping[str, Any], had_fp8: bool
) -> None:
    """Restore the fp8 scales that fit, and log if the checkpoint has scales of which none fits."""
    config = run.config.model
    # Loading has quantized the fp8 parameters with fresh scales.
    is_restored = False
    if config.low_precision is not None:
        is_restored = resolve(_RESTORE_FP8_STATE)(run.chunks, run.ps.ep, model, objects, config)
    if is_restored:
        run.optimizer.requantize()
    elif had_fp8:
        now = f"of --fp8-recipe {config.fp8_recipe}"
        if config.fp8 is None:
            now = "without fp8"
        logger.info(
            f"the scales of fp8 in the checkpoint are not used: this run is {now}, or of another "
            "layout"
        )
