"""What calls answer when all goes well: the JSON of each, and of the frames of its stream, as JSON Schema. Law: PURE.

Written by hand beside the code that answers; the tests hold every answer to it, with no member more and none less.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
ANY_OBJECT: Schema = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One call's success."""

    body: Schema | None = None
    """Of an answer in one piece; None: it has no JSON."""
    frame: Schema | None = None
    """What stands behind `data:`, or in one line, of a stream; None: it does not stream."""
    about: str = ""
    media: str = "application/json"
    has_page: bool = False
    """Browsers, which ask for text/html, get a page in its place."""
    further: Mapping[int, Schema] = field(default_factory=dict)
    """Answers that are no success and no error object either, by status."""


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def const(value: Any) -> Schema:
    return {"const": value}


def enum(*values: Any) -> Schema:
    return {"enum": list(values)}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def several(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def by_name(schema: Schema) -> Schema:
    """An object whose members are named by what they are about."""
    return {"type": "object", "additionalProperties": schema}


def shape(always: Mapping[str, Schema], sometimes: Mapping[str, Schema] | None = None) -> dict[str, Any]:
    """An object with all members of `always`, and perhaps some of `sometimes`."""
    return {"type": "object", "properties": {**always, **(sometimes or {})}, "required": list(always)}


_TOP = shape({"token": TEXT, "logprob": maybe(NUMBER), "bytes": several(COUNT)})
_TOKENS = several(
    shape({"token": TEXT, "logprob": maybe(NUMBER), "bytes": several(COUNT), "top_logprobs": several(_TOP)})
)
_LOGPROBS = maybe(shape({"content": _TOKENS}))
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
_PROMPT_PROGRESS = shape({"total": COUNT, "cache": COUNT, "processed": COUNT, "time_ms": NUMBER})
_FUNCTION = shape({"name": TEXT, "arguments": TEXT})
_CALL = shape({"id": TEXT, "type": const("function"), "function": _FUNCTION})
_FINISH = enum("stop", "length", "tool_calls")
_NATIVE_FRAME: dict[str, Schema] = {
    "index": COUNT,
    "content": TEXT,
    "tokens": several(COUNT),
    "id_slot": const(-1),
    "stop": FLAG,
    "tokens_predicted": COUNT,
    "tokens_evaluated": COUNT,
}
_NATIVE_TOKEN: dict[str, Schema] = {"id": COUNT, "token": TEXT, "bytes": several(COUNT)}
_NATIVE_LOGPROB: dict[str, Schema] = {**_NATIVE_TOKEN, "logprob": maybe(NUMBER)}
_NATIVE_ODDS: dict[str, Schema] = {**_NATIVE_TOKEN, "prob": {"type": "number", "minimum": 0, "maximum": 1}}
_NATIVE_MORE: dict[str, Schema] = {
    "completion_probabilities": {
        "anyOf": [
            several(shape({**_NATIVE_LOGPROB, "top_logprobs": several(shape(_NATIVE_LOGPROB))})),
            several(shape({**_NATIVE_ODDS, "top_probs": several(shape(_NATIVE_ODDS))})),
        ]
    }
}
_NATIVE_END: dict[str, Schema] = {
    "model": TEXT,
    "prompt": TEXT,
    "generation_settings": ANY_OBJECT,
    "has_new_line": FLAG,
    "truncated": FLAG,
    "stop_type": enum("eos", "limit", "word", "none"),
    "stopping_word": TEXT,
    "tokens_cached": COUNT,
    "timings": ref("Timings"),
}
_HEAD: dict[str, Schema] = {"id": TEXT, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT}
_OUTPUT_TEXT = shape(
    {"type": const("output_text"), "text": TEXT, "annotations": several(ANY_OBJECT), "logprobs": _TOKENS}
)
_THOUGHT = shape({"type": const("reasoning_text"), "text": TEXT})
_ITEM_STATUS = enum("in_progress", "completed", "incomplete")
_EVENT: dict[str, Schema] = {"type": TEXT, "sequence_number": COUNT}
_ABOUT_ITEM: dict[str, Schema] = {**_EVENT, "item_id": TEXT, "output_index": COUNT}
_OLLAMA_SAID: dict[str, Schema] = {
    "thinking": TEXT,
    "tool_calls": several(shape({"id": TEXT, "function": shape({"name": TEXT, "arguments": ANY_OBJECT})})),
}
_OLLAMA_LOGPROB: dict[str, Schema] = {"token": TEXT, "logprob": NUMBER, "bytes": several(COUNT)}
_OLLAMA_LINE: dict[str, Schema] = {"model": TEXT, "created_at": TEXT, "done": FLAG}
_OLLAMA_END: dict[str, Schema] = {
    "done_reason": enum("stop", "length", "load", "unload"),
    "total_duration": COUNT,
    "load_duration": COUNT,
    "prompt_eval_count": COUNT,
    "prompt_eval_duration": COUNT,
    "eval_count": COUNT,
    "eval_duration": COUNT,
    "logprobs": several(shape({**_OLLAMA_LOGPROB, "top_logprobs": several(shape(_OLLAMA_LOGPROB))})),
}
_OLLAMA_MESSAGE = shape({"role": const("assistant"), "content": TEXT}, _OLLAMA_SAID)
_OLLAMA_DETAILS = shape(
    {
        "parent_model": TEXT,
        "format": TEXT,
        "family": TEXT,
        "families": several(TEXT),
        "parameter_size": TEXT,
        "quantization_level": TEXT,
    }
)
_OLLAMA_MODEL: dict[str, Schema] = {
    "name": TEXT,
    "model": TEXT,
    "modified_at": TEXT,
    "size": COUNT,
    "digest": TEXT,
    "details": _OLLAMA_DETAILS,
}
_LMI_TOKEN = shape({"id": WHOLE, "text": TEXT, "log_prob": maybe(NUMBER)})
_LMI_TEXT = shape(
    {"generated_text": TEXT},
    {
        "details": shape(
            {
                "finish_reason": enum("length", "eos_token", "stop_sequence"),
                "generated_tokens": COUNT,
                "inputs": TEXT,
                "tokens": several(_LMI_TOKEN),
            }
        )
    },
)
_MEMORY = by_name(shape({"estimated_mib": COUNT, "measured_mib": maybe(COUNT), "reserved_mib": COUNT}))
_CLERK = shape(
    {
        "state": enum("queued", "starting", "ready", "stopping"),
        "draining": FLAG,
        "in_flight": COUNT,
        "queued": COUNT,
        "memory": by_name(shape({"measured_mib": maybe(COUNT), "reserved_mib": COUNT})),
        "load_seconds": maybe(NUMBER),
    }
)
_PULSE = shape(
    {
        "steps": COUNT,
        "running": COUNT,
        "waiting": COUNT,
        "parallel": COUNT,
        "prefill_tokens_per_second": NUMBER,
        "decode_tokens_per_second": NUMBER,
        "cache": shape({"used": COUNT, "reusable": COUNT, "total": COUNT}),
    }
)
_LINE = shape({"id": COUNT, "time": NUMBER, "level": TEXT, "logger": TEXT, "message": TEXT})
_SPOKEN: Mapping[str, Schema] = {"type": TEXT, "text": TEXT}

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
            "prompt_progress": _PROMPT_PROGRESS,
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
        {"usage": maybe(ref("Usage")), "timings": ref("Timings"), "prompt_progress": _PROMPT_PROGRESS},
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
    # whoever sends `response_fields` gets those alone
    "NativeCompletion": shape({}, {**_NATIVE_FRAME, **_NATIVE_END, **_NATIVE_MORE}),
    "NativeCompletionFrame": shape(
        {}, {**_NATIVE_FRAME, **_NATIVE_END, **_NATIVE_MORE, "prompt_progress": _PROMPT_PROGRESS}
    ),
    "ResponseItem": {
        "anyOf": [
            shape(
                {
                    "id": TEXT,
                    "type": const("message"),
                    "role": const("assistant"),
                    "status": _ITEM_STATUS,
                    "content": several(_OUTPUT_TEXT),
                }
            ),
            shape(
                {
                    "id": TEXT,
                    "type": const("reasoning"),
                    "summary": several(ANY_OBJECT),
                    "status": _ITEM_STATUS,
                    "content": several(_THOUGHT),
                }
            ),
            shape(
                {
                    "id": TEXT,
                    "type": const("function_call"),
                    "call_id": TEXT,
                    "name": TEXT,
                    "arguments": TEXT,
                    "status": _ITEM_STATUS,
                }
            ),
        ]
    },
    "Response": shape(
        {
            "id": TEXT,
            "object": const("response"),
            "created_at": COUNT,
            "model": TEXT,
            "status": enum("in_progress", "completed", "incomplete"),
            "error": NULL,
            "incomplete_details": maybe(shape({"reason": const("max_output_tokens")})),
            "previous_response_id": NULL,
            "store": const(False),
            "background": const(False),
            "temperature": NUMBER,
            "top_p": NUMBER,
            "truncation": const("disabled"),
            "instructions": maybe(TEXT),
            "max_output_tokens": maybe(COUNT),
            "metadata": ANY_OBJECT,
            "parallel_tool_calls": FLAG,
            "reasoning": shape({"effort": maybe(TEXT), "summary": NULL}),
            "text": shape({"format": ANY_OBJECT}),
            "tool_choice": {"anyOf": [TEXT, ANY_OBJECT]},
            "tools": several(ANY_OBJECT),
            "top_logprobs": COUNT,
            "output": several(ref("ResponseItem")),
            "usage": maybe(
                shape(
                    {
                        "input_tokens": COUNT,
                        "input_tokens_details": shape({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
                        "output_tokens": COUNT,
                        "output_tokens_details": shape({"reasoning_tokens": COUNT}),
                        "total_tokens": COUNT,
                    }
                )
            ),
        }
    ),
    "ResponseEvent": {
        "anyOf": [
            shape(
                {**_EVENT, "response": ref("Response")},
                {"prompt_progress": _PROMPT_PROGRESS, "timings": ref("Timings")},
            ),
            shape({**_EVENT, "output_index": COUNT, "item": ref("ResponseItem")}),
            shape({**_EVENT, "output_index": COUNT, "item": ANY_OBJECT}),
            shape({**_ABOUT_ITEM, "content_index": COUNT, "part": {"anyOf": [_OUTPUT_TEXT, _THOUGHT]}}),
            shape(
                {**_ABOUT_ITEM, "content_index": COUNT, "delta": TEXT}, {"logprobs": _TOKENS, "timings": ref("Timings")}
            ),
            shape({**_ABOUT_ITEM, "content_index": COUNT, "text": TEXT}, {"logprobs": _TOKENS}),
            shape({**_ABOUT_ITEM, "delta": TEXT}, {"timings": ref("Timings")}),
            shape({**_ABOUT_ITEM, "name": TEXT, "arguments": TEXT}),
        ]
    },
    "InputTokens": shape({"object": const("response.input_tokens"), "input_tokens": COUNT}),
    "AnthropicUsage": shape(
        {
            "input_tokens": COUNT,
            "output_tokens": COUNT,
            "cache_read_input_tokens": COUNT,
            "cache_creation_input_tokens": COUNT,
        }
    ),
    "Message": shape(
        {
            "id": TEXT,
            "type": const("message"),
            "role": const("assistant"),
            "model": TEXT,
            "content": several(
                {
                    "anyOf": [
                        shape({"type": const("text"), "text": TEXT}),
                        shape({"type": const("thinking"), "thinking": TEXT, "signature": TEXT}),
                        shape({"type": const("tool_use"), "id": TEXT, "name": TEXT, "input": ANY_OBJECT}),
                    ]
                }
            ),
            "stop_reason": maybe(enum("end_turn", "max_tokens", "stop_sequence", "tool_use")),
            "stop_sequence": maybe(TEXT),
            "stop_details": NULL,
            "usage": ref("AnthropicUsage"),
        }
    ),
    "MessageEvent": {
        "anyOf": [
            shape({"type": const("message_start"), "message": ref("Message")}),
            shape({"type": const("content_block_start"), "index": COUNT, "content_block": ANY_OBJECT}),
            shape({"type": const("content_block_delta"), "index": COUNT, "delta": by_name(TEXT)}),
            shape({"type": const("content_block_stop"), "index": COUNT}),
            shape(
                {
                    "type": const("message_delta"),
                    "delta": shape({"stop_reason": TEXT, "stop_sequence": maybe(TEXT), "stop_details": NULL}),
                    "usage": ref("AnthropicUsage"),
                }
            ),
            shape({"type": enum("message_stop", "ping")}),
        ]
    },
    "OllamaChat": shape({**_OLLAMA_LINE, "message": _OLLAMA_MESSAGE}, {**_OLLAMA_END, "response": const("")}),
    "OllamaText": shape(
        {**_OLLAMA_LINE, "response": TEXT}, {**_OLLAMA_END, **_OLLAMA_SAID, "message": _OLLAMA_MESSAGE}
    ),
    "OllamaModel": shape(_OLLAMA_MODEL),
    "LmiText": _LMI_TEXT,
    "FastChatText": shape(
        {
            "text": TEXT,
            "usage": maybe(shape({"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT})),
            "error_code": const(0),
            "finish_reason": maybe(enum("stop", "length")),
        },
        {"logprobs": maybe(ANY_OBJECT)},
    ),
    "LmiLine": shape({"token": _LMI_TOKEN}, _LMI_TEXT["properties"]),
    "Status": shape(
        {
            "value": enum("unloaded", "loading", "loaded", "sleeping", "downloading"),
            "args": several(TEXT),
            "pinned": FLAG,
            "in_flight": COUNT,
            "queued": COUNT,
        },
        {
            "preset": TEXT,
            "failed": const(True),
            "exit_code": WHOLE,
            "error": TEXT,
            "retry_at": NUMBER,
            "reason": TEXT,
            "since": NUMBER,
            "draining": FLAG,
            "waiting_for": TEXT,
            "progress": ANY_OBJECT,
            "replicas": shape({"ready": COUNT, "open": COUNT, "least": COUNT, "most": COUNT}),
            "pulse": _PULSE,
            "spent": by_name(NUMBER),
            "processor_seconds": NUMBER,
            "estimate": shape({"source": TEXT}, {"note": TEXT}),
            "memory": _MEMORY,
            "shares": several(TEXT),
            "clerk": _CLERK,
        },
    ),
    "Model": shape(
        {
            "id": TEXT,
            "aliases": several(TEXT),
            "tags": several(TEXT),
            "object": const("model"),
            "owned_by": const("llamacpp"),
            "created": COUNT,
            "status": ref("Status"),
            "architecture": shape({"input_modalities": several(TEXT), "output_modalities": several(TEXT)}),
            "source": enum("preset", "models_dir", "cache"),
            "can_remove": FLAG,
            "capabilities": several(enum("chat", "completion", "tools", "vision", "embedding", "rerank")),
            "meta": shape(
                {},
                {
                    "vocab_type": WHOLE,
                    "n_vocab": COUNT,
                    "n_ctx": COUNT,
                    "n_ctx_train": COUNT,
                    "n_embd": COUNT,
                    "n_params": COUNT,
                    "size": COUNT,
                    "ftype": maybe(TEXT),
                },
            ),
        },
        {"parent": TEXT},
    ),
    "Reload": shape(
        {
            "added": several(TEXT),
            "changed": several(TEXT),
            "restarted": several(TEXT),
            "removed": several(TEXT),
            "warnings": several(TEXT),
        }
    ),
    "Slot": shape(
        {
            "id": COUNT,
            "model": TEXT,
            "n_ctx": COUNT,
            "id_task": WHOLE,
            "is_processing": FLAG,
            "n_prompt_tokens_left": COUNT,
            "next_token": shape({"n_decoded": COUNT, "n_remain": WHOLE}),
        }
    ),
}

_REQUEST = shape(
    {
        "id": TEXT,
        "model": TEXT,
        "endpoint": TEXT,
        "client": TEXT,
        "key": TEXT,
        "arrived": NUMBER,
        "phase": enum("queued", "starting", "streaming"),
        "status": maybe(COUNT),
        "seconds": NUMBER,
        "queue_seconds": maybe(NUMBER),
        "load_seconds": maybe(NUMBER),
        "ttft": maybe(NUMBER),
        "prompt_tokens": maybe(COUNT),
        "cached_tokens": maybe(COUNT),
        "completion_tokens": maybe(COUNT),
        "tokens_per_second": maybe(NUMBER),
    }
)
_STATUS = shape({"status": TEXT})
_ADAPTER = shape({"name": TEXT, "src": TEXT, "pin": FLAG})
_LMI_STATES = ("READY", "PENDING", "FAILED")
_WORKFLOW = shape(
    {
        "workflowName": TEXT,
        "models": several(
            shape(
                {
                    "modelName": TEXT,
                    "modelUrl": TEXT,
                    "batchSize": COUNT,
                    "maxBatchDelayMillis": COUNT,
                    "maxIdleSeconds": COUNT,
                    "queueSize": COUNT,
                    "requestInQueue": COUNT,
                    "status": enum("Healthy", "Unhealthy", "PENDING", "FAILED"),
                    "loadedAtStartup": FLAG,
                    "workerGroups": several(
                        shape(
                            {
                                "device": shape({"deviceType": enum("cpu", "gpu"), "deviceId": WHOLE}),
                                "minWorkers": COUNT,
                                "maxWorkers": COUNT,
                                "workers": several(shape({"id": COUNT, "startTime": TEXT, "status": TEXT})),
                            }
                        )
                    ),
                }
            )
        ),
    }
)
_SUCCESS = shape({"success": const(True)})
_PULLED = shape({"status": TEXT}, {"digest": TEXT, "total": COUNT, "completed": COUNT})
_HEALTH = shape({"status": TEXT}, {"model": TEXT, "message": TEXT, "waiting_for": several(TEXT), "error": ANY_OBJECT})
_INVOCATION: Schema = {"anyOf": [ref("LmiText"), several(ref("LmiText")), ref("ChatCompletion"), ref("Completion")]}

ANSWERS: Mapping[str, Answer] = {
    "chat": Answer(body=ref("ChatCompletion"), frame=ref("ChatCompletionChunk"), about="A chat completion."),
    "completions": Answer(body=ref("Completion"), frame=ref("Completion"), about="A text completion."),
    "embeddings": Answer(body=ref("Embeddings"), about="One vector for each text."),
    "completion": Answer(
        body={"anyOf": [ref("NativeCompletion"), several(ref("NativeCompletion"))]},
        frame=ref("NativeCompletionFrame"),
        about="Text that goes on from the prompt, with all of these fields or those of `response_fields`; a list where"
        " several were asked for.",
    ),
    "infill": Answer(
        body={"anyOf": [ref("NativeCompletion"), several(ref("NativeCompletion"))]},
        frame=ref("NativeCompletionFrame"),
        about="Text that goes between two others, as of `/completion`.",
    ),
    "embedding": Answer(
        body=several(shape({"index": COUNT, "embedding": several(several(NUMBER))})),
        about="Vectors of each text: one, or without pooling one for each token.",
    ),
    "rerank": Answer(
        body={"anyOf": [ref("Ranking"), several(shape({"index": COUNT, "score": NUMBER}, {"text": TEXT}))]},
        about="Documents, the one that fits best first; a bare list where they were sent as `texts`.",
    ),
    "chat_input_tokens": Answer(body=ref("InputTokens"), about="Tokens of the prompt that this chat makes."),
    "responses": Answer(body=ref("Response"), frame=ref("ResponseEvent"), about="A response."),
    "responses_input_tokens": Answer(body=ref("InputTokens"), about="Tokens of the prompt that this input makes."),
    "ping": Answer(
        body=shape({"status": enum("healthy", "pending")}),
        about="Well, or still loading.",
        further={500: shape({"code": WHOLE, "type": TEXT, "message": TEXT})},
    ),
    "invocations": Answer(body=_INVOCATION, frame=ref("LmiLine"), about="Generated text."),
    "ericllm_generate": Answer(
        body=shape({"text": {"anyOf": [TEXT, several(TEXT)]}}), about="The prompt and what follows it."
    ),
    "fastchat_stream": Answer(frame=ref("FastChatText"), about="The text so far, again and again."),
    "fastchat_generate": Answer(body=ref("FastChatText"), about="Generated text."),
    "fastchat_embeddings": Answer(
        body=shape({"embedding": several({"anyOf": [several(NUMBER), TEXT]}), "token_num": COUNT}),
        about="One vector for each text.",
    ),
    "fastchat_conv": Answer(
        body=shape(
            {
                "conv": {
                    **shape({"name": TEXT, "roles": several(TEXT), "sep_style": COUNT}),
                    "additionalProperties": True,
                }
            }
        ),
        about="How FastChat's own API server lays out a chat for this model.",
    ),
    "fastchat_count": Answer(body=shape({"count": COUNT, "error_code": const(0)}), about="Tokens of a prompt."),
    "fastchat_status": Answer(
        body=shape({"model_names": several(TEXT), "speed": COUNT, "queue_length": COUNT}),
        about="What a worker of all models would tell a controller.",
    ),
    "fastchat_details": Answer(body=shape({"context_length": COUNT}), about="Tokens of a model's context."),
    "fastchat_check": Answer(
        body=shape({"prompts": several(shape({"fits": FLAG, "tokenCount": COUNT, "contextLength": COUNT}))}),
        about="Whether each prompt and its answer fit into their model's context.",
    ),
    "messages": Answer(body=ref("Message"), frame=ref("MessageEvent"), about="One message of the assistant."),
    "count_tokens": Answer(body=shape({"input_tokens": COUNT}), about="Tokens of the prompt that these messages make."),
    "ollama_chat": Answer(body=ref("OllamaChat"), frame=ref("OllamaChat"), about="One message of the assistant."),
    "ollama_generate": Answer(body=ref("OllamaText"), frame=ref("OllamaText"), about="Generated text."),
    "ollama_embed": Answer(
        body=shape(
            {"model": TEXT, "embeddings": several(several(NUMBER))},
            {"total_duration": COUNT, "load_duration": COUNT, "prompt_eval_count": COUNT},
        ),
        about="One vector for each text.",
    ),
    "ollama_embeddings": Answer(body=shape({"embedding": several(NUMBER)}), about="One vector."),
    "ollama_tags": Answer(body=shape({"models": several(ref("OllamaModel"))}), about="All models."),
    "ollama_ps": Answer(
        body=shape(
            {
                "models": several(
                    shape(
                        {
                            **_OLLAMA_MODEL,
                            "size_vram": COUNT,
                            "expires_at": TEXT,
                            "context_length": COUNT,
                        }
                    )
                )
            }
        ),
        about="The models in memory.",
    ),
    "ollama_version": Answer(body=shape({"version": TEXT}), about="The router's version."),
    "ollama_show": Answer(
        body=shape(
            {
                "modified_at": TEXT,
                "details": _OLLAMA_DETAILS,
                "model_info": ANY_OBJECT,
                "template": TEXT,
                "capabilities": several(TEXT),
            }
        ),
        about="One model.",
    ),
    "ollama_pull": Answer(body=_PULLED, frame=_PULLED, about="Its files come; the last line says how it ended."),
    "ollama_delete": Answer(media="text/plain", about="Its files are gone. Nothing is said."),
    "models": Answer(
        body=shape({"object": const("list"), "data": several(ref("Model"))}, {"reload": ref("Reload")}),
        about="All models.",
    ),
    "model": Answer(body=ref("Model"), about="One model."),
    "models_sse": Answer(
        frame=shape({"model": TEXT, "event": TEXT, "data": ANY_OBJECT}),
        about="What happens to models, as it happens, each with an id.",
    ),
    "fetch": Answer(body=_SUCCESS, about="The hub has it; its files come. Watch the events of models."),
    "delete": Answer(body=_SUCCESS, about="Its files are gone."),
    "load": Answer(
        body=shape(
            {"success": const(True)},
            {
                "status": ref("Status"),
                "evicted": several(shape({"model": TEXT, "reason": TEXT})),
                "load_ms": NUMBER,
            },
        ),
        about="Queued; with wait, loaded.",
    ),
    "unload": Answer(body=_SUCCESS, about="Leaving; with wait, gone."),
    "health": Answer(body=_HEALTH, about="It is up.", further={503: _HEALTH}),
    "ready": Answer(body=_HEALTH, about="What loads on startup is up.", further={503: _HEALTH}),
    "metrics": Answer(media="text/plain", about="Prometheus' text format."),
    "props": Answer(
        body={
            "anyOf": [
                shape(
                    {
                        "role": const("router"),
                        "max_instances": COUNT,
                        "models_autoload": FLAG,
                        "model_alias": TEXT,
                        "model_path": TEXT,
                        "default_generation_settings": ANY_OBJECT,
                        "ui_settings": ANY_OBJECT,
                        "build_info": TEXT,
                        "cors_proxy_enabled": const(False),
                        "memory_margin_mib": COUNT,
                    }
                ),
                shape(
                    {
                        "default_generation_settings": ANY_OBJECT,
                        "total_slots": COUNT,
                        "model_alias": TEXT,
                        "model_path": TEXT,
                        "modalities": by_name(FLAG),
                        "chat_template": TEXT,
                        "chat_template_caps": ANY_OBJECT,
                        "bos_token": TEXT,
                        "eos_token": TEXT,
                        "capabilities": several(TEXT),
                        "build_info": TEXT,
                        "is_sleeping": FLAG,
                        "is_loaded": FLAG,
                    }
                ),
            ]
        },
        about="The router's properties, or those of one model.",
    ),
    "tokenize": Answer(
        body=shape(
            {"tokens": several({"anyOf": [COUNT, shape({"id": COUNT, "piece": {"anyOf": [TEXT, several(COUNT)]}})]})}
        ),
        about="Token ids, with their pieces if asked for.",
    ),
    "detokenize": Answer(body=shape({"content": TEXT}), about="The text of the tokens."),
    "apply_template": Answer(body=shape({"prompt": TEXT}), about="The prompt that this chat makes."),
    "state": Answer(body=ANY_OBJECT, about="Devices, models, workers and the queue, in bytes and seconds."),
    "plan": Answer(body=ANY_OBJECT, about="What loading the model would do now; nothing is done."),
    "events": Answer(frame=ANY_OBJECT, about="Everything that happens, as it happens, each with an id."),
    "reload": Answer(body=ref("Reload"), about="Presets, folders and caches were read again."),
    "index": Answer(body=shape({"message": TEXT, "version": TEXT}), has_page=True, about="What this is."),
    "style": Answer(media="text/css", about="How the page looks."),
    "script": Answer(media="text/javascript", about="What the page does."),
    "openapi": Answer(body=ANY_OBJECT, about="This description."),
    "lmi_list": Answer(
        body=shape(
            {"models": several(shape({"modelName": TEXT, "modelUrl": TEXT, "status": enum(*_LMI_STATES)}))},
            {"nextPageToken": TEXT},
        ),
        about="A page of models.",
    ),
    "lmi_register": Answer(body=_STATUS, about="Listed, and ready.", further={202: _STATUS}),
    "lmi_describe": Answer(body=several(_WORKFLOW), about="One model and its workers."),
    "lmi_scale": Answer(body=_STATUS, about="So many workers run.", further={202: _STATUS}),
    "lmi_unregister": Answer(body=_STATUS, about="Listed no longer."),
    "adapter_register": Answer(body=_STATUS, about="Requests may name it."),
    "adapter_update": Answer(body=_STATUS, about="It is so for the next request that names it."),
    "adapter_unregister": Answer(body=_STATUS, about="Requests may name it no longer."),
    "adapter_list": Answer(
        body=shape({"adapters": several(_ADAPTER)}, {"nextPageToken": TEXT}), about="A page of the model's adapters."
    ),
    "adapter_describe": Answer(body=several(_ADAPTER), about="One adapter, in a list."),
    "pin": Answer(
        body=shape({"success": const(True), "model": TEXT, "pinned": FLAG}),
        about="It may be put out no longer, or again.",
    ),
    "config": Answer(
        body=shape(
            {
                "schema": const(1),
                "model": TEXT,
                "settings": several(shape({"key": TEXT, "value": TEXT, "origin": TEXT})),
            }
        ),
        about="Every setting of a model, and where it comes from.",
    ),
    "logs": Answer(
        body=shape({"schema": const(1), "lines": several(_LINE)}),
        about="The newest log lines.",
    ),
    "logs_sse": Answer(frame=_LINE, about="The newest log lines, and then each as it comes, with an id."),
    "requests": Answer(
        body=shape({"schema": const(1), "running": several(_REQUEST), "ended": several(_REQUEST)}),
        about="Requests for workers: those that run, and the last 1000 that ended.",
    ),
    "cancel": Answer(
        body=shape({"success": const(True), "cancelled": {"type": "integer", "minimum": 1}}),
        about="The running requests of that id end with an error.",
    ),
    "slots": Answer(body=several(ref("Slot")), about="Places in the batches of loaded models."),
    "lora_adapters": Answer(
        body=several(shape({"id": COUNT, "path": TEXT, "scale": NUMBER})),
        about="Adapters of the model, by their number.",
    ),
    "streams_lookup": Answer(body={"type": "array", "maxItems": 0}, about="None: no stream outlives its connection."),
}
"""By the name of the route. Calls that are never answered well are not here."""
