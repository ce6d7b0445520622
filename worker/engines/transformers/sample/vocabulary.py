"""The tokens of one model: tokens that end an answer, special tokens that its text leaves out, and bytes of tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from worker.detokenizer import TokenBytes
from worker.errors import StartError
from worker.protocol.events import Exit


class Vocabulary:
    """All tokens of the model."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, config: Any, snapshot: Path):
        """Raises StartError if generation_config.json is damaged."""
        self._tokenizer = tokenizer
        self.size = int(config.get_text_config().vocab_size)
        self.ends = _ends(config, snapshot, tokenizer)  # tokens that end an answer
        self.piece = TokenBytes.of(tokenizer)  # the bytes of one token
        self._special = _special(tokenizer)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without special tokens."""
        if self._tokenizer.is_fast:  # the same as the library's own decode, without its 20 microseconds of overhead
            text: str = self._tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=True)
            return text
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def decode_with(self, shown: frozenset[int], tokens: Sequence[int]) -> str:
        """As `decode`, but with the text of the special tokens in `shown`."""
        if shown.isdisjoint(tokens):
            return self.decode(tokens)
        kept = [token for token in tokens if token not in self._special or token in shown]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _ends(config: Any, snapshot: Path, tokenizer: transformers.PreTrainedTokenizerBase) -> frozenset[int]:
    """All tokens that end an answer, from generation_config.json, config.json and the tokenizer."""
    found = [getattr(config.get_text_config(), "eos_token_id", None), tokenizer.eos_token_id]
    path = snapshot / "generation_config.json"
    if path.is_file():
        try:
            found.append(json.loads(path.read_bytes()).get("eos_token_id"))
        except (ValueError, AttributeError) as error:
            raise StartError(f"{path} is damaged: {error}", Exit.DAMAGED) from error
    tokens: set[int] = set()
    for value in found:
        tokens.update(token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))
    return frozenset(tokens)


def _special(tokenizer: transformers.PreTrainedTokenizerBase) -> frozenset[int]:
    """Special tokens, which the text of an answer leaves out."""
    added = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    return frozenset(added.union(tokenizer.all_special_ids))
