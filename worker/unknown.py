"""What stands inside the objects of a body that its table does not know: named, so that it can be reported.

Where several kinds of object may stand, one is told from another by the members that have a fixed word, `type` and
`role` mostly. An object that the table does not describe, a JSON schema or the variables of a template, is the client's
own and not looked into.

Law: PURE, values only. Nothing is judged here: what has the wrong type is refused by whoever reads it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.schemas import Body, Schema, allows

_KNOWN: dict[int, tuple[Body, Mapping[str, "_Shape"]]] = {}
"""Tables that were looked at before, by identity; each is kept, so that no other takes its place."""


@dataclass(slots=True)
class _Shape:
    """What one field takes, as far as it has members."""

    kinds: list["_Kind"] = field(default_factory=list)
    """Of objects that may stand here."""
    items: list["_Shape"] = field(default_factory=list)
    """What the entries of an array may be."""
    is_free: bool = False
    """An object with any members may stand here."""
    is_deep: bool = False
    """Somewhere in it an object has members that are known."""


@dataclass(frozen=True, slots=True)
class _Kind:
    members: Mapping[str, _Shape]
    words: Mapping[str, Schema]
    """Members that tell it from others, with the words that they may have."""

    def may_be(self, value: Mapping[str, Any]) -> bool:
        return all(value.get(name) is None or allows(schema, value[name]) for name, schema in self.words.items())


def unknown(table: Body, body: Mapping[str, Any], *, but: Iterable[str] = ()) -> list[str]:
    """The paths of what nobody knows inside the fields of `body`, each once: `messages[].content[].wibble`. Nulls are
    as good as absent. `but`: fields that are not looked into; fields of no table are the caller's affair."""
    shapes = _shapes(table)
    passed = set(but)
    found: dict[str, None] = {}
    for name, value in body.items():
        shape = shapes.get(name)
        if shape is not None and shape.is_deep and name not in passed:
            _look(value, [shape], name, found)
    return list(found)


def _look(value: Any, shapes: Sequence[_Shape], path: str, found: dict[str, None]) -> None:
    if isinstance(value, dict):
        if any(shape.is_free for shape in shapes):
            return
        every = [kind for shape in shapes for kind in shape.kinds]
        kinds = [kind for kind in every if kind.may_be(value)] or every
        for name, member in value.items():
            if member is None or not kinds:
                continue
            known = [kind.members[name] for kind in kinds if name in kind.members]
            if not known:
                found[f"{path}.{name}"] = None
            elif isinstance(member, dict | list) and any(shape.is_deep for shape in known):
                _look(member, known, f"{path}.{name}", found)
    elif isinstance(value, list):
        items = [item for shape in shapes for item in shape.items]
        if any(item.is_deep for item in items):
            for entry in value:
                if isinstance(entry, dict | list):
                    _look(entry, items, f"{path}[]", found)


def _shapes(table: Body) -> Mapping[str, _Shape]:
    known = _KNOWN.get(id(table))
    if known is None:
        known = _KNOWN[id(table)] = table, {name: _shape(schema) for name, schema in table.items()}
    return known[1]


def _shape(schema: Schema) -> _Shape:
    if "anyOf" in schema:
        every = [_shape(each) for each in schema["anyOf"]]
        return _Shape(
            kinds=[kind for each in every for kind in each.kinds],
            items=[item for each in every for item in each.items],
            is_free=any(each.is_free for each in every),
            is_deep=any(each.is_deep for each in every),
        )
    if "properties" in schema:
        members = {name: _shape(each) for name, each in schema["properties"].items()}
        words = {name: _words(each) for name, each in schema["properties"].items() if "const" in each or "enum" in each}
        return _Shape(kinds=[_Kind(members, words)], is_deep=True)
    if "items" in schema:
        item = _shape(schema["items"])
        return _Shape(items=[item], is_deep=item.is_deep)
    return _Shape(is_free=not {"enum", "const", "not"} & schema.keys() and _takes_objects(schema))


def _words(schema: Schema) -> Schema:
    return schema if "enum" in schema else {"enum": [schema["const"]]}


def _takes_objects(schema: Schema) -> bool:
    kinds = schema.get("type", "object")
    return kinds == "object" or "object" in kinds
