"""OpenAI's answers, `chat.completion` and `text_completion`: deltas to one body, or to the frames of a stream.

Both ways give the same text: deltas concatenate to it.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import orjson

from worker.interface import Delta, Finish, Generation, Prefill, Timings, TokenLogprob
from worker.prompt.body_reader import Json
from worker.prompt.logprob_options import Telling
from worker.prompt.response_parser import Manner, Part, Reading

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """What the chunks of a stream have beside the text."""

    has_usage: bool = False
    """A last one has the usage of all."""
    counts: bool = False
    """Each has the usage so far."""
    has_progress: bool = False
    """They tell how far the prompt is."""
    has_timings: bool = False
    """Each has the timings so far, not the last one only."""

    def usage(self, totals: "Totals") -> Json:
        """What a chunk that is not that last one says of it."""
        return {"usage": totals.usage() if self.counts else None} if self.has_usage else {}

    def progress(self, prefill: Prefill) -> Json:
        """What one says that tells how far the prompt is."""
        return progress_of(prefill, has_timings=self.has_timings)


class Totals:
    """Counts and times of all choices of an answer together."""

    def __init__(self, generations: Sequence[Generation]):
        self._prompt_tokens = sum(len(generation.prompt) for generation in generations)
        self._open = sum(generation.n for generation in generations)
        self._latest: dict[tuple[int, int], Timings] = {}
        self._is_completion_hidden = False
        self._reasoning_tokens = 0

    def add(self, number: int, delta: Delta) -> None:
        """Take the next delta of generation `number`."""
        if delta.finish is not None:
            self._open -= 1
        if delta.timings is not None:
            self._latest[number, delta.index] = delta.timings

    def add_reasoning(self, tokens: int) -> None:
        """So many of the tokens were thoughts."""
        self._reasoning_tokens += tokens

    @property
    def is_complete(self) -> bool:
        return self._open <= 0

    def without_completion(self) -> None:
        self._is_completion_hidden = True

    @property
    def _cached(self) -> int:
        """Of the first choice of each prompt: what further ones share with it was no earlier request's work."""
        return sum(timings.cached_tokens for (_, index), timings in self._latest.items() if index == 0)

    @property
    def _completion_tokens(self) -> int:
        shown = () if self._is_completion_hidden else self._latest.values()
        return sum(timings.completion_tokens for timings in shown)

    def usage(self) -> Json:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
        }

    def timings(self) -> Json:
        """As llama-server reports them, so far. Choices run side by side, so seconds are the longest one's."""
        return _timings(
            cached=self._cached,
            prompt_n=self._prompt_tokens - self._cached,
            prefill_seconds=max((timings.prefill_seconds for timings in self._latest.values()), default=0.0),
            completion_tokens=self._completion_tokens,
            decode_seconds=max((timings.decode_seconds for timings in self._latest.values()), default=0.0),
        )

    def so_far(self) -> Json:
        """What a chunk adds that comes with timings of its own."""
        return {"timings": self.timings()} if self._latest else {}


def _timings(
    *, cached: int, prompt_n: int, prefill_seconds: float, completion_tokens: int = 0, decode_seconds: float = 0.0
) -> Json:
    return {
        "cache_n": cached,
        "prompt_n": prompt_n,
        "prompt_ms": prefill_seconds * 1e3,
        "prompt_per_token_ms": _rate(prefill_seconds * 1e3, prompt_n),
        "prompt_per_second": _rate(prompt_n, prefill_seconds),
        "predicted_n": completion_tokens,
        "predicted_ms": decode_seconds * 1e3,
        "predicted_per_token_ms": _rate(decode_seconds * 1e3, completion_tokens),
        "predicted_per_second": _rate(completion_tokens, decode_seconds),
    }


def progress_of(prefill: Prefill, *, has_timings: bool = False) -> Json:
    """How far a prompt is, as llama-server's `return_progress` puts it: counts of tokens, milliseconds; `has_timings`:
    with the timings of what is done of it."""
    done = prefill.done - prefill.cached
    timings = _timings(cached=prefill.cached, prompt_n=max(done, 0), prefill_seconds=prefill.seconds)
    return ({"timings": timings} if has_timings else {}) | {
        "prompt_progress": {
            "total": prefill.total,
            "cache": prefill.cached,
            "processed": prefill.done,
            "time_ms": prefill.seconds * 1e3,
        }
    }


def _rate(some: float, each: float) -> float:
    return some / each if each > 0 else 0.0


@dataclass(slots=True)
class _Choice:
    """One choice, as far as it has come."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """All that were computed, in the end those too that are not shown."""
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.tokens.extend((*delta.tokens, *delta.unshown))
        self.finish = delta.finish or self.finish

    def mean_logprob(self) -> float:
        known = [entry.logprob for entry in self.logprobs if entry.logprob is not None]
        return sum(known) / len(known) if known else float("-inf")


class _ChatAnswer:
    """One choice of a chat: its message, part by part."""

    def __init__(self, manner: Manner, *, shows_thoughts: bool):
        self._reading = Reading(manner)
        self._shows_thoughts = shows_thoughts
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Json] = []

    def add(self, delta: Delta) -> tuple[list[Json], int]:
        """What `delta` adds to the message, as OpenAI's deltas, and how many of its tokens were thoughts."""
        parts, reasoning_tokens = self._reading.take(delta)
        shown = [part for part in parts if self._shows_thoughts or not part.reasoning]
        return [self._delta(part) for part in shown], reasoning_tokens

    def message(self) -> Json:
        """The whole of it."""
        content = "".join(self._content)
        message: Json = {"role": "assistant", "content": None if self._calls and not content else content}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def finish_reason(self, finish: Finish | None) -> str | None:
        return "tool_calls" if self._calls and finish == "stop" else finish

    def _delta(self, part: Part) -> Json:
        if part.call is not None:
            function = {"name": part.call.name, "arguments": part.call.arguments}
            call = {"id": part.call.id, "type": "function", "function": function}
            self._calls.append(call)
            return {"tool_calls": [{"index": len(self._calls) - 1, **call}]}
        if part.reasoning:
            self._reasoning.append(part.reasoning)
            return {"reasoning_content": part.reasoning}
        self._content.append(part.content)
        return {"content": part.content}


class ChatReply:
    """`chat.completion` and its chunks."""

    def __init__(
        self,
        head: Json,
        generations: Sequence[Generation],
        *,
        shape: Chunks,
        telling: Telling,
        manner: Manner | None = None,
        shows_thoughts: bool = True,
    ):
        """`manner`: how the parts of an answer are told apart."""
        [self._generation] = generations
        self._shape, self._telling = shape, telling
        self._manner = manner or Manner(family=None)
        self._head = head
        self._totals = Totals(generations)
        self._begun: set[int] = set()
        self._held: dict[int, _Choice] = {}
        """Tokens that no chunk has told of yet, by choice."""
        self._answers = [_ChatAnswer(self._manner, shows_thoughts=shows_thoughts) for _ in range(self._generation.n)]

    @property
    def _has_logprobs(self) -> bool:
        return self._telling.logprobs is not None

    def whole(self, deltas: Iterable[tuple[int, Delta]]) -> Json:
        choices = [_Choice() for _ in range(self._generation.n)]
        prompt: Sequence[TokenLogprob] = ()
        for number, delta in deltas:
            self._totals.add(number, delta)
            choices[delta.index].add(self._telling.cut(delta))
            self._totals.add_reasoning(self._answers[delta.index].add(delta)[1])
            prompt = delta.prompt_logprobs or prompt
        of_prompt = self._telling.of_prompt(prompt)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": index,
                    "message": answer.message(),
                    "logprobs": self._logprobs(choice.logprobs) if self._has_logprobs else None,
                    "finish_reason": answer.finish_reason(choice.finish),
                    **({"token_ids": choice.tokens} if self._telling.has_ids else {}),
                }
                for index, (choice, answer) in enumerate(zip(choices, self._answers, strict=True))
            ],
            **({} if of_prompt is None else {"prompt_logprobs": of_prompt}),
            **self._prompt_ids(),
            "usage": self._totals.usage(),
            "timings": self._totals.timings(),
        }

    def frames(self, number: int, delta: Delta) -> bytes:
        frames = []
        answer = self._answers[delta.index]
        parts, reasoning_tokens = answer.add(delta)
        is_shown = delta.progress is None or self._shape.has_progress
        if is_shown and delta.index not in self._begun:  # before the tokens count: it has none of them
            self._begun.add(delta.index)
            first = {"role": "assistant", "content": None}
            frames.append(self._chunk(delta.index, first, _Choice(), **self._prompt_ids()))
        self._totals.add(number, delta)
        self._totals.add_reasoning(reasoning_tokens)
        if not is_shown:
            return b""
        if delta.progress is not None:
            frames.append(self._chunk(delta.index, {}, _Choice(), **self._shape.progress(delta.progress)))
        held = self._held.setdefault(delta.index, _Choice())
        held.add(self._telling.cut(delta))
        for part in parts:
            timings = self._totals.so_far() if self._shape.has_timings else {}
            frames.append(self._chunk(delta.index, part, held, **timings))
            held = self._held[delta.index] = _Choice()
        if delta.finish is not None:
            timings = {"timings": self._totals.timings()} if self._totals.is_complete else {}
            frames.append(self._chunk(delta.index, {}, held, answer.finish_reason(delta.finish), **timings))
        return b"".join(frames)

    def closing(self) -> bytes:
        return _closing({**self._head, "object": "chat.completion.chunk"}, self._totals, self._shape)

    def _prompt_ids(self) -> Json:
        return {"prompt_token_ids": list(self._generation.prompt)} if self._telling.has_ids else {}

    def _chunk(
        self,
        index: int,
        delta: Json,
        held: _Choice,
        finish: str | None = None,
        **further: Any,
    ) -> bytes:
        """`held`: the tokens that no chunk has told of yet."""
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(held.logprobs) if held.logprobs else None,
            "finish_reason": finish,
            **({"token_ids": held.tokens} if self._telling.has_ids else {}),
        }
        usage = self._shape.usage(self._totals)
        return _frame({**self._head, "object": "chat.completion.chunk", "choices": [choice], **usage, **further})

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json:
        return {"content": logprobs_of(entries, self._telling)}


def logprobs_of(entries: Sequence[TokenLogprob], telling: Telling) -> list[Json]:
    """Tokens of an answer with their alternatives, as OpenAI's clients read them."""

    def told(entry: TokenLogprob) -> Json:
        body = described(entry)
        return {**body, "token": telling.spelt(entry, body["token"])}

    return [{**told(entry), "top_logprobs": [told(top) for top in entry.top]} for entry in entries]


def described(entry: TokenLogprob) -> Json:
    return {
        "token": entry.piece.decode(errors="replace"),
        "logprob": finite(entry.logprob),
        "bytes": list(entry.piece),
    }


def finite(logprob: float | None) -> float | None:
    """JSON has no infinity: a token that cannot be is null, like one without a probability."""
    return logprob if logprob is not None and isfinite(logprob) else None


class TextReply:
    """`text_completion`, whole and in chunks. Choice i of prompt p has index p x n + i."""

    def __init__(
        self,
        head: Json,
        generations: Sequence[Generation],
        *,
        n: int,
        shape: Chunks,
        telling: Telling,
        echoes: Sequence[str] | None,
        is_only_echo: bool,
        special_ids: frozenset[int],
    ):
        """`echoes`: the prompts as texts, to stand before each answer; None: they do not."""
        self._head = {**head, "object": "text_completion"}
        self._generations = generations
        self._n = n
        self._shape, self._telling = shape, telling
        self._has_echo = echoes is not None
        self._echoes = [""] * len(generations) if echoes is None else echoes
        self._is_only_echo = is_only_echo
        self._special_ids = special_ids
        self._totals = Totals(generations)
        self._streams: dict[tuple[int, int], LegacyLogprobs] = {}
        self._held: dict[tuple[int, int], _Choice] = {}

    def whole(self, deltas: Iterable[tuple[int, Delta]]) -> Json:
        made = [[_Choice() for _ in range(generation.n)] for generation in self._generations]
        prompts: dict[int, Sequence[TokenLogprob]] = {}
        for number, delta in deltas:
            delta = self._count(number, delta)
            made[number][delta.index].add(delta)
            if delta.prompt_logprobs:
                prompts[number] = delta.prompt_logprobs
        choices: list[Json] = []
        for number, candidates in enumerate(made):
            best = sorted(candidates, key=_Choice.mean_logprob, reverse=True)[: self._n]
            for choice in best if len(candidates) > self._n else candidates:
                prompt = prompts.get(number, ())
                logprobs = self._legacy(number).arrays(self._echoed(prompt), choice.logprobs)
                text = self._echoes[number] + "".join(choice.text)
                told = self._choice(len(choices), text, logprobs if self._has_logprobs else None, choice.finish)
                of_prompt = self._telling.of_prompt(prompt)
                told |= {} if of_prompt is None else {"prompt_logprobs": of_prompt}
                choices.append(told | self._ids(choice) | self._prompt_ids(number))
        return {**self._head, "choices": choices, "usage": self._totals.usage(), "timings": self._totals.timings()}

    def frames(self, number: int, delta: Delta) -> bytes:
        delta = self._count(number, delta)
        key, index = (number, delta.index), number * self._n + delta.index
        if delta.progress is not None:
            told = self._choice(index, "", None, None)
            return self._chunk(told, **self._shape.progress(delta.progress)) if self._shape.has_progress else b""
        text, prompt_ids = delta.text, {}
        if key not in self._streams:
            self._streams[key] = self._legacy(number)
            self._held[key] = _Choice()
            text, prompt_ids = self._echoes[number] + text, self._prompt_ids(number)
        held = self._held[key]
        held.add(delta)
        frames = []
        if text or delta.prompt_logprobs or prompt_ids:
            timings = self._totals.so_far() if self._shape.has_timings else {}
            told = self._choice(index, text, self._arrays(key, delta.prompt_logprobs, held), None)
            frames.append(self._chunk(told | self._ids(held) | prompt_ids, **timings))
            held = self._held[key] = _Choice()
        if delta.finish is not None:
            timings = {"timings": self._totals.timings()} if self._totals.is_complete else {}
            told = self._choice(index, "", self._arrays(key, (), held), delta.finish)
            frames.append(self._chunk(told | self._ids(held), **timings))
        return b"".join(frames)

    def closing(self) -> bytes:
        return _closing(self._head, self._totals, self._shape)

    @property
    def _has_logprobs(self) -> bool:
        return self._telling.logprobs is not None

    def _legacy(self, number: int) -> "LegacyLogprobs":
        return LegacyLogprobs(self._special_ids, self._echoes[number], self._telling)

    def _echoed(self, prompt: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
        """Those of the prompt that stand among the answer's: where it is repeated."""
        return [replace(each, top=each.top[: self._telling.logprobs]) for each in prompt if self._has_echo]

    def _ids(self, choice: _Choice) -> Json:
        return {"token_ids": choice.tokens} if self._telling.has_ids else {}

    def _prompt_ids(self, number: int) -> Json:
        return {"prompt_token_ids": list(self._generations[number].prompt)} if self._telling.has_ids else {}

    def _count(self, number: int, delta: Delta) -> Delta:
        """The delta as it is shown: of an echo alone, nothing that was generated."""
        self._totals.add(number, delta)
        if not self._is_only_echo:
            return self._telling.cut(delta)
        self._totals.without_completion()
        return replace(delta, text="", tokens=(), unshown=(), logprobs=(), finish=delta.finish and "length")

    def _arrays(self, key: tuple[int, int], prompt: Sequence[TokenLogprob], held: _Choice) -> Json | None:
        if not self._has_logprobs or not (prompt or held.logprobs):
            return None
        return self._streams[key].arrays(prompt, held.logprobs)

    @staticmethod
    def _choice(index: int, text: str, logprobs: Json | None, finish: Finish | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _chunk(self, choice: Json, **further: Any) -> bytes:
        return _frame({**self._head, "choices": [choice], **self._shape.usage(self._totals), **further})


class LegacyLogprobs:
    """The four arrays of one choice; offsets count characters of its text, an echoed prompt included."""

    def __init__(self, special_ids: frozenset[int], echo: str, telling: Telling):
        self._special_ids = special_ids
        self._echo = echo
        self._telling = telling
        self._offset = 0
        self._decode: Callable[[bytes], str] = codecs.getincrementaldecoder("utf-8")("replace").decode

    def arrays(self, prompt: Sequence[TokenLogprob], entries: Sequence[TokenLogprob]) -> Json:
        offsets = [self._advance(entry, self._echo) for entry in prompt]
        if prompt:
            self._offset = len(self._echo)
        offsets += [self._advance(entry, "") for entry in entries]
        every = [*prompt, *entries]
        return {
            "tokens": [self._spelt(entry) for entry in every],
            "token_logprobs": [finite(entry.logprob) for entry in every],
            "top_logprobs": [None if entry.logprob is None else self._alternatives(entry) for entry in every],
            "text_offset": offsets,
        }

    def _advance(self, entry: TokenLogprob, text: str) -> int:
        """Where the token begins. A special token has length only where the echoed text spells it."""
        begin = self._offset
        characters = self._decode(entry.piece)
        if entry.token not in self._special_ids or text.startswith(characters, begin):
            self._offset += len(characters)
        return begin

    def _alternatives(self, entry: TokenLogprob) -> Json:
        """Logprobs by token, the chosen one included, as at OpenAI."""
        return {self._spelt(each): finite(each.logprob) for each in (*entry.top, entry)}

    def _spelt(self, entry: TokenLogprob) -> str:
        return self._telling.spelt(entry, _legacy_token(entry))


def _legacy_token(entry: TokenLogprob) -> str:
    """The token's text; a part of a character is spelt as OpenAI does, so that two of them never look alike."""
    try:
        return entry.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.piece)


def _frame(body: Json) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _closing(head: Json, totals: Totals, shape: Chunks) -> bytes:
    usage = {**head, "choices": [], "usage": totals.usage(), "timings": totals.timings()}
    return (_frame(usage) if shape.has_usage else b"") + _DONE
