"""Unknown members inside the objects of a request body, by path, so that they can be reported.

If a place allows several kinds of object, members with fixed values distinguish them, mostly `type` and `role`. Objects
that the table does not describe, such as a JSON schema or the variables of a template, are not searched.

Types are not checked here: the reader of a field rejects a wrong type.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.protocol.schema import Body, Schema, allows

# Cached combinations of fixed values for one place in a table. Clients may send any number of combinations.
MAX_CACHED = 64
# A cache of tables by identity. It keeps a reference to each table, so that its identity is not used again.
_KNOWN: dict[int, tuple[Body, Mapping[str, "_Shape"]]] = {}


@dataclass(frozen=True, slots=True)
class _ObjectKind:
    """One kind of object."""

    members: Mapping[str, "_Shape"]
    fixed: Mapping[str, Schema]  # members that distinguish this kind from others, with their possible values

    def may_be(self, value: Mapping[str, Any]) -> bool:
        return all(value.get(name) is None or allows(schema, value[name]) for name, schema in self.fixed.items())


@dataclass(slots=True)
class _Shape:
    """The objects and arrays that one place allows."""

    kinds: Sequence[_ObjectKind] = ()  # of objects
    entries: "_Shape | None" = None  # of an array
    is_free: bool = False  # objects with arbitrary members are allowed
    is_deep: bool = False  # it contains an object whose members are known
    _fixed: Sequence[str] = ()
    # A cache of members by fixed values: most objects in one place have the same ones.
    _cache: dict[tuple[Any, ...], Mapping[str, "_Shape"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._fixed = list(dict.fromkeys(name for kind in self.kinds for name in kind.fixed))

    def members(self, value: Mapping[str, Any]) -> Mapping[str, "_Shape"]:
        """Return the members that `value` may have, by name."""
        key = tuple(map(value.get, self._fixed))
        try:
            found = self._cache.get(key)
        except TypeError:  # not hashable: a list instead of a string, for example
            return self._members(value)
        if found is None:
            found = self._members(value)
            if len(self._cache) < MAX_CACHED:
                self._cache[key] = found
        return found

    def _members(self, value: Mapping[str, Any]) -> Mapping[str, "_Shape"]:
        kinds = [kind for kind in self.kinds if kind.may_be(value)] or self.kinds
        names = dict.fromkeys(name for kind in kinds for name in kind.members)
        return {name: _merged([kind.members[name] for kind in kinds if name in kind.members]) for name in names}


def unknown_paths(table: Body, body: Mapping[str, Any], *, but: Iterable[str] = ()) -> list[str]:
    """Return the paths of unknown members inside the fields of `body`, such as `messages[].content[].wibble`, without
    duplicates. Nulls are ignored. `but`: fields that are not searched. Fields that are not in `table` are not
    reported."""
    shapes = _shapes(table)
    skipped = set(but)
    found: dict[str, None] = {}
    for name, value in body.items():
        shape = shapes.get(name)
        if shape is not None and shape.is_deep and name not in skipped:
            _search(value, shape, name, found)
    return list(found)


def _search(value: Any, shape: _Shape, path: str, found: dict[str, None]) -> None:
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
                _search(member, inner, f"{path}.{name}", found)
    elif isinstance(value, list) and shape.entries is not None and shape.entries.is_deep:
        within = f"{path}[]"
        for entry in value:
            if isinstance(entry, dict | list):
                _search(entry, shape.entries, within, found)


def _shapes(table: Body) -> Mapping[str, _Shape]:
    known = _KNOWN.get(id(table))
    if known is None:
        known = _KNOWN[id(table)] = table, {name: _shape(schema) for name, schema in table.items()}
    return known[1]


def _shape(schema: Schema) -> _Shape:
    if "anyOf" in schema:
        return _merged([_shape(option) for option in schema["anyOf"]])
    if "properties" in schema:
        members = {name: _shape(member) for name, member in schema["properties"].items()}
        fixed = {
            name: _values(member)
            for name, member in schema["properties"].items()
            if "const" in member or "enum" in member
        }
        return _Shape(kinds=[_ObjectKind(members, fixed)], is_deep=True)
    if "items" in schema:
        entries = _shape(schema["items"])
        return _Shape(entries=entries, is_deep=entries.is_deep)
    return _Shape(is_free=not {"enum", "const", "not"} & schema.keys() and _allows_objects(schema))


def _merged(shapes: Sequence[_Shape]) -> _Shape:
    """Return the shape that allows everything that one of `shapes` allows."""
    if len(shapes) == 1:
        return shapes[0]
    entries = [shape.entries for shape in shapes if shape.entries is not None]
    return _Shape(
        kinds=[kind for shape in shapes for kind in shape.kinds],
        entries=_merged(entries) if entries else None,
        is_free=any(shape.is_free for shape in shapes),
        is_deep=any(shape.is_deep for shape in shapes),
    )


def _values(schema: Schema) -> Schema:
    return schema if "enum" in schema else {"enum": [schema["const"]]}


def _allows_objects(schema: Schema) -> bool:
    kinds = schema.get("type", "object")
    return kinds == "object" or "object" in kinds
