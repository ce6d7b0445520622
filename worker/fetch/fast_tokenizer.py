"""The fast form of a tokenizer (tokenizer.json) for a snapshot that is stored without it."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from worker.engines.transformers.load.snapshot import load_tokenizer
from worker.errors import StartError
from worker.protocol.argv import Estimate

log = logging.getLogger(__name__)

_TOKENIZER = "tokenizer.json"
# Texts on which tokenizers differ if they differ at all: blanks, normalization, scripts, digits.
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces, a tab\t and\n\nlines \r\n",
    "Größe, naïve, \u0130stanbul, \u212b, e\u0301 and \ufb01",
    "Быстрая лиса 敏捷的棕色狐狸 素早い茶色の狐 🦊👩‍👩‍👧 \u200d\u00a0",
    'def f(x: int) -> str:\n    return f"{x:>8}"  # 12345 3.14e-10',
    "",
)


def convert(snapshot: Path, part: Path) -> bool:
    """Write the fast form of a tokenizer that is stored without it, if it behaves like the one that loading makes."""
    if (snapshot / _TOKENIZER).exists():
        return False
    trial = part / "trial"
    trial.mkdir()
    try:
        loaded = load_tokenizer(Estimate(snapshot=str(snapshot)))
        fast = getattr(loaded, "backend_tokenizer", None)
        if fast is None:
            return False
        for path in snapshot.iterdir():
            if path.is_file() and not path.name.endswith(".safetensors"):
                (trial / path.name).symlink_to(path.resolve())
        fast.save(str(trial / _TOKENIZER))
        stored = load_tokenizer(Estimate(snapshot=str(trial)))
        if found := difference(loaded, stored):
            log.info("the tokenizer is not converted: its fast form differs in %s", found)
            return False
        with (trial / _TOKENIZER).open("rb") as file:
            os.fsync(file.fileno())
        os.rename(trial / _TOKENIZER, part / _TOKENIZER)
        return True
    except StartError as error:
        log.info("the tokenizer is not converted: %s", error)
        return False
    finally:
        shutil.rmtree(trial)


def difference(first: Any, second: Any) -> str:
    """Return the first difference between two tokenizers; empty if none was found."""
    if type(first) is not type(second):
        return "class"
    if first.get_vocab() != second.get_vocab():
        return "vocabulary"
    if (first.special_tokens_map, first.all_special_ids) != (second.special_tokens_map, second.all_special_ids):
        return "special tokens"
    if first.chat_template != second.chat_template or first.model_max_length != second.model_max_length:
        return "chat template or maximum length"
    texts = [*PROBES, *(f"a {token} b{token}" for token in first.all_special_tokens)]
    for text in texts:
        ids = first.encode(text)
        plain_ids = first.encode(text, add_special_tokens=False)
        if ids != second.encode(text) or plain_ids != second.encode(text, add_special_tokens=False):
            return f"the tokens of {text[:20]!r}"
        if first.decode(ids) != second.decode(ids):
            return f"the text of {ids[:8]}"
    return ""
