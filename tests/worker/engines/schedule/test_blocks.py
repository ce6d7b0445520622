"""The block cache: no block is lost or shared wrongly, found blocks are right, and each sequence ends.

The state machine keeps a pool of its own. What is computed into it depends on a token and all that precede it, as keys
and values do, and each sequence is read back from there in every step, as attention would.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.worker.scheduled import advance, check_rows, check_scheduler, sequence, sequences
from worker.engines.transformers.schedule.kv_cache import (
    BlockAllocator,
    RowAllocator,
    block_key,
    blocks_for,
    pool_blocks,
)
from worker.engines.transformers.schedule.scheduler import Batch, Scheduler
from worker.engines.transformers.schedule.sequence import Sequence
from worker.protocol.memory import BLOCK_TOKENS

B = BLOCK_TOKENS


def ran(blocks: BlockAllocator, each: Sequence) -> list[int]:
    """Admit it, compute it whole, and end it; the blocks that it had."""
    assert blocks.can_admit(each)
    row, cached = blocks.admit(each)
    each.computed = each.cached = cached
    assert blocks.grow(row, cached, len(each.tokens))
    each.computed = len(each.tokens)
    blocks.cache_blocks(row, each)
    held = list(blocks.table(row).blocks)
    blocks.release(row)
    check_rows(blocks)
    return held


def test_a_prompt_that_begins_like_another_finds_whole_blocks_and_never_its_last_token() -> None:
    blocks = BlockAllocator(2, 16)
    words = list(range(100, 100 + 3 * B))
    ran(blocks, sequence(1, words))
    for tokens, found in (
        ([*words, 7], 3 * B),
        (words, 2 * B),  # the last token's logits are wanted
        (words[:-1], 2 * B),
        (words[: 2 * B + 3], 2 * B),
        ([*words[: B + 5], 9, 9], B),  # another one inside a block
        ([8, *words], 0),
    ):
        each = sequence(2, tokens)
        ran(blocks, each)
        assert each.cached == found


def test_without_caching_and_where_all_logits_are_wanted_nothing_is_found() -> None:
    words = list(range(50))
    off = BlockAllocator(2, 16, caches=False)
    ran(off, sequence(1, words))
    again = sequence(2, words)
    ran(off, again)
    assert (again.cached, off.reusable) == (0, 0)
    on = BlockAllocator(2, 16)
    ran(on, sequence(1, words))
    reported = sequence(2, words, prompt_logprobs=True)
    ran(on, reported)
    assert (reported.cached, on.reusable) == (0, 3 * B)


def test_a_conversation_goes_on_where_it_lies_and_stays_in_one_run() -> None:
    blocks = BlockAllocator(4, 4 * 8)
    words = list(range(3 * B))
    ran(blocks, sequence(1, words))
    row, _ = blocks.admit(sequence(2, [*words, *range(500, 500 + 2 * B)]))
    assert len(blocks.table(row).runs) == 1


def test_sequences_share_prefix_blocks_and_continue_in_own_regions() -> None:
    blocks = BlockAllocator(4, 4 * 8)
    words = list(range(2 * B))
    first = sequence(1, [*words, 1])
    row, _ = blocks.admit(first)
    first.computed = len(first.tokens)
    blocks.cache_blocks(row, first)
    other, cached = blocks.admit(sequence(2, [*words, 2]))
    assert cached == 2 * B
    assert blocks.table(other).blocks[:2] == blocks.table(row).blocks[:2]
    assert blocks.table(other).blocks[2] % 8 == 0, "the start of a region"
    assert blocks.shared == 2 * B
    blocks.release(row)
    check_rows(blocks)
    assert list(blocks.table(other).spans(0, 2 * B + 1)) == [(0, 2 * B), (8 * B, 1)]


def test_prompts_asked_in_turn_are_all_found_as_long_as_the_pool_has_room_for_them() -> None:
    """More prompts than rows: twelve of 500 tokens, and then as many as fill nine tenths of the pool."""
    for count in (12, 58):
        blocks = BlockAllocator(8, pool_blocks(8, 4096, kv_tokens=32_768))
        for turn in range(2):
            for id in range(count):
                prompt = sequence(id, [id] * 500, limit=64)
                ran(blocks, prompt)
                assert prompt.cached == (turn and 500 // B * B)


def test_prompts_asked_in_turn_are_found_in_a_pool_that_is_small_for_its_rows() -> None:
    """Twelve prompts whose answers may fill the context, in 1,024 tokens for eight rows."""
    blocks = BlockAllocator(8, pool_blocks(8, 1024, kv_tokens=1024))
    runs = []
    for turn in range(2):
        for id in range(12):
            prompt = sequence(id, [id] * 70, limit=900)
            held = ran(blocks, prompt)
            assert prompt.cached == (turn and 70 // B * B)
            runs.append(1 + sum(block + 1 != after for block, after in itertools.pairwise(held)))
    assert max(runs) <= 2


def test_short_prompts_whose_answers_may_be_long_use_most_of_the_pool() -> None:
    """200 prompts of five blocks in a pool for 240. An answer may have 4,000 tokens."""
    blocks, runs = BlockAllocator(8, pool_blocks(8, 4096, kv_tokens=240 * 5 * B)), []
    for turn in range(2):
        for id in range(200):
            prompt = sequence(id, [id] * (4 * B + 1), limit=4000)
            held = ran(blocks, prompt)
            assert prompt.cached == turn * 4 * B
            runs.append(1 + sum(block + 1 != after for block, after in itertools.pairwise(held)))
    assert max(runs[:200]) == 1


@pytest.mark.parametrize(("rest", "reuses"), [({}, True), ({"prompt_logprobs": True}, False)])
def test_prompts_that_arrive_together_reuse_their_common_beginning_once_one_has_computed_it(
    rest: dict[str, object], reuses: bool
) -> None:
    """Eight clients with one system prompt. The first step has room for one whole prompt and a part of the next."""
    system, own, clients = 8 * B, 3, 8
    blocks = BlockAllocator(clients, 16 * clients)
    scheduler = Scheduler(blocks, system + own + B)
    sequences = [sequence(id, [*range(system), 1000 + id, 7, 7], limit=1, **rest) for id in range(clients)]
    for each in sequences:
        scheduler.add(each)
    computed = 0
    while scheduler.has_work:
        batch = scheduler.next(system + own + B)
        computed += sum(segment.length for segment in batch)
        advance(scheduler, batch)
        check_rows(blocks)
    cached = sum(each.cached for each in sequences)
    assert computed + cached == clients * (system + own)
    # The two that begin in the first step compute some blocks side by side.
    assert 6 * system < cached <= 7 * system if reuses else cached == 0


def test_a_prompt_in_the_middle_of_a_block_keeps_its_own_blocks() -> None:
    blocks = BlockAllocator(3, 32)
    words = list(range(4 * B))
    first, second = sequence(1, [*words, 1]), sequence(2, [*words, 2])
    rows = {each.id: blocks.admit(each)[0] for each in (first, second)}
    first.computed = 4 * B
    blocks.cache_blocks(rows[1], first)
    second.computed = B // 2
    before = list(blocks.table(rows[2]).blocks)
    assert blocks.reuse(rows[2], second) == 0
    assert blocks.table(rows[2]).blocks == before
    second.computed = 0
    assert blocks.reuse(rows[2], second) == 4 * B
    assert blocks.table(rows[2]).blocks[:4] == blocks.table(rows[1]).blocks[:4]
    check_rows(blocks)


def test_a_restart_finds_its_own_blocks_and_does_not_report_them_as_cached() -> None:
    scheduler, prompt = Scheduler(BlockAllocator(1, 32), chunk=99), sequence(1, list(range(3 * B)), limit=9)
    scheduler.add(prompt)
    advance(scheduler, scheduler.next(99))
    scheduler.preempt(prompt)
    assert scheduler.next(99)
    assert (prompt.computed, prompt.cached) == (3 * B, 0)


def test_conversations_of_more_clients_than_rows_stay_in_few_runs() -> None:
    """Forty conversations that grow in turn, with a common beginning. In the end they fill a third of the pool."""
    blocks = BlockAllocator(8, 2048)
    talks = {client: [*range(20 * B), *([client] * B)] for client in range(40)}
    for _ in range(8):
        for client, words in talks.items():
            words += [client] * 2 * B
            ran(blocks, sequence(client, words, limit=B))
    tables = []
    for client, words in talks.items():
        row, cached = blocks.admit(sequence(client, [*words, 1]))
        assert cached == len(words)
        tables.append(len(blocks.table(row).runs))
        blocks.release(row)
    assert sum(tables) / len(tables) < 6, "one run for the common beginning, and hardly one for every second turn"


def test_a_sequence_that_grows_in_a_full_pool_evicts_whole_runs_and_not_block_by_block() -> None:
    blocks = BlockAllocator(4, 256)
    for id in range(16):
        ran(blocks, sequence(id, [id] * (16 * B)))
    assert blocks.reusable == 256 * B
    row, _ = blocks.admit(sequence(99, [99], limit=200 * B))
    for end in range(2, 200 * B):
        assert blocks.grow(row, end - 1, end)
    check_rows(blocks)
    assert len(blocks.table(row).runs) < 20


@settings(max_examples=150)
@given(
    rows=st.integers(1, 4),
    room=st.integers(4, 40),
    moves=st.lists(
        st.tuples(st.sampled_from("aaagre"), st.integers(0, 3), st.integers(1, 60), st.integers(0, 80)), max_size=60
    ),
)
def test_only_the_least_recently_used_block_is_evicted_and_only_in_need(
    rows: int, room: int, moves: list[tuple[str, int, int, int]]
) -> None:
    """An oracle keeps the last use of every key: the end of the last sequence that held it, heads after tails."""
    blocks, running = BlockAllocator(rows, room), dict[int, Sequence]()
    used: dict[bytes, tuple[int, int]] = {}
    for now, (move, seed, length, turn) in enumerate(moves):
        before, empty = set(blocks._block_of), blocks.free - blocks.reusable // B
        is_corrupt, needed = False, 0
        if move == "a":
            prompt = [seed + (index == turn) for index in range(min(length, room * B - 1))]
            each = sequence(now, prompt, limit=min(turn, room * B - len(prompt)))
            if not blocks.can_admit(each):
                continue
            row, each.computed = blocks.admit(each)
            needed = blocks_for(len(prompt)) - each.computed // B
            running[row] = each
        elif running:
            row = sorted(running)[turn % len(running)]
            each = running[row]
            if move == "g":
                if len(each.tokens) + 1 <= room * B and blocks.grow(row, len(each.tokens), len(each.tokens) + 1):
                    each.tokens.append(seed)
                    needed = 1
                each.computed = len(each.tokens)
                blocks.cache_blocks(row, each)
            else:
                is_corrupt = move == "e" and not turn % 4
                keys = list(blocks.table(row).keys)
                del running[row]
                blocks.release(row, is_corrupt=is_corrupt)
                if not is_corrupt:
                    used |= {key: (now, -index) for index, key in enumerate(keys)}
        check_rows(blocks)
        evicted = before - set(blocks._block_of)
        if not is_corrupt:
            kept = [used[key] for key, block in blocks._block_of.items() if block in blocks._cached]
            assert not evicted or not kept or max(used[key] for key in evicted) < min(kept)
            assert not evicted or needed, "only a sequence that gets blocks evicts any"
            assert not evicted or len(evicted) + empty <= 2 * max(needed, room), "early eviction is bounded"


def test_corrupt_blocks_leave_the_prefix_cache_and_are_reported_once() -> None:
    blocks = BlockAllocator(2, 8)
    words = list(range(2 * B + 1))
    broken = sequence(1, words)
    row, _ = blocks.admit(broken)
    broken.computed = len(words)
    blocks.cache_blocks(row, broken)
    held = list(blocks.table(row).blocks)
    blocks.release(row, is_corrupt=True)
    assert sorted(blocks.take_corrupt()) == held
    assert blocks.take_corrupt() == []
    assert blocks.admit(sequence(2, words))[1] == 0
    check_rows(blocks)


def test_blocks_of_a_prompt_that_is_cancelled_are_cached_but_erased_before_they_hold_other_tokens() -> None:
    """No logits of the prompt were checked, so its keys and values may contain NaN."""
    blocks = BlockAllocator(2, 4)
    scheduler = Scheduler(blocks, 2 * B + 1)
    prompt, other = sequence(1, list(range(4 * B - 1))), sequence(2, list(range(1, 4 * B)))
    scheduler.add(prompt)
    [segment] = scheduler.next(2 * B + 1)
    prompt.computed = segment.end
    scheduler.remove(prompt)
    partly_filled = blocks.take_corrupt()
    assert len(partly_filled) == 2
    assert blocks.reusable == 2 * B
    scheduler.add(other)
    scheduler.next(1)
    assert sorted(partly_filled + blocks.take_corrupt()) == [0, 1, 2, 3]


def test_no_sequence_is_admitted_that_would_be_preempted_at_once() -> None:
    blocks = BlockAllocator(3, 6)
    assert blocks.can_admit(sequence(1, [1] * (3 * B)))
    blocks.admit(sequence(1, [1] * (3 * B)))
    assert not blocks.can_admit(sequence(2, [2] * (3 * B))), "one block is left for the running sequence"
    assert blocks.can_admit(sequence(2, [2] * (2 * B)))
    assert not blocks.grow(0, 3 * B, 7 * B)


def test_keys_name_all_tokens_up_to_the_end_of_a_block() -> None:
    assert block_key(b"", [1, 2]) == block_key(b"", [1, 2])
    assert len({block_key(b"", [1, 2]), block_key(b"", [2, 1]), block_key(block_key(b"", [1]), [1, 2])}) == 3


def values(each: Sequence) -> list[int]:
    """The value that is stored for each of its tokens."""
    return list(itertools.accumulate(each.tokens, lambda before, token: hash((before, token))))


def answer(each: Sequence) -> int:
    """The next token, as a model would choose it: by everything before it."""
    return sum(each.tokens) % 5


@settings(max_examples=60, stateful_step_count=40)
class AnyTraffic(RuleBasedStateMachine):
    """Arrivals (alone, or several choices of one prompt), steps, cancels, failures and steps without memory."""

    @initialize(rows=st.integers(1, 5), chunk=st.integers(1, 40), room=st.integers(5, 16), caches=st.booleans())
    def begin(self, rows: int, chunk: int, room: int, caches: bool) -> None:
        self.blocks = BlockAllocator(rows, room, caches=caches)
        self.scheduler = Scheduler(self.blocks, chunk)
        self.chunk = chunk
        self.pool: list[list[int | None]] = [[None] * B for _ in range(room)]
        self.live: dict[int, Sequence] = {}
        self.prompts: dict[int, tuple[list[int], int]] = {}
        self.next_id = 0

    @rule(
        seed=st.integers(0, 2), length=st.integers(1, 58), turn=st.none() | st.integers(0, 57),
        limit=st.integers(1, 20), choices=st.sampled_from([1, 1, 1, 3]),
        prompt_logprobs=st.sampled_from([False, False, True]),
    )  # fmt: skip
    def arrive(self, seed: int, length: int, turn: int | None, limit: int, choices: int, prompt_logprobs: bool) -> None:
        """Prompts are alike (by `seed`) but for one token, at `turn`."""
        prompt = [seed + index % 7 + (1 if index == turn else 0) for index in range(length)]
        limit = min(limit, 5 * B - length)
        first = self.next_id + 1
        for _ in range(choices):
            self.next_id += 1
            each = sequence(self.next_id, prompt, limit, prompt_logprobs=prompt_logprobs)
            each.group = first if choices > 1 else None
            self.live[each.id], self.prompts[each.id] = each, (prompt, limit)
            self.scheduler.add(each)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_corrupt=st.booleans())
    def end(self, data: st.DataObject, is_corrupt: bool) -> None:
        gone = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        if is_corrupt:
            for other in [each for each in self.live.values() if gone.group and each.group == gone.group]:
                self.scheduler.remove(self.live.pop(other.id), is_corrupt=True)
        self.scheduler.remove(gone, is_corrupt=is_corrupt)

    @rule(budget=st.integers(0, 60))
    def step(self, budget: int) -> None:
        oldest = min((each.id for each in sequences(self.scheduler)[: self.scheduler.running]), default=0)
        batch = self.scheduler.next(budget)
        running = [each.id for each in sequences(self.scheduler)[: self.scheduler.running]]
        assert not oldest or oldest in running, "the oldest is never put back"
        self.scheduler.take_freed_rows()
        self.check(batch, budget)
        self.compute(batch)
        for segment in batch:
            self.advance(segment.sequence, segment.end)

    @rule(budget=st.integers(0, 60))
    def step_without_memory(self, budget: int) -> None:
        """All that the step writes is written, and then again without the youngest."""
        batch = self.scheduler.next(budget)
        self.check(batch, budget)
        self.compute(batch)
        fresh = [segment.sequence for segment in batch if not segment.sequence.preempted_for_memory]
        if len(batch) > 1 and fresh:
            youngest = max(fresh, key=lambda each: each.id)
            self.scheduler.preempt(youngest)
            batch = tuple(segment for segment in batch if segment.sequence is not youngest)
            self.compute(batch)
            for segment in batch:
                if segment.sequence.id in self.live:
                    self.advance(segment.sequence, segment.end)

    def check(self, batch: Batch, budget: int) -> None:
        prompts = [segment for segment in batch if not segment.is_decode]
        assert sum(segment.length for segment in prompts) <= max(1, min(budget, self.chunk)), "the budget is kept"
        assert bool(batch) == bool(self.live), "there is a batch while there is work"
        assert len({segment.row for segment in batch}) == len(batch)
        written: set[int] = set()
        for segment in batch:
            assert segment.start == segment.sequence.computed
            assert 0 < segment.length <= segment.sequence.pending
            places = self.places(segment.sequence, segment.start, segment.end)
            assert written.isdisjoint(places), "two write in one place"
            written.update(places)
        for segment in batch:
            each = segment.sequence
            assert written.isdisjoint(self.places(each, 0, segment.start)), "a sequence writes where another one reads"

    def compute(self, batch: Batch) -> None:
        """Erase, copy, write, then read all that is seen: it must be the sequence's own tokens."""
        for block in self.blocks.take_corrupt():
            self.pool[block] = [None] * B
        pairs = [segment.table.copy for segment in batch if segment.table is not None and segment.table.copy]
        for target, content in [(target, list(self.pool[source])) for source, target in pairs]:
            self.pool[target] = content
        for segment in batch:
            assert segment.table is not None
            segment.table.copy = None
            for position in range(segment.start, segment.end):
                block, offset = divmod(self.place(segment.sequence, position), B)
                self.pool[block][offset] = values(segment.sequence)[position]
        for segment in batch:
            seen = [self.pool[place // B][place % B] for place in self.places(segment.sequence, 0, segment.end)]
            assert seen == values(segment.sequence)[: segment.end], "it reads what another one wrote"

    def advance(self, each: Sequence, end: int) -> None:
        each.computed = end
        if end < len(each.tokens):
            return
        forked = self.scheduler.followers(each) if not each.output_tokens else []
        for follower in forked:
            source, target = self.scheduler.fork(follower)
            assert source != target
        for one in (each, *forked):
            if one.append(answer(one) if one is each else (one.id + one.output_tokens) % 5):
                self.scheduler.remove(self.live.pop(one.id))

    def place(self, each: Sequence, position: int) -> int:
        return self.places(each, position, position + 1)[0]

    def places(self, each: Sequence, start: int, end: int) -> list[int]:
        row = next(row for row, owner in self.blocks.owners.items() if owner == each.id)
        return [
            place for slot, count in self.blocks.table(row).spans(start, end) for place in range(slot, slot + count)
        ]

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "blocks"):
            return
        check_scheduler(self.scheduler)
        assert {each.id for each in sequences(self.scheduler)} == set(self.live)
        for each in self.live.values():
            prompt, limit = self.prompts[each.id]
            assert each.tokens[: len(prompt)] == prompt
            assert each.output_tokens < limit
            assert 0 <= each.cached < len(prompt) or each.cached == 0
            assert each.cached % B == 0
        held = sum(blocks_for(1) for references in self.blocks._references if references)
        assert held + self.blocks.free == self.blocks.count
        waiting = sequences(self.scheduler)[self.scheduler.running :]
        order = [(not each.preempted, each.id) for each in waiting]
        assert order == sorted(order), "first come, first served; preempted sequences before new ones"

    def teardown(self) -> None:
        for _ in range(20_000):
            if not self.live:
                break
            self.step(60)
        assert not self.live, "a sequence never ends"
        assert self.blocks.free == self.blocks.count, "blocks are held without a sequence"


TestAnyTraffic = AnyTraffic.TestCase


@settings(max_examples=200)
@given(st.integers(1, 6), st.lists(st.integers(0, 9), max_size=60))
def test_no_row_is_lost_or_lent_twice(count: int, moves: list[int]) -> None:
    rows, owner = RowAllocator(count), 0
    held: list[int] = []
    for move in moves:
        if move < 6 and rows.has_row:
            owner += 1
            taken = rows.attach(sequence(owner))
            assert taken == min(set(range(count)) - set(held)), "the lowest free row is given"
            held.append(taken)
        elif held:
            rows.release(held.pop(move % len(held)))
        assert sorted(rows.owners) == sorted(held)
        assert rows.has_row == (len(held) < count)


def test_a_pool_has_room_for_all_rows_or_for_as_many_tokens_as_are_asked_for() -> None:
    assert pool_blocks(4, 8192) == 4 * 8192 // BLOCK_TOKENS
    assert pool_blocks(3, 40) == 3 * 3, "40 tokens take three blocks"
    assert pool_blocks(4, 8192, kv_tokens=8192) == 8192 // BLOCK_TOKENS
    assert pool_blocks(4, 8192, kv_tokens=8193) == 8192 // BLOCK_TOKENS + 1
