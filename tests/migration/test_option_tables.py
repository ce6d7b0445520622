"""The option tables of the migration pages: each row is run, and gives its setting or its message."""

from functools import cache
from pathlib import Path

import pytest

from router.config.effective import BUILT_IN
from tests.migration import option_tables
from tests.migration.documented import DOCUMENTED
from tests.migration.request_members import DOCUMENTED_MEMBERS

ROWS = [row for page in sorted(option_tables.PAGES.glob("*.md")) for row in option_tables.rows(page)]


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    option_tables.build_world(folder)
    return folder


@pytest.fixture(autouse=True)
def _only_the_world(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(world / "no-cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(world / "state"))
    monkeypatch.chdir(world)


@cache
def without(heading: str, page: str) -> option_tables.Outcome:
    """The outcome for the model of the tables without any option, or of the page's request without further members."""
    return option_tables.outcome(heading if heading == option_tables.REQUEST_MEMBERS else "Preset keys", (), page)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_an_option_has_the_effect_of_its_row(row: option_tables.Row) -> None:
    found = option_tables.outcome(row.heading, row.given, row.page)
    messages = found.problems if row.verdict == "refused" else found.warnings
    for words in row.messages:
        assert words in messages
    if row.verdict != "refused":
        assert not found.problems
    if not row.messages:
        assert not found.warnings
    for setting in row.settings:
        key, _, value = setting.partition(" = ")
        assert found.settings[key][0] == value.rstrip()
    if row.settings and row.verdict in ("honoured", "mapped"):
        before = without(row.heading, row.page).settings
        keys = [setting.partition(" = ")[0] for setting in row.settings]
        assert any(found.settings[key][1] != BUILT_IN or found.settings[key] != before.get(key) for key in keys), (
            "the value is the default, and nothing shows that the option sets it"
        )


def test_no_row_is_silent() -> None:
    for row in ROWS:
        assert row.heading in (*option_tables.GIVERS, option_tables.REQUEST_MEMBERS), row
        assert row.given, row
        assert row.verdict in option_tables.VERDICTS, row
        if row.verdict in ("no effect", "refused"):
            assert row.messages, row
        elif row.effect.startswith(option_tables.NO_CHANGE):
            others = [other for other in ROWS if (other.page, other.option) == (row.page, row.option)]
            assert any(other.messages or other.settings for other in others), f"{row}: no row shows another value"
        else:
            assert row.settings, row


def test_no_row_stands_in_a_page_twice() -> None:
    names = [str(row) for row in ROWS]
    assert [name for name in set(names) if names.count(name) > 1] == []


@pytest.mark.parametrize("page", DOCUMENTED_MEMBERS)
def test_every_request_member_in_the_documents_of_a_system_has_a_row(page: str) -> None:
    listed = {row.option.strip("`") for row in ROWS if (row.page, row.heading) == (page, option_tables.REQUEST_MEMBERS)}
    assert [member for member in DOCUMENTED_MEMBERS[page].split() if member not in listed] == []


@pytest.mark.parametrize("page", DOCUMENTED)
def test_every_option_in_the_documents_of_a_system_has_a_row(page: str) -> None:
    listed = {row.option.strip("`") for row in ROWS if row.page == page}
    assert [option for option in DOCUMENTED[page].split() if option not in listed] == []
