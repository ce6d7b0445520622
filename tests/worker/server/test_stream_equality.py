"""Streamed responses equal whole ones: 500 random requests of three dialects, each sent both ways to a real engine."""

import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests import tiny
from tests.worker.loaded import DEADLINE, load, options
from tests.worker.serving import chunks
from worker.server.server import Server

TEMPLATE = (
    "{{ bos_token }}{{ tools | tojson if tools else '' }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n"
    "{% endfor %}{{ '<think>' if enable_thinking else '' }}{# </think> <tool_call></tool_call> arguments #}"
)
WORDS = ("fox", "the ", "Größe ", "лиса", "狐", "🦊", "\n", "{", "12", "<think>", "a b c ", "river")
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                                             "additionalProperties": False}},
}  # fmt: skip
LETTER_O = str(tiny.make_tokenizer("llama").convert_tokens_to_ids("o"))
SCHEMA = {
    "type": "object",
    "properties": {"k": {"enum": ["x", "🦊"]}},
    "required": ["k"],
    "additionalProperties": False,
}


def sampling(draw: random.Random) -> dict[str, Any]:
    """Fields that all dialects share; each is present about every fifth time."""
    choices: dict[str, Any] = {
        "temperature": draw.choice([0, 0.7, 1.3]), "top_p": draw.choice([0.5, 0.9]), "top_k": draw.choice([1, 5, 40]),
        "min_p": 0.05, "repeat_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repeat_last_n": 4,
        "stop": draw.sample(["e", "th", " ", "\u00e9", "qu", "in"], 2), "n": 2, "min_tokens": 2,
        "ignore_eos": True, "logit_bias": {str(draw.randrange(2, 500)): 5}, "guided_regex": "[a-d]{2,9}",
        "json_schema": SCHEMA,
    }  # fmt: skip
    stated = {name: value for name, value in choices.items() if draw.random() < 0.2}
    if "guided_regex" in stated:
        stated.pop("json_schema", None)
    return stated | {"seed": draw.randrange(1000), "max_tokens": draw.randrange(2, 10)}


def request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    text = "".join(draw.choices(WORDS, k=draw.randrange(1, 9)))
    body = sampling(draw)
    kind = draw.choice(["/v1/chat/completions", "/v1/completions", "/completion"])
    if kind == "/v1/completions":
        body |= {"prompt": draw.choice([text, [text, "fox"], [5, 6, 7]])}
        body |= draw.choice([{}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 1}])
    elif kind == "/completion":
        body |= {"prompt": text, "return_tokens": True} | draw.choice([{}, {"n_probs": 2}])
    else:
        body |= {"messages": [{"role": "user", "content": text}]}
        body |= draw.choice([{}, {"logprobs": True, "top_logprobs": 1}, {"logprobs": True}])
        plain = {"chat_template_kwargs": {"enable_thinking": False}}
        body |= draw.choice([{}, plain, plain | {"reasoning_format": "none"}])
        is_free = not {"guided_regex", "json_schema"} & body.keys()
        if is_free and draw.random() < 0.4:
            body |= {"tools": [TOOL], "parallel_tool_calls": False}
            # The bias towards "o", which continues `<t` to `<tool_call>`, keeps most outputs from being reasoning only.
            held = {"tool_choice": "required", "max_tokens": 70, "n": 1, "stop": [], "logit_bias": {LETTER_O: 90}}
            body |= draw.choice([{}, held])
    return kind, body


def merged(kind: str, frames: list[Any]) -> Any:
    """The choices and the usage that the chunks of a stream add up to."""
    made: dict[int, dict[str, Any]] = {}
    usage = None
    if kind == "/completion":
        for frame in frames:
            choice = made.setdefault(frame["index"], {"content": "", "tokens": [], "probabilities": []})
            choice["content"] += frame["content"]
            choice["tokens"] += frame["tokens"]
            choice["probabilities"] += frame.get("completion_probabilities", [])
            if frame["stop"]:
                choice |= {name: frame[name] for name in ("stop_type", "stopping_word", "tokens_predicted")}
        return [made[index] for index in sorted(made)], None
    assert frames.pop() == "[DONE]"
    for frame in frames:
        usage = frame["usage"] or usage
        for part in frame["choices"]:
            choice = made.setdefault(part["index"], {"logprobs": {}, "finish": None, "calls": []})
            for name, value in part.get("delta", {"text": part.get("text")}).items():
                if name == "tool_calls":
                    choice["calls"] += [call["function"] for call in value]
                elif name != "role" and value:
                    choice[name] = choice.get(name, "") + value
            for name, listed in (part["logprobs"] or {}).items():
                choice["logprobs"].setdefault(name, []).extend(listed)
            assert choice["finish"] is None, "no chunk follows the end of a choice"
            choice["finish"] = part["finish_reason"]
    return [made[index] for index in sorted(made)], usage


def whole(kind: str, body: Any) -> Any:
    """The choices and the usage of a whole response."""
    if kind == "/completion":
        bodies = body if isinstance(body, list) else [body]
        names = ("content", "tokens", "stop_type", "stopping_word", "tokens_predicted")
        return [
            {**{name: answer[name] for name in names}, "probabilities": answer.get("completion_probabilities", [])}
            for answer in bodies
        ], None
    made = []
    for choice in body["choices"]:
        message = choice.get("message", {"text": choice.get("text")})
        texts = {name: value for name, value in message.items() if name not in ("role", "tool_calls") and value}
        calls = [call["function"] for call in message.get("tool_calls", [])]
        logprobs = {name: listed for name, listed in (choice["logprobs"] or {}).items() if listed}
        made.append({**texts, "calls": calls, "logprobs": logprobs, "finish": choice["finish_reason"]})
    return made, body["usage"]


@pytest.mark.slow
async def test_a_stream_adds_up_to_the_whole_response(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path, dtype="float64")  # rounding must not change a sampled token
    engine = load(folder, ctx_size=256, parallel=16, queue_size=200)
    served = options(folder, name="tiny", chat_template=TEMPLATE)
    server = Server(engine, engine.tokenizer, served, token=None, announce=lambda event: None)
    url = (await server.start()).replace("tcp:", "http://")
    draw = random.Random(7)
    seen = {"calls": 0, "reasoning_content": 0, "stop": 0, "length": 0}
    places = asyncio.Semaphore(16)
    unlimited = aiohttp.ClientTimeout(total=None)

    async def compare(client: aiohttp.ClientSession, kind: str, body: dict[str, Any]) -> None:
        async with places:
            async with client.post(url + kind, json=body) as answer:
                text = await answer.text()
                assert answer.status == 200, (body, text)
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            async with client.post(url + kind, json=streamed) as stream:
                assert stream.status == 200, await stream.text()
                frames = chunks((await stream.text()).removesuffix("\n\n").split("\n\n"))
        in_one, usage = whole(kind, json.loads(text))
        in_many, streamed_usage = merged(kind, frames)
        for choice in in_many:
            if "logprobs" in choice:
                choice["logprobs"] = {name: listed for name, listed in choice["logprobs"].items() if listed}
        assert is_same(in_many, in_one), (body, in_many, in_one)
        assert _without_cache(streamed_usage) == _without_cache(usage), body
        for choice in in_one:
            seen["calls"] += bool(choice.get("calls"))
            seen["reasoning_content"] += "reasoning_content" in choice
            seen[{"eos": "stop", "word": "stop", "limit": "length", "tool_calls": "stop"}.get(
                end := choice.get("finish") or choice["stop_type"], end)] += 1  # fmt: skip

    try:
        async with asyncio.timeout(30 * DEADLINE), aiohttp.ClientSession(timeout=unlimited) as client:
            await asyncio.gather(*(compare(client, *request(draw)) for _ in range(500)))
    finally:
        await server.close()
        await engine.close()
    assert min(seen.values()) > 5, seen


def is_same(one: Any, other: Any) -> bool:
    """Equal, but for the last digits of logprobs: sums of float32 depend on how many share a step."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=1e-3)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def _without_cache(usage: Any) -> Any:
    """The usage without the cached tokens, which depend on earlier requests."""
    return usage and {name: value for name, value in usage.items() if name != "prompt_tokens_details"}
