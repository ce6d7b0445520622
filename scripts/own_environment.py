"""The environment of this checkout, for scripts that are started with another interpreter."""

import importlib.util
import os
import sys
from pathlib import Path


def require_torch(script: str) -> None:
    """Execute `script` (a path) again with `.venv/bin/python` if this interpreter has no torch. Exit if there is none.

    Without torch, only --help continues.
    """
    if importlib.util.find_spec("torch") is not None:
        return
    own = Path(__file__).resolve().parent.parent / ".venv" / "bin" / "python"
    if Path(sys.prefix) != own.parent.parent and own.exists():
        os.execv(own, [str(own), script, *sys.argv[1:]])
    if not {"-h", "--help"} & set(sys.argv):
        name = Path(script).name
        sys.exit(f"{name}: torch is not installed here; bash scripts/test.sh makes an environment that has it")
