"""A value that the schema of a field, the other fields or the model do not allow is rejected with the field's name."""

from collections.abc import Awaitable, Callable, Iterator
from importlib import import_module
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests import tiny
from tests.worker import serving
from tests.worker.fake_engine import FakeEngine
from worker.api.served_model import ServedModel
from worker.errors import RequestError
from worker.protocol.routes import ROUTES
from worker.protocol.schema import Body

VALUES: tuple[Any, ...] = (
    True, 0, -3, 10**30, 1.5, "", "\N{SNOWMAN}", [], [True], [-1], [1.5], [{}], [[]], [[True]], ["a", None], [5, True],
    [[5], {}], [[5, ["a"]]], {}, {"odd": True}, "x" * 5000, ["x" * 5000],
)  # fmt: skip
# fields that a call needs: by its name, or else the first of these that is in its table
NEEDED: dict[str, dict[str, Any]] = {
    "rerank": {"query": "hi", "documents": ["a"]},
    "score": {"text_1": "hi", "text_2": "ho"},
    "infill": {"input_prefix": "a", "input_suffix": "b"},
    "cohere_embed": {"texts": ["hi"]},
}
TEXTS: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "inputs": "hi", "input": "hi", "prompt": "hi"}
TEXTS |= {"content": "hi", "tokens": [5]}
# `inputs` is excluded by the `texts` that the call needs; the format of an answer is no part of a prompt
EXCEPT = {("cohere_embed", "inputs"), ("responses_input_tokens", "text")}
CALLS = {route.name: route for route in ROUTES if route.worker}


def invalid(table: Body) -> Iterator[tuple[str, Any]]:
    """Fields with values that their schema does not allow, also inside of objects."""
    for name, schema in table.items():
        inner = invalid(schema.get("properties", {}))
        values = [*VALUES, *({member: value} for member, value in inner)]
        is_valid = jsonschema.Draft202012Validator(schema).is_valid
        yield from ((name, value) for value in values if not is_valid(value))


def handler(name: str) -> Callable[[dict[str, Any]], Awaitable[Any]]:
    """The handler of a call for a model that can answer all of them."""
    tokenizer = tiny.make_tokenizer("llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<PRE>", "<SUF>", "<MID>"]})
    engine = FakeEngine(tokenizer, capabilities=("completion", "embedding", "rerank"))
    made = ServedModel(engine, tokenizer, serving.options())
    module, _, function = CALLS[name].handler.partition(".")
    call = getattr(import_module(f"worker.api.{module}"), function)
    return lambda body: call(body, made)


@pytest.mark.parametrize("name", CALLS)
async def test_a_value_outside_the_schema_of_a_field_is_rejected_with_its_name(name: str) -> None:
    call = handler(name)
    for table in CALLS[name].requests:
        texts = ({field: TEXTS[field]} for field in TEXTS if field in table)
        others = (fields for fields in NEEDED.values() if fields.keys() <= table.keys())
        needed = NEEDED.get(name) or next(texts, None) or next(others, {})
        for field, value in invalid({field: table[field] for field in table if (name, field) not in EXCEPT}):
            with pytest.raises(RequestError) as caught:  # noqa: PT012 - the failure names the value
                await call({**needed, field: value})
                pytest.fail(f"{field} = {value} is accepted")
            assert caught.value.status in (400, 501), (field, value)
            assert str(caught.value.param).startswith(field), (field, value, caught.value)


# Bodies whose fields lack or exclude another one, or that the model cannot take.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("embeddings", {}, "input"),
    ("embeddings", {"input": [10**6]}, "input"),
    ("embeddings", {"input": "a", "dimensions": 5}, "dimensions"),
    ("rerank", {"documents": ["a"]}, "query"),
    ("rerank", {"query": "a"}, "documents"),
    ("rerank", {"query": "a", "documents": ["a"] * 2049}, "documents"),
    ("rerank", {"query": "a", "documents": ["a", 5]}, "documents[1]"),
    ("rerank", {"query": "a", "documents": ["a"], "texts": ["a"]}, "texts"),
    ("rerank", {"query": "a", "texts": ["a", {"text": "b"}]}, "texts"),
    ("score", {}, "text_1"),
    ("score", {"text_1": "a"}, "text_1"),
    ("score", {"text_1": "a", "text_2": "b", "items": "c"}, "text_1"),
    ("score", {"queries": ["a", "b"], "documents": ["c"]}, "documents"),
    ("score", {"queries": "a", "documents": [{"text": "c"}]}, "documents"),
    ("score", {"text_1": "a", "text_2": "b " * 300}, "text_2"),
    ("cohere_embed", {}, "texts"),
    ("cohere_embed", {"texts": ["a"], "inputs": [{"content": "b"}]}, "texts"),
    ("cohere_embed", {"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs"),
    ("cohere_embed", {"texts": ["a"], "embedding_types": ["binary"]}, "embedding_types"),
    ("cohere_embed", {"texts": ["a"], "output_dimension": 5}, "output_dimension"),
    ("tokenize", {}, "content"),
    ("tokenize", {"messages": []}, "messages"),
    ("tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
    ("tokenize", {"content": "a", "prompt": "a"}, "prompt"),
    ("detokenize", {"tokens": None}, "tokens"),
    ("detokenize", {"tokens": [10**6]}, "tokens"),
]


@pytest.mark.parametrize(("name", "body", "param"), REFUSED, ids=lambda value: str(value)[:60])
async def test_a_body_that_is_contradictory_or_beyond_the_model_is_rejected_with_the_field(
    name: str, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        await handler(name)(body)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["completion", "completions"])
async def test_the_choices_of_all_prompts_together_are_limited(name: str) -> None:
    call = handler(name)
    await call({"prompt": ["hi"] * 16, "n": 128, "max_tokens": 1})
    with pytest.raises(RequestError, match="17 prompts with 128 choices each are more than 2048 choices") as failure:
        await call({"prompt": ["hi"] * 17, "n": 128, "max_tokens": 1})
    assert (failure.value.status, failure.value.param) == (400, "prompt")
