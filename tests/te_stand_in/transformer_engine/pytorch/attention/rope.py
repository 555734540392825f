"""Rotary embedding with one angle per element."""

import torch


def apply_rotary_pos_emb(
    t, freqs, tensor_format="sbhd", start_positions=None, interleaved=False, fused=False, cu_seqlens=None, cp_size=1,
    cp_rank=0,
):  # fmt: skip
    """Rotate `[s, b, heads, d]` by `[s, 1, 1, d or less]`."""
    assert (
        fused
        and tensor_format == "sbhd"
        and freqs.dtype == torch.float32
        and freqs.shape[0] >= t.shape[0]
    )
    width = freqs.shape[-1]
    turned = t[..., :width].float()
    rest = t[..., width:]
    if interleaved:
        quarter = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
    else:
        quarter = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), -1)
    angles = freqs[: t.shape[0]]
    return torch.cat(((turned * angles.cos() + quarter * angles.sin()).to(t.dtype), rest), -1)
