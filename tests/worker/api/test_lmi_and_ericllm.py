"""The calls of LMI and of EricLLM, by plain HTTP."""

import json
from typing import Any

import pytest

from tests.worker.fake_engine import SCRIPT, FakeEngine
from tests.worker.serving import chunks, serving, tokenizer
from worker.interface import EncodingConfig


async def test_invocations_have_lmis_fields_and_defaults() -> None:
    async with serving() as world:
        status, _, answer = await world.post("/invocations", {"inputs": "hi"})
        assert status == 200
        assert set(answer) == {"generated_text"}
        assert f"0 {SCRIPT}".startswith(answer["generated_text"].rstrip("\ufffd"))
        [asked] = world.engine.requests
        assert (asked.max_tokens, asked.sampling.temperature) == (30, 0.0)
        parameters: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "top_k": 3, "seed": 7, "details": True}
        parameters |= {"max_new_tokens": 99, "stop_sequences": ["fox"], "return_full_text": True}
        _, _, answers = await world.post("/invocations", {"inputs": ["hi", "ho"], "parameters": parameters})
        assert [each["details"]["inputs"] for each in answers] == ["hi", "ho"]
        assert answers[1]["generated_text"].startswith("ho0 ")
        details = answers[0]["details"]
        assert details["finish_reason"] == "stop_sequence"
        assert {"id", "text", "log_prob"} == set(details["tokens"][0])
        picked = world.engine.requests[-1].sampling
        assert (picked.temperature, picked.top_k, picked.seed) == (0.5, 3, 7)


@pytest.mark.parametrize(
    "parameters", [{}, {"max_new_tokens": 99, "details": True}, {"stop": ["lazy"], "details": True}]
)
async def test_the_lines_of_a_stream_add_up_to_the_full_text(parameters: dict[str, Any]) -> None:
    body = {"inputs": "hi", "parameters": {"max_new_tokens": 60, **parameters}}
    async with serving() as world:
        _, _, whole = await world.post("/invocations", body)
        async with world.client.post(world.url + "/invocations", json={**body, "stream": True}) as answer:
            assert answer.headers["Content-Type"] == "application/jsonlines"
            lines = [json.loads(line) for line in (await answer.read()).splitlines()]
        assert "".join(line["token"]["text"] for line in lines) == whole["generated_text"]
        assert [line.get("generated_text") for line in lines[:-1]] == [None] * (len(lines) - 1)
        last = {name: value for name, value in lines[-1].items() if name != "token"}
        assert last == whole


async def test_invocations_accept_openais_bodies() -> None:
    async with serving() as world:
        messages = [{"role": "user", "content": "hi"}]
        _, _, chat = await world.post("/invocations", {"messages": messages, "max_tokens": 2})
        assert chat["choices"][0]["message"]["content"] == "0 G"
        _, _, text = await world.post("/invocations", {"prompt": "hi", "max_tokens": 2})
        assert text["choices"][0]["text"] == "0 G"
        assert chunks(await world.stream("/invocations", {"messages": messages}))[-1] == "[DONE]"
        lines = (await world.failed_stream("/invocations", {"prompt": " fail-later ", "stream": True})).splitlines()
        assert "logits" in json.loads(lines[-2].removeprefix(b"data: "))["error"]["message"]


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}, "json_schema"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
        ({"guided_regex": "a+"}, "regex"),
    ],
)
async def test_parameters_constrain_the_text_as_in_vllm(parameters: dict[str, Any], kind: str) -> None:
    async with serving() as world:
        status, headers, _ = await world.post("/invocations", {"inputs": "hi", "parameters": parameters})
        assert (status, "X-Ignored-Fields" in headers) == (200, False)
        grammar = world.engine.requests[-1].grammar
        assert grammar is not None
        assert grammar.kind == kind
        status, _, answer = await world.post(
            "/invocations", {"inputs": "hi", "parameters": dict.fromkeys(parameters, 5)}
        )
        assert (status, answer["message"].startswith(f"parameters.{next(iter(parameters))}")) == (400, True)


async def test_invocations_of_an_embedder_compute_vectors() -> None:
    encoding = EncodingConfig(dimensions=4)
    engine = FakeEngine(tokenizer(), capabilities=("embedding", "rerank"), encoding=encoding)
    async with serving(engine) as world:
        _, _, expected = await world.post("/v1/embeddings", {"input": ["hi", "ho"]})
        vectors = [item["embedding"] for item in expected["data"]]
        _, _, answer = await world.post("/invocations", {"inputs": ["hi", "ho"]})
        assert answer == vectors
        _, headers, answer = await world.post("/invocations", {"inputs": "hi", "parameters": {"seed": 1}})
        assert (answer, headers["X-Ignored-Fields"]) == (vectors[0], "parameters")
        for inputs in ([], "", [5], None):
            status, _, answer = await world.post("/invocations", {"inputs": inputs} if inputs != "" else {})
            assert (status, answer["message"].split()[0]) == (400, "inputs")
        status, _, answer = await world.post("/invocations", {"inputs": "hi", "stream": True})
        assert (status, answer["message"]) == (400, "stream is only for generated text; leave it out")
        status, _, answer = await world.post("/invocations", {"inputs": "word " * 500})
        assert (status, answer["message"][:22]) == (400, "the prompt is too long")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "hi", "dimensions": 2}),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/rerank", {"query": "hi", "documents": ["ho", "hu"]}),
        ("/v1/score", {"text_1": "hi", "text_2": ["ho", "hu"]}),
        ("/v1/score", {"queries": "hi", "documents": ["ho", "hu"]}),
    ],
)
async def test_invocations_accept_the_bodies_of_vectors_and_scores(path: str, body: dict[str, Any]) -> None:
    encoding = EncodingConfig(dimensions=4)
    engine = FakeEngine(tokenizer(), capabilities=("embedding", "rerank"), encoding=encoding)
    async with serving(engine) as world:
        _, _, expected = await world.post(path, body)
        status, _, answer = await world.post("/invocations", body)
        changing = {"id", "created"}
        assert status == 200
        assert {name: expected[name] for name in expected.keys() - changing} == {
            name: answer[name] for name in answer.keys() - changing
        }


async def test_invalid_fields_are_rejected_in_lmis_format() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"inputs": "a", "parameters": {"stop_sequences": [], "stop": ["x"] * 17}}, "parameters.stop"),
        ({"inputs": ["a", "b"], "stream": True}, "stream"),
        ({"inputs": "a", "adapters": ["x", "y"]}, "adapters"),
        ({"inputs": "a", "parameters": {"n": 2}, "stream": True}, "parameters.n"),
        ({"inputs": "a", "parameters": {"n": 3, "best_of": 2}}, "parameters.best_of"),
        ({"inputs": "a", "parameters": {"details": True, "top_n_tokens": 999}}, "parameters.top_n_tokens"),
        ({"inputs": "a", "parameters": {"min_tokens": 31}}, "parameters.min_tokens"),
        (
            {"inputs": "a", "parameters": {"details": True, "decoder_input_details": True}, "stream": True},
            "parameters.decoder_input_details",
        ),
        ({"messages": [], "stream": True}, "messages"),
    ]
    async with serving() as world:
        for body, message in refused:
            status, _, answer = await world.post("/invocations", body)
            assert (status, set(answer)) == (400, {"code", "type", "message"})
            assert message in answer["message"]
        body = {"inputs": "a", "parameters": {"watermark": True, "top_n_tokens": 2, "decoder_input_details": True}}
        _, headers, _ = await world.post("/invocations", body)
        ignored = {"parameters.watermark", "parameters.top_n_tokens", "parameters.decoder_input_details"}
        assert set(headers["X-Ignored-Fields"].split(",")) == ignored
        assert len(world.engine.requests) == 1


async def test_several_choices_are_returned_with_the_likeliest_first() -> None:
    async with serving() as world:
        # The fake engine's later choices are likelier.
        for parameters, kept in (({"n": 3}, 3), ({"best_of": 3}, 3), ({"n": 2, "best_of": 3}, 2)):
            body = {"inputs": "hi", "parameters": {"max_new_tokens": 4, "return_full_text": True, **parameters}}
            status, headers, answer = await world.post("/invocations", body)
            assert (status, "X-Ignored-Fields" in headers) == (200, False)
            assert world.engine.requests[-1].n == 3
            others = answer["details"]["best_of_sequences"]
            texts = [answer["generated_text"], *(other["generated_text"] for other in others)]
            assert [text[:6] for text in texts] == ["hi2 Gr", "hi1 Gr", "hi0 Gr"][:kept]
            assert [(other["finish_reason"], len(other["tokens"])) for other in others] == [("length", 4)] * (kept - 1)


async def test_logprobs_are_in_the_details() -> None:
    parameters = {"max_new_tokens": 3, "details": True, "top_n_tokens": 2, "decoder_input_details": True}
    async with serving() as world:
        _, _, answer = await world.post("/invocations", {"inputs": "hi", "parameters": parameters})
        details = answer["details"]
        assert [len(tops) for tops in details["top_tokens"]] == [2, 2, 2]
        assert [token["id"] for token in details["tokens"]] != [top[0]["id"] for top in details["top_tokens"]]
        assert [token["log_prob"] for token in details["prefill"]][:2] == [None, -0.5]
        assert len(details["prefill"]) == len(world.engine.requests[-1].prompt)
        body = {
            "inputs": "hi",
            "parameters": {"max_new_tokens": 3, "details": True, "logprobs": 1, "prompt_logprobs": 1},
        }
        _, _, same = await world.post("/invocations", body)
        assert [len(tops) for tops in same["details"]["top_tokens"]] == [1, 1, 1]
        assert same["details"]["prefill"] == details["prefill"]


async def test_a_prompt_is_truncated_and_ends_where_lmis_parameters_say() -> None:
    async with serving() as world:

        async def asked(**parameters: Any) -> tuple[Any, Any]:
            _, headers, answer = await world.post("/invocations", {"inputs": "hi ho", "parameters": parameters})
            assert "X-Ignored-Fields" not in headers
            return world.engine.requests[-1], answer

        whole, text = await asked(max_new_tokens=9)
        cut, _ = await asked(truncate=2)
        assert cut.prompt == whole.prompt[-2:]
        stop = world.engine.tokenizer.encode("ü", add_special_tokens=False)[0]
        ended, shorter = await asked(max_new_tokens=9, stop_token_ids=[stop])
        assert ended.ends == frozenset({stop})
        assert text["generated_text"].startswith(shorter["generated_text"])
        _, shown = await asked(stop_sequences=["Gr"], include_stop_str_in_output=True)
        assert shown["generated_text"] == "0 Gr"
        special, _ = await asked(skip_special_tokens=False, min_tokens=3, logit_bias={"70": 5})
        assert special.visible_special_tokens
        assert (special.sampling.min_tokens, dict(special.sampling.logit_bias)) == (3, {70: 5.0})


async def test_a_temperature_without_sampling_is_reported_as_ignored() -> None:
    async with serving() as world:
        for sampled, ignored in (({}, "parameters.temperature"), ({"do_sample": True}, None)):
            body = {"inputs": "a", "parameters": {"temperature": 0.5, **sampled}}
            _, headers, _ = await world.post("/invocations", body)
            assert headers.get("X-Ignored-Fields") == ignored
            assert world.engine.requests[-1].sampling.temperature == (0.0 if ignored else 0.5)


async def test_a_failed_stream_ends_with_an_error_line() -> None:
    async with serving() as world:
        data = await world.failed_stream("/invocations", {"inputs": "fail-later", "stream": True})
        last = json.loads(data.splitlines()[-1])
        assert "logits" in last["token"]["error_msg"]
        assert last["details"]["finish_reason"] == "error"


async def test_ericllm_returns_the_prompt_with_its_continuation() -> None:
    async with serving() as world:
        _, _, answer = await world.post("/generate", {"prompt": "hi "})
        [asked] = world.engine.requests
        picked = asked.sampling
        assert (asked.max_tokens, picked.temperature, picked.top_k, picked.top_p) == (128, 0.7, 40, 0.5)
        assert answer["text"].startswith(f"hi 0 {SCRIPT}")
        body = {"prompt": "hi ", "max_tokens": 2, "n": 2, "token_repetition_penalty": 1.5, "stop": ["x"]}
        _, _, answer = await world.post("/generate", body)
        assert answer == {"text": ["hi 0 G", "hi 1 G"]}
        assert world.engine.requests[-1].sampling.repetition_penalty == 1.5
        for wrong in ({"top_a": "x"}, {"filters": ["x"]}, {"skip_special_tokens": 1}, {"prompt": None}):
            status, _, answer = await world.post("/generate", {"prompt": "hi", **wrong})
            assert status == 400
            assert next(iter(wrong)) in answer["detail"]


async def test_ericllms_request_with_all_of_its_defaults_is_answered() -> None:
    body = {
        "prompt": "hi ", "max_tokens": 128, "temperature": 0.7, "top_k": 40, "top_p": 0.5,
        "token_repetition_penalty": 1.0, "stop": [], "skip_special_tokens": True, "n": 1, "model": "", "top_a": 1.0,
        "min_p": 0, "filters": [],
    }  # fmt: skip
    async with serving() as world:
        _, _, least = await world.post("/generate", {"prompt": "hi "})
        status, headers, whole = await world.post("/generate", body)
        assert (status, whole, "X-Ignored-Fields" in headers) == (200, least, False)
        assert world.engine.requests[0].sampling == world.engine.requests[1].sampling
        _, headers, _ = await world.post("/generate", {"prompt": "hi ", "top_a": 0.5, "skip_special_tokens": False})
        assert headers["X-Ignored-Fields"] == "top_a"
        assert world.engine.requests[-1].visible_special_tokens
