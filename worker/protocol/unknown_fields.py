"""Unknown members inside the objects of a request body, by path, so that they can be reported.

If a place allows several kinds of object, members with fixed values distinguish them, mostly `type` and `role`. Objects
that the table does not describe, such as a JSON schema or the variables of a template, are not searched.

Types are not checked here: the reader of a field rejects a wrong type.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from worker.protocol.schema import Body, Schema


def unknown_paths(table: Body, body: Mapping[str, Any], *, but: Iterable[str] = ()) -> list[str]:
    """Return the paths of unknown members inside the fields of `body`, such as `messages[].content[].wibble`, without
    duplicates. Nulls are ignored. `but`: fields that are not searched. Fields that are not in `table` are not
    reported."""
    skipped = set(but)
    found: dict[str, None] = {}
    for name, value in body.items():
        if name in table and name not in skipped:
            _search(value, _options([table[name]]), name, found)
    return list(found)


def _search(value: Any, options: Sequence[Schema], path: str, found: dict[str, None]) -> None:
    """Add the unknown members inside of `value`, whose schema is one of `options`, to `found`."""
    if isinstance(value, list):
        entries = _options(option["items"] for option in options if "items" in option)
        if any("properties" in entry or "items" in entry for entry in entries):
            for entry in value:
                if isinstance(entry, dict | list):
                    _search(entry, entries, f"{path}[]", found)
    elif isinstance(value, dict):
        kinds = [option["properties"] for option in options if "properties" in option]
        if not kinds or any(map(_allows_any_object, options)):
            return
        if len(kinds) > 1:
            kinds = [kind for kind in kinds if _may_be(value, kind)] or kinds
        for name, member in value.items():
            if member is None:
                continue
            schemas = [kind[name] for kind in kinds if name in kind]
            if not schemas:
                found[f"{path}.{name}"] = None
            elif isinstance(member, dict | list):
                _search(member, _options(schemas), f"{path}.{name}", found)


def _options(schemas: Iterable[Schema]) -> list[Schema]:
    """Return all alternatives of `schemas`, down to those without `anyOf`."""
    return [option for schema in schemas for option in (_options(schema["anyOf"]) if "anyOf" in schema else [schema])]


def _may_be(value: Mapping[str, Any], kind: Body) -> bool:
    """True unless a member of `value` differs from the values that this kind of object fixes."""
    for name, member in value.items():
        schema = kind.get(name, {})
        fixed = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
        if fixed is not None and member is not None and member not in fixed:
            return False
    return True


def _allows_any_object(schema: Schema) -> bool:
    """True if objects with arbitrary members are allowed."""
    if "properties" in schema or "items" in schema or "enum" in schema or "const" in schema or "not" in schema:
        return False
    return "object" in schema.get("type", "object")
