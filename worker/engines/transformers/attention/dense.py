"""Attention of queries over keys and values that lie in tensors of their own: torch's kernels, and the plain formula.

Shapes: query `[rows, heads, queries, head_dim]`, keys and values `[rows, kv_heads, positions, head_dim]`, mask added to
the scores.
"""

import torch
import torch.nn.functional as F

from worker.engines.transformers.attention import cpu_attention


def flash(
    told: list[torch.Tensor],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    """Torch's kernel for the CPU, as `sdpa`; the logarithms of its sums `[rows, heads, queries]` go to `told`."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    shape, pairs = query.shape[:3], cpu_attention.paired(query, keys, values)
    answer, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(pairs or (query, keys, values)), 0.0, causal, attn_mask=mask, scale=scaling
    )
    told.append(sums.reshape(shape))
    out: torch.Tensor = cpu_attention.unpaired(answer) if pairs else answer
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
    """Torch's kernels. `[rows, heads, queries, head_dim]` against `[rows, kv_heads, positions, head_dim]`."""
    grouped = query.shape[1] != keys.shape[1]
    if grouped and query.is_cuda and not _may_share(query, keys, values, mask, causal=causal):
        group = query.shape[1] // keys.shape[1]
        keys, values, grouped = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), False
    pairs = None if causal or grouped else cpu_attention.paired(query, keys, values)
    if pairs is not None:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return cpu_attention.unpaired(F.scaled_dot_product_attention(*pairs, attn_mask=mask, scale=scaling))
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped
    )


def _may_share(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
) -> bool:
    """Whether a fast kernel of CUDA's takes keys that heads share: FlashAttention alone does, without a mask, in types
    of 16 bits and on cards that it knows. Where it cannot, torch would compute all scores at once."""
    asked = torch.backends.cuda.SDPAParams(query, keys, values, mask, 0.0, causal, True)
    return mask is None and torch.backends.cuda.can_use_flash_attention(asked)


def eager(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    """The formula, step by step, softmax in float32."""
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
