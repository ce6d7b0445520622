"""LMI's API (DJL Serving): schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol.dialects.generation_fields import MAX_CHOICES, STOP
from worker.protocol.dialects.llama_server import RANKING
from worker.protocol.dialects.openai import ADAPTERS, COMMON, MODEL
from worker.protocol.dialects.vllm import SCORES
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

# Parameters with the name and the meaning of a field of OpenAI's API.
SAME_AS_OPENAI = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "min_tokens", "logit_bias",
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
# Parameters of beam search and of another tokenizer. Other values than these, LMI's defaults, are reported as ignored.
DEFAULTS_WITHOUT_EFFECT: Mapping[str, float] = {
    "length_penalty": 1.0,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
}
WITHOUT_EFFECT: Body = members({"description": "Reported as ignored."}, *DEFAULTS_WITHOUT_EFFECT)
PARAMETERS: Body = {
    **{name: COMMON[name] for name in SAME_AS_OPENAI},
    "do_sample": flag(),
    "max_new_tokens": integer(1, None, "30 unless stated."),
    "stop_sequences": STOP,
    "stop": STOP,
    "ignore_eos_token": flag(),
    "details": flag(),
    "return_full_text": flag(),
    "n": integer(1, MAX_CHOICES, "best_of unless stated. The likeliest choice is the text; not in streams."),
    "best_of": integer(1, MAX_CHOICES, "Choices that are generated; the n likeliest are returned."),
    "truncate": integer(1, None, "The last tokens of the prompt that are kept."),
    "logprobs": integer(0, None, "The same as top_n_tokens."),
    "top_n_tokens": integer(0, None, "Alternatives of each token, with details. At most the model's max-logprobs."),
    "decoder_input_details": flag("Logprobs of the prompt, with details; not in streams."),
    "prompt_logprobs": integer(0, None, "The same as decoder_input_details."),
    **WITHOUT_EFFECT,
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
_SEQUENCE = {
    "finish_reason": enum("length", "eos_token", "stop_sequence"),
    "generated_tokens": COUNT,
    "tokens": several(_TOKEN),
}
_TOP_TOKENS = {"top_tokens": several(several(_TOKEN))}
_DETAILS = shape(
    {**_SEQUENCE, "inputs": TEXT},
    {
        **_TOP_TOKENS,
        "prefill": several(_TOKEN),
        "best_of_sequences": several(shape({**_SEQUENCE, "generated_text": TEXT}, _TOP_TOKENS)),
    },
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
_VECTOR = several(NUMBER)
INVOCATIONS_RESPONSE = ResponseSchema(
    body=any_of(
        *(ref("LmiText"), several(ref("LmiText")), ref("ChatCompletion"), ref("Completion")),
        *(_VECTOR, several(_VECTOR), ref("Embeddings"), RANKING, SCORES),
    ),
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
