"""The tokens of one model: tokens that end an answer, tokens that its checkpoint forbids or forces, special tokens that
its text leaves out, and bytes of tokens.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from worker.detokenizer import TokenBytes
from worker.engines.transformers.schedule.sequence import TokenRules
from worker.errors import StartError
from worker.protocol.events import Exit

log = logging.getLogger(__name__)
# Members of generation_config.json that change the text and are not offered, with the values without effect.
_NOT_OFFERED: Mapping[str, tuple[Any, ...]] = {
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "num_beams": (1,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
    "guidance_scale": (1,),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "top_h", "min_new_tokens"), (0,)),
    **dict.fromkeys(("force_words_ids", "constraints", "stop_strings", "watermarking_config"), ()),
}


class Vocabulary:
    """All tokens of the model."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, config: Any, snapshot: Path):
        """Raises StartError if generation_config.json is damaged."""
        self._tokenizer = tokenizer
        self.size = int(config.get_text_config().vocab_size)
        given = _generation_config(config, snapshot)
        self.ends = _ends(config, given, tokenizer)  # tokens that end an answer
        has_encoder = bool(getattr(config, "is_encoder_decoder", False))
        self.rules = _rules(given, self.size, self.ends, has_encoder=has_encoder)
        self.piece = TokenBytes.of(tokenizer)  # the bytes of one token
        # Special tokens, which the text of an answer leaves out.
        added = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
        self._special = frozenset(added.union(tokenizer.all_special_ids))

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


def _generation_config(config: Any, snapshot: Path) -> Mapping[str, Any]:
    """The content of generation_config.json. Old checkpoints have its members in config.json instead."""
    path = snapshot / "generation_config.json"
    if not path.is_file():
        return {str(name): value for name, value in vars(config).items()}
    try:
        return {**json.loads(path.read_bytes())}
    except (ValueError, TypeError) as error:
        raise StartError(f"{path} is damaged: {error}", Exit.DAMAGED) from error


def _ends(config: Any, given: Mapping[str, Any], tokenizer: transformers.PreTrainedTokenizerBase) -> frozenset[int]:
    """All tokens that end an answer, from generation_config.json, config.json and the tokenizer."""
    found = (getattr(config.get_text_config(), "eos_token_id", None), tokenizer.eos_token_id, given.get("eos_token_id"))
    return frozenset(token for value in found for token in _tokens(value))


def _rules(given: Mapping[str, Any], size: int, ends: frozenset[int], *, has_encoder: bool) -> TokenRules:
    """The tokens that the checkpoint forbids or forces. Warn of what it sets besides and has no effect."""
    words = given.get("bad_words_ids")
    words = words if isinstance(words, list) else []
    # As in transformers, the end is never a bad word.
    single = [token for word in words if isinstance(word, list) and len(word) == 1 for token in _tokens(word)]
    unused = [name for name, neutral in _NOT_OFFERED.items() if given.get(name) not in (None, *neutral)]
    if any(not isinstance(word, list) or len(word) != 1 for word in words):
        unused.append("bad_words_ids of several tokens")
    if unused:
        log.warning("generation_config.json: %s has no effect", ", ".join(unused))

    def known(value: Any) -> frozenset[int]:
        return frozenset(token for token in _tokens(value) if 0 <= token < size)

    # The prompt of a model without an encoder precedes the token that would be forced, so no token is.
    first = min(known(given.get("forced_bos_token_id")), default=None) if has_encoder else None
    never = known(given.get("suppress_tokens")) | known(single) - ends
    # Of several equally likely tokens, greedy `generate` takes the lowest.
    last = min(known(given.get("forced_eos_token_id")), default=None)
    return TokenRules(never, known(given.get("begin_suppress_tokens")), first, last)


def _tokens(value: Any) -> list[int]:
    """The token ids among `value`, one or a list."""
    return [token for token in (value if isinstance(value, list) else [value]) if type(token) is int]
