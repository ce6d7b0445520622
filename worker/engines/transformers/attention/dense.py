"""Dense attention kernels: torch's, and the plain formula.

Shapes: query `[rows, heads, queries, head_dim]`, keys and values `[rows, kv_heads, positions, head_dim]`, mask added to
the scores.
"""

import torch
import torch.nn.functional as F

from worker.engines.transformers.attention import cpu_attention


def cpu_flash_attention(
    logsums: list[torch.Tensor],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    """Torch's CPU flash-attention kernel. Like `sdpa`, and appends the log-sum-exp `[rows, heads, queries]` to
    `logsums`."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    shape, pairs = query.shape[:3], cpu_attention.pair_heads(query, keys, values)
    answer, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(pairs or (query, keys, values)), 0.0, causal, attn_mask=mask, scale=scaling
    )
    logsums.append(sums.reshape(shape))
    out: torch.Tensor = cpu_attention.unpair_heads(answer) if pairs else answer
    return out


def sdpa(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    """Torch's scaled_dot_product_attention, with workarounds for grouped-query attention on CUDA."""
    grouped = query.shape[1] != keys.shape[1]
    # Without a kernel for grouped queries torch falls back to the plain formula and allocates all scores.
    if grouped and query.is_cuda and not _can_use_flash_attention(query, keys, values, mask, causal=causal):
        group = query.shape[1] // keys.shape[1]
        keys, values, grouped = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), False
    # The CPU kernel is slow for single bfloat16 queries; see cpu_attention.pair_heads.
    pairs = None if causal or grouped else cpu_attention.pair_heads(query, keys, values)
    if pairs is not None:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return cpu_attention.unpair_heads(F.scaled_dot_product_attention(*pairs, attn_mask=mask, scale=scaling))
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped
    )


def _can_use_flash_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
) -> bool:
    """True if a fused CUDA kernel supports keys shared by heads: only FlashAttention does, without a mask, in 16-bit
    types and on supported GPUs."""
    params = torch.backends.cuda.SDPAParams(query, keys, values, mask, 0.0, causal, True)
    return mask is None and torch.backends.cuda.can_use_flash_attention(params)


def eager(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    """The formula step by step, with softmax in float32. Reference for the other kernels."""
    if query.shape[1] != keys.shape[1]:
        group = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ values
