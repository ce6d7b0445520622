"""What an answer tells of its tokens beside their text, as vLLM's clients ask for it.

Law: PURE, values only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from worker.errors import InvalidValue
from worker.interface import Delta, TokenLogprob
from worker.prompt.body_reader import Fields, to_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Telling:
    """Alternatives are counted for each token; None: no logprobs."""

    logprobs: int | None = None
    """Of the answer's tokens."""
    prompt_logprobs: int | None = None
    """Of the prompt's."""
    has_ids: bool = False
    """Prompt and answer come as token ids, too."""
    names_ids: bool = False
    """Logprobs name a token by its id, not by its text."""

    @property
    def wanted(self) -> int | None:
        """Alternatives that the engine is to give, to prompt and answer alike."""
        stated = [count for count in (self.logprobs, self.prompt_logprobs) if count is not None]
        return max(stated, default=None)

    def cut(self, delta: Delta) -> Delta:
        """`delta` with as many alternatives of its tokens as were asked for."""
        if self.logprobs == self.wanted:
            return delta
        most = self.logprobs
        kept = () if most is None else tuple(replace(each, top=each.top[:most]) for each in delta.logprobs)
        return replace(delta, logprobs=kept)

    def spelt(self, entry: TokenLogprob, text: str) -> str:
        """How logprobs name a token whose text is `text`."""
        return f"token_id:{entry.token}" if self.names_ids else text

    def of_prompt(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any] | None] | None:
        """`prompt_logprobs`: for each token of the prompt, by id, it and its alternatives; the first has none."""
        if self.prompt_logprobs is None:
            return None
        return [None if entry.logprob is None else self._ranked(entry) for entry in entries]

    def _ranked(self, entry: TokenLogprob) -> dict[str, Any]:
        top = entry.top[: self.prompt_logprobs]
        ranks = {each.token: rank for rank, each in enumerate(entry.top, start=1)}
        return {
            str(each.token): {
                "logprob": each.logprob if each.logprob is not None and isfinite(each.logprob) else None,
                "rank": ranks.get(each.token),  # of a token below all that were looked at, nobody knows it
                "decoded_token": each.piece.decode(errors="replace"),
            }
            for each in (*(each for each in top if each.token != entry.token), entry)
        }


def alternatives(fields: Fields, name: str, most: int) -> int | None:
    """How many alternatives of each token field `name` asks for, at most `most`. Raises InvalidValue, which says how
    more may be had: -1 is vLLM's word for the whole vocabulary."""
    stated = to_integer(fields.take(name))
    if stated is not None and (stated == -1 or stated > most):
        raise InvalidValue(
            f"{name} must be between 0 and {most}, the model's max-logprobs; its preset may allow more", param=name
        )
    return fields.integer(name)


def read(fields: Fields, *, logprobs: int | None, most: int, stream: bool) -> Telling:
    """`logprobs`: as each call spells that in its own way; `most`: the model's max-logprobs. Raises InvalidValue."""
    of_prompt = alternatives(fields, "prompt_logprobs", most)
    if of_prompt is not None and stream:
        raise InvalidValue(
            "prompt_logprobs cannot be streamed; leave out stream or prompt_logprobs", param="prompt_logprobs"
        )
    return Telling(
        logprobs=logprobs,
        prompt_logprobs=of_prompt,
        has_ids=fields.flag("return_token_ids") or False,
        names_ids=fields.flag("return_tokens_as_token_ids") or False,
    )
