"""The Triton kernels of `paged_kernel`. Only that module imports this one."""

# Triton's language is not Python's, and its functions have no types.
# mypy: ignore-errors

import triton
import triton.language as tl


# Arguments that differ between steps and layers of one model must not choose a variant: it would be compiled while
# requests wait. Tables of graphs and of other steps have different strides and alignments.
@triton.jit(
    do_not_specialize=["blocks_stride", "lengths_stride", "parts", "window"],
    do_not_specialize_on_alignment=["blocks", "lengths"],
)
def decode(
    query, keys, values, blocks, lengths, partial, sums, blocks_stride, lengths_stride, keys_stride, values_stride,
    scaling, parts, window, is_whole: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr,
    block_tokens: tl.constexpr, queries: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Attend to one part of the tokens of one row, with the `group` query heads of one key-value head.

    If one part is the whole, `partial` is the result `[rows, heads, head_dim]`. Otherwise it is
    `[rows, heads, parts, head_dim]`, and `sums` `[rows, heads, parts]` gets the logarithm of the sum of exponentials.
    """
    row, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * group
    length = tl.load(lengths + row * lengths_stride).to(tl.int32)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    begin = first // tile * tile
    share = tl.cdiv(tl.cdiv(length - begin, tile), parts) * tile
    begin += part * share
    end = tl.minimum(begin + share, length)

    index = tl.arange(0, queries)
    dim = tl.arange(0, width)
    is_dim = dim < head_dim
    is_query = (index < group)[:, None] & is_dim[None, :]
    head = row * heads + kv_head * group + index  # of all rows
    own = tl.load(query + head[:, None] * head_dim + dim[None, :], mask=is_query, other=0.0)

    highest = tl.full((queries,), float("-inf"), tl.float32)
    total = tl.zeros((queries,), tl.float32)
    found = tl.zeros((queries, width), tl.float32)
    for start in range(begin, end, tile):
        token = start + tl.arange(0, tile)
        is_token = token < end
        block = tl.load(blocks + row * blocks_stride + token // block_tokens, mask=is_token, other=0)
        position = block.to(tl.int64) * block_tokens + token % block_tokens
        is_loaded = is_token[:, None] & is_dim[None, :]
        offset = kv_head * head_dim + dim[None, :]
        key = tl.load(keys + position[:, None] * keys_stride + offset, mask=is_loaded, other=0.0)
        value = tl.load(values + position[:, None] * values_stride + offset, mask=is_loaded, other=0.0)
        scores = tl.dot(own, tl.trans(key), input_precision="ieee") * scaling
        is_seen = is_token & (token >= first)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        before, highest = highest, tl.maximum(highest, tl.max(scores, 1))
        # Before the first visible token all scores are -inf: the difference of two would be NaN.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp(scores - base[:, None])
        rescale = tl.exp(before - base)
        total = total * rescale + tl.sum(weight, 1)
        found = found * rescale[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")

    answer = found / tl.where(total == 0.0, 1.0, total)[:, None]
    if is_whole:
        at = head[:, None] * head_dim + dim[None, :]
    else:
        at = (head[:, None] * parts + part) * head_dim + dim[None, :]
        tl.store(sums + head * parts + part, highest + tl.log(total), mask=index < group)
    tl.store(partial + at, answer.to(partial.dtype.element_ty), mask=is_query)


@triton.jit(do_not_specialize=["parts"])
def add_up(partial, sums, out, parts, most: tl.constexpr, head_dim: tl.constexpr, width: tl.constexpr):
    """Write the output of one head: the average of its parts, weighted by their sums of exponentials.

    At least one part has tokens. `most`: a power of two, at least `parts`.
    """
    head = tl.program_id(0)
    part, dim = tl.arange(0, most), tl.arange(0, width)
    is_part, is_dim = part < parts, dim < head_dim
    logs = tl.load(sums + head * parts + part, mask=is_part, other=float("-inf"))
    weight = tl.exp(logs - tl.max(logs, 0))
    offset = (head * parts + part)[:, None] * head_dim + dim[None, :]
    each = tl.load(partial + offset, mask=is_part[:, None] & is_dim[None, :], other=0.0)
    answer = tl.sum(each * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + head * head_dim + dim, answer.to(out.dtype.element_ty), mask=is_dim)
