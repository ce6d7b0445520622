"""The default state and runtime folders of a router: those of the user that it runs as (XDG base directories)."""

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from router.errors import ConfigError

NAME = "fleet-router"


def state(named: str) -> Path:
    """The state folder: `named`, else the user's. Raises ConfigError if the user has no home folder."""
    try:
        return Path(named or platformdirs.user_state_dir(NAME))
    except RuntimeError:  # its message names variables only, and not the option that helps
        raise ConfigError("this user has no home, and HOME is not set; give a --state-dir") from None


def runtime(named: str, environ: Mapping[str, str], router: str) -> Path:
    """The runtime folder of one `router`: `named`, else a folder in XDG_RUNTIME_DIR, else in the temporary folder.

    The folder in the temporary folder is private to the user. Raises ConfigError if another user has created it.
    """
    if named:
        return Path(named)
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(platformdirs.user_runtime_dir(NAME)) / router
    folder = Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user; give a --runtime-dir")
    return folder / router
