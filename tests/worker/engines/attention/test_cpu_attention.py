"""Promises of `worker.engines.transformers.attention.cpu_attention`: the formula of attention, by whatever calls it is
computed."""

import pytest
import torch

from tests.worker.paged_reference import assert_formula, formula, random_pool, table
from worker.engines.transformers.attention import cpu_attention, decode_plan, dense, paged
from worker.estimate.memory_tracer import peak_bytes
from worker.protocol.memory import BLOCK_TOKENS, SPREAD_SCORES, WIDENED_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("window", [0, 9])
def test_rows_that_decode_together_give_the_logits_of_each_alone(group: int, window: int, dtype: torch.dtype) -> None:
    rows, stride, kv_heads, dim = 40, 3 * BLOCK_TOKENS, 2, 8
    pool = random_pool(rows=rows, blocks=3 * rows, dtype=dtype)
    pool.values[0].fill_(float("nan"))
    ends = {0: 48, 2: 1, 3: 17, 5: 30, 6: 47}  # three rows belong to no sequence
    ends |= {row: 20 + row % 28 for row in range(8, rows)}
    decodes = tuple((table(*range(3 * row, 3 * row + 3)), end) for row, end in ends.items())
    for row, end in ends.items():
        low = max(0, end - window) if window else 0
        pool.values[0][row * stride + low : row * stride + end].normal_()
    packed = paged.PackedBatch(pool, torch.zeros(len(ends), dtype=torch.int64), decodes, {})
    query = torch.randn(len(ends), kv_heads * group, dim).to(dtype)
    plan = packed.plan(window, kv_heads * group, dtype, can_merge=True)
    assert [isinstance(call, decode_plan.PaddedCall) and call.places is not None for call in plan.calls] == [True]
    answers = packed.decode(paged.LayerAttention(dense.sdpa, 0, window), query)
    near = 1e-4 if dtype == torch.float32 else 1e-2
    assert_formula(answers, query, pool, decodes, window, atol=near, rtol=near)


@pytest.mark.parametrize("window", [0, 9])
def test_rows_that_begin_anywhere_attend_together(window: int) -> None:
    starts = [3 * row + row * row % 5 for row in range(1, 30)]
    pool = random_pool(rows=2, blocks=100)
    decodes = tuple((table(start, start + 1), place % 31 + 1) for place, start in enumerate(starts))
    packed = paged.PackedBatch(pool, torch.zeros(len(starts), dtype=torch.int64), decodes, {})
    query = torch.randn(len(starts), 2, 8)
    plan = packed.plan(window, 2, torch.float32, can_merge=True)
    assert [isinstance(call, decode_plan.PaddedCall) and call.stride == 0 for call in plan.calls] == [True]
    answers = packed.decode(paged.LayerAttention(dense.sdpa, 0, window), query)
    exact = packed.decode(paged.LayerAttention(dense.eager, 0, window), query)
    torch.testing.assert_close(answers, exact, atol=1e-5, rtol=1e-4)
    assert_formula(answers, query, pool, decodes, window)


def test_shared_and_own_runs_of_rows_are_merged() -> None:
    rows = 34
    pool = random_pool(rows=rows, blocks=3 * rows)
    decodes = tuple((table(0, 1, 3 * row, 3 * row + 1), 2 * BLOCK_TOKENS + 5 * (row % 6 + 1)) for row in range(1, rows))
    packed = paged.PackedBatch(pool, torch.zeros(rows - 1, dtype=torch.int64), decodes, {})
    plan = packed.plan(0, 2, torch.float32, can_merge=True)
    assert plan.merges
    assert any(isinstance(call, decode_plan.PaddedCall) and call.places is not None for call in plan.calls)
    query = torch.randn(rows - 1, 2, 8)
    assert_formula(packed.decode(paged.LayerAttention(dense.sdpa, 0, 0), query), query, pool, decodes)


def test_two_heads_at_once_answer_as_each_alone() -> None:
    torch.manual_seed(0)
    rows, tokens, heads, dim = 3, 20, 6, 16
    lying = torch.randn(2, rows, tokens, heads, dim).bfloat16()
    keys, values = lying.transpose(2, 3)  # [rows, heads, tokens, head_dim]: heads side by side
    query = torch.randn(rows, heads, 1, dim).bfloat16()
    mask = torch.zeros(rows, 1, 1, tokens).bfloat16()
    mask[1, ..., 11:] = float("-inf")
    two = cpu_attention.pair_heads(query, keys, values)
    assert two is not None
    assert two[0].shape == (rows, heads // 2, 2, 2 * dim)
    logsums: list[torch.Tensor] = []
    for answer in (
        dense.sdpa(query, keys, values, mask, causal=False, scaling=None),
        dense.cpu_flash_attention(logsums, query, keys, values, mask, causal=False, scaling=None),
    ):
        for row in range(rows):
            end = 11 if row == 1 else tokens
            exact, sums = formula(query[row, :, 0], lying[0, row, :end], lying[1, row, :end])
            torch.testing.assert_close(answer[row, :, 0].double(), exact, atol=2e-2, rtol=2e-2)
            if logsums:
                torch.testing.assert_close(logsums[0][row, :, 0].double(), sums, atol=2e-2, rtol=2e-2)


def test_heads_are_taken_two_by_two_only_where_it_helps_and_they_lie_so() -> None:
    lying = torch.zeros(1, 5, 4, 8, dtype=torch.bfloat16)
    keys = lying.transpose(1, 2)
    query = torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16)
    assert cpu_attention.pair_heads(query, keys, keys) is not None
    assert cpu_attention.pair_heads(query, keys.contiguous(), keys) is None, "tokens of a head side by side"
    assert cpu_attention.pair_heads(query.float(), keys.float(), keys.float()) is None
    assert cpu_attention.pair_heads(query[:, :3], keys[:, :3], keys[:, :3]) is None, "an odd number"
    assert cpu_attention.pair_heads(torch.zeros(1, 4, 2, 8).bfloat16(), keys, keys) is None, "several queries a head"


def test_keys_of_many_rows_are_widened_a_few_rows_at_a_time() -> None:
    torch.manual_seed(0)
    rows, tokens, heads, dim = 20, 3000, 1, 64
    positions = torch.arange(tokens).expand(rows, tokens).int()
    assert 1 < WIDENED_BYTES // (4 * tokens * heads * dim) < rows
    keys, values = torch.randn(2, rows * tokens, heads, dim).bfloat16()
    query = torch.randn(rows, heads, 1, dim).bfloat16()
    logsums: list[torch.Tensor] = []
    places = cpu_attention.RowPositions(0, tokens, positions)
    answer = cpu_attention.decode_attention(query, keys, values, places, None, scaling=None, logsums=logsums)
    for row in range(rows):
        lying = slice(row * tokens, (row + 1) * tokens)
        exact, sums = formula(query[row, :, 0], keys[lying], values[lying])
        torch.testing.assert_close(answer[row, :, 0].double(), exact, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(logsums[0][row, :, 0].double(), sums, atol=1e-3, rtol=1e-3)


def test_no_more_scores_are_computed_at_once_than_a_step_has_memory_for() -> None:
    keys = torch.zeros(16, 12, 64)
    assert cpu_attention.max_tokens(64, 12, keys) == SPREAD_SCORES // (64 * 12)
    assert cpu_attention.max_tokens(2, 12, keys) == cpu_attention.max_tokens(64, 12, keys.half()) == 0, (
        "torch's kernel is no slower"
    )
    assert cpu_attention.max_tokens(64, 12, keys.bfloat16()) == cpu_attention.max_tokens(64, 12, keys)
    assert 4 * cpu_attention.max_tokens(4, 12, keys.bfloat16()) * 12 * 64 <= WIDENED_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_live_bytes_are_as_estimated(dtype: torch.dtype) -> None:
    rows, heads, tokens, dim = 8, 4, 64, 8
    keys, values = torch.randn(2, rows * tokens, heads, dim).to(dtype)
    query = torch.randn(rows, heads, 1, dim).to(dtype)
    mask = torch.zeros(rows, 1, 1, tokens, dtype=dtype)
    positions = torch.arange(tokens).expand(rows, tokens).int()
    places = cpu_attention.RowPositions(0, tokens, positions)
    peak = peak_bytes(
        lambda: [
            cpu_attention.decode_attention(query, keys, values, places, mask, scaling=None, logsums=[])
            for _ in range(2)
        ]
    )
    scores, widened = rows * heads * tokens, 4 * keys.numel() if dtype == torch.bfloat16 else 0
    assert (2 if widened else 3) * 4 * scores + widened < peak <= 4 * 4 * scores + widened
