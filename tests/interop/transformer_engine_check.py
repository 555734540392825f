"""Our layers over the real modules of Transformer Engine: names, shapes and every call, on a
machine without a GPU.

    python tests/interop/transformer_engine_check.py FOLDER      where pip install --no-deps --target has put it

`transformer_engine` is Python; what is compiled is another package, in the place of which stands an inert module. So
modules can be constructed but not run. What is held against the real package: a whole model at TP
1, 2 and 4 has the parameters, boxes and initial values of local's; the modules mean the same by
them; every call that the forward pass makes (recorded over tests/te_stand_in) binds to the real
signatures; every recipe can be made; casts of weights in fp8 leave no outdated transposes.
"""

from __future__ import annotations

import ast
import enum
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
from torch.overrides import TorchFunctionMode  # noqa: E402

from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402
from megatron.core.models import GPTModel  # noqa: E402
from megatron.core.module import param_info  # noqa: E402
from megatron.core.parallel_state import Axis, ExpertAxes  # noqa: E402
from megatron.core.tensor_parallel import TensorParallelRng  # noqa: E402
from megatron.core.transformer.layer_spec import select_layer_spec  # noqa: E402
from megatron.core.transformer.placement import ContextParallel, Placement  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "num_query_groups": 4,
              "group_query_attention": True, "position_embedding_type": "rope", "qk_layernorm": True},
    "gpt2": {"max_position_embeddings": 16, "apply_layernorm_1p": True},
    "mixtral": {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "num_experts": 4,
                "position_embedding_type": "rope"},
}  # fmt: skip
RECIPES = [
    {"fp8": "hybrid", "fp8_margin": 1}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    {"fp8": "e4m3", "fp8_recipe": "blockwise"}, {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, {"fp4": "e2m1"},
]  # fmt: skip


class Inert(types.ModuleType):
    """An object with every attribute; calls have no effect."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (InertType,), {})
        setattr(self, name, value)
        return value


class InertFinder(MetaPathFinder, Loader):
    """Import hook for unused packages: kernels in Triton, export to ONNX."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        te = "transformer_engine.pytorch."
        unused = (
            "onnxscript",
            "einops",
            f"{te}onnx_extensions",
            f"{te}triton",
            f"{te}attention.fused_mla",
        )
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
    """Return the names of a compiled enumeration, which newer releases compare when imported."""
    if not path.is_file():
        return []
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    body = next((node.body for node in classes if node.name == enumeration), [])
    return [node.targets[0].id for node in body if isinstance(node, ast.Assign)]  # type: ignore[attr-defined]


def import_without_kernels() -> types.ModuleType:
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
    compiled = sys.modules["transformer_engine_torch"] = Inert("transformer_engine_torch")
    tensors = [
        f"GEMM{product}_{what}" for product in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")
    ]
    gradients = [f"GRAD_{what}{product}" for product in (1, 2, 3) for what in ("OUTPUT", "INPUT")]
    compiled.FP8BwdTensors = enum.IntEnum("FP8BwdTensors", gradients, start=0)
    compiled.FP8FwdTensors = enum.IntEnum("FP8FwdTensors", tensors, start=0)  # indices of scales
    sys.meta_path.insert(0, InertFinder())
    pytorch = Path(common.__file__ or "").parents[1] / "pytorch"
    for name, file, python in (
        ("DType", "constants.py", "DType"),
        ("NVTE_Fused_Attn_Backend", "cpp_extensions/fused_attn.py", "FusedAttnBackend"),
    ):
        prefix = "NVTE_" if name.startswith("NVTE_") else ""
        getattr(compiled, name).__members__ = [
            prefix + member for member in members(pytorch / file, python)
        ]

    te = importlib.import_module("transformer_engine.pytorch")
    te.cpp_extensions.get_cudnn_version = lambda: 91000
    torch.cuda.is_available = lambda: True  # constructors of older releases check it
    return te


def build(impl: str, tp: int, rank: int, **model: Any) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        vocab_size=64,
        bf16=True,
        transformer_impl=impl,
        **model,
    )
    axis = Axis(rank, tp, tuple(range(tp)))
    return GPTModel(config, tp=axis, sequence_parallel=tp > 1, experts=ExpertAxes(axis))


def check_model(name: str, tp: int) -> int:
    """Check every parameter of every rank; return their number."""
    count = 0
    for rank in range(tp):
        local, engine = (
            build(impl, tp, rank, **MODELS[name]) for impl in ("local", "transformer_engine")
        )
        states = []
        for model in (local, engine):
            model.initialize(7)
            states.append(model.sharded_state_dict())

        assert [n for n, _ in local.named_parameters()] == [n for n, _ in engine.named_parameters()]
        assert states[0].keys() == states[1].keys()

        for key, ours in states[0].items():
            theirs = states[1][key]
            assert isinstance(ours, ShardedTensor)
            assert isinstance(theirs, ShardedTensor)
            assert (ours.global_shape, ours.dtype) == (theirs.global_shape, theirs.dtype), key
            for a, b in zip(ours.boxes, theirs.boxes, strict=True):
                assert a.offset == b.offset, key
                assert torch.equal(a.tensor, b.tensor), key

        count += len(states[0])
        for module in engine.modules():
            if hasattr(module, "engine"):
                check_engine(module, tp)
    return count


def check_engine(owner: nn.Module, tp: int) -> None:
    """What the module of Transformer Engine has are the parameters of its owner, and it sees the
    same place in TP.
    """
    engine: Any = owner.engine.module  # type: ignore[union-attr]
    parameters = dict(engine.named_parameters())
    is_grouped = owner.engine.has_own_weights  # type: ignore[union-attr]
    if is_grouped:  # one per expert, bound in the forward pass
        assert [tuple(p.shape) for p in parameters.values()] == [
            tuple(owner.weight.shape[1:])
        ] * len(owner.weight)  # type: ignore
        return

    own = dict(owner.named_parameters(recurse=False))
    assert parameters.keys() == own.keys(), (type(owner), parameters.keys(), own.keys())
    assert all(parameters[name] is own[name] for name in own)

    if hasattr(owner, "tp"):
        assert engine.tp_size == tp, type(owner)
        assert engine.sequence_parallel == (tp > 1), type(owner)
        rows, columns = own["weight"].shape
        assert (engine.out_features, engine.in_features) == (rows, columns), type(owner)


@contextmanager
def recorded(te: types.ModuleType, calls: set[tuple[str, str, tuple[str, ...], int]]) -> Any:
    """Bind the arguments of every call in a module's forward pass instead of running it."""
    kinds = (
        "Linear",
        "LayerNormLinear",
        "GroupedLinear",
        "LayerNorm",
        "RMSNorm",
        "DotProductAttention",
    )
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
    loss = te.parallel_cross_entropy
    # Of older releases the loss is the `apply` of a function, whose `forward` says what it takes
    # after its context.
    own = getattr(loss, "__self__", None)
    takes_loss, context = (
        (inspect.signature(loss), ()) if own is None else (inspect.signature(own.forward), (None,))
    )

    def bind_loss(logits: torch.Tensor, labels: torch.Tensor, *args: Any) -> torch.Tensor:
        takes_loss.bind(*context, logits, labels, *args)
        calls.add(("loss", "call", (), len(args)))
        return logits[..., 0].float()

    te.parallel_cross_entropy = bind_loss
    try:
        yield
    finally:
        te.parallel_cross_entropy = loss
        for name, forward in kept.items():
            getattr(te, name).forward = forward


def check_calls(te: types.ModuleType) -> int:
    """Run a forward pass of each model: dense, documents, window, ALiBi, experts in fp8."""
    calls: set[tuple[str, str, tuple[str, ...], int]] = set()
    documents = (torch.arange(16) // 8).expand(2, -1)
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    cases: list[tuple[str, dict[str, Any], torch.Tensor | None]] = [
        ("llama", {}, None), ("llama", {"window_size": (5, 0)}, documents), ("gpt2", {}, None),
        ("gpt2", {"position_embedding_type": "alibi"}, None), ("mixtral", {"fp8": "hybrid"}, None),
        ("llama", fused, None),
    ]  # fmt: skip
    with recorded(te, calls), torch.no_grad():
        for name, more, mask in cases:
            model = build(
                "transformer_engine",
                1,
                0,
                **(MODELS[name] | more | {"attention_dropout": 0.0}),
            )
            model.decoder.precision = select_layer_spec(TransformerConfig(1, 16, 1)).precision(
                model.config,
                None,
            )
            model.initialize(1)
            select_layer_spec(model.config).start_step()
            tokens = torch.zeros(2, 16, dtype=torch.long)
            model(tokens, torch.arange(16).expand(2, -1), labels=tokens, documents=mask)
    return len(calls)


def check_functions(te: types.ModuleType) -> None:
    """Check the calls of functions outside of modules."""
    adapter = importlib.import_module(
        "megatron.core.transformer.transformer_engine.building_blocks"
    )
    for options in RECIPES:
        config = TransformerConfig(
            2,
            64,
            4,
            bf16=True,
            transformer_impl="transformer_engine",
            **options,
        )
        made = adapter.TEPrecision(config, None)._recipe
        if made.delayed():
            assert options is RECIPES[0]
            assert (made.margin, made.amax_history_len, made.amax_compute_algo) == (
                1,
                1,
                "most_recent",
            )

    for module_class in (
        te.Linear,
        te.LayerNormLinear,
        te.GroupedLinear,
    ):  # how scales are restored
        inspect.signature(module_class.init_fp8_meta_tensors).bind(module_class, made)
    options = {"calibrating": False, "fp8_recipe": made, "fp8_group": None}
    inspect.signature(te.fp8_autocast).bind(enabled=True, **options)
    assert any(
        p.kind is p.VAR_KEYWORD for p in inspect.signature(te.checkpoint).parameters.values()
    )

    source = inspect.getsource(te.checkpoint)
    assert '"use_reentrant"' in source or "'use_reentrant'" in source


class OnTheCPU(TorchFunctionMode):
    """Allocate scales on the available device."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if torch.device(options.get("device") or "cpu").type == "cuda":
            options["device"] = "cpu"
        return function(*args, **options)


def check_fp8_weights(te: types.ModuleType) -> int:
    """--fp8-param-gather: what is taken from a module that is made for it, and the
    functions that fill its weights.
    """
    tensor = importlib.import_module("transformer_engine.pytorch.tensor")
    count = 0
    inspect.signature(tensor.replace_raw_data).bind("tensor", "memory")
    inspect.signature(tensor.cast_master_weights_to_fp8).bind(["tensor"], ["main"], [0], "group")

    for options in RECIPES[:3]:
        for name in ("llama", "mixtral"):
            with OnTheCPU():
                model = build(
                    "transformer_engine",
                    1,
                    0,
                    **MODELS[name],
                    **options,
                    fp8_param_gather=True,
                )

            for owner in model.modules():
                fp8 = param_info(owner.weight).fp8 if hasattr(owner, "engine") else None  # type: ignore
                if fp8 is None:
                    continue
                module: Any = owner.engine.module  # type: ignore[union-attr]
                made = module.fp8_meta["recipe"]

                assert module.primary_weights_in_fp8
                assert made.delayed() == (options is RECIPES[0])

                for weight in [
                    weight for weight in module._parameters if weight.startswith("weight")
                ]:
                    slot = owner.engine.parameter_metadata[weight].fp8_meta_index  # type: ignore[union-attr]
                    quantizer = module.quantizers["scaling_fwd"][slot]
                    assert isinstance(quantizer.internal, bool)
                    assert callable(quantizer)

                    inspect.signature(quantizer.set_usage).bind(rowwise=True, columnwise=True)

                    if made.delayed():
                        scales = module.fp8_meta["scaling_fwd"].scale
                        quantizer.scale.fill_(2.0)  # it is a view: of the scale of this weight
                        assert scales[slot] == 2.0
                        assert quantizer.amax.numel() == 1

                    count += 1

    assert "_get_quantizer" in dir(
        importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor").Float8Tensor
    )
    return count


def quantize_on_cpu(
    source: torch.Tensor, quantizer: Any, target: Any = None, noop: Any = None
) -> Any:
    """Do what the compiled function does with delayed scaling on Hopper, which transposes bytes
    if the quantizer is used column-wise.
    """
    scaled = (source.float() * quantizer.scale).clamp(-448, 448)
    content = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    quantizer.amax.copy_(torch.maximum(quantizer.amax, source.abs().amax().float()))
    if target is None:
        target = quantizer.create_tensor_from_data(content.clone(), source.dtype)
    else:
        assert not quantizer.columnwise_usage, "a part of a weight is transposed as one row"
    target._data.copy_(content)
    target._transpose = content.t().contiguous() if quantizer.columnwise_usage else None
    target._transpose_invalid = target._transpose is None
    return target


def scale_on_cpu(chunk: int, overflow: Any, lists: list[list[torch.Tensor]], scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


@contextmanager
def kernels_of_casts() -> Any:
    """Replace the compiled functions that casts of fp8 weights call."""
    compiled = sys.modules["transformer_engine_torch"]
    replaced = {
        "quantize": quantize_on_cpu,
        "multi_tensor_scale": scale_on_cpu,
        "fp8_transpose": lambda content, dtype, out=None: content.t().contiguous(),
        "is_non_tn_fp8_gemm_supported": lambda: False,  # as on Hopper
    }
    for name, function in replaced.items():
        setattr(compiled, name, function)
    for name, module in [*sys.modules.items()]:
        if name.startswith("transformer_engine.pytorch"):
            for function in replaced.keys() & vars(module).keys():
                setattr(module, function, replaced[function])
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def check_casts_of_weights() -> int:
    """Cast weights of --fp8-param-gather in two parts, twice; the products of the next forward and
    backward pass use the bytes of the last cast.
    """
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    if not hasattr(base, "quantize_weight"):
        return 0  # tensors of older releases require a GPU
    count = 0
    for name in ("llama", "mixtral"):
        with OnTheCPU(), kernels_of_casts():
            model = build(
                "transformer_engine", 1, 0, **MODELS[name], **RECIPES[0], fp8_param_gather=True
            )
            model.initialize(7)
            for owner in model.modules():
                weight: Any = getattr(owner, "weight", None)
                fp8 = None if weight is None else param_info(weight).fp8
                if fp8 is None:
                    continue
                weight.main_grad = torch.zeros(weight.shape)
                fp8.quantize(torch.zeros(weight.numel(), dtype=torch.uint8))
                for _ in range(2):
                    check_cast_of_weight(fp8, base)
                count += len(fp8.tensors)
    return count


def check_cast_of_weight(fp8: Any, base: Any) -> None:
    group = torch.distributed.group.WORLD
    main = [torch.randn(tensor.numel()) for tensor in fp8.tensors]
    half = len(main[0]) // 2
    tensors = fp8.tensors
    fp8.cast(tensors, [values[:half] for values in main], [0] * len(main), group, True)
    fp8.cast(tensors, [values[half:] for values in main], [half] * len(main), group, False)
    for tensor, values in zip(tensors, main, strict=True):
        assert tensor._transpose is None or tensor._transpose_invalid
        # As linear layers do in the forward and in the backward pass
        base.quantize_weight(tensor=tensor, quantizer=tensor._get_quantizer())
        tensor.update_usage(columnwise_usage=True)
        assert torch.equal(tensor._transpose, tensor._data.t())
        scaled = (values.bfloat16().float() * tensor._get_quantizer().scale).clamp(-448, 448)
        expected = scaled.to(torch.float8_e4m3fn).view(torch.uint8).view(tensor.shape)
        assert torch.equal(tensor._data, expected)
        assert torch.equal(tensor._scale_inv.view(()), 1 / tensor._get_quantizer().scale)


def check_overlap(te: types.ModuleType) -> int:
    """--tp-comm-overlap: every module takes its options, and its buffers are set up."""
    bound: list[Any] = []
    setup, te.initialize_ub = (
        inspect.signature(te.initialize_ub),
        lambda **o: bound.append(setup.bind(**o)),
    )
    overlap = {"tp_comm_overlap": True, "fp8": "hybrid", "first_last_layers_bf16": True}
    config = TransformerConfig(
        2,
        64,
        4,
        bf16=True,
        transformer_impl="transformer_engine",
        **overlap,
    )
    select_layer_spec(config).set_up(config, 32, 2)
    base: Any = importlib.import_module("transformer_engine.pytorch.module.base")
    base._ub_initialized = True  # newer releases insist on this order
    model = build("transformer_engine", 2, 0, **MODELS["llama"], **overlap)
    assert bound[0].arguments["quantization_modes"] == [te.UserBufferQuantizationMode.NONE]

    engines: list[Any] = [
        module.engine.module for module in model.modules() if hasattr(module, "engine")
    ]
    named = [engine for engine in engines if getattr(engine, "ub_name", None) is not None]
    assert sorted({engine.ub_name for engine in named}) == ["fc1", "fc2", "proj", "qkv"]
    assert len(named) == 8

    for engine in named:
        column = engine.parallel_mode == "column"
        assert (engine.ub_overlap_ag_fprop, engine.ub_overlap_rs_fprop) == (column, not column), (
            engine.ub_name
        )
        assert engine.ub_bulk_dgrad == column, engine.ub_name
        assert engine.ub_bulk_wgrad == column, engine.ub_name
    return len(named)


def check_context_parallel(te: types.ModuleType) -> None:
    adapter = importlib.import_module(
        "megatron.core.transformer.transformer_engine.building_blocks"
    )
    config = TransformerConfig(
        2,
        64,
        4,
        bf16=True,
        transformer_impl="transformer_engine",
        attention_dropout=0.0,
    )
    group: Any = object()
    torch.cuda.Stream = object  # type: ignore[assignment, misc]
    for comm_type in ("p2p", "all_gather", "a2a"):
        cp = ContextParallel(Axis(0, 2, (0, 1), group), comm_type)
        module = adapter.TECoreAttention(
            config,
            Placement(Axis(), TensorParallelRng(0, 0), cp),
        ).module
        whole = comm_type == "a2a"  # our exchange of heads is around it
        assert module.num_attention_heads == (2 if whole else 4)
        core = module.flash_attention if hasattr(module, "flash_attention") else module
        assert module.cp_group is (None if whole else group), core
        assert module.cp_comm_type == comm_type, core


def main() -> None:
    te = import_without_kernels()
    num_parameters = {
        f"{name} TP{tp}": check_model(name, tp) for name in MODELS for tp in (1, 2, 4)
    }
    calls = check_calls(te)
    check_functions(te)
    check_context_parallel(te)
    weights = check_fp8_weights(te)
    casts = check_casts_of_weights()
    overlaps = check_overlap(te)
    print(
        f"transformer_engine {version('transformer_engine')}: {sum(num_parameters.values())} parameters of "
        f"{len(num_parameters)} models "
        f"as in local, {calls} kinds of calls bind, {len(RECIPES)} recipes, "
        f"{weights} weights can be in fp8, {casts} are cast, {overlaps} modules overlap"
    )


if __name__ == "__main__":
    main()
