"""Where a router keeps what it keeps, if no folder is named: with the user whom it runs as."""

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from router.errors import ConfigError

NAME = "fleet-router"


def state(named: str) -> Path:
    """The state folder: the one that is `named`, else the user's own. Raises ConfigError if this user has none."""
    try:
        return Path(named or platformdirs.user_state_dir(NAME))
    except RuntimeError:  # what it says is of variables only
        raise ConfigError(["this user has no home, and HOME is not set; give a --state-dir"]) from None


def runtime(named: str, environ: Mapping[str, str], router: str) -> Path:
    """Where the runtime files of one `router` of this user go: the folder that is `named`, else its own below the
    session's, else below one of the temporary folder that is ours.

    Raises ConfigError if somebody else has made that one.
    """
    if named:
        return Path(named)
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(platformdirs.user_runtime_dir(NAME)) / router
    folder = Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise ConfigError([f"{folder} belongs to somebody else; give a --runtime-dir"])
    return folder / router


__all__ = ["runtime", "state"]
