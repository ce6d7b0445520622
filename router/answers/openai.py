"""What OpenAI's calls answer: chats, completions, vectors; and Cohere's and Jina's rankings."""

from collections.abc import Mapping

from router.answers.words import COUNT, NUMBER, TEXT, Answer, Schema, by_name, const, enum, maybe, ref, several, shape

_TOP = shape({"token": TEXT, "logprob": maybe(NUMBER), "bytes": several(COUNT)})
TOKENS = several(
    shape({"token": TEXT, "logprob": maybe(NUMBER), "bytes": several(COUNT), "top_logprobs": several(_TOP)})
)
_LOGPROBS = maybe(shape({"content": TOKENS}))
_LEGACY_LOGPROBS = maybe(
    shape(
        {
            "tokens": several(TEXT),
            "token_logprobs": several(maybe(NUMBER)),
            "top_logprobs": several(maybe(by_name(maybe(NUMBER)))),
            "text_offset": several(COUNT),
        }
    )
)
_PROMPT_LOGPROBS = several(
    maybe(by_name(shape({"logprob": maybe(NUMBER), "rank": maybe(COUNT), "decoded_token": TEXT})))
)
_IDS = several(COUNT)
PROMPT_PROGRESS = shape({"total": COUNT, "cache": COUNT, "processed": COUNT, "time_ms": NUMBER})
_FUNCTION = shape({"name": TEXT, "arguments": TEXT})
_CALL = shape({"id": TEXT, "type": const("function"), "function": _FUNCTION})
_FINISH = enum("stop", "length", "tool_calls")
_HEAD: dict[str, Schema] = {"id": TEXT, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT}

COMPONENTS: Mapping[str, Schema] = {
    "Usage": shape(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": shape({"cached_tokens": COUNT}),
            "completion_tokens_details": shape({"reasoning_tokens": COUNT}),
        }
    ),
    "PromptUsage": shape({"prompt_tokens": COUNT, "total_tokens": COUNT}),
    "Timings": shape(
        {
            "cache_n": COUNT,
            "prompt_n": COUNT,
            "prompt_ms": NUMBER,
            "prompt_per_token_ms": NUMBER,
            "prompt_per_second": NUMBER,
            "predicted_n": COUNT,
            "predicted_ms": NUMBER,
            "predicted_per_token_ms": NUMBER,
            "predicted_per_second": NUMBER,
        }
    ),
    "ChatCompletion": shape(
        {
            **_HEAD,
            "object": const("chat.completion"),
            "choices": several(
                shape(
                    {
                        "index": COUNT,
                        "message": shape(
                            {"role": const("assistant"), "content": maybe(TEXT)},
                            {"reasoning_content": TEXT, "tool_calls": several(_CALL)},
                        ),
                        "logprobs": _LOGPROBS,
                        "finish_reason": _FINISH,
                    },
                    {"token_ids": _IDS},
                )
            ),
            "usage": ref("Usage"),
            "timings": ref("Timings"),
        },
        {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _IDS},
    ),
    "ChatCompletionChunk": shape(
        {
            **_HEAD,
            "object": const("chat.completion.chunk"),
            "choices": several(
                shape(
                    {
                        "index": COUNT,
                        "delta": shape(
                            {},
                            {
                                "role": const("assistant"),
                                "content": maybe(TEXT),
                                "reasoning_content": TEXT,
                                "tool_calls": several(
                                    shape(
                                        {
                                            "index": COUNT,
                                            "id": TEXT,
                                            "type": const("function"),
                                            "function": _FUNCTION,
                                        }
                                    )
                                ),
                            },
                        ),
                        "logprobs": _LOGPROBS,
                        "finish_reason": maybe(_FINISH),
                    },
                    {"token_ids": _IDS},
                )
            ),
        },
        {
            "usage": maybe(ref("Usage")),
            "timings": ref("Timings"),
            "prompt_progress": PROMPT_PROGRESS,
            "prompt_token_ids": _IDS,
        },
    ),
    "Completion": shape(
        {
            **_HEAD,
            "object": const("text_completion"),
            "choices": several(
                shape(
                    {
                        "index": COUNT,
                        "text": TEXT,
                        "logprobs": _LEGACY_LOGPROBS,
                        "finish_reason": maybe(enum("stop", "length")),
                    },
                    {"token_ids": _IDS, "prompt_token_ids": _IDS, "prompt_logprobs": _PROMPT_LOGPROBS},
                )
            ),
        },
        {"usage": maybe(ref("Usage")), "timings": ref("Timings"), "prompt_progress": PROMPT_PROGRESS},
    ),
    "Embeddings": shape(
        {
            "object": const("list"),
            "model": TEXT,
            "data": several(
                shape(
                    {
                        "object": const("embedding"),
                        "index": COUNT,
                        "embedding": {"anyOf": [several(NUMBER), {"type": "string", "contentEncoding": "base64"}]},
                    }
                )
            ),
            "usage": ref("PromptUsage"),
        }
    ),
    "Ranking": shape(
        {
            "object": const("list"),
            "model": TEXT,
            "results": several(shape({"index": COUNT, "relevance_score": NUMBER}, {"document": shape({"text": TEXT})})),
            "usage": ref("PromptUsage"),
        }
    ),
}

ANSWERS: Mapping[str, Answer] = {
    "chat": Answer(body=ref("ChatCompletion"), frame=ref("ChatCompletionChunk"), about="A chat completion."),
    "completions": Answer(body=ref("Completion"), frame=ref("Completion"), about="A text completion."),
    "embeddings": Answer(body=ref("Embeddings"), about="One vector for each text."),
    "rerank": Answer(
        body={"anyOf": [ref("Ranking"), several(shape({"index": COUNT, "score": NUMBER}, {"text": TEXT}))]},
        about="Documents, the one that fits best first; a bare list where they were sent as `texts`.",
    ),
}
