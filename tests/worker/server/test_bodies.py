"""Bounds of what a request costs before it is admitted: prompts that are too long, and bodies in progress."""

import asyncio
import functools
import re
import sys
import threading
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import FrameType
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from transformers import PreTrainedTokenizerFast

from tests import tiny
from tests.worker.fake_engine import FakeEngine
from tests.worker.serving import chat, options, serving, tokenizer
from tests.worker.speaking import model
from worker.api import ollama, openai
from worker.api.responses import responses
from worker.api.served_model import ServedModel
from worker.api.tokens import detokenize
from worker.engines.transformers.load import lora
from worker.errors import ContextExceeded, InvalidValue, RequestError
from worker.prompt.chat_template import Conversation
from worker.prompt.text_limits import TextLimit
from worker.server.bodies import LARGE, LargeBodies

LONG = "hello world " * 84_000  # 1 MB; a context of 256 tokens has at most 2.6 kB, and 256 KiB without tokens
PARTS = [{"type": "text", "text": LONG[:1000]}] * 980
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG},
    "/v1/completions, an array": {"prompt": ["hi", LONG]},
    "/v1/completions, a mixed list": {"prompt": [[1, LONG]]},
    "/v1/completions, a suffix": {"prompt": LONG, "suffix": "b"},
    "/completion": {"prompt": LONG},
    "/completion, an object": {"prompt": {"prompt_string": LONG}},
    "/infill": {"input_prefix": LONG, "input_suffix": "b"},
    "/infill, the suffix": {"input_prefix": "a", "input_suffix": LONG},
    "/infill, the prompt": {"input_prefix": "a", "input_suffix": "b", "prompt": LONG},
    "/infill, a file": {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": LONG}]},
    "/v1/chat/completions": chat(LONG),
    "/v1/chat/completions, parts": {"messages": [{"role": "user", "content": PARTS}]},
    "/v1/chat/completions, messages": {"messages": [{"role": "user", "content": LONG[:1000]}] * 980},
    "/v1/chat/completions/input_tokens": chat(LONG),
    "/v1/responses": {"input": LONG},
    "/v1/messages": chat(LONG, max_tokens=1),
    "/v1/messages/count_tokens": chat(LONG),
    "/api/chat": chat(LONG),
    "/api/generate": {"prompt": LONG},
    "/api/embed": {"input": LONG, "truncate": False},
    "/generate": {"prompt": LONG},
    "/worker_generate": {"prompt": LONG},
    "/invocations": {"inputs": LONG},
    "/count_token": {"prompt": LONG},
    "/v1/embeddings": {"input": LONG},
    "/v1/embeddings, an array": {"input": ["hi", LONG]},
    "/embedding": {"content": LONG},
    "/v1/rerank": {"query": "hi", "documents": ["hi", LONG]},
    "/v1/rerank, the query": {"query": LONG, "documents": ["hi"]},
    "/v1/score": {"text_1": "hi", "text_2": LONG},
    "/v2/embed": {"texts": [LONG], "input_type": "classification", "truncate": "NONE"},
    "/tokenize": {"content": LONG},
    "/tokenize, pieces": {"content": ["hi", LONG]},
    "/tokenize, a prompt": {"prompt": LONG},
    "/tokenize, a chat": chat(LONG),
}


@functools.cache
def coder() -> PreTrainedTokenizerFast:
    """A tokenizer with fill-in-the-middle tokens, none of which is longer than its longest token."""
    made = tiny.make_tokenizer("llama")
    made.add_special_tokens({"additional_special_tokens": ["<PRE>", "<SUF>", "<MID>"]})
    return made


@pytest.mark.parametrize("call", CALLS)
async def test_a_prompt_that_cannot_fit_is_rejected_by_its_length(call: str) -> None:
    path = call.partition(",")[0]
    engine = FakeEngine(
        coder() if path == "/infill" else tokenizer(), capabilities=("completion", "embedding", "rerank")
    )
    async with serving(engine) as world:
        status, _, answer = await world.post(path, CALLS[call])
    assert status == 400, answer
    # The number follows from the length alone, 10 bytes per token. Counting would have stopped at the limit, of 65,536
    # tokens at most.
    found = re.search(r"at least (\d+) tokens", str(answer))
    assert found is not None, answer
    assert int(found[1]) > 70_000
    assert "maximum context length" in str(answer)


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/completion", "/v1/chat/completions", "/v1/chat/completions/input_tokens", "/v1/responses",
     "/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/generate", "/worker_generate",
     "/invocations"],
)  # fmt: skip
async def test_the_length_of_a_prompt_is_checked_before_unknown_fields(path: str) -> None:
    async with serving(strict_fields=True) as world:
        status, _, answer = await world.post(path, {**CALLS[path], "wibble": 1})
        assert status == 400
        assert "maximum context length" in str(answer)
        short = {name: "hi" if value is LONG else value for name, value in CALLS[path].items()}
        status, _, answer = await world.post(
            path, {**short, **(chat("hi") if "messages" in short else {}), "wibble": 1}
        )
        assert (status, "this field is unknown" in str(answer)) == (400, True), answer


@pytest.mark.parametrize("side", ["left", "right"])
async def test_a_prompt_that_is_truncated_is_not_rejected(side: str) -> None:
    async with serving() as world:
        body = {"prompt": f"first {LONG} last", "truncate_prompt_tokens": 8, "truncation_side": side}
        status, _, answer = await world.post("/v1/completions", {**body, "max_tokens": 1})
        assert status == 200, answer
        assert answer["usage"]["prompt_tokens"] == 8
        [request] = world.engine.requests
        assert ("first" in tokenizer().decode(request.prompt)) == (side == "right")
        assert ("last" in tokenizer().decode(request.prompt)) == (side == "left")


async def test_an_embedding_that_is_truncated_has_the_tokens_of_the_whole_text() -> None:
    async with serving() as world:
        status, _, _ = await world.post("/v1/embeddings", {"input": LONG, "truncate": True})
        assert status == 200
        [text] = world.engine.texts
    whole = tokenizer()(LONG[:10_000])["input_ids"]
    assert list(text.tokens) == whole[: len(text.tokens)]
    assert len(text.tokens) == 256


async def test_all_texts_of_a_request_have_a_bound_together() -> None:
    made = model()
    limit = TextLimit(4096, "input")
    with pytest.raises(InvalidValue, match="input has more than 1048576 tokens in all; send its texts in several"):
        await made.encode(["a b c d " * 500] * 1000, limit)


async def test_one_text_beyond_that_bound_is_too_long() -> None:
    text = "a " * 1_100_000
    with pytest.raises(ContextExceeded, match="prompt is too long"):
        await model().encode([text], TextLimit(400_000, "prompt"))


async def passes_of_the_loop(work: Coroutine[Any, Any, Any]) -> int:
    """Run `work`; count how often the event loop comes round meanwhile."""
    task, passes = asyncio.ensure_future(work), 0
    while not task.done():
        await asyncio.sleep(0)
        passes += 1
    await task
    return passes


@pytest.mark.parametrize("kind", ["text", "pair", "chat"])
async def test_the_event_loop_runs_while_a_long_text_is_tokenized_or_rendered(kind: str) -> None:
    made, limit = model(), TextLimit(1 << 20, "prompt")
    text = "hello world " * 20_000
    conversation = Conversation(messages=[{"role": "user", "content": "hello"}] * 40_000, variables={})
    work: dict[str, Coroutine[Any, Any, Any]] = {
        "text": made.encode([text], limit),
        "pair": made.encode_pairs("hi", [text], limit),
        "chat": made.render(conversation, limit),
    }
    for other in work.keys() - {kind}:
        work[other].close()
    assert await passes_of_the_loop(work[kind]) > 10, "the loop stood still"


@pytest.mark.parametrize("call", ["/detokenize", "/v1/completions"])
async def test_many_tokens_are_decoded_beside_the_event_loop(call: str) -> None:
    threads = set[str]()

    class Noted(ServedModel):
        def decode(self, tokens: Sequence[int]) -> str:
            threads.add(threading.current_thread().name)
            return super().decode(tokens)

    made = Noted(FakeEngine(tokenizer(), ctx_size=1 << 17), tokenizer(), options())
    ids = [5] * 100_000
    await (detokenize({"tokens": ids}, made) if call == "/detokenize" else openai.completions({"prompt": ids}, made))
    assert threads
    assert threading.current_thread().name not in threads


async def calls_in_the_event_loop(work: Coroutine[Any, Any, Any]) -> int:
    """Run `work`; count the calls of functions in this thread meanwhile."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        await work
    finally:
        sys.setprofile(None)
    return calls


async def test_dropping_turns_takes_no_more_of_the_event_loop_than_reading_them() -> None:
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")] * 1500
    body = {"input": turns, "truncation": "auto"}
    calls = []
    for ctx_size in (1 << 17, 1 << 15):
        made = ServedModel(FakeEngine(tokenizer(), ctx_size=ctx_size), tokenizer(), options())
        calls.append(await calls_in_the_event_loop(responses(body, made)))
    whole, dropping = calls
    assert dropping < 2 * whole


BIASES = {str(token): 1 for token in range(100_000)}
LONG_VALUES: dict[str, Callable[[], Awaitable[Any]]] = {
    "logit_bias": lambda: openai.completions({"prompt": "a", "logit_bias": BIASES}, model()),
    "samplers": lambda: openai.completions({"prompt": "a", "samplers": "p" * 10**6}, model()),
    "keep_alive": lambda: ollama.generate({"prompt": "a", "keep_alive": "1s" * 10**6}, model()),
    "adapters": lambda: loaded_adapter("x" * 10**6),
}


async def loaded_adapter(name: str) -> None:
    raise InvalidValue(lora._unknown(name, ["french"]))


@pytest.mark.parametrize("name", LONG_VALUES)
async def test_a_long_value_that_is_rejected_takes_no_memory(name: str) -> None:
    model()
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            await LONG_VALUES[name]()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


FUNCTION = {"type": "function", "name": "f", "function": {"name": "f"}}  # in both APIs


def eight_million_characters() -> str:
    return "x" * (8 << 20)


UNUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "metadata": lambda: {"metadata": {"text": eight_million_characters()}},
    "label": lambda: {"safety_identifier": eight_million_characters()},
    "values": lambda: {"user": eight_million_characters(), "wibble": [eight_million_characters()]},
    "tools": lambda: {"tools": [{**FUNCTION, "description": eight_million_characters()}], "tool_choice": "none"},
    "kind of a tool": lambda: {"tools": [{"type": eight_million_characters()}]},
    "format": lambda: {"text": {"format": {"type": "text", "wibble": eight_million_characters()}}},
    "name": lambda: {eight_million_characters(): 1},
    "names": lambda: {str(number): 1 for number in range(100_000)},
}


@pytest.mark.parametrize("unused", UNUSED)
@pytest.mark.parametrize("path", [openai.chat, responses], ids=["chat", "responses"])
async def test_a_parsed_request_keeps_nothing_that_has_no_effect(path: Any, unused: str) -> None:
    made = model()
    await path({**chat("hi"), "input": "hi"}, made)
    refused = ""
    tracemalloc.start()
    try:
        try:
            call = await path({**chat("hi"), "input": "hi", **UNUSED[unused]()}, made)
            assert call.generations
        except InvalidValue as error:
            refused = error.param or ""
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1 << 20
    if path is responses:  # a response would repeat it
        expected = {"metadata": "metadata", "tools": "tools", "kind of a tool": "tools", "format": "text"}
    else:
        expected = {"kind of a tool": "tools[0]"}
    assert refused == expected.get(unused, "")


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}])
async def test_the_logprobs_of_prompts_have_a_limit(fields: dict[str, Any]) -> None:
    """25,000 prompt tokens with 20 alternatives each took 300 MB."""
    async with serving(FakeEngine(tokenizer(), ctx_size=8192)) as world:
        status, _, answer = await world.post("/v1/completions", {"prompt": [[5] * 5000] * 5, **fields})
        assert (status, "are more than 524288" in str(answer)) == (400, True), answer
        assert answer["error"]["param"] in fields
        fewer = {name: min(value, 1) for name, value in fields.items()}
        assert (await world.post("/v1/completions", {"prompt": [[5] * 5000] * 5, "max_tokens": 1, **fewer}))[0] == 200


async def test_the_logprobs_of_prompts_are_counted_in_each_choice_that_repeats_them() -> None:
    async with serving(FakeEngine(tokenizer(), ctx_size=8192)) as world:
        body = {"prompt": [5] * 5000, "max_tokens": 1, "echo": True, "logprobs": 0, "prompt_logprobs": 0}
        status, _, answer = await world.post("/v1/completions", {**body, "n": 128})
        assert (status, "0 alternatives each in 128 choices" in str(answer)) == (400, True), answer
        assert (await world.post("/v1/completions", {**body, "n": 2}))[0] == 200
        chat = {"messages": [{"role": "user", "content": "a " * 5000}], "max_tokens": 1, "prompt_logprobs": 0, "n": 128}
        assert (await world.post("/v1/chat/completions", chat))[0] == 200, "its answer has them once"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[5, *["a"] * 2049]], "truncate_prompt_tokens": 5}),
        ("/v1/completions", {"prompt": [[5, *["a"] * 20]] * 200}),
        ("/tokenize", {"content": ["a"] * 2049}),
    ],
)
async def test_the_texts_between_token_ids_have_a_limit(path: str, body: dict[str, Any]) -> None:
    """Each takes as long as a text of a hundred bytes."""
    async with serving(FakeEngine(tokenizer(), ctx_size=8192)) as world:
        status, _, answer = await world.post(path, body)
    assert (status, "at most 2048 texts between token ids" in str(answer)) == (400, True), answer


# Bodies


def large(size: int | None) -> Any:
    return make_mocked_request("POST", "/", headers={} if size is None else {"Content-Length": str(size)})


async def test_large_bodies_wait_for_each_other_in_their_order_and_small_ones_do_not() -> None:
    bodies = LargeBodies(10 * LARGE)
    order: list[str] = []
    release = {name: asyncio.Event() for name in ("first", "second", "third", "small")}
    release["small"].set()
    all_read = asyncio.Event()

    async def read(name: str, size: int | None) -> None:
        async with bodies.admit(large(size)):
            order.append(name)
            if len(order) == 4:
                all_read.set()
            await release[name].wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read("first", 8 * LARGE))
        await asyncio.sleep(0)
        tasks.create_task(read("second", 5 * LARGE))
        tasks.create_task(read("third", 2 * LARGE))  # there is room for it, but the second came before
        await asyncio.sleep(0)
        tasks.create_task(read("small", LARGE - 1))
        await asyncio.sleep(0)
        assert order == ["first", "small"]
        release["first"].set()
        await all_read.wait()
        assert order == ["first", "small", "second", "third"]
        release["second"].set()
        release["third"].set()


async def test_a_large_body_whose_client_disconnects_while_it_waits_takes_no_place() -> None:
    bodies = LargeBodies(2 * LARGE)
    async with bodies.admit(large(2 * LARGE)):
        waiting = bodies.admit(large(2 * LARGE))
        task = asyncio.ensure_future(waiting.__aenter__())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        last = asyncio.ensure_future(bodies.admit(large(None)).__aenter__())
        await asyncio.sleep(0)
        assert not last.done()
    await last


async def test_a_body_of_unknown_length_is_read_alone() -> None:
    bodies = LargeBodies(4 * LARGE)
    async with bodies.admit(large(None)):
        waiting = asyncio.ensure_future(bodies.admit(large(LARGE)).__aenter__())
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


async def test_a_body_above_the_budget_is_read_alone() -> None:
    bodies = LargeBodies(LARGE)
    async with bodies.admit(large(100 * LARGE)):
        pass
    async with bodies.admit(large(100 * LARGE)):
        pass
