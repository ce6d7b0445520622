"""Ollama's calls: the official client, and bodies that it never sends."""

from typing import Any

import ollama
import pytest

from tests import tiny
from tests.worker.clients import ollama_client
from tests.worker.fake_engine import SCRIPT, FakeEngine
from tests.worker.serving import bare_tokenizer, serving, tokenizer
from tests.worker.speaking import ANSWERS, CALL, SAID, SCHEMA, THINKING, TOOLS, Speaking
from worker.protocol.dialects import Dialect
from worker.protocol.routes import WAITED_HEADER
from worker.protocol.streams import stream

HI: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "?", "parameters": SCHEMA}}
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


async def test_a_chat() -> None:
    async with serving() as world, ollama_client(world) as client:
        options = {"temperature": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7, "num_predict": 5, "stop": ["dog"]}
        options |= {"repeat_penalty": 1.1, "num_gpu": 9}
        answer = await client.chat("m", HI, options=options)
        [asked] = world.engine.requests
        assert (answer.model, answer.done, answer.done_reason) == ("m", True, "length")
        assert answer.message.role == "assistant"
        assert f"0 {SCRIPT}".startswith(answer.message.content or "?")
        assert (answer.prompt_eval_count, answer.eval_count) == (len(asked.prompt), 5)
        assert (answer.prompt_eval_duration, answer.eval_duration, answer.load_duration) == (
            500_000_000,
            250_000_000,
            0,
        )
        assert answer.total_duration is not None
        assert asked.stop == ("dog",)
        picked = asked.sampling
        assert (picked.temperature, picked.top_k, picked.min_p, picked.seed) == (0.5, 3, 0.1, 7)
        assert picked.repetition_penalty == 1.1
        _, headers, _ = await world.post("/api/chat", {"messages": HI, "stream": False, "options": {"num_gpu": 9}})
        assert headers["X-Ignored-Fields"] == "options.num_gpu"


@pytest.mark.parametrize(("told", "waited"), [("1.500000", 1.5), ("0.2", 0.2), ("", 0.0), ("-3", 0.0), ("nan", 0.0)])
async def test_the_load_duration_is_part_of_the_total(told: str, waited: float) -> None:
    loaded = {WAITED_HEADER: told}
    asked = {"messages": HI, "prompt": "hi", "stream": False}
    async with serving() as world:
        for path in ("/api/chat", "/api/generate"):
            whole = (await world.post(path, asked, **loaded))[2]
            assert whole["load_duration"] == int(waited * 1e9)
            assert waited * 1e9 <= whole["total_duration"] < (waited + 60) * 1e9
        _, _, plain = await world.post("/api/chat", asked)
        assert plain["load_duration"] == 0


@pytest.mark.parametrize("said", ANSWERS)
async def test_the_lines_of_a_stream_add_up_to_the_full_answer(said: str) -> None:
    async with serving(Speaking(said), chat_template=THINKING) as world, ollama_client(world) as client:
        whole = await client.chat("m", HI, tools=[WEATHER])
        lines = [line async for line in await client.chat("m", HI, tools=[WEATHER], stream=True)]
        assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
        assert "".join(line.message.content or "" for line in lines) == whole.message.content
        assert "".join(line.message.thinking or "" for line in lines) == (whole.message.thinking or "")
        calls = [call for line in lines for call in line.message.tool_calls or []]
        assert calls == list(whole.message.tool_calls or [])
        assert (lines[-1].done_reason, lines[-1].eval_count) == (whole.done_reason, whole.eval_count)


async def test_reasoning_and_calls_are_separated_and_arguments_are_objects() -> None:
    async with serving(Speaking(SAID), chat_template=THINKING) as world, ollama_client(world) as client:
        message = (await client.chat("m", HI, tools=[WEATHER])).message
        assert (message.thinking, message.content) == ("They ask for Oslo.", "Let me look.")
        [call] = message.tool_calls or []
        assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})


async def test_calls_are_numbered_and_the_numbers_may_come_back() -> None:
    async with serving(Speaking(CALL * 2), chat_template=TOOLS, strict_fields=True) as world:
        asked: dict[str, Any] = {"messages": HI, "tools": [WEATHER], "stream": False}
        _, _, answer = await world.post("/api/chat", asked)
        calls = answer["message"]["tool_calls"]
        assert [call["function"]["index"] for call in calls] == [0, 1]
        messages = [*HI, {"role": "assistant", "content": "", "tool_calls": calls}, *HI]
        status, _, answer = await world.post("/api/chat", {**asked, "messages": messages})
        assert status == 200, answer


async def test_a_conversation_with_calls_and_results_reaches_the_template() -> None:
    engine = Speaking("fine")
    messages: Any = [
        *HI,
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]},
        {"role": "tool", "content": "rain", "tool_name": "weather"},
    ]
    async with serving(engine, chat_template=TOOLS) as world, ollama_client(world) as client:
        await client.chat("m", messages)
        call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
        assert engine.prompt().endswith(f"<user>hi<assistant>{call}<tool>rain<assistant>")


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
async def test_a_message_without_content_is_empty(role: str) -> None:
    engine = Speaking("fine")
    async with serving(engine, chat_template=TOOLS) as world, ollama_client(world) as client:
        await client.chat("m", [{"role": role, "content": ""}, *HI])
        without = engine.prompt()
        await client.chat("m", [{"role": role}, *HI])
        assert engine.prompt() == without
        status, _, _ = await world.post(
            "/api/chat", {"messages": [{"role": role, "content": None}, *HI], "stream": False}
        )
        assert (status, engine.prompt()) == (200, without)


async def test_generate_renders_the_template_unless_raw() -> None:
    engine = Speaking("fine")
    async with serving(engine, chat_template=TOOLS) as world, ollama_client(world) as client:
        answer = await client.generate("m", "hi", system="S")
        assert (answer.response, answer.done_reason) == ("fine", "stop")
        assert engine.prompt().endswith("<system>S<user>hi<assistant>")
        lines = [line async for line in await client.generate("m", "hi", raw=True, stream=True)]
        assert "".join(line.response or "" for line in lines) == "fine"
        assert engine.prompt().endswith("hi")
        assert "<user>" not in engine.prompt()


# a chat template with text before the first message and after each one
TURNS = (
    "{% for m in messages %}{% if loop.first %}<s>{% endif %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


async def test_a_returned_context_continues_the_conversation() -> None:
    engine = Speaking("fine")
    async with serving(engine, chat_template=TURNS) as world, ollama_client(world) as client:
        first = await client.generate("m", "hi", system="S")
        encoded = engine.tokenizer.encode("<s>[system]S</s>\n[user]hi</s>\n[assistant]", add_special_tokens=False)
        assert list(first.context or []) == [*encoded, *engine.tokenizer.encode("fine", add_special_tokens=False)]
        lines = [line async for line in await client.generate("m", "more", context=first.context, stream=True)]
        added = engine.tokenizer.encode("</s>\n[user]more</s>\n[assistant]", add_special_tokens=False)
        assert list(engine.requests[-1].prompt) == [*(first.context or []), *added]
        assert [line.context for line in lines[:-1]] == [None] * (len(lines) - 1)
        assert list(lines[-1].context or [])[: len(engine.requests[-1].prompt)] == list(engine.requests[-1].prompt)
        await client.generate("m", "more", system="T", context=first.context)
        assert engine.prompt().endswith("[assistant]fine</s>\n[system]T</s>\n[user]more</s>\n[assistant]")


async def test_the_context_of_a_reasoning_model_includes_the_reasoning() -> None:
    engine = Speaking(SAID)
    async with serving(engine, chat_template=THINKING) as world, ollama_client(world) as client:
        first = await client.generate("m", "hi")
        assert first.thinking == "They ask for Oslo."
        again = await client.generate("m", "more", context=first.context)
        assert again.thinking == "They ask for Oslo."
        assert engine.prompt().endswith(f"<think>\n{SAID}<user>more<assistant><think>\n")


async def test_a_context_is_continued_by_a_template_without_past_answers() -> None:
    engine = Speaking("fine")
    async with (
        serving(engine, chat_template="<s>[{{ messages[-1].content }}]") as world,
        ollama_client(world) as client,
    ):
        first = await client.generate("m", "hi")
        await client.generate("m", "more", context=first.context)
        assert engine.prompt() == "<s>[hi]fine[more]"


async def test_a_context_is_continued_by_a_model_without_a_template() -> None:
    engine = Speaking("fine")
    engine.tokenizer = bare_tokenizer()
    async with serving(engine) as world, ollama_client(world) as client:
        first = await client.generate("m", "hi")
        assert len(first.context or []) > 0
        await client.generate("m", " more", context=first.context)
        assert engine.prompt().endswith("hifine more")


async def test_raw_prompts_loads_and_chats_return_no_context() -> None:
    async with serving(Speaking("fine"), chat_template=TOOLS) as world, ollama_client(world) as client:
        assert (await client.generate("m", "hi", raw=True)).context is None
        assert (await client.generate("m")).context is None
        assert "context" not in (await world.post("/api/chat", {"messages": HI, "stream": False}))[2]


async def test_roles_are_case_insensitive() -> None:
    engine = Speaking("fine")
    async with serving(engine, chat_template=TOOLS) as world:
        body = {"messages": [{"role": "User", "content": "hi"}], "stream": False}
        assert (await world.post("/api/chat", body))[0] == 200
        assert engine.prompt().endswith("<user>hi<assistant>")


async def test_a_suffix_uses_the_fill_in_the_middle_layout() -> None:
    engine = Speaking("fine")
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    async with serving(engine, chat_template=TOOLS) as world, ollama_client(world) as client:
        with pytest.raises(ollama.ResponseError, match="no fill-in-the-middle tokens"):
            await client.generate("m", "def f(", suffix="return 1")
    engine.tokenizer = tiny.make_tokenizer("llama")
    engine.tokenizer.add_special_tokens({"additional_special_tokens": marks})
    async with serving(engine, chat_template=TOOLS) as world, ollama_client(world) as client:
        assert (await client.generate("m", "def f(", suffix="return 1")).response == "fine"
        assert engine.prompt() == "<s><|fim_prefix|>def f(<|fim_suffix|>return 1<|fim_middle|>"
        with pytest.raises(ollama.ResponseError, match="suffix and system"):
            await client.generate("m", "def f(", suffix="x", system="S")


@pytest.mark.parametrize("most", [0, -1, -2])
async def test_a_num_predict_of_zero_or_less_is_no_limit(most: int) -> None:
    async with serving() as world, ollama_client(world) as client:
        await client.chat("m", HI, options={"num_predict": most})
        assert world.engine.requests[-1].max_tokens is None


async def test_a_format_constrains_the_answer() -> None:
    engine = Speaking("fine")
    async with serving(engine) as world, ollama_client(world) as client:
        await client.chat("m", HI, format="json")
        await client.generate("m", "hi", format=SCHEMA)
        await client.generate("m", "hi", format=SCHEMA, raw=True)
        await client.chat("m", HI)
        grammars = [request.grammar and request.grammar.text for request in engine.requests]
        assert grammars[0] == '{"type":"object"}'
        assert grammars[1] == grammars[2]
        assert '"city"' in (grammars[1] or "")
        assert grammars[3] is None


async def test_reports_and_errors_use_the_clients_field_names() -> None:
    async with serving() as world:
        asked = {"messages": HI, "stream": False, "think": "high", "format": "json"}
        _, headers, _ = await world.post("/api/chat", asked)
        assert headers["X-Ignored-Fields"] == "think"
        held = world.engine.requests[-1].grammar
        assert held is not None
        assert held.field == "format"
        raw = {"prompt": "hi", "raw": True, "system": "S", "think": "high", "stream": False}
        _, headers, _ = await world.post("/api/generate", raw)
        assert headers["X-Ignored-Fields"] == "system,think"
        _, headers, _ = await world.post("/api/chat", {"messages": HI, "stream": False, "top_logprobs": 2})
        assert headers["X-Ignored-Fields"] == "top_logprobs"


@pytest.mark.parametrize(("path", "text"), [("/api/embed", "input"), ("/api/embeddings", "prompt")])
async def test_options_of_embeddings_are_validated_and_reported_as_ignored(path: str, text: str) -> None:
    async with serving() as world:
        options = {"num_gpu": 9, "temperature": 0.5, "num_ctx": 64, "seed": None, "odd": 1}
        _, headers, _ = await world.post(path, {text: "hi", "options": options})
        assert set(headers["X-Ignored-Fields"].split(",")) == {f"options.{name}" for name in options} - {"options.seed"}
        status, _, answer = await world.post(path, {text: "hi", "options": {"temperature": -1}})
        assert (status, answer["error"].startswith("options.temperature")) == (400, True)


async def test_samplers_that_are_not_offered_are_reported_as_ignored() -> None:
    options = {"typical_p": 0.7, "tfs_z": 0.5, "mirostat": 1, "mirostat_tau": 0.8, "draft_num_predict": 4}
    async with serving() as world:
        body = {"prompt": "hi", "stream": False, "options": {**options, "num_predict": 2, "top_k": 20}}
        status, headers, _ = await world.post("/api/generate", body)
        assert status == 200
        assert set(headers["X-Ignored-Fields"].split(",")) == {f"options.{name}" for name in options}


async def test_num_ctx_lowers_the_context_size_and_is_reported_as_ignored_above_it() -> None:
    async with serving() as world, ollama_client(world) as client:
        answer = await client.generate("m", "hi", raw=True, options={"num_ctx": 6})
        assert (answer.prompt_eval_count or 0) + (answer.eval_count or 0) == 6
        above = {"prompt": "hi", "raw": True, "stream": False, "options": {"num_ctx": 257, "num_predict": -1}}
        status, headers, body = await world.post("/api/generate", above)
        assert (status, headers["X-Ignored-Fields"]) == (200, "options.num_ctx")
        assert body["prompt_eval_count"] + body["eval_count"] <= 256
        with pytest.raises(ollama.ResponseError, match="maximum context length is 256 tokens"):
            await client.generate("m", "hi " * 600, raw=True, options={"num_ctx": 8192})
        with pytest.raises(ollama.ResponseError, match="maximum context length is 2 tokens"):
            await client.generate("m", "hi", raw=True, options={"num_ctx": 2})


async def test_truncate_drops_the_oldest_turns_of_a_chat_that_is_too_long() -> None:
    turns = [{"role": "user", "content": f"{turn} " * 20} for turn in range(8)]
    body: Any = {"messages": [{"role": "system", "content": "S"}, *turns], "stream": False}
    async with serving(chat_template=PLAIN) as world:
        for options, most in (({}, 255), ({"num_ctx": 100}, 99)):
            status, _, answer = await world.post("/api/chat", {**body, "options": options})
            assert (status, "maximum context length" in answer["error"]) == (400, True)
            status, headers, answer = await world.post("/api/chat", {**body, "options": options, "truncate": True})
            assert status == 200, answer
            assert "X-Ignored-Fields" not in headers
            prompt = str(tokenizer().decode(world.engine.requests[-1].prompt))
            assert prompt.startswith("S")
            assert ("0 0" in prompt, "7 7" in prompt) == (False, True)
            turn = len(tokenizer()(turns[0]["content"], add_special_tokens=False)["input_ids"])
            assert most - turn <= answer["prompt_eval_count"] <= most
        status, _, answer = await world.post("/api/chat", {**body, "options": {"num_ctx": 2}, "truncate": True})
        assert (status, "maximum context length is 2 tokens" in answer["error"]) == (400, True)
        status, _, answer = await world.post("/api/chat", {"messages": [], "truncate": True, "stream": False})
        assert (status, answer["done_reason"]) == (200, "load")
        _, headers, _ = await world.post("/api/generate", {"prompt": "hi", "truncate": True, "stream": False})
        assert headers["X-Ignored-Fields"] == "truncate"


async def test_an_empty_request_only_loads_or_unloads() -> None:
    async with serving() as world, ollama_client(world) as client:
        assert (await client.generate("m")).done_reason == "load"
        answer = await client.chat("m", keep_alive=0)
        assert (answer.done, answer.done_reason, answer.message.content) == (True, "unload", "")
        assert world.engine.requests == []


async def test_an_empty_request_unloads_a_model_that_generates_no_text() -> None:
    engine = FakeEngine(tokenizer(), capabilities=["embedding"])
    async with serving(engine) as world, ollama_client(world) as client:
        assert (await client.generate("m", keep_alive=0)).done_reason == "unload"
        assert world.events[-1].keep_alive == 0
        with pytest.raises(ollama.ResponseError, match="does not generate text"):
            await client.generate("m")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_load_that_the_router_waited_for_is_a_complete_stream_of_one_line(path: str) -> None:
    """Otherwise a router that has started the stream could only abort it. Ollama itself answers without a stream."""
    form = stream(Dialect.OLLAMA)
    async with serving() as world:
        for headers, media in (({WAITED_HEADER: "1.5"}, form.headers["Content-Type"]), ({}, "application/json")):
            async with world.client.post(world.url + path, json={"model": "m"}, headers=headers) as answer:
                assert answer.content_type == media
                assert form.is_whole(await answer.read() + (b"" if headers else b"\n"))
        async with world.client.post(world.url + path, json={"model": "m", "stream": False}) as answer:
            assert answer.content_type == "application/json"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"num_predict": 0.5}}, "options.num_predict"),
        ({"tools": [5]}, "tools"),
        ({"sse_ping_interval": 0}, "sse_ping_interval"),
    ],
)
async def test_a_load_rejects_invalid_fields(body: dict[str, Any], param: str) -> None:
    async with serving() as world:
        status, _, answer = await world.post("/api/chat", body)
        assert (status, answer["error"].startswith(param)) == (400, True), answer


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(0, 0.0), (90, 90.0), ("5m", 300.0), ("1h30m", 5400.0), (-1, -1.0), ("-1m", -1.0), ("7", 7.0)],
)
async def test_keep_alive_is_reported_in_seconds(value: Any, seconds: float) -> None:
    async with serving() as world, ollama_client(world) as client:
        await client.generate("m", "hi", keep_alive=value, options={"num_predict": 1})
        await world.announced.wait()
        assert world.events[-1].keep_alive == seconds
        await client.embed("m", "hi", keep_alive=value)
        assert world.events[-1].keep_alive == seconds


async def test_embeddings() -> None:
    async with serving() as world, ollama_client(world) as client:
        answer = await client.embed("m", ["hi", "hi"])
        assert [list(vector) for vector in answer.embeddings] == [[2.0, 4.0, 6.0, 8.0]] * 2
        assert answer.load_duration == 0
        _, _, received = await world.post("/api/embed", {"input": "hi"}, **{WAITED_HEADER: "2.5"})
        assert received["load_duration"] == 2_500_000_000 <= received["total_duration"]
        one = await client.embed("m", "hi", dimensions=1)
        assert [list(vector) for vector in one.embeddings] == [[1.0]]
        every = await client.embed("m", "hi", dimensions=0)
        assert [len(vector) for vector in every.embeddings] == [4]
        older = await client.embeddings("m", "hi")
        assert list(older.embedding) == [2.0, 4.0, 6.0, 8.0]
        assert list((await client.embed("m", "")).embeddings) == []


async def test_unsupported_fields_are_rejected_by_name() -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "not images"),
        ("chat", {"messages": HI, "keep_alive": "soon"}, "keep_alive"),
        ("chat", {"messages": HI, "format": "xml"}, "format"),
        ("generate", {"prompt": "x", "context": [1.5]}, "context must be the token ids"),
        ("generate", {"prompt": "x", "context": [10**6]}, "context must be the token ids"),
        ("generate", {"prompt": "x", "context": [1], "raw": True}, "context and raw exclude each other"),
        ("generate", {"prompt": "x", "context": [1], "suffix": "y"}, "context and suffix exclude each other"),
        ("generate", {"prompt": "x", "context": [1] * 256}, "maximum context length is 256"),
        ("generate", {"prompt": "x", "_debug_render_only": True}, "_debug_render_only is not supported"),
        ("generate", {"prompt": "x", "images": ["aGk="]}, "takes text, not images"),
    ]
    async with serving() as world:
        for call, body, message in refused:
            status, _, answer = await world.post(f"/api/{call}", body)
            assert status == 400
            assert message in answer["error"]
        assert world.engine.requests == []


async def test_a_failed_stream_raises_an_error_of_the_client() -> None:
    late: Any = [{"role": "user", "content": " fail-later "}]
    text = ""
    async with serving(chat_template=PLAIN) as world, ollama_client(world) as client:
        with pytest.raises(ollama.ResponseError, match="logits"):  # noqa: PT012 - the text before the error counts
            async for line in await client.chat("m", late, stream=True):
                text += line.message.content or ""
        assert text == "0 G"


async def test_empty_lines_keep_an_idle_stream_alive() -> None:
    body = {"messages": [{"role": "user", "content": " prefill "}], "sse_ping_interval": 0.05}
    async with serving(chat_template=PLAIN) as world, world.client.post(world.url + "/api/chat", json=body) as answer:
        assert answer.headers["Content-Type"] == "application/x-ndjson"
        first = ollama.ChatResponse.model_validate_json(await answer.content.readline())
        assert (first.message.content, first.done) == ("", False)
        world.engine.gate.set()
        assert b'"done":true}\n' in await answer.content.read()
