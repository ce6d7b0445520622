"""The page that browsers get at /: the files of router/ui as they are. They ask this server and nobody else."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "ui"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True)
class Sheet:
    """One file: what is sent of it, and the headers that go with it."""

    body: bytes
    headers: Mapping[str, str]

    @property
    def tag(self) -> str:
        return self.headers["ETag"]


@cache
def sheet(name: str) -> Sheet:
    """The file of this name in router/ui; it is read once."""
    body = (FOLDER / name).read_bytes()
    return Sheet(
        body,
        {
            "Content-Type": TYPES[Path(name).suffix],
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
            "Vary": "Accept",
        },
    )


def wants(accept: str) -> bool:
    """Whether who sends this `Accept` is a browser that opens a page."""
    return "text/html" in accept


__all__ = ["sheet", "wants"]
