"""LMI's API (DJL Serving): schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol import schema as s
from worker.protocol.dialects.generation_fields import MAX_CHOICES, STOP
from worker.protocol.dialects.llama_server import RANKING
from worker.protocol.dialects.openai import ADAPTERS, COMMON, MODEL
from worker.protocol.dialects.vllm import SCORES
from worker.protocol.schema import Body, ResponseSchema, Schema

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
WITHOUT_EFFECT: Body = s.members({"description": "Reported as ignored."}, *DEFAULTS_WITHOUT_EFFECT)
PARAMETERS: Body = {
    **{name: COMMON[name] for name in SAME_AS_OPENAI},
    "do_sample": s.flag(),
    "max_new_tokens": s.integer(1, None, "30 unless stated."),
    "stop_sequences": STOP,
    "stop": STOP,
    "ignore_eos_token": s.flag(),
    "details": s.flag(),
    "return_full_text": s.flag(),
    "n": s.integer(1, MAX_CHOICES, "best_of unless stated. The likeliest choice is the text; not in streams."),
    "best_of": s.integer(1, MAX_CHOICES, "Choices that are generated; the n likeliest are returned."),
    "truncate": s.integer(1, None, "The last tokens of the prompt that are kept."),
    "logprobs": s.integer(0, None, "The same as top_n_tokens."),
    "top_n_tokens": s.integer(0, None, "Alternatives of each token, with details. At most the model's max-logprobs."),
    "decoder_input_details": s.flag("Logprobs of the prompt, with details; not in streams."),
    "prompt_logprobs": s.integer(0, None, "The same as decoder_input_details."),
    **WITHOUT_EFFECT,
    "num_beams": s.one_of([1]),
    "typical_p": s.one_of([1]),
}
INVOCATIONS: Body = {
    "model": MODEL,
    "inputs": s.any_of(s.TEXT, {**s.several(s.TEXT), "minItems": 1}),
    "parameters": s.record(PARAMETERS),
    "stream": s.flag(),
    "adapters": ADAPTERS,
}

_TOKEN = s.shape({"id": s.WHOLE, "text": s.TEXT, "log_prob": s.or_null(s.NUMBER)})
_SEQUENCE = {
    "finish_reason": s.enum("length", "eos_token", "stop_sequence"),
    "generated_tokens": s.COUNT,
    "tokens": s.several(_TOKEN),
}
_TOP_TOKENS = {"top_tokens": s.several(s.several(_TOKEN))}
_DETAILS = s.shape(
    {**_SEQUENCE, "inputs": s.TEXT},
    {
        **_TOP_TOKENS,
        "prefill": s.several(_TOKEN),
        "best_of_sequences": s.several(s.shape({**_SEQUENCE, "generated_text": s.TEXT}, _TOP_TOKENS)),
    },
)
_GENERATED_TEXT = s.shape({"generated_text": s.TEXT}, {"details": _DETAILS})
_STATUS = s.shape({"status": s.TEXT})
_ADAPTER = s.shape({"name": s.TEXT, "src": s.TEXT, "pin": s.FLAG})
_WORKER_GROUP = s.shape(
    {
        "device": s.shape({"deviceType": s.enum("cpu", "gpu"), "deviceId": s.WHOLE}),
        **s.members(s.COUNT, "minWorkers", "maxWorkers"),
        "workers": s.several(s.shape({"id": s.COUNT, "startTime": s.TEXT, "status": s.TEXT})),
    }
)
_MODEL = s.shape(
    {
        **s.members(s.TEXT, "modelName", "modelUrl"),
        **s.members(s.COUNT, "batchSize", "maxBatchDelayMillis", "maxIdleSeconds", "queueSize", "requestInQueue"),
        "status": s.enum("Healthy", "Unhealthy", "PENDING", "FAILED"),
        "loadedAtStartup": s.FLAG,
        "workerGroups": s.several(_WORKER_GROUP),
    }
)
_MODELS = s.several(s.shape({"modelName": s.TEXT, "modelUrl": s.TEXT, "status": s.enum("READY", "PENDING", "FAILED")}))

PING_RESPONSE = ResponseSchema(
    body=s.shape({"status": s.enum("healthy", "pending")}),
    further={500: s.shape({"code": s.WHOLE, "type": s.TEXT, "message": s.TEXT})},
)
_VECTOR = s.several(s.NUMBER)
INVOCATIONS_RESPONSE = ResponseSchema(
    body=s.any_of(
        *(s.ref("LmiText"), s.several(s.ref("LmiText")), s.ref("ChatCompletion"), s.ref("Completion")),
        *(_VECTOR, s.several(_VECTOR), s.ref("Embeddings"), RANKING, SCORES),
    ),
    frame=s.ref("LmiLine"),
    events=s.any_of(s.ref("ChatCompletionChunk"), s.ref("Completion")),
)
LIST_RESPONSE = ResponseSchema(body=s.shape({"models": _MODELS}, {"nextPageToken": s.TEXT}))
WORKFLOWS_RESPONSE = ResponseSchema(
    body=s.shape({"workflows": s.several(s.shape({"workflowName": s.TEXT}))}, {"nextPageToken": s.TEXT})
)
DESCRIBE_RESPONSE = ResponseSchema(body=s.several(s.shape({"workflowName": s.TEXT, "models": s.several(_MODEL)})))
# Of calls that change models: registering, scaling.
SCHEDULED_RESPONSE = ResponseSchema(body=_STATUS, further={202: _STATUS})
# Of unregistering a model, and of calls that change adapters.
STATUS_RESPONSE = ResponseSchema(body=_STATUS)
ADAPTER_LIST_RESPONSE = ResponseSchema(body=s.shape({"adapters": s.several(_ADAPTER)}, {"nextPageToken": s.TEXT}))
ADAPTER_DESCRIBE_RESPONSE = ResponseSchema(body=s.several(_ADAPTER))

COMPONENTS: Mapping[str, Schema] = {
    "LmiText": _GENERATED_TEXT,
    "LmiLine": s.shape({"token": _TOKEN}, _GENERATED_TEXT["properties"]),
}
