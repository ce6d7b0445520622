"""Options for logprobs and token ids in answers, with vLLM's extensions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from worker.errors import InvalidValue
from worker.interface import Delta, TokenLogprob
from worker.prompt.body_reader import BodyFields, to_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobOptions:
    """Numbers of alternatives are per token; None: no logprobs."""

    logprobs: int | None = None  # of the answer's tokens
    prompt_logprobs: int | None = None  # of the prompt's tokens
    return_token_ids: bool = False  # return the token ids of prompt and answer
    tokens_as_ids: bool = False  # identify tokens in logprobs by id instead of by text

    @property
    def engine_logprobs(self) -> int | None:
        """Number of alternatives to request from the engine, for prompt and answer together."""
        given = [count for count in (self.logprobs, self.prompt_logprobs) if count is not None]
        return max(given, default=None)

    def cut(self, delta: Delta) -> Delta:
        """Reduce the alternatives of the delta's tokens to the requested number."""
        if self.logprobs == self.engine_logprobs:
            return delta
        most = self.logprobs
        kept = () if most is None else tuple(replace(entry, top=entry.top[:most]) for entry in delta.logprobs)
        return replace(delta, logprobs=kept)

    def spelt(self, entry: TokenLogprob, text: str) -> str:
        """Return the name of a token in logprobs; `text` is the token's text."""
        return f"token_id:{entry.token}" if self.tokens_as_ids else text

    def prompt_entries(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any] | None] | None:
        """Return `prompt_logprobs`: for each prompt token, the token and its alternatives by id. The first token has
        none."""
        if self.prompt_logprobs is None:
            return None
        return [None if entry.logprob is None else self._ranked(entry) for entry in entries]

    def _ranked(self, entry: TokenLogprob) -> dict[str, Any]:
        top = entry.top[: self.prompt_logprobs]
        ranks = {candidate.token: rank for rank, candidate in enumerate(entry.top, start=1)}
        return {
            str(candidate.token): {
                "logprob": finite_or_none(candidate.logprob),
                "rank": ranks.get(candidate.token),  # the rank is unknown for a token below all reported alternatives
                "decoded_token": candidate.piece.decode(errors="replace"),
            }
            for candidate in (*(candidate for candidate in top if candidate.token != entry.token), entry)
        }


def finite_or_none(logprob: float | None) -> float | None:
    """Return null for an infinite logprob (an impossible token), because JSON has no infinity."""
    return logprob if logprob is not None and isfinite(logprob) else None


def alternatives(fields: BodyFields, name: str, most: int) -> int | None:
    """Read the number of alternatives per token from field `name`. Raise InvalidValue above `most`.

    -1 means the whole vocabulary in vLLM, and is rejected with the limit in the message.
    """
    given = to_integer(fields.take(name))
    if given is not None and (given == -1 or given > most):
        raise InvalidValue(
            f"{name} must be between 0 and {most}, the model's max-logprobs; its preset may allow more", param=name
        )
    return fields.integer(name)


def read(fields: BodyFields, *, logprobs: int | None, most: int, stream: bool) -> LogprobOptions:
    """Read the options. `logprobs`: the number of alternatives, read by the caller. `most`: the model's max-logprobs.
    Raise InvalidValue."""
    prompt_alternatives = alternatives(fields, "prompt_logprobs", most)
    if prompt_alternatives is not None and stream:
        raise InvalidValue(
            "prompt_logprobs cannot be streamed; leave out stream or prompt_logprobs", param="prompt_logprobs"
        )
    return LogprobOptions(
        logprobs=logprobs,
        prompt_logprobs=prompt_alternatives,
        return_token_ids=fields.flag("return_token_ids") or False,
        tokens_as_ids=fields.flag("return_tokens_as_token_ids") or False,
    )
