"""The documented behavior of the Transformer Engine modules in use, in plain torch.

fp8 supports delayed scaling: inputs and weights are rounded to e4m3, gradients of outputs to e5m2
(or e4m3, by the recipe), with scales from the maxima of earlier calls. All ranks of the group agree
on the scales of every module, used or not: forward scales when the outermost autocast ends,
backward scales after the backward pass of the first module that it contained. nvfp4 rounds to e2m1 with a scale in e4m3 for each 16 elements of a row, and has no
state. Weights are rounded in the first micro-batch.
"""

import contextlib
import enum
import math
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .tensor import Fp8Tensor, Quantizer

USER_BUFFERS = []  # arguments of `initialize_ub`
CALLS = []  # (module, arguments) of every forward pass of a linear layer


class _Fp8:
    recipe = group = model_recipe = None
    calibrating = False
    depth = 0
    has_first = False  # whether a module has computed in the outermost autocast
    recomputes = False
    modules = {}  # that computed in fp8, and the group of the autocast that they did it in first


def forget():
    """Clear the state of earlier models."""
    USER_BUFFERS.clear()
    CALLS.clear()
    _Fp8.modules.clear()


@contextlib.contextmanager
def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None):
    before = _Fp8.recipe, _Fp8.group, _Fp8.calibrating
    in_use = enabled or calibrating
    _Fp8.recipe, _Fp8.group = (fp8_recipe, fp8_group) if in_use else (None, None)
    _Fp8.calibrating = calibrating and not enabled
    if _Fp8.depth == 0:
        _Fp8.has_first = False
    _Fp8.depth += 1

    try:
        yield
    finally:
        _Fp8.depth -= 1
        _Fp8.recipe, _Fp8.group, _Fp8.calibrating = before
        if enabled and _Fp8.depth == 0 and torch.is_grad_enabled():
            for module, group in _Fp8.modules.items():
                module.update_scales("scaling_fwd", group)


@contextlib.contextmanager
def fp8_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    before = _Fp8.model_recipe
    _Fp8.model_recipe = recipe if enabled else None
    try:
        yield
    finally:
        _Fp8.model_recipe = before


class UserBufferQuantizationMode(enum.Enum):
    NONE = "none"
    FP8 = "fp8"


def initialize_ub(
    shape,
    tp_size,
    use_fp8=False,
    quantization_modes=None,
    dtype=torch.bfloat16,
    ub_cfgs=None,
    bootstrap_backend=None,
):
    USER_BUFFERS.append((shape, tp_size, quantization_modes, dtype, ub_cfgs, bootstrap_backend))


def parallel_cross_entropy(
    inp, target, label_smoothing=0.0, reduce_loss=False, dist_process_group=None
):
    """Return losses for logits `[s, b, v / ranks]` and targets `[s, b]` over the whole
    vocabulary.
    """
    assert inp.isfinite().all()
    assert target.is_contiguous()
    assert not reduce_loss

    if dist_process_group is not None:
        inp = _Gather.apply(inp, dist_process_group)
    return F.cross_entropy(inp.float().flatten(0, 1), target.flatten(), reduction="none").view(
        target.shape
    )


class _Gather(torch.autograd.Function):
    """Gather along the last dimension; every rank has the same loss, so the gradient is this rank's
    part.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.rank = dist.get_rank(group)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        ctx.size = len(parts)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, dy):
        return dy.chunk(ctx.size, -1)[ctx.rank].contiguous(), None


def checkpoint(function, *args, use_reentrant=True, **kwargs):
    recipe = None if _Fp8.calibrating else _Fp8.recipe

    @contextlib.contextmanager
    def recomputing():
        _Fp8.recomputes = True
        try:
            with fp8_autocast(recipe is not None, fp8_recipe=recipe):
                yield
        finally:
            _Fp8.recomputes = False

    def contexts():
        return contextlib.nullcontext(), recomputing()

    return torch_checkpoint(
        function,
        *args,
        use_reentrant=use_reentrant,
        context_fn=contexts,
        **kwargs,
    )


def _normalized(x, weight, bias, eps, rms, zero_centered):
    weight = weight.float() + 1 if zero_centered else weight.float()
    if rms:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * weight).to(
            x.dtype
        )
    return F.layer_norm(x.float(), weight.shape, weight, bias.float(), eps).to(x.dtype)


class _Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.fp8_meta = {}
        self.fp8 = False
        self._rounded = None
        self.primary_weights_in_fp8 = _Fp8.model_recipe is not None

    def init_fp8_weights(self, names):
        """Create fp8 weights; the last call of a constructor."""
        self.param_init_meta = {
            name: SimpleNamespace(fp8_meta_index=3 * i + 1) for i, name in enumerate(names)
        }
        if self.primary_weights_in_fp8:
            self.fp8_meta |= {"recipe": _Fp8.model_recipe, "num_gemms": len(names)}
            self.init_fp8_meta_tensors(_Fp8.model_recipe)
            self.quantizers = {
                "scaling_fwd": [Quantizer(self, slot) for slot in range(3 * len(names))]
            }

    def start(self):
        self.calibrates = _Fp8.calibrating
        self.fp8 = _Fp8.recipe is not None and not self.calibrates
        if self.fp8:
            _Fp8.modules.setdefault(self, _Fp8.group)
            if not _Fp8.recomputes:
                self.is_first = not _Fp8.has_first
                _Fp8.has_first = True

        if (self.fp8 or self.calibrates) and "scaling_fwd" not in self.fp8_meta:
            self.fp8_meta |= {"recipe": _Fp8.recipe, "num_gemms": 1}
            self.init_fp8_meta_tensors(_Fp8.recipe)

    def init_fp8_meta_tensors(self, recipe):
        if "scaling_fwd" in self.fp8_meta or not recipe.delayed():
            return
        for name, each in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            count = each * self.fp8_meta["num_gemms"]
            history = torch.zeros(recipe.amax_history_len, count)
            self.fp8_meta[name] = SimpleNamespace(scale=torch.ones(count), amax_history=history)

    def rounded(self, x, slot):
        if not self.fp8_meta["recipe"].delayed():
            return x + (_round_to_nvfp4(x) - x).detach()
        meta = self.fp8_meta["scaling_fwd"]
        meta.amax_history[0, slot] = torch.maximum(
            meta.amax_history[0, slot],
            x.detach().abs().amax().float(),
        )
        y = (x.float() * meta.scale[slot]).clamp(-448, 448).to(
            torch.float8_e4m3fn
        ).float() / meta.scale[slot]
        return x + (y.to(x.dtype) - x).detach()

    def calibrate(self, x, slot):
        if self.fp8_meta["recipe"].delayed():
            meta = self.fp8_meta["scaling_fwd"]
            meta.amax_history[0, slot] = x.detach().abs().amax().float()

    def rounded_gradient(self, dy):
        """Return the gradient of an output, rounded with the scale of the first product."""
        if not self.fp8 or not self.fp8_meta["recipe"].delayed():
            return dy
        meta = self.fp8_meta["scaling_bwd"]
        amax = dy.abs().amax().float()
        meta.amax_history[0, 0] = torch.maximum(meta.amax_history[0, 0], amax)
        fp8_max = _format_maximum(self, "scaling_bwd")
        dtype = torch.float8_e4m3fn if fp8_max == 448 else torch.float8_e5m2
        scaled = (dy.float() * meta.scale[0]).clamp(-fp8_max, fp8_max)
        return (scaled.to(dtype).float() / meta.scale[0]).to(dy.dtype)

    def update_scales(self, direction, group):
        if not self.fp8_meta["recipe"].delayed():
            return
        meta = self.fp8_meta[direction]
        if dist.is_initialized():
            dist.all_reduce(meta.amax_history[0], dist.ReduceOp.MAX, group=group)
        amax = meta.amax_history.amax(0)
        meta.scale = torch.where(
            amax > 0,
            _format_maximum(self, direction) / amax.clamp(min=1e-30) / 2 ** _margin(self),
            meta.scale,
        )
        meta.amax_history = meta.amax_history.roll(-1, 0)
        meta.amax_history[0].zero_()

    def weight_for(self, weight, is_first_microbatch):
        if isinstance(weight, Fp8Tensor):
            return weight.dequantize()
        if not self.fp8:
            return weight
        if is_first_microbatch is not False or self._rounded is None:
            self._rounded = self.rounded(weight, 1).detach()
        return weight + (self._rounded - weight).detach()


def _round_to_nvfp4(x):
    """Return the nearest multiples of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 times the scale of a block."""
    blocks = x.detach().float().unflatten(-1, (-1, 16))
    whole = blocks.abs().amax() / (6 * 448)  # the scale of the tensor
    scales = (blocks.abs().amax(-1, keepdim=True) / 6 / whole).to(torch.float8_e4m3fn).float()
    scales = (scales * whole).clamp(min=1e-30)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    bounds = (magnitudes[1:] + magnitudes[:-1]) / 2
    nearest = magnitudes[torch.bucketize(blocks.abs() / scales, bounds)]
    return (nearest * blocks.sign() * scales).flatten(-2).to(x.dtype)


def _margin(module):
    return module.fp8_meta["recipe"].margin


def _format_maximum(module, direction):
    return module.fp8_meta["recipe"].fp8_format.value[direction == "scaling_bwd"]


class _Product(torch.autograd.Function):
    """y = x W^T; the gradient of W is added to `main_grad` if accumulation is fused."""

    @staticmethod
    def forward(ctx, x, weight, parameter, fused, overwrite, module):
        ctx.save_for_backward(x, weight)
        ctx.module = module
        ctx.parameter = parameter
        ctx.fused = fused
        ctx.overwrite = overwrite
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        module = ctx.module
        if module is not None:
            dy = module.rounded_gradient(dy)
        dw = dy.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.fused and ctx.parameter.requires_grad:
            main_grad = ctx.parameter.main_grad
            main_grad.copy_(dw) if ctx.overwrite else main_grad.add_(dw)
            dw = None

        if module is not None and module.fp8 and module.is_first:
            for other, group in _Fp8.modules.items():
                other.update_scales("scaling_bwd", group)
        return dy @ weight, dw, None, None, None, None


class _Sum(torch.autograd.Function):
    """Sum over the group: forward at the end of a row-parallel layer, backward at the start of a
    column-parallel layer.
    """

    @staticmethod
    def forward(ctx, x, group, forward, sequence):
        ctx.group = group
        ctx.forward_sums = forward
        ctx.sequence = sequence
        return _combine(x, group, forward, sequence)

    @staticmethod
    def backward(ctx, dy):
        return _combine(dy, ctx.group, not ctx.forward_sums, ctx.sequence), None, None, None


def _combine(x, group, sums, sequence):
    size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    if sums:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(size)[rank].contiguous() if sequence else x

    if not sequence:
        return x.view_as(x)
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


class Linear(_Module):
    def __init__(
        self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
        tp_size=1, bias=True, params_dtype=None, parallel_mode=None, device="cuda", ub_overlap_rs=False,
        ub_overlap_ag=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None,
    ):  # fmt: skip
        super().__init__()
        overlaps = (ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad)
        self.overlaps = (ub_name, overlaps) if any(overlaps) else None
        self.tp_group = tp_group
        self.tp_size = tp_size
        self.mode = parallel_mode
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        columns = in_features // (tp_size if parallel_mode == "row" else 1)
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=params_dtype, device=device))
        self.bias = (
            nn.Parameter(torch.empty(rows, dtype=params_dtype, device=device)) if bias else None
        )
        self.init_fp8_weights(["weight"])

    def forward(self, inp, is_first_microbatch=None):
        self.start()
        told = {
            "fused": self.fuse_wgrad_accumulation,
            "first": is_first_microbatch,
            "fp8": self.fp8,
        }
        CALLS.append(
            (
                self,
                told | {"overlaps": self.overlaps, "primary": isinstance(self.weight, Fp8Tensor)},
            )
        )
        if self.mode == "column" and self.tp_size > 1:
            inp = _Sum.apply(inp, self.tp_group, False, self.sequence_parallel)
        if self.calibrates:
            self.calibrate(inp, 0)
            self.calibrate(self.weight, 1)
        inp = self.rounded(inp, 0) if self.fp8 else inp
        weight = self.weight_for(self.weight, is_first_microbatch)
        first = is_first_microbatch is True
        # Without fp8 the real module computes with a copy of a weight in fp8, as its parameter.
        parameter = self.weight
        if isinstance(parameter, Fp8Tensor) and not self.fp8:
            parameter = weight.requires_grad_(self.weight.requires_grad)
        out = _Product.apply(inp, weight, parameter, self.fuse_wgrad_accumulation, first, self)
        if self.mode == "row" and self.tp_size > 1:
            out = _Sum.apply(out, self.tp_group, True, self.sequence_parallel)
        return out if self.bias is None else out + self.bias


class LayerNormLinear(Linear):
    def __init__(
        self, in_features, out_features, eps=1e-5, normalization="LayerNorm", zero_centered_gamma=False,
        params_dtype=None, device="cuda", **kwargs,
    ):  # fmt: skip
        super().__init__(
            in_features,
            out_features,
            params_dtype=params_dtype,
            device=device,
            **kwargs,
        )
        self.eps = eps
        self.rms = normalization == "RMSNorm"
        self.zero_centered_gamma = zero_centered_gamma
        empty = torch.empty(in_features, dtype=params_dtype, device=device)
        self.layer_norm_weight = nn.Parameter(empty)
        self.layer_norm_bias = None if self.rms else nn.Parameter(empty.clone())

    def forward(self, inp, is_first_microbatch=None):
        norm = (
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.eps,
            self.rms,
            self.zero_centered_gamma,
        )
        return super().forward(_normalized(inp, *norm), is_first_microbatch)


class _Norm(nn.Module):
    def __init__(
        self,
        normalized_shape,
        eps=1e-5,
        params_dtype=None,
        zero_centered_gamma=False,
        device="cuda",
    ):
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(normalized_shape, dtype=params_dtype, device=device))
        self.bias = None if self.rms else nn.Parameter(torch.empty_like(self.weight))

    def forward(self, x):
        return _normalized(x, self.weight, self.bias, self.eps, self.rms, self.zero_centered_gamma)


class LayerNorm(_Norm):
    rms = False


class RMSNorm(_Norm):
    rms = True


class GroupedLinear(_Module):
    def __init__(
        self, num_gemms, in_features, out_features, bias=True, params_dtype=None, device="cuda"
    ):
        super().__init__()
        self.num_gemms = num_gemms
        self.fuse_wgrad_accumulation = False
        for index in range(num_gemms):
            empty = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            setattr(self, f"weight{index}", nn.Parameter(empty))
        self.init_fp8_weights([f"weight{index}" for index in range(num_gemms)])

    def forward(self, inp, m_splits, is_first_microbatch=None):
        self.start()
        CALLS.append(
            (
                self,
                {
                    "fused": self.fuse_wgrad_accumulation,
                    "first": is_first_microbatch,
                    "fp8": self.fp8,
                },
            )
        )
        assert sum(m_splits) == len(inp)
        assert len(inp) > 0, "cuBLAS' grouped product may crash or hang"

        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        assert not self.fp8 or all(rows % 16 == 0 for rows in m_splits), m_splits

        fused = self.fuse_wgrad_accumulation
        first = is_first_microbatch is True
        products = []
        for x, parameter in zip(inp.split(m_splits), weights, strict=True):
            weight = parameter.dequantize() if isinstance(parameter, Fp8Tensor) else parameter
            # As in `Linear`
            if isinstance(parameter, Fp8Tensor) and not self.fp8:
                parameter = weight.requires_grad_(parameter.requires_grad)
            products.append(_Product.apply(x, weight, parameter, fused, first, None))
        return torch.cat(products)


class Fp8Padding(nn.Module):
    def __init__(self, num_gemms):
        super().__init__()

    def forward(self, inp, m_splits):
        padded = [math.ceil(rows / 16) * 16 for rows in m_splits]
        parts = [
            F.pad(x, (0, 0, 0, to - len(x)))
            for x, to in zip(inp.split(m_splits), padded, strict=True)
        ]
        return torch.cat(parts), padded


class Fp8Unpadding(nn.Module):
    def __init__(self, num_gemms):
        super().__init__()

    def forward(self, inp, m_splits):
        padded = [math.ceil(rows / 16) * 16 for rows in m_splits]
        return torch.cat([x[:rows] for x, rows in zip(inp.split(padded), m_splits, strict=True)])


def _positions(length, group):
    """Return the positions of this rank's two chunks (one from each end) and of all ranks
    in order.
    """
    size = dist.get_world_size(group)
    chunk = length // 2
    chunks = [torch.arange(index * chunk, (index + 1) * chunk) for index in range(2 * size)]
    by_rank = [torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(size)]
    return by_rank[dist.get_rank(group)], torch.cat(by_rank)


class _GatherKeys(torch.autograd.Function):
    """Gather keys of all ranks; the queries of each rank contribute a gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.clone()
        dist.all_reduce(dy, group=ctx.group)
        return dy.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class DotProductAttention(nn.Module):
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, attn_mask_type="causal",
        softmax_scale=None, cp_group=None, cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p",
    ):  # fmt: skip
        super().__init__()
        self.cp_group = cp_group
        assert cp_group is None or cp_global_ranks == dist.get_process_group_ranks(cp_group)
        assert cp_comm_type in ("p2p", "all_gather") or cp_group is None  # a2a is exchanged before

        self.heads = num_attention_heads
        self.channels = kv_channels
        self.groups = num_gqa_groups
        self.scale = softmax_scale or kv_channels**-0.5
        self.dropout = attention_dropout

    def forward(
        self, query_layer, key_layer, value_layer, qkv_format="sbhd", attn_mask_type="causal", window_size=None,
        cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=None, max_seqlen_kv=None,
        core_attention_bias_type="no_bias", alibi_slopes=None,
    ):  # fmt: skip
        """Attend. sbhd: `[s, b, heads, d]` to `[s, b, heads d]`; thd: `[t, heads, d]` to `[t, heads
        d]`.
        """
        assert query_layer.shape[-2:] == (self.heads, self.channels)
        assert key_layer.shape[-2] == self.groups

        q = query_layer
        k = key_layer
        v = value_layer
        k, v = (x.repeat_interleave(self.heads // self.groups, -2) for x in (k, v))
        if qkv_format == "thd":
            assert attn_mask_type == "padding_causal"
            assert cu_seqlens_q.dtype == torch.int32
            assert cu_seqlens_q[0] == 0
            assert cu_seqlens_q[-1] == len(q)
            assert torch.equal(cu_seqlens_q, cu_seqlens_kv)

            lengths = cu_seqlens_q.diff()
            assert lengths.max() <= max_seqlen_q == max_seqlen_kv

            document = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        else:
            assert attn_mask_type == "causal"
            assert cu_seqlens_q is None
            document = torch.zeros(len(q), dtype=torch.long)

        place = here = torch.arange(len(q))
        if self.cp_group is not None:
            assert qkv_format == "sbhd"
            assert core_attention_bias_type == "no_bias"
            here, place = _positions(len(q), self.cp_group)
            k, v = (_GatherKeys.apply(x, self.cp_group) for x in (k, v))
            document = torch.zeros(len(k), dtype=torch.long)

        distance = here.unsqueeze(1) - place
        hidden = (distance < 0) | (document[: len(q)].unsqueeze(1) != document)
        if window_size is not None:
            hidden |= distance > window_size[0]
        scores = torch.einsum("sbhd,tbhd->bhst", q.float(), k.float()) * self.scale
        if core_attention_bias_type == "alibi":
            scores = scores - alibi_slopes.view(1, -1, 1, 1) * distance
        probs = F.dropout(
            scores.masked_fill(hidden, -math.inf).softmax(-1),
            self.dropout,
            self.training,
        )
        out = torch.einsum("bhst,tbhd->sbhd", probs, v.float()).to(q.dtype).flatten(2)
        return out.squeeze(1) if qkv_format == "thd" else out
