"""The files of a DeepSpeed universal checkpoint, and arguments and training state between them and
ours.

<root>/latest_universal                            name of the directory
<root>/<tag>/mp_rank_XX_model_states.pt            arguments, schedule, counters; equal for all XX
but rank numbers <root>/<tag>/zero/optimizer_state.pt               parameter groups (not in
BLOOM-era directories) <root>/<tag>/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt; of SGD
{fp32,momentum_buffer,step}.pt

Parameters have names in three styles, those of the programs that train them. A pipeline numbers its
stages: Megatron-DeepSpeed has 0 cast, 1 embedding, 2.. layers, final norm, head; BigScience's fork
(BLOOM) has two transpositions around the layers. Without a pipeline the names are those of the
module. Both programs descend from older Megatron-LM: most of their arguments have the same names, a
few differ or are missing, and a few are no model of ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.conversion.file_names import ZERO
from megatron.conversion.model_space.pieces import find_archive_faults
from megatron.conversion.model_space.source import (
    GRAD_SCALER,
    OPTIMIZER_STATES,
    PARAM_GROUP,
    RANKS,
    SIZE,
    WORD_EMBEDDINGS,
    Shape,
    TrainingState,
    check_namespace,
    check_scalar,
    check_scheduler,
    plain_args,
    plain_numbers,
    refuse_other_models,
)
from megatron.core.dist_checkpointing import safe_load
from megatron.core.dist_checkpointing.format.safe_globals import Placeholder
from megatron.core.dist_checkpointing.format.schema import COUNT, number, optional, record, sequence
from megatron.core.dist_checkpointing.format.schema import key as check_key
from megatron.core.optimizer import UPDATE_RULES
from megatron.core.transformer.transformer_config import TransformerConfig

# Within a layer, and within the embedding: model space -> universal.
_IN_LAYER = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.q_layernorm.": "self_attention.q_layernorm.",
    "self_attention.k_layernorm.": "self_attention.k_layernorm.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
}
_IN_EMBEDDING = {
    "embedding.word_embeddings.": "word_embeddings.",
    "embedding.position_embeddings.": "position_embeddings.",
    "embedding.word_embeddings_layernorm.": "word_embeddings.norm.",
}
_FINAL_NORM = "decoder.final_layernorm."
_HEAD = "output_layer.weight"
_KEY = re.compile(r"(?:decoder\.layers\.(\d+)\.)?(.*?)(weight|bias)")


class Style(NamedTuple):
    """How one program names parameters; `{n}` is the number of a layer or of what comes after the
    layers.
    """

    first_layer: int  # number of layer 0
    gap: int  # numbers without parameters between the last layer and the final norm
    tied_embedding: str = "tied_modules.embed."
    untied_embedding: str = "1."
    layer: str = "{n}."
    final_norm: str = "{n}."
    head: str = "{n}.lm_head.weight"

    def of(self, key: str, num_layers: int, tied: bool) -> str:
        """The universal name of model-space `key`; raises ValueError for a tensor that these
        programs do not have.
        """
        end = self.first_layer + num_layers + self.gap
        match = _KEY.fullmatch(key)
        number, module, kind = match.groups() if match else (None, key, "")
        if number is not None and module in _IN_LAYER:
            return self.layer.format(n=self.first_layer + int(number)) + _IN_LAYER[module] + kind
        if module in _IN_EMBEDDING:
            return (
                (self.tied_embedding if tied else self.untied_embedding)
                + _IN_EMBEDDING[module]
                + kind
            )
        if module == _FINAL_NORM:
            return self.final_norm.format(n=end) + kind
        if key == _HEAD:
            return self.head.format(n=end + 1)
        raise ValueError(
            f"universal checkpoints have no name for {key}, as for nothing of --num-experts, --multi-latent-attention "
            "and norms behind a block: write torch_dist, legacy or hf"
        )


STYLES = {
    "pipeline": Style(2, 0),
    "bigscience": Style(3, 1),
    "no-pipeline": Style(
        0,
        0,
        "language_model.embedding.",
        "language_model.embedding.",
        "language_model.encoder.layers.{n}.",
        "language_model.encoder.final_layernorm.",
        "language_model.output_layer.weight",
    ),
}

_FIRST_NORM = re.compile(r"(?:language_model\.encoder\.layers\.)?(\d+)\.input_layernorm\.weight")


def model_space_names(names: Sequence[str], description: str) -> dict[str, str]:
    """Model-space key -> universal name; layers are counted from the smallest number that has an
    input norm.

    Raises ValueError for names of another kind of model, or layers with gaps.
    """
    plain = {name: name.removeprefix("module.") for name in names}
    layers = {int(match[1]) for match in map(_FIRST_NORM.fullmatch, plain.values()) if match}
    if not layers:
        raise ValueError(
            f"{description} has no layers with the names of Megatron-DeepSpeed (N.input_layernorm.weight)"
        )
    first = min(layers)
    if layers != set(range(first, first + len(layers))):
        raise ValueError(
            f"{description}: layers {sorted(layers)} have gaps: the directory is incomplete"
        )
    modules = [
        f"decoder.layers.{number}.{module}" for number in range(len(layers)) for module in _IN_LAYER
    ]
    keys = [
        module + kind
        for module in (*modules, *_IN_EMBEDDING, _FINAL_NORM)
        for kind in ("weight", "bias")
    ]
    keys.append(_HEAD)
    styles = [style._replace(first_layer=first) for style in STYLES.values()]
    known = {
        s.of(key, len(layers), tied): key for s in styles for tied in (True, False) for key in keys
    }
    unknown = [name for name in names if plain[name] not in known]
    if unknown:
        raise ValueError(
            f"{description}: {', '.join(unknown)} are not parameters of a GPT that is supported here"
        )
    found = {known[plain[name]]: name for name in names}
    if len(found) < len(names):
        twice = [name for name in names if found[known[plain[name]]] != name]
        raise ValueError(
            f"{description}: {', '.join(twice)} and other names are the same parameters of a GPT"
        )
    return found


_VOCABULARY = record({"original_vocab_size?": optional(SIZE)})
MODEL_STATE_SCHEMA = record(
    {
        "args?": check_namespace,
        "iteration?": optional(COUNT),
        "global_steps?": optional(COUNT),
        "global_samples?": optional(COUNT),
        "skipped_steps?": optional(COUNT),
        "num_floating_point_operations_so_far?": optional(number(0)),
        "lr_scheduler?": optional(check_scheduler),
        "megatron_param_groups?": optional(sequence(PARAM_GROUP)),
        "grad_scaler?": optional(GRAD_SCALER),
        "universal_checkpoint_info?": optional(_VOCABULARY),
        "checkpoint_info?": optional(_VOCABULARY),
        "checkpoint_parallel_dimensions?": optional(record({"tp_degree?": optional(RANKS)})),
    }
)
OPTIMIZER_SCHEMA = record({"param_groups": sequence(PARAM_GROUP)})

OPTIMIZER_STATE = "optimizer_state.pt"
STEP = "step.pt"
STATE_FILES = {"param": "fp32.pt"} | {name: f"{name}.pt" for name in OPTIMIZER_STATES[1:]}


def model_state_name(rank: int) -> str:
    return f"mp_rank_{rank:02d}_model_states.pt"


def list_universal_damage(directory: Path) -> list[str]:
    """Files that are missing or truncated. Raises CheckpointError for other damage.

    A state that one parameter has (Adam's moments or the momentum of SGD) all must have.
    """
    folders = _parameter_folders(directory)
    names = [
        name for name in STATE_FILES.values() if any((folder / name).exists() for folder in folders)
    ]
    required = {folder / name for folder in folders for name in {*names, STATE_FILES["param"]}}
    files = required | {directory / model_state_name(0)} | set(directory.rglob("*.pt"))
    return find_archive_faults(sorted(files), directory)


def _parameter_folders(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / ZERO).iterdir() if path.is_dir())


class UniversalFiles:
    """What is in the files; tensors are mapped when they are asked for."""

    def __init__(self, directory: Path) -> None:
        if not (directory / ZERO).is_dir():
            raise ValueError(
                f"{directory} is no DeepSpeed universal checkpoint: it has no {ZERO}/ directory"
            )
        self.directory = directory
        self.description = f"DeepSpeed universal checkpoint {directory}"
        states = sorted(directory.glob("mp_rank_*_model_states.pt"))
        if not states:
            raise ValueError(f"{self.description} is incomplete: it has no {model_state_name(0)}")
        self.state: dict[str, Any] = dict(MODEL_STATE_SCHEMA(safe_load(states[0]), str(states[0])))
        self.args: dict[str, Any] = vars(
            self.state.pop("args", argparse.Namespace())
        )  # under their names
        folders = [path.name for path in _parameter_folders(directory)]
        sequence(check_key)(folders, str(directory / ZERO))
        self.names = model_space_names(folders, self.description)  # model-space key -> parameter
        self.shapes: dict[str, Shape] = {}
        self.shapes |= {key: tuple(self.tensor(key, "param").shape) for key in self.names}

    def entry(self, key: str, state: str) -> Any:
        """One file: a dict with `param`, or from ZeRO-3 the flat tensor itself."""
        path = self.directory / ZERO / self.names[key] / STATE_FILES[state]
        if not path.exists():
            raise ValueError(f"{self.description} is incomplete: {path} is missing")
        return safe_load(path)

    def tensor(self, key: str, state: str) -> torch.Tensor:
        entry = self.entry(key, state)
        if isinstance(entry, dict) and entry.get("is_expert_param"):
            raise ValueError(
                f"{self.description}: {self.names[key]} is an expert, which is not supported"
            )
        tensor = entry.get("param") if isinstance(entry, dict) else entry
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{self.description}: {STATE_FILES[state]} of {self.names[key]} holds no tensor"
            )
        shape = self.shapes.get(key, tensor.shape)  # of its parameter, which is looked at first
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(
                f"{self.description}: {STATE_FILES[state]} of {self.names[key]} has {tensor.dtype} of shape "
                f"{list(tensor.shape)}, but must have floating-point numbers of shape {list(shape)}"
            )
        return tensor.detach()

    def optimizer_state(self) -> dict[str, Any] | None:
        path = self.directory / ZERO / OPTIMIZER_STATE
        return dict(OPTIMIZER_SCHEMA(safe_load(path), str(path))) if path.exists() else None

    def states(self) -> tuple[str, ...]:
        """Return the states that the optimizer has of each parameter."""
        rule = UPDATE_RULES.get(self.args.get("optimizer") or "adam", UPDATE_RULES["adam"])
        sets = rule.STATE_SETS
        folder = self.directory / ZERO / self.names[WORD_EMBEDDINGS]
        for states in sets:
            if all((folder / STATE_FILES[name]).exists() for name in states):
                return ("param", *states)
        return ("param", *sets[0])  # reading them reports the missing file

    def step(self) -> int:
        """Of Adam: stored per parameter, all equal; BLOOM-era directories count the steps that were
        not skipped.
        """
        paths = [self.directory / ZERO / name / STEP for name in self.names.values()]
        steps = {int(check_scalar(safe_load(path), str(path))) for path in paths if path.exists()}
        if len(steps) > 1:
            raise ValueError(
                f"{self.description}: parameters are at different steps: {sorted(steps)}"
            )
        if steps:
            return steps.pop()
        return (self.state.get("global_steps") or 0) - (self.state.get("skipped_steps") or 0)


# Their argument -> the only values that our model can express.
_REQUIRED = {
    "apply_residual_connection_post_layernorm": (False, None),
    "glu_activation": (None,),
    "num_experts": ([1], None),
    "onnx_safe": (None,),
}
# The change of Megatron-DeepSpeed that brought blocks of q, k and v also brought this option.
BLOCKS_MARK = "ds_sequence_parallel_fpdt"
_RENAMED = {
    "layernorm_epsilon": "norm_epsilon",
    "embed_layernorm": "embedding_layernorm",
    "rope_theta": "rotary_base",
}
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_POSITION_TYPES = {
    1: "rope",
    2: "learned_absolute",
    3: "alibi",
}  # PositionEmbeddingType of BigScience's fork
_SCHEDULE = (
    "max_lr", "lr_warmup_steps", "num_steps", "lr_decay_style", "lr_decay_steps", "min_lr", "start_wd", "end_wd",
    "wd_incr_style", "wd_incr_steps", "init_lr", "wsd_decay_steps", "wsd_decay_style",
)  # fmt: skip
_RENAMED_SCHEDULE = {name: f"lr_{name}" for name in ("warmup_steps", "decay_steps", "decay_style")}
_BY_TOKENS = ("lr_decay_tokens", "decay_tokens")


def read_args(namespace: Mapping[str, Any], description: str) -> dict[str, Any]:
    """Their arguments under our names; values that are not plain data are left out."""
    refuse_other_models(namespace, _REQUIRED, description)
    args = {_RENAMED.get(name, name): value for name, value in plain_args(namespace).items()}
    args["num_experts"] = None  # their [1] is Megatron-LM's None
    args["position_embedding_type"] = _position_type(namespace)
    normalization = args.get("normalization", "layernorm")
    args["normalization"] = _NORMS.get(normalization, normalization)
    if args.get("num_key_value_heads") is not None:
        args["num_query_groups"] = args["num_key_value_heads"]
        args["group_query_attention"] = args["num_query_groups"] != args.get("num_attention_heads")
    return args


def _position_type(namespace: Mapping[str, Any]) -> str:
    kind = namespace.get("position_embedding_type")
    if isinstance(kind, Placeholder):
        if kind.args not in [(number,) for number in _POSITION_TYPES]:
            raise ValueError(f"position_embedding_type {kind} is not supported")
        return _POSITION_TYPES[kind.args[0]]
    if kind is not None:
        return str(kind)
    if namespace.get("use_rotary_position_embeddings"):
        return "rope"
    return "learned_absolute" if namespace.get("add_position_embedding", True) else "none"


def write_args(
    config: TransformerConfig, args: Mapping[str, Any], training: TrainingState, blocks: int | None
) -> argparse.Namespace:
    """All arguments under our names and under theirs, with the consumed samples: else their data
    would start over.

    `blocks` of q, k and v are marked as their writers mark them.
    """
    rope, learned = (
        config.position_embedding_type == kind for kind in ("rope", "learned_absolute")
    )
    theirs: dict[str, Any] = {
        "num_key_value_heads": config.query_groups,
        "add_position_embedding": learned,
        "use_rotary_position_embeddings": rope,
        "rope_theta": config.rotary_base,
        "normalization": {ours: theirs for theirs, ours in _NORMS.items()}[config.normalization],
        "layernorm_epsilon": config.norm_epsilon,
        "embed_layernorm": config.embedding_layernorm,
        "tensor_model_parallel_size": blocks or 1,
        "pipeline_model_parallel_size": 1,
        "iteration": training.iteration,
        "consumed_train_samples": training.consumed_train_samples,
        "consumed_valid_samples": training.consumed_valid_samples,
    }
    if args.get("vocab_size") is not None:
        theirs["vocab_size"] = args[
            "vocab_size"
        ]  # of the tokenizer; the model's is in the vocabulary's record
    everything = {**plain_args(args), **dataclasses.asdict(config), **theirs}
    everything.pop(BLOCKS_MARK, None)  # the source's own
    return argparse.Namespace(**everything, **({BLOCKS_MARK: False} if blocks else {}))


_WITHOUT_FORM = (
    "quick_geglu", "geglu", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "norm_placement",
    "qk_layernorm_across_heads", "softmax_scale", "attn_logit_softcapping", "final_logit_softcapping",
    "scale_embeddings", "window_attn_skip_freq", "softmax_type",
)  # fmt: skip


def parts_without_place(config: TransformerConfig) -> list[str]:
    """What of the model their programs lack: the files hold it, but only a reader that knows it
    computes the same.

    Raises ValueError where the files have no form for it.
    """
    for name in _WITHOUT_FORM:
        if getattr(config, name) != TransformerConfig.__dataclass_fields__[name].default:
            raise ValueError(
                f"--{name.replace('_', '-')}: Megatron-DeepSpeed has no such model to write this one as"
            )
    parts = {
        "window_size": config.window_size is not None,
        "use_rope_scaling": config.use_rope_scaling,
        "rope_type": config.position_embedding_type == "rope" and config.rope_type == "yarn",
        "qk_layernorm": config.qk_layernorm,
        "add_qkv_bias": config.has_qkv_bias and not config.add_bias_linear,
    }
    return [
        f"{name}: Megatron-DeepSpeed has no such model; other readers need to know"
        for name in parts
        if parts[name]
    ]


def read_training(
    state: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
    step: int,
    args: Mapping[str, Any],
) -> TrainingState:
    """From a model-state file, `optimizer_state.pt` (BLOOM-era directories have none) and the Adam
    step.
    """
    scheduler = _read_scheduler(state.get("lr_scheduler"), args)
    operations = "num_floating_point_operations_so_far"
    return TrainingState(
        iteration=state.get("iteration") or state.get("global_steps") or 0,
        consumed_train_samples=args.get("consumed_train_samples")
        or state.get("global_samples")
        or 0,
        consumed_valid_samples=args.get("consumed_valid_samples") or 0,
        num_floating_point_operations_so_far=float(state.get(operations) or 0.0),
        grad_scaler=plain_numbers(state.get("grad_scaler") or {}) or None,
        param_groups=state.get("megatron_param_groups")
        or _read_groups(optimizer, scheduler, step, args),
        scheduler=scheduler,
    )


def _read_scheduler(
    state: Mapping[str, Any] | None, args: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Megatron-LM's schedule; one that counts tokens has no counterpart (`lost_state` names it)."""
    if not state or any(state.get(name) for name in _BY_TOKENS):
        return None
    renamed = {_RENAMED_SCHEDULE.get(name, name): value for name, value in state.items()}
    weight_decay = args.get("weight_decay", 0.0)  # BigScience's fork has no schedule for it
    defaults = {"start_wd": weight_decay, "end_wd": weight_decay, "wd_incr_style": "constant"}
    renamed = defaults | {"wd_incr_steps": renamed.get("lr_decay_steps")} | renamed
    return {name: renamed[name] for name in _SCHEDULE if name in renamed}


def _read_groups(
    optimizer: Mapping[str, Any] | None,
    scheduler: Mapping[str, Any] | None,
    step: int,
    args: Mapping[str, Any],
) -> list[dict[str, Any]] | None:
    """Megatron-LM's two groups, with and without weight decay (BigScience's fork splits the first
    in two).
    """
    if optimizer is None and "lr" not in args:
        return None
    schedule = scheduler or {}
    groups = list(optimizer["param_groups"]) if optimizer is not None else []
    fixed = {
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "bias_correction": True,
        "step": step,
    }
    implied = {
        "lr": args.get("lr"),
        "betas": (args.get("adam_beta1", 0.9), args.get("adam_beta2", 0.999)),
        "eps": args.get("adam_eps", 1e-8),
        "weight_decay": schedule.get("end_wd", args.get("weight_decay", 0.01)),
        "lr_mult": 1.0,
    }
    limits = {
        name: schedule.get(name, args.get(ours))
        for name, ours in (("max_lr", "lr"), ("min_lr", "min_lr"))
    }
    result = []
    for decays in (True, False):
        known = [
            g for g in groups if bool(g.get("wd_mult", 1.0) and g.get("weight_decay")) == decays
        ]
        group = {
            name: (known[0] if known else {}).get(name, value) for name, value in implied.items()
        }
        group |= {
            "betas": tuple(group["betas"]),
            "weight_decay": group["weight_decay"] if decays else 0.0,
        }
        result.append(fixed | limits | group | {"wd_mult": float(decays)})
    return result


def write_groups(training: TrainingState, counts: tuple[int, int]) -> list[dict[str, Any]]:
    """`counts` groups with and without weight decay, in DeepSpeed's terms; the loader copies every key."""
    result = []
    for place in range(sum(counts)):
        decayed = place < counts[0]
        name = "wd_no_scale_lr" if decayed else "no_wd_no_scale_lr"
        group = {"name": name, "wd_mult": float(decayed), "lr_mult": 1.0}
        for known in training.param_groups or []:
            if bool(known.get("wd_mult", 1.0)) == decayed:
                kept = ("lr", "betas", "eps", "weight_decay", "lr_mult")
                group |= {name: known[name] for name in kept if known.get(name) is not None}
        result.append(group | {"params": [place]})
    return result


def write_scheduler(
    training: TrainingState, tokens: int, bigscience: bool
) -> dict[str, Any] | None:
    """Megatron's schedule with the token counts of its descendants; BigScience's fork has older
    names.
    """
    if training.scheduler is None:
        return None
    state = {name: training.scheduler[name] for name in _SCHEDULE if name in training.scheduler}
    if bigscience:
        old = {new: name for name, new in _RENAMED_SCHEDULE.items()}
        state = {old.get(name, name): value for name, value in state.items()}
        return state | {"warmup_tokens": 0, "num_tokens": tokens}
    return state | {"lr_warmup_tokens": None, "num_tokens": tokens, "lr_decay_tokens": None}


def lost_state(state: Mapping[str, Any]) -> list[str]:
    """What a model-state file holds that a `Source` has no place for."""
    lost = [
        name
        for name in ("rng_state", "random_rng_state", "data_sampler", "random_ltd")
        if state.get(name)
    ]
    scheduler = state.get("lr_scheduler") or {}
    return lost + [f"lr_scheduler.{name}" for name in _BY_TOKENS if scheduler.get(name)]
