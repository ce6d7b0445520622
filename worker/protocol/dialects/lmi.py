"""LMI's API (DJL Serving): schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol.dialects.generation_fields import SAMPLING, STOP, TUNING
from worker.protocol.dialects.openai import ADAPTERS, MODEL
from worker.protocol.schema import (
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    WHOLE,
    Body,
    ResponseSchema,
    Schema,
    enum,
    flag,
    integer,
    maybe,
    one_of,
    record,
    ref,
    several,
    shape,
)

# A body with one of these fields is in OpenAI's format, also at LMI's paths. The response then has that format too.
OPENAI_FIELDS = frozenset({"messages", "prompt"})


PARAMETERS: Body = {
    **{
        name: TUNING[name]
        for name in (
            "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
        )
    },
    "seed": SAMPLING["seed"],
    "do_sample": flag(),
    "max_new_tokens": integer(1, None, "30 unless stated."),
    "stop_sequences": STOP,
    "stop": STOP,
    "ignore_eos_token": flag(),
    "details": flag(),
    "return_full_text": flag(),
    "num_beams": one_of([1]),
    "typical_p": one_of([1]),
}  # fmt: skip
INVOCATIONS: Body = {
    "model": MODEL,
    "inputs": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]},
    "parameters": record(PARAMETERS),
    "stream": flag(),
    "adapters": ADAPTERS,
}

_TOKEN = shape({"id": WHOLE, "text": TEXT, "log_prob": maybe(NUMBER)})
_GENERATED_TEXT = shape(
    {"generated_text": TEXT},
    {
        "details": shape(
            {
                "finish_reason": enum("length", "eos_token", "stop_sequence"),
                "generated_tokens": COUNT,
                "inputs": TEXT,
                "tokens": several(_TOKEN),
            }
        )
    },
)
_STATUS = shape({"status": TEXT})
_ADAPTER = shape({"name": TEXT, "src": TEXT, "pin": FLAG})
_STATES = ("READY", "PENDING", "FAILED")
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

PING_RESPONSE = ResponseSchema(
    body=shape({"status": enum("healthy", "pending")}),
    further={500: shape({"code": WHOLE, "type": TEXT, "message": TEXT})},
)
INVOCATIONS_RESPONSE = ResponseSchema(
    body=_INVOCATION, frame=ref("LmiLine"), events={"anyOf": [ref("ChatCompletionChunk"), ref("Completion")]}
)
LIST_RESPONSE = ResponseSchema(
    body=shape(
        {"models": several(shape({"modelName": TEXT, "modelUrl": TEXT, "status": enum(*_STATES)}))},
        {"nextPageToken": TEXT},
    )
)
REGISTER_RESPONSE = ResponseSchema(body=_STATUS, further={202: _STATUS})
DESCRIBE_RESPONSE = ResponseSchema(body=several(_WORKFLOW))
SCALE_RESPONSE = ResponseSchema(body=_STATUS, further={202: _STATUS})
UNREGISTER_RESPONSE = ResponseSchema(body=_STATUS)
ADAPTER_REGISTER_RESPONSE = ResponseSchema(body=_STATUS)
ADAPTER_UPDATE_RESPONSE = ResponseSchema(body=_STATUS)
ADAPTER_UNREGISTER_RESPONSE = ResponseSchema(body=_STATUS)
ADAPTER_LIST_RESPONSE = ResponseSchema(body=shape({"adapters": several(_ADAPTER)}, {"nextPageToken": TEXT}))
ADAPTER_DESCRIBE_RESPONSE = ResponseSchema(body=several(_ADAPTER))

COMPONENTS: Mapping[str, Schema] = {
    "LmiText": _GENERATED_TEXT,
    "LmiLine": shape({"token": _TOKEN}, _GENERATED_TEXT["properties"]),
}
