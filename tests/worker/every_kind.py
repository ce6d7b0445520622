"""Requests of every kind, and the parts of their answers that two engines must share."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.worker.loaded import GREEDY, CollectedChoice, generation
from worker.interface import GenerationRequest, Grammar, SamplingParams

NEW = 30
WARM = SamplingParams(temperature=1.0, seed=11)


def prompts(longest: int = 60) -> list[tuple[int, ...]]:
    source = random.Random(3)
    return [tuple(source.randrange(2, 500) for _ in range(length)) for length in (1, 7, 17, longest)]


def requests(longest: int = 60, *, prompt_logprobs: bool = True) -> list[GenerationRequest]:
    first, second, third, fourth = prompts(longest)
    array = Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}, "maxItems": 4}', "response_format")
    penalised = replace(WARM, repetition_penalty=1.3, presence_penalty=0.5, repeat_last_n=8)
    return [
        *(generation(each, max_tokens=NEW) for each in (first, second, third, fourth)),
        generation(second, max_tokens=9, sampling=replace(WARM, temperature=1.5)),
        generation(third, max_tokens=NEW, sampling=replace(WARM, seed=5, top_p=0.9, top_k=40, min_tokens=12)),
        generation(fourth, max_tokens=NEW, sampling=replace(WARM, seed=6), stop=("e", "t")),
        generation(third, max_tokens=1),
        generation(second, max_tokens=0),
        generation(third, max_tokens=NEW, sampling=penalised),
        generation(third, max_tokens=NEW, sampling=replace(GREEDY, frequency_penalty=0.7)),
        generation(third, n=3, max_tokens=11, sampling=WARM),
        generation(fourth, max_tokens=NEW, sampling=replace(GREEDY, logprobs=3), prompt_logprobs=prompt_logprobs),
        generation(first, max_tokens=40, sampling=replace(WARM, seed=8), grammar=array),
        generation(second, max_tokens=40, grammar=array),
        generation(first, max_tokens=NEW, sampling=replace(GREEDY, ignore_eos=True), timings=True),
        generation(second),
    ]


def comparable(answers: Sequence[Sequence[CollectedChoice]]) -> list[Any]:
    """Text, tokens and end of each choice; logprobs to three digits, since sums differ in order."""
    return [
        [
            (
                choice.text,
                choice.tokens,
                choice.finish,
                choice.stop,
                [(one.token, round(one.logprob or 0.0, 3)) for one in (*choice.logprobs, *choice.prompt_logprobs)],
            )
            for choice in choices
        ]
        for choices in answers
    ]
