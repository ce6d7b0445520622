"""A value that the schema of a field does not allow is rejected with the field's name, in every call of the worker."""

from collections.abc import Iterator
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
    [[5], {}], [[5, ["a"]]], {}, {"odd": True},
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


@pytest.mark.parametrize("name", CALLS)
async def test_a_value_outside_the_schema_of_a_field_is_rejected_with_its_name(name: str) -> None:
    tokenizer = tiny.make_tokenizer("llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<PRE>", "<SUF>", "<MID>"]})
    engine = FakeEngine(tokenizer, capabilities=("completion", "embedding", "rerank"))
    made = ServedModel(engine, tokenizer, serving.options())
    module, _, function = CALLS[name].handler.partition(".")
    call = getattr(import_module(f"worker.api.{module}"), function)
    for table in CALLS[name].requests:
        needed = NEEDED.get(name) or next(({field: TEXTS[field]} for field in TEXTS if field in table), {})
        for field, value in invalid({field: table[field] for field in table if (name, field) not in EXCEPT}):
            with pytest.raises(RequestError) as caught:  # noqa: PT012 - the failure names the value
                await call({**needed, field: value}, made)
                pytest.fail(f"{field} = {value} is accepted")
            assert caught.value.status in (400, 501), (field, value)
            assert str(caught.value.param).startswith(field), (field, value, caught.value)
