"""What stands inside the objects of a body that its table does not know: named, so that it can be reported.

Where several kinds of object may stand, one is told from another by the members that have a fixed word, `type` and
`role` mostly. An object that the table does not describe, a JSON schema or the variables of a template, is the client's
own and not looked into.

Pure. Nothing is judged here: what has the wrong type is refused by whoever reads it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.protocol.schema import Body, Schema, allows

MOST_CHOSEN = 64
"""Combinations of words that are remembered for one place in a table; clients may send any."""
_KNOWN: dict[int, tuple[Body, Mapping[str, "_Shape"]]] = {}
"""Tables that were looked at before, by identity; each is kept, so that no other takes its place."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of object."""

    members: Mapping[str, "_Shape"]
    words: Mapping[str, Schema]
    """Members that tell it from others, with the words that they may have."""

    def may_be(self, value: Mapping[str, Any]) -> bool:
        return all(value.get(name) is None or allows(schema, value[name]) for name, schema in self.words.items())


@dataclass(slots=True)
class _Shape:
    """What may stand in one place, as far as it has members."""

    kinds: Sequence[_Kind] = ()
    """Of objects."""
    entries: "_Shape | None" = None
    """Of an array."""
    is_free: bool = False
    """An object with any members may stand here."""
    is_deep: bool = False
    """Somewhere in it an object has members that are known."""
    _words: Sequence[str] = ()
    _chosen: dict[tuple[Any, ...], Mapping[str, "_Shape"]] = field(default_factory=dict)
    """Members by the words that an object has: most objects of one place have the same."""

    def __post_init__(self) -> None:
        self._words = list(dict.fromkeys(name for kind in self.kinds for name in kind.words))

    def members(self, value: Mapping[str, Any]) -> Mapping[str, "_Shape"]:
        """Those that `value` may have, by name."""
        said = tuple(map(value.get, self._words))
        try:
            found = self._chosen.get(said)
        except TypeError:  # a word that is a list, say
            return self._members(value)
        if found is None:
            found = self._members(value)
            if len(self._chosen) < MOST_CHOSEN:
                self._chosen[said] = found
        return found

    def _members(self, value: Mapping[str, Any]) -> Mapping[str, "_Shape"]:
        kinds = [kind for kind in self.kinds if kind.may_be(value)] or self.kinds
        names = dict.fromkeys(name for kind in kinds for name in kind.members)
        return {name: _merged([kind.members[name] for kind in kinds if name in kind.members]) for name in names}


def unknown(table: Body, body: Mapping[str, Any], *, but: Iterable[str] = ()) -> list[str]:
    """The paths of what nobody knows inside the fields of `body`, each once: `messages[].content[].wibble`. Nulls are
    as good as absent. `but`: fields that are not looked into; fields of no table are the caller's affair."""
    shapes = _shapes(table)
    passed = set(but)
    found: dict[str, None] = {}
    for name, value in body.items():
        shape = shapes.get(name)
        if shape is not None and shape.is_deep and name not in passed:
            _look(value, shape, name, found)
    return list(found)


def _look(value: Any, shape: _Shape, path: str, found: dict[str, None]) -> None:
    if isinstance(value, dict):
        if shape.is_free or not shape.kinds:
            return
        members = shape.members(value)
        for name, member in value.items():
            if member is None:
                continue
            inner = members.get(name)
            if inner is None:
                found[f"{path}.{name}"] = None
            elif inner.is_deep and isinstance(member, dict | list):
                _look(member, inner, f"{path}.{name}", found)
    elif isinstance(value, list) and shape.entries is not None and shape.entries.is_deep:
        within = f"{path}[]"
        for entry in value:
            if isinstance(entry, dict | list):
                _look(entry, shape.entries, within, found)


def _shapes(table: Body) -> Mapping[str, _Shape]:
    known = _KNOWN.get(id(table))
    if known is None:
        known = _KNOWN[id(table)] = table, {name: _shape(schema) for name, schema in table.items()}
    return known[1]


def _shape(schema: Schema) -> _Shape:
    if "anyOf" in schema:
        return _merged([_shape(each) for each in schema["anyOf"]])
    if "properties" in schema:
        members = {name: _shape(each) for name, each in schema["properties"].items()}
        words = {name: _words(each) for name, each in schema["properties"].items() if "const" in each or "enum" in each}
        return _Shape(kinds=[_Kind(members, words)], is_deep=True)
    if "items" in schema:
        entries = _shape(schema["items"])
        return _Shape(entries=entries, is_deep=entries.is_deep)
    return _Shape(is_free=not {"enum", "const", "not"} & schema.keys() and _takes_objects(schema))


def _merged(shapes: Sequence[_Shape]) -> _Shape:
    """What may be any of these."""
    if len(shapes) == 1:
        return shapes[0]
    entries = [shape.entries for shape in shapes if shape.entries is not None]
    return _Shape(
        kinds=[kind for shape in shapes for kind in shape.kinds],
        entries=_merged(entries) if entries else None,
        is_free=any(shape.is_free for shape in shapes),
        is_deep=any(shape.is_deep for shape in shapes),
    )


def _words(schema: Schema) -> Schema:
    return schema if "enum" in schema else {"enum": [schema["const"]]}


def _takes_objects(schema: Schema) -> bool:
    kinds = schema.get("type", "object")
    return kinds == "object" or "object" in kinds
