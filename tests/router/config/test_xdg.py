"""The default folders of a router."""

import pwd
from pathlib import Path

import pytest

from router.config import xdg
from router.errors import ConfigError


def test_the_message_for_a_user_without_a_home_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> pwd.struct_passwd:
        raise KeyError(user)  # as in a container whose user is a bare number

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"this user has no home, and HOME is not set; give a --state-dir"):
        xdg.state("")
    assert xdg.state("/somewhere") == Path("/somewhere")
