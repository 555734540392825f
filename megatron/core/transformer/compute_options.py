"""How a model is computed: precision, back end, fused kernels, overlaps and recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.lazy_import import lazy_module
from megatron.core.utils import flag

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "moe", "mla_up_proj")


@dataclass(kw_only=True)
class ComputeOptions:
    """Options that leave the model as it is: the same weights and, to rounding, the same results."""

    bf16: bool = flag(False)
    """bfloat16 parameters and arithmetic, fp32 gradients and main parameters."""
    fp16: bool = flag(False)
    """float16 parameters and arithmetic with loss scaling, fp32 gradients and main parameters."""
    transformer_impl: str = flag("local", choices=("local", "transformer_engine"))
    """What computes the layers: plain torch, or Transformer Engine; also whose modules of Megatron-LM legacy files are
    for. Results are the same to rounding, and so are checkpoints."""
    norm_impl: str = flag("torch", choices=("torch", "apex"))
    """What computes the norms of local layers: torch, or apex's fused kernels."""
    fp8: str | None = flag(None, "--fp8-format", choices=("e4m3", "hybrid"))
    """Matrix products of the layers in fp8 (Micikevicius et al. 2022): e4m3 throughout, or e5m2 for gradients."""
    fp8_recipe: str = flag("delayed", choices=("delayed", "tensorwise", "blockwise", "mxfp8"))
    """How fp8 tensors are scaled: by the maxima of earlier steps, by their own, by those of blocks, of 32 elements."""
    fp8_margin: int = flag(0)
    """With delayed scaling: scales are smaller by 2 to this power."""
    fp8_amax_history_len: int = flag(1)
    """With delayed scaling: number of maxima that are kept."""
    fp8_amax_compute_algo: str = flag("most_recent", choices=("most_recent", "max"))
    """With delayed scaling: which of them decides."""
    fp8_param_gather: bool = flag(False)
    """Keep and gather the weights of the layers in fp8; the fp32 main parameters are what is trained and stored."""
    fp4: str | None = flag(None, "--fp4-format", choices=("e2m1",))
    """Matrix products of the layers in 4 bits (Blackwell)."""
    fp4_recipe: str = flag("nvfp4", choices=("nvfp4",))
    """How fp4 tensors are scaled: by the maxima of 16 elements (NVFP4)."""
    first_last_layers_bf16: bool = flag(False)
    """Keep the first and the last layers out of fp8 or fp4, as many as the two options below say."""
    num_layers_at_start_in_bf16: int = flag(1, at_least=0)
    """Layers at the start with --first-last-layers-bf16."""
    num_layers_at_end_in_bf16: int = flag(1, at_least=0)
    """Layers at the end with --first-last-layers-bf16."""
    tp_comm_overlap: bool = flag(False)
    """Overlap collectives of tensor parallelism with the matrix products that they are for (Transformer Engine)."""
    tp_comm_overlap_cfg: str | None = flag(None)
    """YAML file with the way of each of these overlaps. Default: Transformer Engine's."""
    tp_comm_overlap_ag: bool = flag(True, "--no-tp-comm-overlap-ag", "--disable-tp-comm-overlap-ag")
    """Do not overlap all-gathers."""
    tp_comm_overlap_rs: bool = flag(True, "--no-tp-comm-overlap-rs", "--disable-tp-comm-overlap-rs")
    """Do not overlap reduce-scatters."""
    tp_comm_overlap_rs_dgrad: bool = flag(False)
    """Overlap reduce-scatters with the gradients of inputs, too."""
    tp_comm_bulk_dgrad: bool = flag(True, "--no-tp-comm-bulk-dgrad", "--disable-tp-comm-bulk-dgrad")
    """Do not overlap the all-gather of inputs with their gradients."""
    tp_comm_bulk_wgrad: bool = flag(True, "--no-tp-comm-bulk-wgrad", "--disable-tp-comm-bulk-wgrad")
    """Do not overlap the reduce-scatter of the inputs' gradients with those of weights."""
    tp_comm_bootstrap_backend: str = flag("nccl", choices=("nccl", "mpi", "gloo"))
    """Backend of torch.distributed that the buffers of these overlaps are set up over."""
    cross_entropy_loss_fusion: bool = flag(False)
    """Take the loss from --cross-entropy-fusion-impl; native, which is fused in any case, without it."""
    cross_entropy_fusion_impl: str = flag("native", choices=("native", "te"))
    """The output layer with the loss in one, or Transformer Engine's kernel on the logits."""
    apply_rope_fusion: bool = flag(False)
    """Rotate queries and keys by Transformer Engine's kernel."""
    recompute_granularity: str | None = flag(None, choices=("full", "selective"))
    """Recompute activations in backward: whole layers (full) or parts of them (selective)."""
    recompute_modules: list[str] | None = flag(None, choices=RECOMPUTE_MODULES)
    """With selective: attention without its projections (core_attn, the default), the two norms in front of the
    projections (layernorm: their outputs are not kept), the whole MLP (mlp), a layer's experts with router and
    dispatch (moe), latent attention from its narrow vectors on (mla_up_proj)."""
    recompute_method: str | None = flag(None, choices=("uniform", "block"))
    """With full: groups of --recompute-num-layers layers (uniform), or the first so many layers of a chunk (block)."""
    recompute_num_layers: int | None = flag(None, positive=True)
    """Number of layers per group (uniform) or per chunk (block)."""

    @property
    def params_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32

    @property
    def low_precision(self) -> str | None:
        """The recipe of the layers' matrix products, where they are in fp8 or fp4."""
        return self.fp8_recipe if self.fp8 is not None else self.fp4_recipe if self.fp4 is not None else None

    def recomputes(self, module: str) -> bool:
        """Whether --recompute-granularity selective recomputes this one of RECOMPUTE_MODULES."""
        return self.recompute_granularity == "selective" and module in (self.recompute_modules or ["core_attn"])
