"""What the official clients can state is known here: honoured, without effect, or refused by name."""

from collections.abc import Iterable
from typing import Any, get_args

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from openai.types.shared.reasoning_effort import ReasoningEffort

from worker.bodies import anthropic as messages
from worker.bodies import common, openai, responses
from worker.schemas import Body

REPORTED = {
    "max_tool_calls",
    "context_management",
    "speed",
    "inference_geo",
    "diagnostics",
    "user_profile_id",
    "workspace_id",
    "access_programs",
    "image",
}
"""What means something only where tools or machines are theirs: named in X-Ignored-Fields, as all that nobody knows."""


def fields(*kinds: Any) -> Iterable[str]:
    return {name for kind in kinds for name in kind.__annotations__}


@pytest.mark.parametrize(
    ("stated", "known"),
    [
        (fields(chat_create_params.CompletionCreateParamsBase), openai.CHAT),
        (fields(completion_create_params.CompletionCreateParamsBase), openai.COMPLETIONS),
        (fields(embedding_create_params.EmbeddingCreateParams), openai.EMBEDDINGS),
        (fields(response_create_params.ResponseCreateParamsBase), responses.RESPONSES),
        (fields(message_create_params.MessageCreateParamsBase), messages.ANTHROPIC),
        (fields(message_count_tokens_params.MessageCountTokensParams), messages.COUNT_TOKENS),
    ],
    ids=["chat", "completions", "embeddings", "responses", "messages", "count_tokens"],
)
def test_every_field_of_an_official_client_is_known(stated: Iterable[str], known: Body) -> None:
    assert len(set(stated)) > 4
    assert set(stated) - known.keys() - common.NO_OPS.keys() - common.NEUTRAL.keys() <= REPORTED


def test_every_effort_of_the_official_client_is_one_here() -> None:
    words = {word for each in get_args(ReasoningEffort) for word in get_args(each)}
    assert "low" in words
    assert words <= set(common.EFFORTS)
