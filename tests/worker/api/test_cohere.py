"""Cohere's `/v2/embed`."""

import base64
import struct
from typing import Any

import pytest

from tests.worker import serving
from tests.worker.fake_engine import FakeEngine
from tests.worker.speaking import encoded, seen
from worker.api import cohere
from worker.api.served_model import ServedModel
from worker.errors import RequestError
from worker.interface import EncodingConfig

PROMPTS = {"query": "? ", "passage": "# ", "clustering": "c "}


def model(*, dimensions: int = 4, **settings: Any) -> ServedModel:
    encoding = EncodingConfig(dimensions=dimensions, prompts=PROMPTS)
    engine = FakeEngine(serving.tokenizer(), capabilities=("embedding",), encoding=encoding)
    return ServedModel(engine, engine.tokenizer, serving.options(**settings))


async def test_texts_become_vectors_by_type() -> None:
    made = model()
    result = await cohere.embed({"texts": ["a", "b c"], "embedding_types": ["float", "base64"]}, made)
    floats = result.body["embeddings"]["float"]
    assert [len(vector) for vector in floats] == [4, 4]
    packed = [base64.b64decode(text) for text in result.body["embeddings"]["base64"]]
    assert packed == [struct.pack("<4f", *vector) for vector in floats]
    tokens = result.body["meta"]["billed_units"]["input_tokens"]
    assert tokens == result.prompt_tokens == sum(len(made.tokenizer(text)["input_ids"]) for text in ("a", "b c"))
    assert (result.body["texts"], result.body["response_type"]) == (["a", "b c"], "embeddings_by_type")


async def test_objects_with_content_are_accepted_as_texts() -> None:
    made = model()
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": " c"}]
    result = await cohere.embed({"inputs": [{"content": parts}]}, made)
    assert (seen(made), result.body["texts"]) == (["b c"], None)


async def test_the_input_type_selects_an_instruction_of_the_model() -> None:
    made = model()
    for kind in ("search_query", "search_document", "clustering"):
        assert (await cohere.embed({"texts": ["a"], "input_type": kind}, made)).ignored == ()
    assert seen(made) == ["? a", "# a", "c a"]
    assert (await cohere.embed({"texts": ["a"], "input_type": "classification"}, made)).ignored == ("input_type",)
    assert seen(made)[-1] == "a"


async def test_long_texts_are_truncated_by_default() -> None:
    made = model()
    await cohere.embed({"texts": ["word " * 500]}, made)
    assert len(encoded(made)[0].tokens) == 256
    with pytest.raises(RequestError) as caught:
        await cohere.embed({"texts": ["word " * 500], "truncate": "NONE"}, made)
    assert (caught.value.param, caught.value.reason) == ("texts", "context_length_exceeded")


async def test_texts_are_truncated_to_max_tokens() -> None:
    made = model()
    await cohere.embed({"texts": ["word " * 500], "max_tokens": 20}, made)
    assert len(encoded(made)[0].tokens) == 20
    for extra in ({"max_tokens": 20, "truncate": "NONE"}, {"max_tokens": 0}, {"max_tokens": 1}):
        with pytest.raises(RequestError) as caught:
            await cohere.embed({"texts": ["word " * 500], **extra}, made)
        assert (caught.value.status, caught.value.param) == (400, "max_tokens")
        assert caught.value.message.startswith("max_tokens")


def test_bits_are_the_signs_of_components() -> None:
    vector = [1.0, -1.0, 0.0, 0.5, -0.5, 2.0, 3.0, -4.0]
    assert cohere.to_bits(vector) == [0b10010110]
