"""The wait until a preset file is written."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from router.config.written_file import State, look_at, until_written

EMPTY, HALF, WHOLE = (1, 0, 1), (1, 9, 2), (1, 20, 3)
FILE = Path("models.ini")


async def looks(states: Sequence[State | None], *, empty: float = 2.0) -> int:
    """The number of states that are read until a file with these successive states counts as written."""
    left = list(states)
    # One unit of time for each look: the clock of the test is the list.
    await until_written(FILE, look=lambda path: left.pop(0), quiet=1e-3, empty=empty * 1e-3)
    return len(states) - len(left)


async def test_a_file_counts_as_written_when_it_no_longer_changes(caplog: pytest.LogCaptureFixture) -> None:
    assert await looks([WHOLE, WHOLE, EMPTY]) == 2
    assert await looks([HALF, WHOLE, WHOLE, EMPTY]) == 3
    assert await looks([None, WHOLE]) == 1, "the reload reports a file that is missing"
    assert not caplog.records


async def test_an_empty_file_is_waited_for_and_counts_only_if_it_stays_empty(caplog: pytest.LogCaptureFixture) -> None:
    assert await looks([EMPTY, EMPTY, HALF, WHOLE, WHOLE]) == 5
    assert [record.message.split(";")[0] for record in caplog.records] == ["models.ini is empty"]
    assert await looks([EMPTY, EMPTY, EMPTY, WHOLE]) == 3


async def test_the_state_of_a_file_changes_with_its_content(tmp_path: Path) -> None:
    path = tmp_path / "models.ini"
    assert look_at(path) is None
    path.touch()
    empty = look_at(path)
    path.write_text("[a]\n")
    assert empty != look_at(path)
    async with asyncio.timeout(60):
        await until_written(path, quiet=0.01)
