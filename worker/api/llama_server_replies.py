"""llama-server's own answers of `/completion`: deltas to one body for each choice, or to the frames of a stream."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import orjson

from worker.api.openai_replies import Totals, finite, progress_of
from worker.interface import Delta, Generation, TokenLogprob
from worker.prompt.body_reader import Json

_NOWHERE = object()
_STOPS = {"stop": "eos", "length": "limit", None: "none"}


class NativeReply:
    """One body for each choice of each prompt; a list of them where there is more than one."""

    def __init__(
        self,
        generations: Sequence[Generation],
        *,
        model: str,
        prompts: Sequence[str],
        settings: Json,
        returns_tokens: bool,
        has_progress: bool,
        shown: Sequence[str] = (),
    ):
        """`prompts` are texts; `settings` those of all choices, as they were understood; `shown`: of a whole body these
        fields alone, `a/b` for a field of a field; empty for all."""
        self._shown = shown
        self._generations = generations
        self._n = generations[0].n
        self._has_progress = has_progress
        self._answers = [
            _Answer(
                number * self._n + index,
                generation,
                {"model": model, "prompt": prompts[number], "generation_settings": settings},
                returns_tokens=returns_tokens,
            )
            for number, generation in enumerate(generations)
            for index in range(generation.n)
        ]

    def whole(self, deltas: Iterable[tuple[int, Delta]]) -> Any:
        for number, delta in deltas:
            self._answer(number, delta).add(delta)
        bodies = [self._cut(answer.body()) for answer in self._answers]
        return bodies[0] if len(bodies) == 1 else bodies

    def frames(self, number: int, delta: Delta) -> bytes:
        answer = self._answer(number, delta)
        answer.add(delta)
        if delta.progress is not None:
            if not self._has_progress:
                return b""
            progress = progress_of(delta.progress, has_timings=self._generations[number].timings)
            return _frame(answer.chunk(Delta()) | progress)
        frames = []
        if delta.text or delta.tokens:
            further = answer.timings() if self._generations[number].timings else {}
            frames.append(_frame(answer.chunk(delta) | further))
        if delta.finish is not None:
            told = {"content", "tokens", "completion_probabilities"}
            last = {name: value for name, value in answer.body().items() if name not in told}
            frames.append(_frame(self._cut(last | {"content": "", "tokens": []})))
        return b"".join(frames)

    def closing(self) -> bytes:
        return b""  # the last body says `stop`

    def _cut(self, body: Json) -> Json:
        if not self._shown:
            return body
        found = ((path, _at(body, path.split("/"))) for path in self._shown)
        return {path: value for path, value in found if value is not _NOWHERE}

    def _answer(self, number: int, delta: Delta) -> "_Answer":
        return self._answers[number * self._n + delta.index]


class _Answer:
    """One choice, as far as it has come."""

    def __init__(self, index: int, generation: Generation, about: Json, *, returns_tokens: bool):
        self._index = index
        self._generation = generation
        self._about = about
        self._returns_tokens = returns_tokens
        self._totals = Totals([replace(generation, n=1)])
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._last = Delta()
        self._most = math.inf if generation.max_tokens is None else generation.max_tokens

    def add(self, delta: Delta) -> None:
        self._totals.add(0, replace(delta, index=0))
        self._text.append(delta.text)
        self._tokens.extend(delta.tokens)
        self._logprobs.extend(delta.logprobs)
        self._last = delta

    def timings(self) -> Json:
        return self._totals.so_far()

    def chunk(self, delta: Delta) -> Json:
        """What `delta` adds."""
        return {
            "index": self._index,
            "content": delta.text,
            "tokens": list(delta.tokens),  # whether they were asked for or not, as in llama-server
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(self._tokens),
            "tokens_evaluated": len(self._generation.prompt),
            **self._probabilities(delta.logprobs),
        }

    def body(self) -> Json:
        """All of it."""
        timings = self._totals.timings()
        text = "".join(self._text)
        predicted = timings["predicted_n"]
        return {
            "index": self._index,
            "content": text,
            "tokens": self._tokens if self._returns_tokens else [],
            "id_slot": -1,
            "stop": True,
            **self._about,
            "tokens_predicted": predicted,
            "tokens_evaluated": len(self._generation.prompt),
            "has_new_line": "\n" in text,
            "truncated": self._last.finish == "length" and predicted < self._most,
            "stop_type": _STOPS[self._last.finish] if self._last.stop is None else "word",
            "stopping_word": self._last.stop or "",
            "tokens_cached": len(self._generation.prompt) + predicted,
            "timings": timings,
            **self._probabilities(self._logprobs),
        }

    def _probabilities(self, logprobs: Sequence[TokenLogprob]) -> Json:
        sampling = self._generation.sampling
        if sampling.logprobs is None or not logprobs:
            return {}
        if sampling.tells_odds:
            told = [
                {**_odds(each), "top_probs": [_odds(top) for top in each.top if top.logprob is not None]}
                for each in logprobs
            ]
        else:
            told = [{**_entry(each), "top_logprobs": [_entry(top) for top in each.top]} for each in logprobs]
        return {"completion_probabilities": told}


def _at(value: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        value = value.get(key, _NOWHERE) if isinstance(value, dict) else _NOWHERE
    return value


def _entry(entry: TokenLogprob) -> Json:
    return {**_token(entry), "logprob": finite(entry.logprob)}


def _odds(entry: TokenLogprob) -> Json:
    return {**_token(entry), "prob": 0.0 if entry.logprob is None else math.exp(entry.logprob)}


def _token(entry: TokenLogprob) -> Json:
    return {"id": entry.token, "token": entry.piece.decode(errors="replace"), "bytes": list(entry.piece)}


def _frame(body: Json) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
