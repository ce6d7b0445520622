"""What the calls of LMI, EricLLM and FastChat answer."""

from collections.abc import Mapping

from router.answers.words import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    WHOLE,
    Answer,
    Schema,
    const,
    enum,
    maybe,
    ref,
    several,
    shape,
)

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
_INVOCATION: Schema = {"anyOf": [ref("LmiText"), several(ref("LmiText")), ref("ChatCompletion"), ref("Completion")]}

COMPONENTS: Mapping[str, Schema] = {
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
}

ANSWERS: Mapping[str, Answer] = {
    "ping": Answer(
        body=shape({"status": enum("healthy", "pending")}),
        about="Well, or still loading.",
        further={500: shape({"code": WHOLE, "type": TEXT, "message": TEXT})},
    ),
    "invocations": Answer(
        body=_INVOCATION,
        frame=ref("LmiLine"),
        events={"anyOf": [ref("ChatCompletionChunk"), ref("Completion")]},
        about="Generated text.",
    ),
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
}
