"""The texts of `worker --help`, generated from the dataclasses of `worker.protocol.argv`, so that none is missing."""

import ast
import dataclasses
import inspect
import textwrap
import typing
from typing import Any

from worker.protocol.argv import COMMANDS

WIDTH = 110
# Fields of argv.py without a text of their own.
_TEXTS = {
    "revision": "Branch, tag or commit.",
    "trust_remote_code": "Run code that comes with the model. Off: models that need it are rejected.",
    "quantization": "Quantization method of the checkpoint; auto: as its config states.",
    "max_logprobs": "Maximum number of alternatives per token in one request.",
    "embd_normalize": "Norm of vectors: -1 none, 0 largest value, 1 taxicab, 2 Euclidean.",
    "strict_fields": "Reject requests with fields that have no meaning here.",
    "supervised": "Read a token line from stdin, and exit when stdin ends or the parent exits. For routers.",
    "parent_pid": "Process id of the parent; required with --supervised.",
}


def overview() -> str:
    """The list of verbs."""
    verbs = "\n".join(_entry(name, inspect.getdoc(kind) or "", 12) for name, kind in COMMANDS.items())
    return (
        "Usage: worker VERB [--option=value ...]\n"
        "       worker VERB --help\n\n"
        "One process that serves one model. Events are JSON lines on stdout; the log goes to stderr.\n\n"
        f"{verbs}\n\n"
        "Example: worker serve --snapshot=FOLDER --listen=tcp:127.0.0.1:9000\n"
        "         curl http://127.0.0.1:9000/v1/chat/completions -d '{\"messages\": [...]}'"
    )


def of(verb: str) -> str:
    """One verb and its options; the overview for an unknown verb."""
    if verb not in COMMANDS:
        return overview()
    kind = COMMANDS[verb]
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
    """The string under each field. Python does not keep it, so it is read from the source."""
    texts = {}
    for owner in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, string in zip(body.body, body.body[1:], strict=False):
            match field, string:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                    texts[name] = " ".join(text.split())
    return texts
