"""A LoRA adapter of PEFT: the tensors of a model that it changes, and how."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.conversion.huggingface.adapter_changes import (
    LowRankProduct,
    add_bias,
    add_to_experts,
    add_to_matrix,
    replace_rows,
)
from megatron.conversion.huggingface.adapter_files import (
    open_adapter_tensors,
    read_adapter_config,
    require_adapter,
)
from megatron.conversion.huggingface.family import Family
from megatron.conversion.huggingface.wrappers import remove_wrapper_prefix
from megatron.conversion.model_space.lazy_tensors import cast
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.safe_files.schema import abbreviate, key

_PREFIX = "base_model.model."
_BIAS = "lora_B.bias"
_MAGNITUDE = "lora_magnitude_vector"
_LINEAR_MATRICES = ("lora_A", "lora_B")
_EMBEDDING_MATRICES = ("lora_embedding_A", "lora_embedding_B")
# Matrix of a linear layer -> matrix of an embedding with the same values, transposed.
_TIED_MATRICES = {"lora_A": "lora_embedding_B", "lora_B": "lora_embedding_A"}
_WRAPPER = ".base_layer"
# Names of tensors that describe a change of a module. Other tensors replace one of the model.
_CHANGE = re.compile(
    r"(?P<module>.+?)\.(?:"
    r"(?P<linear>lora_[AB])\.(?P<tensor>weight|bias)"
    r"|(?P<embedding>lora_embedding_[AB])"
    r"|(?P<magnitude>lora_magnitude_vector)(?:\.weight)?"
    r"|token_adapter\.(?P<tokens>trainable_tokens_delta)"
    r")"
)


@dataclass(frozen=True)
class _Target:
    """The tensor of the model that the matrices of a module change."""

    name: str
    is_parameter: bool  # PEFT wraps the parameter itself, not a linear layer


class LoraAdapter:
    """The tensors of an adapter under the names of a family's models.

    Raises CheckpointError for files that are damaged or of an adapter that is not LoRA.
    """

    def __init__(self, directory: Path, family: Family) -> None:
        require_adapter(directory)
        self.directory = directory
        self.config = read_adapter_config(directory)
        # Name of a tensor -> its name in the files
        self._stored_names: dict[str, str] = {}
        # Module -> "lora_A", "lora_B", "lora_B.bias", ... -> tensor
        self._matrices: dict[str, dict[str, LazyTensor]] = defaultdict(dict)
        # Module -> its trained rows
        self._tokens: dict[str, LazyTensor] = {}
        # Tensor of the model -> the tensor that replaces it
        self._replacements: dict[str, LazyTensor] = {}
        tensors = open_adapter_tensors(directory)
        if not tensors:
            raise CheckpointError(f"{directory}: the adapter has no tensors")
        for name, stored_name in _name_tensors(tensors, family, directory).items():
            self._check_dtype(stored_name, tensors[stored_name])
            self._add_tensor(name, stored_name, tensors[stored_name])
        self._inner_modules = set(map(_strip_wrappers, self._matrices))

    def _add_tensor(self, name: str, stored_name: str, tensor: LazyTensor) -> None:
        """Add a tensor of the adapter to the changes that it describes.

        Raises CheckpointError if the files have a tensor of this name under two names.
        """
        match = _CHANGE.fullmatch(name)
        if match is None:
            # Modules within other wrappers of PEFT have the name of the wrapper.
            name = name.replace(f"{_WRAPPER}.", ".")
            self._replacements[name] = tensor
        elif match["tokens"]:
            self._tokens[match["module"]] = tensor
            name = f"{match['module']}.tokens"
        else:
            matrix = match["embedding"] or match["magnitude"] or match["linear"]
            if match["tensor"] == "bias":
                matrix += ".bias"
            self._matrices[match["module"]][matrix] = tensor
            name = f"{match['module']}.{matrix}"
        if name in self._stored_names:
            raise CheckpointError(
                f"{self.directory}: {self._stored_names[name]} and {stored_name} are changes of "
                "the same tensor: remove one of them"
            )
        self._stored_names[name] = stored_name

    def _check_dtype(self, name: str, tensor: LazyTensor) -> None:
        """Raise CheckpointError unless the values of a tensor are numbers."""
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
            raise CheckpointError(
                f"{self.directory}: {name} has dtype {tensor.dtype}: tensors of an adapter must be "
                "floating point, of 16 bits or more"
            )

    @property
    def matrices(self) -> Mapping[str, Mapping[str, LazyTensor]]:
        """Return the matrices of each module by their names, e.g. "lora_A".

        Raises CheckpointError if the adapter has changes that are not low-rank products.
        """
        other_changes = list(self._replacements)
        for module in self._tokens:
            other_changes.append(f"{module}.tokens")
        if other_changes:
            name = self._stored_names[other_changes[0]]
            raise CheckpointError(
                f"{self.directory}: {name} is not a low-rank matrix, and cannot be trained here: "
                "merge the adapter into the base model (convert.py --lora)"
            )
        return self._matrices

    def has_bias(self, module: str) -> bool:
        """Return whether the low-rank product of a module has a bias."""
        return _BIAS in self._matrices[module]

    # ---- Changes ----

    def changes(self, name: str) -> bool:
        """Return whether the adapter may change the tensor that transformers calls `name`."""
        module = name.rpartition(".")[0]
        return module in self._inner_modules or name in self._replacements

    def trains(self, module: str) -> bool:
        """Return whether a module has matrices, or was trained as a whole."""
        if module in self._matrices:
            return True
        return f"{module}.weight" in self._replacements and self.config.is_saved(module)

    def trains_rows(self, module: str) -> bool:
        """Return whether some rows of a module were trained."""
        return module in self._tokens

    def drop_copy(self, copy: str, original: str) -> bool:
        """Leave out the changes of the linear layer `copy` if they equal those of `original`.

        Return whether they do. `original` is an embedding, whose matrices are transposed.
        """
        name = f"{copy}.weight"
        replacement = self._replacements.get(name)
        if replacement is not None:
            original_replacement = self._replacements.get(f"{original}.weight")
            if original_replacement is None:
                return False
            if not torch.equal(replacement.read_all(), original_replacement.read_all()):
                return False

        original_matrices = self._matrices.get(original, {})
        for matrix, tensor in self._matrices.get(copy, {}).items():
            original_tensor = original_matrices.get(_TIED_MATRICES.get(matrix, ""))
            if original_tensor is None:
                return False
            if not torch.equal(tensor.read_all().t(), original_tensor.read_all()):
                return False
        self._replacements.pop(name, None)
        self._matrices.pop(copy, None)
        return True

    # ---- Application ----

    def apply(
        self, tensors: Mapping[str, LazyTensor], transposed: Collection[str]
    ) -> dict[str, LazyTensor]:
        """Return the tensors that the adapter changes, by name.

        `tensors` are those of the model, and `transposed` the names of matrices that are stored as
        [in, out]. Raises CheckpointError if the adapter has a tensor that does not belong to one.
        """
        model = dict(tensors)
        changed: dict[str, None] = {}
        unused: list[str] = []

        # Tensors that were trained as a whole, or saved next to their changes.
        for name, tensor in self._replacements.items():
            if name not in model:
                unused.append(self._stored_names[name])
                continue
            self._check_changeable(name, model[name])
            self._check_shape(name, tensor, model[name].shape)
            model[name] = cast(tensor, model[name].dtype)
            changed[name] = None

        # Products of matrices.
        children = _group_by_module(tensors)
        for module, matrices in self._matrices.items():
            target = self._find_target(module, children)
            if target is None:
                unused += [self._stored_names[f"{module}.{matrix}"] for matrix in matrices]
                continue
            base = model[target.name]
            self._check_changeable(target.name, base)
            shape = self._check_matrix(target.name, base)
            product = self._make_product(module, target, shape, target.name in transposed)
            add = add_to_experts if len(base.shape) == 3 else add_to_matrix
            model[target.name] = add(base, product)
            changed[target.name] = None
            if _BIAS in matrices:
                bias_name = target.name.removesuffix("weight") + "bias"
                model[bias_name] = self._add_bias(module, bias_name, model)
                changed[bias_name] = None

        # Rows.
        for module, rows in self._tokens.items():
            name = f"{module}.weight"
            if name not in model:
                unused.append(self._stored_names[f"{module}.tokens"])
                continue
            self._check_changeable(name, model[name])
            row_indices = self._find_rows(module, rows, model[name].shape)
            model[name] = replace_rows(model[name], row_indices, rows)
            changed[name] = None

        if unused:
            raise CheckpointError(
                f"{self.directory}: {len(unused)} of {len(self._stored_names)} tensors of the "
                f"adapter change no tensor of the model: {abbreviate(unused, 3, ', ')}. It is an "
                "adapter of another model, or of parts that were not read (--keep-foreign)"
            )
        return {name: model[name] for name in changed}

    def _find_target(self, module: str, children: Mapping[str, list[str]]) -> _Target | None:
        """Return the tensor that the matrices of a module change, or None if the model lacks it.

        `children` are the tensors of each module. PEFT wraps a module once for each of its
        parameters that is trained; the last parameter has the outermost wrapper.
        """
        inner = _strip_wrappers(module)
        depth = (len(module) - len(inner)) // len(_WRAPPER)
        parameters = [name for name in children[inner] if self.config.is_target_parameter(name)]
        if parameters:
            index = len(parameters) - 1 - depth
            if index < 0:
                return None
            return _Target(parameters[index], is_parameter=True)
        name = f"{inner}.weight"
        if depth or name not in children[inner]:
            return None
        return _Target(name, is_parameter=False)

    def _check_changeable(self, name: str, base: LazyTensor) -> None:
        """Raise CheckpointError for a tensor of the model that contains codes, not numbers."""
        if not base.dtype.is_floating_point or base.dtype.itemsize == 1:
            raise CheckpointError(
                f"{self.directory} changes {name}, which has dtype {base.dtype}: dequantize the "
                "base model first"
            )

    def find_products(
        self, shapes: Mapping[str, Shape], transposed: Collection[str]
    ) -> dict[str, tuple[str, LowRankProduct]]:
        """Return the changes of tensors with these shapes by name, each with its module.

        `transposed` are the names of matrices that are stored as [in, out].
        """
        children = _group_by_module(shapes)
        products = {}
        for module in self._matrices:
            target = self._find_target(module, children)
            if target is None:
                continue
            name = target.name
            is_transposed = name in transposed
            product = self._make_product(module, target, shapes[name], is_transposed)
            products[name] = (module, product)
        return products

    def _make_product(
        self, module: str, target: _Target, shape: Shape, is_transposed: bool
    ) -> LowRankProduct:
        """Return the change of a matrix, or of the matrices of all experts, of this shape."""
        matrices = self._matrices[module]
        is_embedding = any(name in matrices for name in _EMBEDDING_MATRICES)
        a_name, b_name = _EMBEDDING_MATRICES if is_embedding else _LINEAR_MATRICES
        required = [a_name, b_name]
        if self.config.has_magnitudes:
            required.append(_MAGNITUDE)
        self._check_names(module, required)

        # Shapes. The matrices of all experts are stored as one.
        is_transposed = is_transposed or is_embedding
        *lead, num_rows, num_columns = shape
        num_experts = lead[0] if lead else 1
        out_size, in_size = num_rows, num_columns
        if is_transposed:
            out_size, in_size = num_columns, num_rows
        pattern_name = target.name if target.is_parameter else _strip_wrappers(module)
        total_rank = num_experts * self.config.get_rank(pattern_name)
        a = matrices[a_name]
        b = matrices[b_name]
        self._check_shape(f"{module}.{a_name}", a, (total_rank, in_size))
        self._check_shape(f"{module}.{b_name}", b, (out_size, total_rank))
        magnitude = matrices.get(_MAGNITUDE)
        is_linear = not target.is_parameter and num_experts == 1
        if not is_linear and (magnitude is not None or _BIAS in matrices):
            raise CheckpointError(
                f"{self.directory}: {module} has a magnitude or a bias, which only linear layers "
                "and embeddings have in PEFT"
            )
        if magnitude is not None:
            self._check_shape(f"{module}.{_MAGNITUDE}", magnitude, (out_size,))
        return LowRankProduct(
            a=a,
            b=b,
            scaling=self.config.get_scaling(pattern_name),
            magnitude=magnitude,
            transposed=is_transposed,
            is_rounded=target.is_parameter or (is_embedding and magnitude is None),
        )

    def _check_matrix(self, name: str, base: LazyTensor) -> Shape:
        """Return the shape of a matrix, or of the matrices of all experts.

        Raises CheckpointError for a tensor of another rank.
        """
        if len(base.shape) not in (2, 3):
            raise CheckpointError(
                f"{self.directory} changes {name} of shape {list(base.shape)}, which is not a "
                "matrix"
            )
        return base.shape

    def _check_names(self, module: str, required: list[str]) -> None:
        """Raise CheckpointError unless a module has the required matrices, and at most a bias."""
        matrices = self._matrices[module]
        missing = [matrix for matrix in required if matrix not in matrices]
        if missing:
            raise CheckpointError(
                f"{self.directory}: {module} has {', '.join(matrices)}, but no "
                f"{', '.join(missing)}: the adapter is incomplete, or its configuration is that of "
                "another one"
            )
        extra = [matrix for matrix in matrices if matrix not in (*required, _BIAS)]
        if extra:
            name = self._stored_names[f"{module}.{extra[0]}"]
            raise CheckpointError(
                f"{self.directory}: {name} is not used by an adapter with this configuration"
            )

    def _add_bias(self, module: str, name: str, tensors: Mapping[str, LazyTensor]) -> LazyTensor:
        """Return the bias of a layer with the bias of its low-rank product added.

        `name` is the bias of the layer in `tensors`, those of the model.
        """
        change = self._matrices[module][_BIAS]
        if name not in tensors:
            raise CheckpointError(
                f"{self.directory}: {module} has a bias (lora_bias), but the model does not have "
                f"{name}"
            )
        base = tensors[name]
        self._check_changeable(name, base)
        self._check_shape(f"{module}.{_BIAS}", change, base.shape)
        return add_bias(base, change, self.config.get_scaling(module))

    def _find_rows(self, module: str, values: LazyTensor, shape: Shape) -> list[int]:
        """Return the rows of a matrix that the adapter replaces.

        `values` are the new rows of the module, and `shape` is that of its matrix.
        """
        rows = self.config.get_tokens(module)
        if not rows:
            raise CheckpointError(
                f"{self.directory}: trainable_token_indices has no tokens of {module}, of which "
                "the adapter has rows"
            )
        self._check_shape(f"{module}.tokens", values, (len(rows), shape[1]))
        if len(set(rows)) < len(rows):
            raise CheckpointError(f"{self.directory}: trainable_token_indices has a token twice")
        if max(rows) >= shape[0]:
            raise CheckpointError(
                f"{self.directory} trains token {max(rows)}, but the model has {shape[0]} tokens"
                f"{_describe_growth(max(rows) + 1)}"
            )
        return rows

    def _check_shape(self, name: str, tensor: LazyTensor, expected: Shape) -> None:
        """Raise CheckpointError if a tensor of the adapter does not have the expected shape."""
        if tensor.shape == expected:
            return
        hint = ""
        has_more_rows = len(expected) == 2 and tensor.shape[1:] == expected[1:]
        if name in self._replacements and has_more_rows and tensor.shape[0] > expected[0]:
            hint = _describe_growth(tensor.shape[0])
        raise CheckpointError(
            f"{self.directory}: {self._stored_names[name]} has shape {list(tensor.shape)}, but the "
            f"model and adapter_config.json make it {list(expected)}{hint}"
        )


def _name_tensors(stored_names: Iterable[str], family: Family, directory: Path) -> dict[str, str]:
    """Return the stored name of each tensor of an adapter by its name in the model."""
    names: dict[str, str] = {}
    for stored_name in stored_names:
        key(stored_name, f"{directory}: the name of a tensor")
        name = remove_wrapper_prefix(stored_name.removeprefix(_PREFIX))
        if name in names:
            raise CheckpointError(
                f"{directory}: {names[name]} and {stored_name} are changes of the same tensor: "
                "remove one of them"
            )
        names[name] = stored_name
    # Adapters of the base model alone (AutoModel) name its modules without the prefix.
    layers = family.layers.removeprefix(family.prefix)
    if any(name.startswith(layers) for name in names):
        return {family.prefix + name: stored_name for name, stored_name in names.items()}
    return names


def _group_by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the tensors of each module, in the order of `names`."""
    children: dict[str, list[str]] = defaultdict(list)
    for name in names:
        module = name.rpartition(".")[0]
        children[module].append(name)
    return children


def _strip_wrappers(module: str) -> str:
    """Return the name of a module without PEFT's wrappers around it."""
    while module.endswith(_WRAPPER):
        module = module.removesuffix(_WRAPPER)
    return module


def _describe_growth(rows: int) -> str:
    """Return how to add tokens to the base model, for a message."""
    return f". If tokens were added before training, give --target-vocab-size {rows}"
