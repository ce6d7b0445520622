"""The environment of this checkout, for scripts that are started with another interpreter."""

import importlib.util
import os
import sys
from pathlib import Path


def require(module: str, script: str) -> None:
    """Execute `script` (a path) again with `.venv/bin/python` if this interpreter does not have `module`. Exit if there
    is none.

    Without the module, only --help continues.
    """
    if importlib.util.find_spec(module) is not None:
        return
    own = Path(__file__).resolve().parent.parent / ".venv" / "bin" / "python"
    if Path(sys.prefix) != own.parent.parent and own.exists():
        os.execv(own, [str(own), script, *sys.argv[1:]])
    if not {"-h", "--help"} & set(sys.argv):
        name = Path(script).name
        sys.exit(f"{name}: {module} is not installed here; bash scripts/test.sh makes an environment that has it")
