"""LMI's API (DJL Serving): schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol.dialects.generation_fields import SAMPLING, STOP, tuning
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
    any_of,
    enum,
    flag,
    integer,
    members,
    one_of,
    or_null,
    record,
    ref,
    several,
    shape,
)

# A body with one of these fields is in OpenAI's format, also at LMI's paths. The response then has that format too.
OPENAI_FIELDS = frozenset({"messages", "prompt"})

PARAMETERS: Body = {
    **tuning("temperature", "top_k", "top_p", "min_p"),
    **tuning("repetition_penalty", "presence_penalty", "frequency_penalty"),
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
}
INVOCATIONS: Body = {
    "model": MODEL,
    "inputs": any_of(TEXT, {**several(TEXT), "minItems": 1}),
    "parameters": record(PARAMETERS),
    "stream": flag(),
    "adapters": ADAPTERS,
}

_TOKEN = shape({"id": WHOLE, "text": TEXT, "log_prob": or_null(NUMBER)})
_DETAILS = shape(
    {
        "finish_reason": enum("length", "eos_token", "stop_sequence"),
        "generated_tokens": COUNT,
        "inputs": TEXT,
        "tokens": several(_TOKEN),
    }
)
_GENERATED_TEXT = shape({"generated_text": TEXT}, {"details": _DETAILS})
_STATUS = shape({"status": TEXT})
_ADAPTER = shape({"name": TEXT, "src": TEXT, "pin": FLAG})
_WORKER_GROUP = shape(
    {
        "device": shape({"deviceType": enum("cpu", "gpu"), "deviceId": WHOLE}),
        **members(COUNT, "minWorkers", "maxWorkers"),
        "workers": several(shape({"id": COUNT, "startTime": TEXT, "status": TEXT})),
    }
)
_MODEL = shape(
    {
        **members(TEXT, "modelName", "modelUrl"),
        **members(COUNT, "batchSize", "maxBatchDelayMillis", "maxIdleSeconds", "queueSize", "requestInQueue"),
        "status": enum("Healthy", "Unhealthy", "PENDING", "FAILED"),
        "loadedAtStartup": FLAG,
        "workerGroups": several(_WORKER_GROUP),
    }
)
_MODELS = several(shape({"modelName": TEXT, "modelUrl": TEXT, "status": enum("READY", "PENDING", "FAILED")}))

PING_RESPONSE = ResponseSchema(
    body=shape({"status": enum("healthy", "pending")}),
    further={500: shape({"code": WHOLE, "type": TEXT, "message": TEXT})},
)
INVOCATIONS_RESPONSE = ResponseSchema(
    body=any_of(ref("LmiText"), several(ref("LmiText")), ref("ChatCompletion"), ref("Completion")),
    frame=ref("LmiLine"),
    events=any_of(ref("ChatCompletionChunk"), ref("Completion")),
)
LIST_RESPONSE = ResponseSchema(body=shape({"models": _MODELS}, {"nextPageToken": TEXT}))
DESCRIBE_RESPONSE = ResponseSchema(body=several(shape({"workflowName": TEXT, "models": several(_MODEL)})))
# Of calls that change models: registering, scaling.
SCHEDULED_RESPONSE = ResponseSchema(body=_STATUS, further={202: _STATUS})
# Of unregistering a model, and of calls that change adapters.
STATUS_RESPONSE = ResponseSchema(body=_STATUS)
ADAPTER_LIST_RESPONSE = ResponseSchema(body=shape({"adapters": several(_ADAPTER)}, {"nextPageToken": TEXT}))
ADAPTER_DESCRIBE_RESPONSE = ResponseSchema(body=several(_ADAPTER))

COMPONENTS: Mapping[str, Schema] = {
    "LmiText": _GENERATED_TEXT,
    "LmiLine": shape({"token": _TOKEN}, _GENERATED_TEXT["properties"]),
}
