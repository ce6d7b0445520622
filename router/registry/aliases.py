"""Which model a request means: ids, aliases, near misses. Law: PURE."""

import difflib
from collections.abc import Callable, Iterable, Mapping

from router.config.presets import Preset
from router.errors import BadRequest, ModelNotFound

LONGEST = 192
"""Characters of a name; what is longer cannot be one, and is neither compared nor repeated."""


class Names:
    """All ids and aliases of one set of presets."""

    def __init__(self, presets: Mapping[str, Preset]):
        self._exact: dict[str, str] = {id: id for id in presets}
        for preset in presets.values():
            for alias in preset.aliases:
                self._exact.setdefault(alias, preset.id)
        for preset in presets.values():
            if preset.dedup_cache_models and preset.repo:  # hidden in lists, and known all the same
                self._exact.setdefault(preset.repo, preset.id)
        self._adapters: dict[str, str] = {}
        for preset in presets.values():
            for base in (preset.id, *preset.aliases):
                for each in preset.adapters:
                    name = f"{base}@{each.name}"
                    if self._exact.setdefault(name, preset.id) == preset.id and name not in presets:
                        self._adapters[name] = each.name
        self._folded: dict[str, set[str]] = {}
        for name, id in self._exact.items():
            self._folded.setdefault(name.casefold(), set()).add(id)
        self._ids = tuple(presets)

    def find(self, name: str, allowed: Callable[[str], bool] = lambda id: True) -> str:
        """The id that `name` means: exact id, exact alias, else unique without regard to case.

        A model outside `allowed` is as unknown as one that does not exist. Raises ModelNotFound with up to three
        near names that may be seen.
        """
        id = self._exact.get(name)
        if id is None:
            folded = self._folded.get(name.casefold(), set())
            id = next(iter(folded)) if len(folded) == 1 else None
        if id is not None and allowed(id):
            return id
        if len(name) > LONGEST:
            raise ModelNotFound(
                f"model not found: its name has {len(name)} characters, {LONGEST} at most", param="model"
            )
        near = self._near(name, (known for known, id in self._exact.items() if allowed(id)))
        hint = f"; did you mean {' or '.join(near)}?" if near else "; GET /v1/models lists what there is"
        raise ModelNotFound(f"model '{name}' not found{hint}", param="model")

    def adapter(self, name: str) -> str:
        """The adapter that `name` means beside its model (`id@adapter`); empty if it means none."""
        if name in self._exact:
            return self._adapters.get(name, "")
        folded = {found for known, found in self._adapters.items() if known.casefold() == name.casefold()}
        return next(iter(folded)) if len(folded) == 1 else ""

    def only(self, allowed: Callable[[str], bool]) -> str | None:
        """The only configured model that may be seen."""
        seen = [id for id in self._ids if allowed(id)]
        return seen[0] if len(seen) == 1 else None

    @staticmethod
    def _near(name: str, known: Iterable[str]) -> list[str]:
        by_fold = {each.casefold(): each for each in known}
        return [by_fold[fold] for fold in difflib.get_close_matches(name.casefold(), by_fold, n=3, cutoff=0.6)]


def choose(
    names: Names,
    *,
    path: str | None,
    body: str | None,
    query: str | None,
    default: str,
    fall_back: bool,
    allowed: Callable[[str], bool],
) -> tuple[str, str]:
    """(id, name as asked) of the model that a request means; path, then body, then query, then the default.

    With `fall_back` an unknown name means the default. Raises BadRequest (model_missing, model_conflict) and
    ModelNotFound.
    """

    def find(name: str) -> str:
        try:
            return names.find(name, allowed)
        except ModelNotFound:
            if fall_back and default:
                return names.find(default, allowed)
            raise

    if path is None and body and query and (find(body), names.adapter(body)) != (find(query), names.adapter(query)):
        raise BadRequest(
            "the body asks for one model and the query for another; name one",
            reason="model_conflict",
            param="model",
        )
    asked = path or body or query
    if asked:
        return find(asked), asked
    if default:
        return names.find(default, allowed), default
    only = names.only(allowed)
    if only is None:
        raise BadRequest("model name is missing from the request", reason="model_missing", param="model")
    return only, only
