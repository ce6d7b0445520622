"""How a model wants a prompt whose middle it is to fill in, by the tokens that its vocabulary has for that.

Law: PURE, values only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_PREFIX, _SUFFIX = "prefix", "suffix"
_LAYOUTS: Sequence[tuple[str, ...]] = (
    ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>"),
    ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>"),
    ("<fim-prefix>", _PREFIX, "<fim-suffix>", _SUFFIX, "<fim-middle>"),
    ("<|fim_begin|>", _PREFIX, "<|fim_hole|>", _SUFFIX, "<|fim_end|>"),
    ("<\N{FULLWIDTH VERTICAL LINE}fim\N{LOWER ONE EIGHTH BLOCK}begin\N{FULLWIDTH VERTICAL LINE}>", _PREFIX,
     "<\N{FULLWIDTH VERTICAL LINE}fim\N{LOWER ONE EIGHTH BLOCK}hole\N{FULLWIDTH VERTICAL LINE}>", _SUFFIX,
     "<\N{FULLWIDTH VERTICAL LINE}fim\N{LOWER ONE EIGHTH BLOCK}end\N{FULLWIDTH VERTICAL LINE}>"),
    ("<PRE>", _PREFIX, "<SUF>", _SUFFIX, "<MID>"),
    ("\N{LOWER ONE EIGHTH BLOCK}<PRE>", _PREFIX, "\N{LOWER ONE EIGHTH BLOCK}<SUF>", _SUFFIX,
     "\N{LOWER ONE EIGHTH BLOCK}<MID>"),
    ("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX),
)  # fmt: skip
"""Codestral, and the last of these, has the suffix first and no mark for the middle."""
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>", "<|fim_repo|>", "<fim-repo>")
_FILE = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
"""Before the name of a repository, and before the name of each of its files (Qwen2.5-Coder's report, section 3.1)."""


@dataclass(frozen=True, slots=True)
class Filling:
    """Of one vocabulary."""

    layout: tuple[int | str, ...]
    """Token ids, and where what goes before the gap and what follows it stand."""
    repository: int | None = None
    file: int | None = None
    """Tokens that begin a repository and each of its files; None: it has none."""

    def around(self, prefix: Iterable[int], suffix: Iterable[int]) -> list[int]:
        """The prompt, behind which the model goes on with what stands between the two."""
        parts = {_PREFIX: list(prefix), _SUFFIX: list(suffix)}
        return [id for each in self.layout for id in (parts[each] if isinstance(each, str) else [each])]


def find(vocabulary: Mapping[str, int]) -> Filling | None:
    """None for a vocabulary without such tokens."""
    for layout in _LAYOUTS:
        marks = [mark for mark in layout if mark not in (_PREFIX, _SUFFIX)]
        if all(mark in vocabulary for mark in marks):
            found = tuple(vocabulary[each] if each in marks else each for each in layout)
            return Filling(found, _first(_REPOSITORY, vocabulary), _first(_FILE, vocabulary))
    return None


def _first(names: Sequence[str], vocabulary: Mapping[str, int]) -> int | None:
    return next((vocabulary[name] for name in names if name in vocabulary), None)
