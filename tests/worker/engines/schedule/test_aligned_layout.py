"""Positions of rows: each row keeps its columns when others are added or removed, and decoding rows are adjacent."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.engines.transformers.schedule.aligned_layout import AlignedLayout, ColumnMove, RowSwap

SLOTS, WIDTH = 4, 12


class Rows(RuleBasedStateMachine):
    """A cache of strings: each column holds the row and the number of its token, so that nothing gets mixed up."""

    def __init__(self) -> None:
        super().__init__()
        self.alignment = AlignedLayout(SLOTS, WIDTH)
        self.columns: list[list[str]] = [[""] * WIDTH for _ in range(SLOTS)]
        self.lengths: dict[int, int] = {}

    def carry_out(self, moves: tuple[ColumnMove | RowSwap, ...]) -> None:
        for move in moves:
            if isinstance(move, RowSwap):
                one, other = self.columns[move.one], self.columns[move.other]
                self.columns[move.one], self.columns[move.other] = other, one
            else:
                kept = self.columns[move.source][move.begin : move.begin + move.length]
                assert len(kept) == move.length
                self.columns[move.target][move.to : move.to + move.length] = kept
                assert len(self.columns[move.target]) == WIDTH, "nothing is moved beyond the width"

    @rule(row=st.integers(0, SLOTS - 1), length=st.integers(1, WIDTH))
    def computes_a_chunk(self, row: int, length: int) -> None:
        start = self.lengths.get(row, 0)
        length = min(length, WIDTH - start)
        if not length:
            return
        self.carry_out(self.alignment.reserve(row, start, length))
        buffer_row, begin = self.alignment.buffer_row(row), self.alignment.begin(row)
        for token in range(start, start + length):
            self.columns[buffer_row][begin + token] = f"{row}.{token}"
        self.lengths[row] = start + length

    @rule(chosen=st.sets(st.integers(0, SLOTS - 1), min_size=1))
    def decodes(self, chosen: set[int]) -> None:
        starts = [(row, self.lengths[row]) for row in sorted(chosen) if 0 < self.lengths.get(row, 0) < WIDTH]
        if not starts:
            return
        plan = self.alignment.align(starts)
        self.carry_out(plan.moves)
        assert plan.buffer_rows.stop - plan.buffer_rows.start == len(starts)
        assert plan.time < WIDTH, "there is a column for the next token"
        lengths = dict(starts)
        assert sorted(plan.rows) == sorted(lengths)
        assert plan.low == min(plan.time - start for start in lengths.values()) >= 0
        for buffer_row, row in zip(range(plan.buffer_rows.start, plan.buffer_rows.stop), plan.rows, strict=True):
            assert self.alignment.buffer_row(row) == buffer_row
            assert self.alignment.begin(row) + lengths[row] == plan.time
            self.columns[buffer_row][plan.time] = f"{row}.{lengths[row]}"
            self.lengths[row] += 1

    @rule(row=st.integers(0, SLOTS - 1))
    def ends(self, row: int) -> None:
        self.alignment.forget(row)
        self.lengths.pop(row, None)

    @precondition(lambda self: 0 < len(self.lengths) < SLOTS)
    @rule()
    def forks(self) -> None:
        source = min(self.lengths)
        target = next(row for row in range(SLOTS) if row not in self.lengths)
        move = self.alignment.fork(source, target, self.lengths[source])
        self.carry_out((move,))
        buffer_row, begin = self.alignment.buffer_row(target), self.alignment.begin(target)
        for token in range(self.lengths[source]):
            assert self.columns[buffer_row][begin + token] == f"{source}.{token}"
            self.columns[buffer_row][begin + token] = f"{target}.{token}"
        self.lengths[target] = self.lengths[source]

    @invariant()
    def every_row_has_its_tokens_in_order(self) -> None:
        for row, length in self.lengths.items():
            buffer_row, begin = self.alignment.buffer_row(row), self.alignment.begin(row)
            assert self.columns[buffer_row][begin : begin + length] == [f"{row}.{token}" for token in range(length)]


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=60, stateful_step_count=40)


def test_rows_that_end_together_stay_where_they_are() -> None:
    alignment = AlignedLayout(3, 16)
    for row, length in ((0, 5), (1, 5)):
        alignment.reserve(row, 0, length)
    assert alignment.align([(0, 5), (1, 5)]).moves == ()
    assert alignment.align([(0, 6), (1, 6)]).moves == ()


def test_a_longer_row_moves_the_shorter_ones_and_not_itself() -> None:
    alignment = AlignedLayout(2, 16)
    alignment.reserve(0, 0, 3)
    alignment.reserve(1, 0, 9)
    plan = alignment.align([(0, 3), (1, 9)])
    assert [move.length for move in plan.moves if isinstance(move, ColumnMove)] == [3]
    assert (plan.low, plan.time) == (0, 9)
