"""What the worker program can be asked for, in words for people: read off the contract, so that nothing is missing."""

import ast
import dataclasses
import inspect
import textwrap
import typing
from typing import Any

from worker.protocol.argv import Convert, Download, Estimate, Nursery, Serve

WIDTH = 110
_KINDS: dict[str, type[Any]] = {
    "download": Download, "convert": Convert, "estimate": Estimate,
    "serve": Serve, "nursery": Nursery,
}  # fmt: skip
_TEXTS = {
    "revision": "Branch, tag or commit.",
    "trust_remote_code": "Run code that comes with the model. Off: a model that needs it is refused.",
    "quantization": "How the checkpoint is quantized; auto: as it says itself.",
    "max_logprobs": "Most alternatives per token that a request may ask for.",
    "embd_normalize": "Norm of vectors: -1 none, 0 largest value, 1 taxicab, 2 Euclidean.",
    "strict_fields": "Refuse requests with fields that mean nothing here.",
    "leashed": "Read a token line from stdin, then live no longer than stdin and the spawner do. For routers.",
    "spawner": "Process id of whoever starts this worker; needed with --leashed.",
}
"""Of the fields whose names say enough to a reader of the contract."""


def overview() -> str:
    """The verbs."""
    verbs = "\n".join(_entry(name, inspect.getdoc(kind) or "", 12) for name, kind in _KINDS.items())
    return (
        "Usage: worker VERB [--option=value ...]\n"
        "       worker VERB --help\n\n"
        "One process that serves one model. Events come as JSON lines on stdout, the log on stderr.\n\n"
        f"{verbs}\n\n"
        "By hand: worker serve --snapshot=FOLDER --listen=tcp:127.0.0.1:9000\n"
        "         curl http://127.0.0.1:9000/v1/chat/completions -d '{\"messages\": [...]}'"
    )


def of(verb: str) -> str:
    """One verb and its options; the overview if there is no such verb."""
    if verb not in _KINDS:
        return overview()
    kind = _KINDS[verb]
    texts = {**_TEXTS, **_field_texts(kind)}
    hints = typing.get_type_hints(kind)
    options = "\n".join(
        _entry(_spelling(field.name, hints[field.name]), texts[field.name] + _default(field), 32)
        for field in dataclasses.fields(kind)
    )
    return f"Usage: worker {verb} [--option=value ...]\n\n{inspect.getdoc(kind)}\n\n{options}"


def _spelling(name: str, hint: Any) -> str:
    flag = name.replace("_", "-")
    if hint is bool:
        return f"--[no-]{flag}"
    return f"--{flag}=" + {int: "N", str: "TEXT"}.get(hint, "A,B,...")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return " Required."
    if field.default in ("", False, 0, ()):
        return ""
    value = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    return f" [{value}]"


def _entry(name: str, text: str, column: int) -> str:
    indent = " " * column
    first = f"  {name}".ljust(column)
    if len(first) > column:
        return f"  {name}\n" + textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=indent)


def _field_texts(kind: type[Any]) -> dict[str, str]:
    """The string below each field, which Python itself does not keep."""
    texts = {}
    for owner in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as words)):
                    texts[name] = " ".join(words.split())
    return texts
