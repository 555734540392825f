"""Our layers over the real modules of Transformer Engine: names, shapes and every call, on a machine without a GPU.

    python tests/interop/transformer_engine_check.py FOLDER      where pip install --no-deps --target has put it

`transformer_engine` is Python; what is compiled is another package, in the place of which stands an inert module. So
modules can be constructed but not run. What is held against the real package: a whole model at TP 1, 2 and 4 has the
parameters, boxes and initial values of local's; the modules mean the same by them; every call that the forward pass
makes (recorded over tests/te_stand_in) binds to the real signatures; every recipe can be made.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
import types
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["NVTE_PROJECT_BUILDING"] = "1"  # do not look for CUDA's libraries
REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [*sys.argv[1:], str(REPOSITORY)]

import torch  # noqa: E402
from torch import nn  # noqa: E402

from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402
from megatron.core.models import GPTModel  # noqa: E402
from megatron.core.parallel_state import Axis, ExpertAxes  # noqa: E402
from megatron.core.transformer.layer_spec import layer_spec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "num_query_groups": 4,
              "group_query_attention": True, "position_embedding_type": "rope", "qk_layernorm": True},
    "gpt2": {"max_position_embeddings": 16, "apply_layernorm_1p": True},
    "mixtral": {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "num_experts": 4,
                "position_embedding_type": "rope"},
}  # fmt: skip
RECIPES = [("delayed", "hybrid"), ("tensorwise", "hybrid"), ("blockwise", "e4m3"), ("mxfp8", "e4m3")]


class Inert(types.ModuleType):
    """Has every attribute, can be called, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (InertType,), {})
        setattr(self, name, value)
        return value


class InertFinder(MetaPathFinder, Loader):
    """For modules with packages of their own that nothing here uses: kernels in Triton, export to ONNX."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        te = "transformer_engine.pytorch."
        unused = ("onnxscript", "einops", f"{te}onnx_extensions", f"{te}triton", f"{te}attention.fused_mla")
        return ModuleSpec(name, self, is_package=True) if name.startswith(unused) else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Inert(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class InertMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Number(len(vars(cls)))
        setattr(cls, name, value)
        return value


class InertType(metaclass=InertMeta):
    def __new__(cls, *args: Any, **options: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None:
        pass


class Number(int):
    """A member of an enumeration."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self


def members(path: Path, enumeration: str) -> list[str]:
    """Names in the Python copy of a compiled enumeration, which newer releases compare with it when imported."""
    if not path.is_file():
        return []
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    body = next((node.body for node in classes if node.name == enumeration), [])
    return [node.targets[0].id for node in body if isinstance(node, ast.Assign)]  # type: ignore[attr-defined]


def import_without_kernels() -> types.ModuleType:
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
    compiled = sys.modules["transformer_engine_torch"] = Inert("transformer_engine_torch")
    sys.meta_path.insert(0, InertFinder())
    pytorch = Path(common.__file__ or "").parents[1] / "pytorch"
    for name, file, python in (
        ("DType", "constants.py", "DType"),
        ("NVTE_Fused_Attn_Backend", "cpp_extensions/fused_attn.py", "FusedAttnBackend"),
    ):
        prefix = "NVTE_" if name.startswith("NVTE_") else ""
        getattr(compiled, name).__members__ = [prefix + member for member in members(pytorch / file, python)]
    te = importlib.import_module("transformer_engine.pytorch")
    te.cpp_extensions.get_cudnn_version = lambda: 91000
    torch.cuda.is_available = lambda: True  # constructors of older releases ask for it
    return te


def build(impl: str, tp: int, rank: int, **model: Any) -> GPTModel:
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=64, bf16=True, transformer_impl=impl, **model
    )
    axis = Axis(rank, tp, tuple(range(tp)))
    return GPTModel(config, tp=axis, sequence_parallel=tp > 1, experts=ExpertAxes(axis))


def check_model(name: str, tp: int) -> int:
    """Every parameter of every rank; returns how many."""
    count = 0
    for rank in range(tp):
        local, engine = (build(impl, tp, rank, **MODELS[name]) for impl in ("local", "transformer_engine"))
        states = []
        for model in (local, engine):
            model.initialize(7)
            states.append(model.sharded_state_dict())
        assert [n for n, _ in local.named_parameters()] == [n for n, _ in engine.named_parameters()]
        assert states[0].keys() == states[1].keys()
        for key, ours in states[0].items():
            theirs = states[1][key]
            assert isinstance(ours, ShardedTensor) and isinstance(theirs, ShardedTensor)
            assert (ours.global_shape, ours.dtype) == (theirs.global_shape, theirs.dtype), key
            for a, b in zip(ours.boxes, theirs.boxes, strict=True):
                assert a.offset == b.offset and torch.equal(a.tensor, b.tensor), key
        count += len(states[0])
        for module in engine.modules():
            if hasattr(module, "engine"):
                check_engine(module, tp)
    return count


def check_engine(owner: nn.Module, tp: int) -> None:
    """What the module of Transformer Engine has are the parameters of its owner, and it sees the same place in TP."""
    engine: Any = owner.engine.module  # type: ignore[union-attr]
    parameters = dict(engine.named_parameters())
    if hasattr(owner, "axes"):  # experts: one for each, bound in the forward pass
        assert [tuple(p.shape) for p in parameters.values()] == [tuple(owner.weight.shape[1:])] * len(owner.weight)  # type: ignore
        return
    own = dict(owner.named_parameters(recurse=False))
    assert parameters.keys() == own.keys(), (type(owner), parameters.keys(), own.keys())
    assert all(parameters[name] is own[name] for name in own)
    if hasattr(owner, "tp"):
        assert engine.tp_size == tp and engine.sequence_parallel == (tp > 1), type(owner)
        rows, columns = own["weight"].shape
        assert (engine.out_features, engine.in_features) == (rows, columns), type(owner)


@contextmanager
def recorded(te: types.ModuleType, calls: set[tuple[str, str, tuple[str, ...], int]]) -> Any:
    """Bind every call of a module's forward pass in place of running it."""
    kinds = ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNorm", "RMSNorm", "DotProductAttention")
    kept = {name: getattr(te, name).forward for name in (*kinds, "Fp8Padding", "Fp8Unpadding")}

    def stand_in(name: str, forward: Any) -> Any:
        def bind(self: Any, *args: Any, **options: Any) -> Any:
            bound = inspect.signature(forward).bind(self, *args, **options)
            calls.add((name, "forward", tuple(sorted(options)), len(args)))
            x = args[0]
            if name == "DotProductAttention":
                assert bound.arguments["qkv_format"] in ("sbhd", "thd")
                return x.flatten(-2)
            if name == "Fp8Padding":
                return x, args[1]
            if name == "Fp8Unpadding" or name.endswith("Norm"):
                return x
            if self.parallel_mode == "row" and self.sequence_parallel:
                x = x[: len(x) // self.tp_size]
            elif self.parallel_mode == "column" and self.sequence_parallel:
                x = torch.cat([x] * self.tp_size)
            return x.new_zeros(*x.shape[:-1], self.out_features) + 0 * x.sum()

        return bind

    for name, forward in kept.items():
        getattr(te, name).forward = stand_in(name, forward)
    try:
        yield
    finally:
        for name, forward in kept.items():
            getattr(te, name).forward = forward


def check_calls(te: types.ModuleType) -> int:
    """A forward pass of every model: dense, with documents, a window, ALiBi and experts in fp8."""
    calls: set[tuple[str, str, tuple[str, ...], int]] = set()
    documents = torch.ones(2, 1, 16, 16, dtype=torch.bool).triu(1)
    documents[:, :, 8:, :8] = True
    cases: list[tuple[str, dict[str, Any], torch.Tensor | None]] = [
        ("llama", {}, None), ("llama", {"window_size": (5, 0)}, documents), ("gpt2", {}, None),
        ("gpt2", {"position_embedding_type": "alibi"}, None), ("mixtral", {"fp8": "hybrid"}, None),
    ]  # fmt: skip
    with recorded(te, calls), torch.no_grad():
        for name, more, mask in cases:
            model = build("transformer_engine", 1, 0, **(MODELS[name] | more | {"attention_dropout": 0.0}))
            model.decoder.precision = layer_spec(TransformerConfig(1, 16, 1)).precision(model.config, None)
            model.initialize(1)
            layer_spec(model.config).start_step()
            tokens = torch.zeros(2, 16, dtype=torch.long)
            model(tokens, torch.arange(16).expand(2, -1), labels=tokens, attention_mask=mask)
    return len(calls)


def check_functions(te: types.ModuleType) -> None:
    """What is called besides modules."""
    adapter = importlib.import_module("megatron.core.transformer.te_layers")
    for name, fp8 in RECIPES:
        config = TransformerConfig(
            2, 64, 4, bf16=True, fp8=fp8, fp8_recipe=name, transformer_impl="transformer_engine", fp8_margin=1
        )
        precision = adapter.TEPrecision(config, None)
        made = precision._recipe
        assert made.delayed() == (name == "delayed"), made
        if name == "delayed":
            assert (made.margin, made.amax_history_len, made.amax_compute_algo) == (1, 1, "most_recent")
    for kind in (te.Linear, te.LayerNormLinear, te.GroupedLinear):  # how scales are restored
        inspect.signature(kind.init_fp8_meta_tensors).bind(kind, made)
    inspect.signature(te.fp8_autocast).bind(enabled=True, fp8_recipe=made, fp8_group=None)
    assert any(p.kind is p.VAR_KEYWORD for p in inspect.signature(te.checkpoint).parameters.values())
    source = inspect.getsource(te.checkpoint)
    assert '"use_reentrant"' in source or "'use_reentrant'" in source


def main() -> None:
    te = import_without_kernels()
    found = {f"{name} TP{tp}": check_model(name, tp) for name in MODELS for tp in (1, 2, 4)}
    calls = check_calls(te)
    check_functions(te)
    print(
        f"transformer_engine {version('transformer_engine')}: {sum(found.values())} parameters of {len(found)} models "
        f"as in local, {calls} kinds of calls bind, {len(RECIPES)} recipes"
    )


if __name__ == "__main__":
    main()
