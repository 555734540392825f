"""The frozen base model of adapters: loaded at every launch, and never saved.

Checkpoints of a run with adapters contain its directory and a digest of its values. A launch that
resumes loads it from this directory, or from `--pretrained-checkpoint` if it has moved.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, narrow
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.policy import CheckpointRef, ChosenCheckpoint
from megatron.core.module import initialize_parameters, param_info
from megatron.core.object_path import path_of
from megatron.core.optimizer.grad_norm import counts_for_model
from megatron.core.parallel_state import ParallelState, gather_objects
from megatron.core.run_checkpoint.formats import find_checkpoint, open_found
from megatron.core.run_checkpoint.native_reader import load_from_source
from megatron.core.run_checkpoint.source import Source
from megatron.core.safe_files.schema import sequence, text
from megatron.core.terminal import escape_control_chars
from megatron.core.wings import resolve
from megatron.training.adapters.adapted_layers import AdaptedExperts, reset_magnitudes
from megatron.training.adapters.encoded_layers import EncodedLayer, index_encoded_layers
from megatron.training.adapters.frozen_weights import (
    Components,
    load_frozen_weights,
    open_stored_components,
)
from megatron.training.adapters.targets import (
    compute_scale,
    find_unmatched_targets,
    iterate_linear_layers,
    list_available,
)
from megatron.training.checkpoint.resume import check_same_model, is_skipped
from megatron.training.config.stored_args import normalize_stored_args
from megatron.training.run import BaseModel, Run

_BASE_MODEL = sequence(text(4096), limit=3, least=3)

logger = logging.getLogger(__name__)

_READ_ADAPTER = "megatron.conversion.huggingface.adapter_reader:read_adapter"
_MAX_ELEMENTS = 1 << 22  # whose bits are summed up at once
_SAME_IN_ALL_LAUNCHES = (
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "lora_dora",
    "lora_base_encoding",
)


def separate_adapters(state: ShardedStateDict) -> tuple[ShardedStateDict, ShardedStateDict]:
    """Return the parameters of the adapters, and those of the base model."""
    adapters: ShardedStateDict = {}
    base: ShardedStateDict = {}
    for key, entry in state.items():
        assert isinstance(entry, ShardedTensor) and entry.local is not None
        (adapters if entry.local.requires_grad else base)[key] = entry
    return adapters, base


def load_base_model(run: Run, checkpoint: ChosenCheckpoint[Source]) -> bool:
    """Load the frozen weights, and give the adapters initial values. Collective.

    Returns whether `checkpoint` contains adapters, which the caller loads; if not, it is the base
    model itself.
    """
    source = checkpoint.source
    flags = run.config.checkpoint
    checkpoint_base = _read_base_model(source)
    if checkpoint_base is not None:
        _check_same_adapters(run.config.flags(), source)
        directory = flags.pretrained_checkpoint or checkpoint_base.directory
        ref, base = _open_base_model(run, directory)
        directory = str(ref.directory.absolute())
    elif checkpoint.choice.weights_only:
        base = source
        directory = str(checkpoint.directory.absolute())
    else:
        raise ValueError(
            f"--lora-rank {run.config.lora.lora_rank}: {source.description} contains a whole model "
            "with its training state, not adapters. To train adapters on it, give it as "
            "--pretrained-checkpoint, or add --finetune"
        )

    state: ShardedStateDict = {}
    for chunk in run.chunks:
        state |= chunk.sharded_state_dict()
    adapters, frozen = separate_adapters(state)
    initialize_parameters(adapters, run.config.loader.seed)
    base_args = normalize_stored_args(base.args)
    for warning in check_same_model(run.config.flags(), base_args, base.description):
        logger.warning(warning)
    layers = index_encoded_layers(run.chunks)
    components: Components | None = None
    encoding = run.config.lora.lora_base_encoding
    if encoding is not None:
        components = Coordination.of(None).run_on_all(
            lambda: open_stored_components(directory, encoding)
        )
    _load_frozen(frozen, layers, base, components, flags.dist_ckpt_strictness)
    for chunk in run.chunks:
        reset_magnitudes(chunk)
    identity = compute_identity(frozen, run.ps, layers)
    run.base_model = BaseModel(directory, identity, base.args.get("hf_model_type") or "")
    logger.info(f"the adapters belong to the frozen weights of {base.description}")
    if checkpoint_base is not None:
        _check_same_base_model(run.base_model, checkpoint_base, source)
        return True
    if run.config.lora.lora_load is not None:
        _load_peft_files(run, adapters)
    run.optimizer.reload_model_params(adapters)
    run.loaded = base.description
    return False


def _load_frozen(
    state: ShardedStateDict,
    layers: Mapping[Tensor, EncodedLayer],
    base: Source,
    components: Components | None,
    strictness: str,
) -> None:
    """Load the frozen weights, those of `layers` encoded. Collective."""
    dense: ShardedStateDict = {}
    encoded: ShardedStateDict = {}
    for key, entry in state.items():
        assert isinstance(entry, ShardedTensor)
        (encoded if entry.local in layers else dense)[key] = entry
    # Stages have different layers.
    encoded_keys: set[str] = set()
    for keys_of_rank in gather_objects(list(encoded)):
        encoded_keys.update(keys_of_rank)
    load_from_source(
        dense,
        base,
        strictness=strictness,
        skip=lambda key: key in encoded_keys or is_skipped(key, False, base.tensors),
    )
    Coordination.of(None).run_on_all(lambda: load_frozen_weights(encoded, layers, base, components))


def _load_peft_files(run: Run, adapters: ShardedStateDict) -> None:
    """Fill the adapters from the directory --lora-load. Collective."""
    lora = run.config.lora
    assert lora.lora_load is not None and run.base_model is not None
    directory = path_of(lora.lora_load)
    # Stages have different layers; the files must have those of all.
    keys: set[str] = set()
    for keys_of_rank in gather_objects(list(adapters)):
        keys.update(keys_of_rank)
    model_type = run.base_model.model_type
    model = run.config.model
    options = (keys, lora.lora_rank, compute_scale(lora))
    values: dict[str, torch.Tensor] = Coordination.of(None).run_on_all(
        lambda: resolve(_READ_ADAPTER)(directory, model, model_type, *options)
    )
    with torch.no_grad():
        for key, entry in adapters.items():
            assert isinstance(entry, ShardedTensor)
            for box in entry.boxes:
                box.tensor.copy_(narrow(values[key], box.offset, tuple(box.tensor.shape)))
    logger.info(f"the adapters start from {directory}")


def _read_base_model(source: Source) -> BaseModel | None:
    """Return the base model that a checkpoint of adapters names, None for any other checkpoint."""
    fields = source.args.get("lora_base_model")
    if fields is None:
        return None
    location = f"{source.description}: lora_base_model"
    directory, identity, model_type = _BASE_MODEL(fields, location)
    return BaseModel(directory, identity, model_type)


def check_adapters(run: Run) -> None:
    """Raise ValueError without a base model, or for targets that match nothing. Collective."""
    lora = run.config.lora
    if run.base_model is None:
        raise ValueError(
            f"--lora-rank {lora.lora_rank} without a base model: adapters on random weights are "
            "useless. Give --pretrained-checkpoint (or --load with --finetune)"
        )
    local_paths = []
    for chunk in run.chunks:
        local_paths += list_available(iterate_linear_layers(chunk))
    # Layers may differ between pipeline stages.
    paths = []
    for paths_of_rank in gather_objects(local_paths):
        paths += paths_of_rank
    unmatched = find_unmatched_targets(paths, lora.lora_targets)
    if unmatched:
        raise ValueError(
            f"--lora-targets {' '.join(unmatched)}: no layer has that name. Use names of layers or "
            f"projections, e.g. {' '.join(sorted(set(paths))[:4])}"
        )
    if lora.lora_dora and run.config.checkpoint.save_hf is not None:
        _check_experts_without_magnitudes(run)


def _check_experts_without_magnitudes(run: Run) -> None:
    """Raise ValueError if experts have magnitudes, which PEFT cannot store. Collective."""
    local_names = []
    for chunk in run.chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, AdaptedExperts):
                local_names.append(name)
    names = sum(gather_objects(local_names), [])
    if names:
        raise ValueError(
            f"--save-hf with --lora-dora of experts ({names[0]}): PEFT has no magnitudes for "
            "parameters of experts. Leave out --save-hf (checkpoints of the run contain them) or "
            "--lora-dora, or adapt other layers: --lora-targets linear_qkv linear_proj"
        )


def _open_base_model(run: Run, directory: str) -> tuple[CheckpointRef, Source]:
    """Open the base model of a run that resumes. Collective."""
    ranks = Coordination.of(None)

    def find() -> CheckpointRef:
        ref = find_checkpoint(path_of(directory))
        if ref is None:
            raise ValueError(
                f"{directory}, the base model of the adapters, contains no checkpoint: give the "
                "directory that it has been moved to as --pretrained-checkpoint"
            )
        return ref

    ref = ranks.run_on_rank0(find)
    verify = run.config.checkpoint.ckpt_verify
    return ref, ranks.run_on_all(lambda: open_found(ref, optimizer=False, verify=verify))


def _check_same_adapters(flags: Mapping[str, Any], source: Source) -> None:
    """Raise ValueError if the adapters in a checkpoint differ from those of the flags."""
    differences = []
    for name in _SAME_IN_ALL_LAUNCHES:
        checkpoint_value = source.args.get(name)
        value = flags[name]
        if isinstance(value, list | tuple):
            checkpoint_value = sorted(checkpoint_value or ())
            value = sorted(value)
        if checkpoint_value != value:
            flag_name = f"--{name.replace('_', '-')}"
            escaped_value = escape_control_chars(str(checkpoint_value))
            differences.append(f"{flag_name}: {escaped_value} in the checkpoint, {value} now")
    if differences:
        raise ValueError(
            f"{source.description} contains other adapters: {'; '.join(differences)}. Change the "
            "flags, or begin a new run with another --save"
        )


def _check_same_base_model(base: BaseModel, expected: BaseModel, source: Source) -> None:
    """Raise ValueError if the frozen weights are not those that the adapters were trained on.

    `expected` is the base model according to the checkpoint of the adapters.
    """
    dtype, _, _ = base.identity.partition(":")
    expected_dtype, _, _ = expected.identity.partition(":")
    if dtype != expected_dtype:
        logger.warning(
            f"{source.description} was trained on {expected_dtype} weights, and continues on "
            f"{dtype}: whether the base model is the same is not checked"
        )
    elif base.identity != expected.identity:
        expected_directory = escape_control_chars(expected.directory)
        raise ValueError(
            f"{base.directory} is another base model (identity {base.identity}) than the adapters "
            f"in {source.description} were trained on ({expected.identity}, loaded from "
            f"{expected_directory}): give that one as --pretrained-checkpoint"
        )


# ---- Identity ----


def compute_identity(
    state: ShardedStateDict, ps: ParallelState, layers: Mapping[Tensor, EncodedLayer]
) -> str:
    """Return a digest of the values of all parameters, the same at every layout. Collective.

    Encoded weights of `layers` have the digest of the decoded ones.

    It sums the bits of the elements, and their squares, as integers modulo 2^64, with a factor for
    each key: sums of integers do not depend on the layout.
    """
    device = torch.device("cpu")
    totals = [torch.zeros(2, dtype=torch.int64)]
    dtype = ""
    for key, entry in state.items():
        assert isinstance(entry, ShardedTensor) and entry.local is not None
        dtype = str(entry.dtype).removeprefix("torch.")
        info = param_info(entry.local)  # type: ignore[arg-type]
        layer = layers.get(entry.local)
        device = entry.local.device if layer is None else layer.frozen.device
        is_first_replica = ps.config.splits_experts or ps.dp_cp.is_first
        if not (is_first_replica and counts_for_model(info, ps, sharded=False)):
            continue
        if layer is not None:
            entry = info.sharding.describe(key, layer.decode_weight())
        factors = _compute_factors(key).to(device)
        for box in entry.boxes:
            totals.append(_sum_bits(box.tensor) * factors)
    total = torch.stack([sums.to(device) for sums in totals]).sum(0)
    dist.all_reduce(total)
    words = [value % (1 << 64) for value in total.tolist()]
    return f"{dtype}:{words[0]:016x}{words[1]:016x}"


def _compute_factors(key: str) -> torch.Tensor:
    """Return the factors of a parameter's sums, int64 [2]: 56 bits each of a digest of its key."""
    digest = hashlib.sha256(key.encode()).digest()
    factor = int.from_bytes(digest[:7], "little")
    factor_of_squares = int.from_bytes(digest[7:14], "little")
    return torch.tensor([factor, factor_of_squares], dtype=torch.int64)


def _sum_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of the elements' bits and of their squares, as int64 that wrap around."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = torch.zeros(2, dtype=torch.int64, device=values.device)
    bits = values.detach().reshape(-1).view(integers[values.element_size()])
    for block in bits.split(_MAX_ELEMENTS):
        wide = block.to(torch.int64)
        sums += torch.stack((wide.sum(), wide.square().sum()))
    return sums
