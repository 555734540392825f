"""The files of a DeepSpeed universal checkpoint.

<root>/latest_universal                            name of the directory
<root>/<tag>/mp_rank_XX_model_states.pt            arguments, schedule, counters; equal for all XX but rank numbers
<root>/<tag>/zero/optimizer_state.pt               parameter groups (not in BLOOM-era directories)
<root>/<tag>/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt; of SGD {fp32,momentum_buffer,step}.pt

Parameters have names in three styles, those of the programs that train them. A pipeline numbers its stages:
Megatron-DeepSpeed has 0 cast, 1 embedding, 2.. layers, final norm, head; BigScience's fork (BLOOM) has two
transpositions around the layers. Without a pipeline the names are those of the module.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.formats import ZERO, read_latest
from megatron.conversion.model_space.model import WORD_EMBEDDINGS
from megatron.conversion.model_space.pieces import archive_faults
from megatron.conversion.model_space.source import (
    ADAM,
    GRAD_SCALER,
    PARAM_GROUP,
    RANKS,
    SCHEDULER,
    SGD,
    SIZE,
    Shape,
    namespace,
    scalar,
)
from megatron.core.dist_checkpointing.format.schema import (
    COUNT,
    number,
    optional,
    record,
    sequence,
)
from megatron.core.dist_checkpointing.format.schema import key as check_key
from megatron.core.dist_checkpointing.format.torch_load import safe_load
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
_KEY = re.compile(r"(?:decoder\.layers\.(\d+)\.)?(.*?)(weight|bias)")


@dataclass(frozen=True)
class Style:
    """How one program names parameters; `{n}` is the number of a layer or of what comes after the layers."""

    name: str
    tied_embedding: str
    untied_embedding: str
    layer: str
    final_norm: str
    head: str
    first_layer: int  # number of layer 0
    gap: int  # numbers without parameters between the last layer and the final norm

    def of(self, key: str, config: TransformerConfig) -> str:
        """The universal name of model-space `key`; raises ValueError for a tensor that these programs do not have."""
        end = self.first_layer + config.num_layers + self.gap
        tied = not config.untie_embeddings_and_output_weights
        match = _KEY.fullmatch(key)
        number, module, kind = match.groups() if match else (None, key, "")
        if number is not None and module in _IN_LAYER:
            return self.layer.format(n=self.first_layer + int(number)) + _IN_LAYER[module] + kind
        if module in _IN_EMBEDDING:
            return (self.tied_embedding if tied else self.untied_embedding) + _IN_EMBEDDING[module] + kind
        if module == "decoder.final_layernorm.":
            return self.final_norm.format(n=end) + kind
        if module == "output_layer.":
            return self.head.format(n=end + 1)
        raise ValueError(f"DeepSpeed universal checkpoints have no place for {key}")


STYLES = {
    style.name: style
    for style in (
        Style("pipeline", "tied_modules.embed.", "1.", "{n}.", "{n}.", "{n}.lm_head.weight", 2, 0),
        Style("bigscience", "tied_modules.embed.", "1.", "{n}.", "{n}.", "{n}.lm_head.weight", 3, 1),
        Style(
            "no-pipeline",
            "language_model.embedding.",
            "language_model.embedding.",
            "language_model.encoder.layers.{n}.",
            "language_model.encoder.final_layernorm.",
            "language_model.output_layer.weight",
            0,
            0,
        ),
    )
}

_LAYER = re.compile(r"(?:language_model\.encoder\.layers\.)?(\d+)\.((?:\w+\.)*?(?:\w+\.))(weight|bias)")
_EMBEDDING = re.compile(
    r"(?:tied_modules\.embed|\d+|language_model\.embedding)\."
    r"(word_embeddings\.|position_embeddings\.|word_embeddings\.norm\.)(weight|bias)"
)
_FINAL_NORM = re.compile(r"(?:\d+|language_model\.encoder\.final_layernorm)\.(weight|bias)")
_HEAD = re.compile(r"(?:\d+\.lm_head|language_model\.output_layer)\.weight")


def model_space_names(names: Iterable[str], description: str) -> dict[str, str]:
    """Model-space key -> universal name; layers are counted from the smallest number that has an input norm.

    Raises ValueError for names of another kind of model, or layers with gaps.
    """
    names = list(names)
    layers = {int(m[1]) for m in map(_LAYER.fullmatch, names) if m and m[2] == "input_layernorm."}
    if not layers:
        raise ValueError(f"{description} has no layers with the names of Megatron-DeepSpeed (N.input_layernorm.weight)")
    first = min(layers)
    if layers != set(range(first, first + len(layers))):
        raise ValueError(f"{description}: layers {sorted(layers)} have gaps: the directory is incomplete")
    keys = {name: _model_space_name(name.removeprefix("module."), first) for name in names}
    unknown = [name for name, key in keys.items() if key is None]
    if unknown:
        raise ValueError(f"{description}: {', '.join(unknown)} are not parameters of a GPT that is supported here")
    found = {key: name for name, key in keys.items() if key is not None}
    if len(found) < len(keys):
        twice = [name for name, key in keys.items() if key is not None and found[key] != name]
        raise ValueError(f"{description}: {', '.join(twice)} and other names are the same parameters of a GPT")
    return found


def _model_space_name(name: str, first_layer: int) -> str | None:
    in_layer, in_embedding = ({name: ours for ours, name in table.items()} for table in (_IN_LAYER, _IN_EMBEDDING))
    if match := _EMBEDDING.fullmatch(name):
        return in_embedding[match[1]] + match[2]
    if _HEAD.fullmatch(name):
        return "output_layer.weight"
    if match := _FINAL_NORM.fullmatch(name):
        return f"decoder.final_layernorm.{match[1]}"
    match = _LAYER.fullmatch(name)
    if match and match[2] in in_layer:
        return f"decoder.layers.{int(match[1]) - first_layer}.{in_layer[match[2]]}{match[3]}"
    return None


_VOCABULARY = record({"original_vocab_size?": optional(SIZE)})
_STATE = record(
    {
        "args?": namespace,
        "iteration?": optional(COUNT),
        "global_steps?": optional(COUNT),
        "global_samples?": optional(COUNT),
        "skipped_steps?": optional(COUNT),
        "num_floating_point_operations_so_far?": optional(number(0)),
        "lr_scheduler?": optional(SCHEDULER),
        "megatron_param_groups?": optional(sequence(PARAM_GROUP)),
        "grad_scaler?": optional(GRAD_SCALER),
        "universal_checkpoint_info?": optional(_VOCABULARY),
        "checkpoint_info?": optional(_VOCABULARY),
        "checkpoint_parallel_dimensions?": optional(record({"tp_degree?": optional(RANKS)})),
    }
)
_OPTIMIZER = record({"param_groups": sequence(PARAM_GROUP)})

OPTIMIZER_STATE = "optimizer_state.pt"
STEP = "step.pt"
STATE_FILES = {"param": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}
STATE_FILES["momentum_buffer"] = "momentum_buffer.pt"  # of SGD, in place of the moments


def model_state_name(rank: int) -> str:
    return f"mp_rank_{rank:02d}_model_states.pt"


def find_universal(directory: Path) -> Path | None:
    """The universal directory at, or named in, `directory`; None where there is none."""
    tag = read_latest(directory)
    found = directory if tag is None else directory / tag
    return found if (found / ZERO).is_dir() else None


def universal_faults(directory: Path) -> list[str]:
    """Files that are missing or truncated. Raises CheckpointError for other damage.

    A state that one parameter has (Adam's moments or the momentum of SGD) all must have.
    """
    folders = _parameter_folders(directory)
    names = [name for name in STATE_FILES.values() if any((folder / name).exists() for folder in folders)]
    required = {folder / name for folder in folders for name in {*names, STATE_FILES["param"]}}
    files = required | {directory / model_state_name(0)} | set(directory.rglob("*.pt"))
    return archive_faults(sorted(files), directory)


def _parameter_folders(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / ZERO).iterdir() if path.is_dir())


class UniversalFiles:
    """What is in the files; tensors are mapped when they are asked for."""

    def __init__(self, directory: Path) -> None:
        found = find_universal(directory)
        if found is None:
            raise ValueError(f"{directory} is no DeepSpeed universal checkpoint: it has no {ZERO}/ directory")
        self.directory = found
        self.description = f"DeepSpeed universal checkpoint {found}"
        states = sorted(found.glob("mp_rank_*_model_states.pt"))
        if not states:
            raise ValueError(f"{self.description} is incomplete: it has no {model_state_name(0)}")
        self.state: dict[str, Any] = dict(_STATE(safe_load(states[0]), str(states[0])))
        self.args: dict[str, Any] = vars(self.state.pop("args", argparse.Namespace()))  # under their names
        folders = [path.name for path in _parameter_folders(found)]
        sequence(check_key)(folders, str(found / ZERO))
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
            raise ValueError(f"{self.description}: {self.names[key]} is an expert, which is not supported")
        tensor = entry.get("param") if isinstance(entry, dict) else entry
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{self.description}: {STATE_FILES[state]} of {self.names[key]} holds no tensor")
        shape = self.shapes.get(key, tensor.shape)  # of its parameter, which is looked at first
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(
                f"{self.description}: {STATE_FILES[state]} of {self.names[key]} has {tensor.dtype} of shape "
                f"{list(tensor.shape)}, but must have floating-point numbers of shape {list(shape)}"
            )
        return tensor.detach()

    def optimizer_state(self) -> dict[str, Any] | None:
        path = self.directory / ZERO / OPTIMIZER_STATE
        return dict(_OPTIMIZER(safe_load(path), str(path))) if path.exists() else None

    def states(self) -> tuple[str, ...]:
        """Those that the optimizer has of every parameter."""
        if self.args.get("optimizer") != "sgd":
            return ADAM
        folder = self.directory / ZERO / self.names[WORD_EMBEDDINGS]
        return SGD if (folder / STATE_FILES["momentum_buffer"]).exists() else SGD[:1]

    def step(self) -> int:
        """Of Adam: stored per parameter, all equal; BLOOM-era directories count the steps that were not skipped."""
        paths = [self.directory / ZERO / name / STEP for name in self.names.values()]
        steps = {int(scalar(safe_load(path), str(path))) for path in paths if path.exists()}
        if len(steps) > 1:
            raise ValueError(f"{self.description}: parameters are at different steps: {sorted(steps)}")
        if steps:
            return steps.pop()
        return (self.state.get("global_steps") or 0) - (self.state.get("skipped_steps") or 0)
