"""OpenAI's answers, `chat.completion` and `text_completion`: serialization of deltas to one body or to stream frames.

Both forms give the same text.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from worker.api.call import data_frame
from worker.api.openai_options import CommonOptions
from worker.api.usage import UsageTotals
from worker.interface import Delta, FinishReason, GenerationRequest, TokenLogprob
from worker.prompt.body_reader import Json
from worker.prompt.logprob_options import LogprobOptions, finite_or_none
from worker.prompt.response_parser import AnswerParser, AnswerPart, ParseOptions

_DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class _ChoiceState:
    """Text, logprobs and tokens of one choice so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # all computed tokens, in the end including those that are not shown
    tokens: list[int] = field(default_factory=list)
    last: Delta = field(default_factory=Delta)

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.tokens.extend((*delta.tokens, *delta.hidden_tokens))
        self.last = delta

    def mean_logprob(self) -> float:
        known = [entry.logprob for entry in self.logprobs if entry.logprob is not None]
        return sum(known) / len(known) if known else float("-inf")


class _ChatMessage:
    """Message of one chat choice, built from the parts of the answer."""

    def __init__(self, parse_options: ParseOptions, *, include_reasoning: bool):
        self._parser = AnswerParser(parse_options)
        self._include_reasoning = include_reasoning
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Json] = []

    def add(self, delta: Delta) -> tuple[list[Json], int]:
        """Return OpenAI deltas for the content of `delta`, and the number of its reasoning tokens."""
        parts, reasoning_tokens = self._parser.take(delta)
        shown = [part for part in parts if self._include_reasoning or not part.reasoning]
        return [self._delta(part) for part in shown], reasoning_tokens

    def message(self) -> Json:
        """Return the complete message. `refusal` is null: OpenAI's schema requires it."""
        content = "".join(self._content)
        shown = None if self._calls and not content else content
        message: Json = {"role": "assistant", "content": shown, "refusal": None}
        if self._reasoning:
            message |= _reasoning("".join(self._reasoning))
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def finish_reason(self, finish: FinishReason | None) -> str | None:
        return "tool_calls" if self._calls and finish == "stop" else finish

    def _delta(self, part: AnswerPart) -> Json:
        if part.call is not None:
            function = {"name": part.call.name, "arguments": part.call.arguments}
            call = {"id": part.call.id, "type": "function", "function": function}
            self._calls.append(call)
            return {"tool_calls": [{"index": len(self._calls) - 1, **call}]}
        if part.reasoning:
            self._reasoning.append(part.reasoning)
            return _reasoning(part.reasoning)
        self._content.append(part.content)
        return {"content": part.content}


def _reasoning(text: str) -> Json:
    """Return the reasoning under its name in llama-server and SGLang and under its name in vLLM."""
    return {"reasoning_content": text, "reasoning": text}


class _OpenAiWriter:
    """Fields and chunks that both kinds of answers have."""

    def __init__(self, head: Json, generations: Sequence[GenerationRequest], common: CommonOptions):
        """`head`: the first fields of every chunk."""
        self._head = head
        self._generations = generations
        self._chunk_options, self._logprob_settings = common.chunk_options, common.logprob_settings
        self._totals = UsageTotals(generations)

    def closing_frames(self) -> bytes:
        usage = {**self._head, "choices": [], "usage": self._totals.usage(), "timings": self._totals.timings()}
        return (data_frame(usage) if self._chunk_options.has_usage else b"") + _DONE

    @property
    def _has_logprobs(self) -> bool:
        return self._logprob_settings.logprobs is not None

    def _finish(self, number: int, last: Delta, reason: str | None) -> Json:
        """Return the reason of a choice's end, and vLLM's `stop_reason`: the request's stop string or stop token that
        ended it; null after the model's own end or at the token limit. `last`: the last delta of the choice."""
        stop: str | int | None = last.stop
        if last.finish == "stop" and stop is None:
            ended = (*last.tokens, *last.hidden_tokens)[-1:]
            stop = next((token for token in ended if token in self._generations[number].ends), None)
        return {"finish_reason": reason, "stop_reason": stop}

    def _ids(self, choice: _ChoiceState) -> Json:
        return {"token_ids": choice.tokens} if self._logprob_settings.return_token_ids else {}

    def _prompt_ids(self, number: int = 0) -> Json:
        if not self._logprob_settings.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._generations[number].prompt)}

    def _prompt_logprobs(self, entries: Sequence[TokenLogprob]) -> Json:
        listed = self._logprob_settings.prompt_entries(entries)
        return {} if listed is None else {"prompt_logprobs": listed}

    def _timings(self, *, is_last: bool = False) -> Json:
        """Return the timings of a chunk. The last chunk of all choices always has them."""
        if is_last:
            return {"timings": self._totals.timings()} if self._totals.is_complete else {}
        return self._totals.so_far() if self._chunk_options.has_timings else {}

    def _chunk(self, choice: Json, **further: Any) -> bytes:
        usage = self._chunk_options.usage(self._totals)
        return data_frame({**self._head, "choices": [choice], **usage, **further})


class ChatWriter(_OpenAiWriter):
    """Writer of `chat.completion` and its chunks."""

    def __init__(
        self,
        head: Json,
        generations: Sequence[GenerationRequest],
        common: CommonOptions,
        *,
        parse_options: ParseOptions,
        include_reasoning: bool,
    ):
        """`parse_options`: how to find reasoning and tool calls in the answer."""
        super().__init__(head, generations, common)
        [generation] = generations
        self._answers = [_ChatMessage(parse_options, include_reasoning=include_reasoning) for _ in range(generation.n)]
        self._started: set[int] = set()
        self._pending: dict[int, _ChoiceState] = {}  # tokens that no chunk has reported yet, by choice

    def full_body(self, deltas: Iterable[tuple[int, Delta]]) -> Json:
        choices = [_ChoiceState() for _ in self._answers]
        prompt: Sequence[TokenLogprob] = ()
        for number, delta in deltas:
            self._totals.add(number, delta)
            choices[delta.index].add(self._logprob_settings.cut(delta))
            self._totals.add_reasoning(self._answers[delta.index].add(delta)[1])
            prompt = delta.prompt_logprobs or prompt
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": index,
                    "message": answer.message(),
                    "logprobs": self._logprobs(choice.logprobs) if self._has_logprobs else None,
                    **self._finish(0, choice.last, answer.finish_reason(choice.last.finish)),
                    **self._ids(choice),
                }
                for index, (choice, answer) in enumerate(zip(choices, self._answers, strict=True))
            ],
            **self._prompt_logprobs(prompt),
            **self._prompt_ids(),
            "usage": self._totals.usage(),
            "timings": self._totals.timings(),
        }

    def frames(self, number: int, delta: Delta) -> bytes:
        frames = []
        answer = self._answers[delta.index]
        parts, reasoning_tokens = answer.add(delta)
        is_shown = delta.progress is None or self._chunk_options.has_progress
        if is_shown and delta.index not in self._started:  # before the tokens are counted: this chunk has none of them
            self._started.add(delta.index)
            first = {"role": "assistant", "content": None}
            frames.append(self._delta(delta.index, first, **self._prompt_ids()))
        self._totals.add(number, delta)
        self._totals.add_reasoning(reasoning_tokens)
        if not is_shown:
            return b""
        if delta.progress is not None:
            frames.append(self._delta(delta.index, {}, **self._chunk_options.progress(delta.progress)))
        pending = self._pending.setdefault(delta.index, _ChoiceState())
        pending.add(self._logprob_settings.cut(delta))
        for part in parts:
            frames.append(self._delta(delta.index, part, pending, **self._timings()))
            pending = self._pending[delta.index] = _ChoiceState()
        if delta.finish is not None:
            finish = self._finish(number, delta, answer.finish_reason(delta.finish))
            frames.append(self._delta(delta.index, {}, pending, finish, **self._timings(is_last=True)))
        return b"".join(frames)

    def _delta(
        self,
        index: int,
        delta: Json,
        pending: _ChoiceState | None = None,
        finish: Json | None = None,
        **further: Any,
    ) -> bytes:
        """Return a chunk. `pending`: tokens that no chunk has reported yet; `finish`: fields of the last chunk."""
        pending = pending or _ChoiceState()
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(pending.logprobs) if pending.logprobs else None,
            **(finish or {"finish_reason": None}),
            **self._ids(pending),
        }
        return self._chunk(choice, **further)

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json:
        return {"content": logprob_entries(entries, self._logprob_settings), "refusal": None}


def logprob_entries(entries: Sequence[TokenLogprob], logprob_settings: LogprobOptions) -> list[Json]:
    """Return the tokens of an answer with their alternatives, in OpenAI's chat format."""

    def named_entry(entry: TokenLogprob) -> Json:
        body = token_entry(entry)
        return {**body, "token": logprob_settings.spelt(entry, body["token"])}

    return [{**named_entry(entry), "top_logprobs": [named_entry(top) for top in entry.top]} for entry in entries]


def token_entry(entry: TokenLogprob) -> Json:
    return {
        "token": entry.piece.decode(errors="replace"),
        "logprob": finite_or_none(entry.logprob),
        "bytes": list(entry.piece),
    }


class TextWriter(_OpenAiWriter):
    """Writer of `text_completion` and its chunks. Choice i of prompt p has index p * n + i."""

    def __init__(
        self,
        head: Json,
        generations: Sequence[GenerationRequest],
        common: CommonOptions,
        *,
        echoes: Sequence[str] | None,
        is_only_echo: bool,
        special_ids: frozenset[int],
    ):
        """`echoes`: the prompts as texts, to prepend to each answer; None: no echo."""
        super().__init__(head, generations, common)
        self._n = common.request.n
        self._has_echo = echoes is not None
        self._echoes = [""] * len(generations) if echoes is None else echoes
        self._is_only_echo = is_only_echo
        self._special_ids = special_ids
        self._streams: dict[tuple[int, int], LegacyLogprobs] = {}
        self._pending: dict[tuple[int, int], _ChoiceState] = {}

    def full_body(self, deltas: Iterable[tuple[int, Delta]]) -> Json:
        made = [[_ChoiceState() for _ in range(generation.n)] for generation in self._generations]
        prompts: dict[int, Sequence[TokenLogprob]] = {}
        for number, delta in deltas:
            delta = self._count(number, delta)
            made[number][delta.index].add(delta)
            if delta.prompt_logprobs:
                prompts[number] = delta.prompt_logprobs
        choices: list[Json] = []
        for number, candidates in enumerate(made):
            best = sorted(candidates, key=_ChoiceState.mean_logprob, reverse=True)[: self._n]
            for choice in best if len(candidates) > self._n else candidates:
                prompt = prompts.get(number, ())
                logprobs = self._legacy(number).arrays(self._echoed(prompt), choice.logprobs)
                text = self._echoes[number] + "".join(choice.text)
                choice_body = self._choice(len(choices), text, logprobs if self._has_logprobs else None)
                choice_body |= self._finish(number, choice.last, choice.last.finish) | self._prompt_logprobs(prompt)
                choices.append(choice_body | self._ids(choice) | self._prompt_ids(number))
        return {**self._head, "choices": choices, "usage": self._totals.usage(), "timings": self._totals.timings()}

    def frames(self, number: int, delta: Delta) -> bytes:
        delta = self._count(number, delta)
        key, index = (number, delta.index), number * self._n + delta.index
        if delta.progress is not None:
            if not self._chunk_options.has_progress:
                return b""
            return self._chunk(self._choice(index, "", None), **self._chunk_options.progress(delta.progress))
        text, prompt_ids = delta.text, {}
        if key not in self._streams:
            self._streams[key] = self._legacy(number)
            self._pending[key] = _ChoiceState()
            text, prompt_ids = self._echoes[number] + text, self._prompt_ids(number)
        pending = self._pending[key]
        pending.add(delta)
        frames = []
        if text or delta.prompt_logprobs or prompt_ids:
            choice_body = self._choice(index, text, self._arrays(key, delta.prompt_logprobs, pending))
            frames.append(self._chunk(choice_body | self._ids(pending) | prompt_ids, **self._timings()))
            pending = self._pending[key] = _ChoiceState()
        if delta.finish is not None:
            choice_body = self._choice(index, "", self._arrays(key, (), pending))
            choice_body |= self._finish(number, delta, delta.finish)
            frames.append(self._chunk(choice_body | self._ids(pending), **self._timings(is_last=True)))
        return b"".join(frames)

    def _legacy(self, number: int) -> "LegacyLogprobs":
        return LegacyLogprobs(self._special_ids, self._echoes[number], self._logprob_settings)

    def _echoed(self, prompt: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
        """Return the prompt's entries that belong to the answer's logprobs, which is the case for an echoed prompt."""
        return [replace(entry, top=entry.top[: self._logprob_settings.logprobs]) for entry in prompt if self._has_echo]

    def _count(self, number: int, delta: Delta) -> Delta:
        """Count the delta and return it as it is shown. With `is_only_echo` the generated text is dropped."""
        self._totals.add(number, delta)
        if not self._is_only_echo:
            return self._logprob_settings.cut(delta)
        self._totals.without_completion()
        return replace(
            delta, text="", tokens=(), hidden_tokens=(), logprobs=(), finish=delta.finish and "length", stop=None
        )

    def _arrays(self, key: tuple[int, int], prompt: Sequence[TokenLogprob], pending: _ChoiceState) -> Json | None:
        if not self._has_logprobs or not (prompt or pending.logprobs):
            return None
        return self._streams[key].arrays(prompt, pending.logprobs)

    @staticmethod
    def _choice(index: int, text: str, logprobs: Json | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}


class LegacyLogprobs:
    """The four logprob arrays of one choice in the legacy format. Offsets count characters of its text, including an
    echoed prompt."""

    def __init__(self, special_ids: frozenset[int], echo: str, logprob_settings: LogprobOptions):
        self._special_ids = special_ids
        self._echo = echo
        self._logprob_settings = logprob_settings
        self._offset = 0
        self._decode: Callable[[bytes], str] = codecs.getincrementaldecoder("utf-8")("replace").decode

    def arrays(self, prompt: Sequence[TokenLogprob], entries: Sequence[TokenLogprob]) -> Json:
        offsets = [self._advance(entry, self._echo) for entry in prompt]
        if prompt:
            self._offset = len(self._echo)
        offsets += [self._advance(entry, "") for entry in entries]
        all_entries = [*prompt, *entries]
        return {
            "tokens": [self._token_name(entry) for entry in all_entries],
            "token_logprobs": [finite_or_none(entry.logprob) for entry in all_entries],
            "top_logprobs": [None if entry.logprob is None else self._alternatives(entry) for entry in all_entries],
            "text_offset": offsets,
        }

    def _advance(self, entry: TokenLogprob, text: str) -> int:
        """Return the offset of the token's beginning. A special token has a length only if the echoed
        text contains it."""
        begin = self._offset
        characters = self._decode(entry.piece)
        if entry.token not in self._special_ids or text.startswith(characters, begin):
            self._offset += len(characters)
        return begin

    def _alternatives(self, entry: TokenLogprob) -> Json:
        """Return logprobs by token, including the chosen one, as OpenAI does."""
        return {self._token_name(candidate): finite_or_none(candidate.logprob) for candidate in (*entry.top, entry)}

    def _token_name(self, entry: TokenLogprob) -> str:
        return self._logprob_settings.spelt(entry, _legacy_token(entry))


def _legacy_token(entry: TokenLogprob) -> str:
    """Return the token's text. Partial characters are escaped as OpenAI does, so that different tokens differ."""
    try:
        return entry.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.piece)
