"""Paths that nobody answers, and the one that was probably meant. Law: PURE."""

import difflib

from worker.protocol.routes import ROUTES

LONGEST = 100
"""Characters of a path that is compared, or repeated."""
_CALLS = tuple(dict.fromkeys(route.path for route in ROUTES if "{" not in route.path))


def not_found(path: str) -> str:
    """What whoever asks for `path`, printable and without the prefix of all paths, is told."""
    if len(path) > LONGEST:
        return "File Not Found"
    near = next(iter(difflib.get_close_matches(path, _CALLS, n=1, cutoff=0.75)), "")
    hint = f"did you mean {near}?" if near else "GET /openapi.json lists what is"
    return f"File Not Found: {path} is no path of this server; {hint}"


__all__ = ["not_found"]
