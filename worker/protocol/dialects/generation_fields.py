"""Request fields that several dialects share: sampling, structured output, and fields that have no effect."""

from worker.protocol.schema import (
    Body,
    Schema,
    array,
    choice,
    described,
    flag,
    integer,
    number,
    one_of,
    or_null,
    record,
    required,
    text,
)

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_TOOLS = 512
# Prompts, inputs or documents of one request; OpenAI's limit.
MAX_TEXTS = 2048
MAX_GUIDED_CHOICES = 1024
# Entries of `response_fields`.
MAX_SHOWN = 64
# Characters of a text in `logit_bias`.
MAX_BIAS_LENGTH = 128
MAX_INT32 = 2**31 - 1
_LONG = 2**63

ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")
FORMATS = ("text", "json_object", "json_schema")

# Schema of fields that clients send and that have no effect.
NO_EFFECT: Schema = {"description": "No effect."}
# Request fields without effect: any value is accepted.
NO_OPS: Body = dict.fromkeys(
    (
        "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention",
        "moderation", "id_slot", "cache_prompt", "n_keep", "n_discard", "n_cache_reuse", "backend_sampling",
        "guided_decoding_backend", "spaces_between_special_tokens",
    ),
    NO_EFFECT,
)  # fmt: skip

_OFF = "Not supported: only the value without effect is accepted."
_TUNES = "No effect: the feature that it tunes is off."
# Unsupported fields, with the values that have no effect and are therefore accepted.
NEUTRAL: Body = {
    "audio": one_of([], _OFF),
    "modalities": one_of([[], ["text"]], _OFF),
    "web_search_options": one_of([], _OFF),
    "prediction": one_of([], _OFF),
    "store": one_of([False], _OFF),
    "functions": one_of([[]], _OFF),
    "function_call": one_of(["none", "auto"], _OFF),
    "mirostat": one_of([0], _OFF),
    "mirostat_tau": {"description": _TUNES},
    "mirostat_eta": {"description": _TUNES},
    "xtc_probability": one_of([0], _OFF),
    "xtc_threshold": {"description": _TUNES},
    "dry_multiplier": one_of([0], _OFF),
    "dry_base": {"description": _TUNES},
    "dry_allowed_length": {"description": _TUNES},
    "dry_penalty_last_n": {"description": _TUNES},
    "dry_sequence_breakers": {"description": _TUNES},
    "dynatemp_range": one_of([0], _OFF),
    "dynatemp_exponent": {"description": _TUNES},
    "typical_p": one_of([1], _OFF),
    "typ_p": one_of([1], _OFF),
    "top_n_sigma": {"type": ["number", "null"], "maximum": 0, "description": _OFF},
    "adaptive_target": {"type": ["number", "null"], "maximum": 0, "description": _OFF},
    "adaptive_decay": {"description": _TUNES},
    "tfs_z": one_of([1], _OFF),
    "min_keep": one_of([0, 1], _OFF),
    "t_max_predict_ms": {"type": ["number", "null"], "maximum": 0, "description": _OFF},
    "grammar_lazy": one_of([False], _OFF),
    "grammar_triggers": one_of([[]], _OFF),
    "preserved_tokens": one_of([[]], _OFF),
    "parse_tool_calls": one_of([True], _OFF),
    "thinking_forced_open": one_of([False], _OFF),
    "reasoning_budget": one_of([-1], _OFF),
    "reasoning_budget_tokens": one_of([-1], _OFF),
    "thinking_budget_tokens": one_of([-1], _OFF),
    "thinking_token_budget": one_of([-1], _OFF),
    "include_reasoning": one_of([True], _OFF),
    "chat_template": one_of([""], "Not supported in a request: set it in the model's preset."),
    "use_beam_search": one_of([False], _OFF),
    "length_penalty": {"description": _TUNES},
    "early_stopping": {"description": _TUNES},
    "best_of": one_of([1], _OFF),
    "echo": one_of([False], _OFF),
    "priority": one_of([0], "Not supported in a request: set it in the model's preset."),
    "allowed_token_ids": one_of([[]], _OFF),
    "bad_words": one_of([[]], _OFF),
    "logits_processors": one_of([[]], _OFF),
    "logprob_token_ids": one_of([[]], _OFF),
    "guided_whitespace_pattern": one_of([""], _OFF),
    "structural_tag": one_of([""], _OFF),
    "repetition_detection": one_of([{}], _OFF),
    "kv_transfer_params": one_of([{}], _OFF),
    "vllm_xargs": one_of([{}], _OFF),
    "mm_processor_kwargs": one_of([{}], _OFF),
    "image_data": one_of([[]], "Not supported: send images in messages."),
    "media_io_kwargs": one_of([{}], _OFF),
    "stop_regex": one_of(["", []], _OFF),
    "lora_path": one_of([""], "Not supported: an adapter is named in `model`, `adapters` or `lora`."),
    "custom_logit_processor": one_of([""], _OFF),
    "return_hidden_states": one_of([False], _OFF),
    "session_params": one_of([{}], _OFF),
}

# Sampling

NON_EMPTY_TEXT: Schema = {"type": "string", "minLength": 1}
STOP: Schema = {
    "anyOf": [NON_EMPTY_TEXT, {"type": "array", "items": NON_EMPTY_TEXT, "maxItems": MAX_STOPS}, {"type": "null"}],
    "description": "Strings at which the text ends; none of them is part of it.",
}
_BIAS: Schema = {"anyOf": [{"type": "number", "minimum": -100, "maximum": 100}, {"const": False}]}
_LOGIT_BIAS: Schema = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"minLength": 1, "maxLength": MAX_BIAS_LENGTH},
            "additionalProperties": _BIAS,
            "maxProperties": MAX_BIASES,
        },
        {
            "type": "array",
            "items": {
                "type": "array",
                "prefixItems": [
                    {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "maxLength": MAX_BIAS_LENGTH}]},
                    _BIAS,
                ],
                "minItems": 2,
                "maxItems": 2,
            },
            "maxItems": MAX_BIASES,
        },
        {"type": "null"},
    ],
    "description": "Biases by token id; a text stands for each of its tokens; false bans a token.",
}
TUNING: Body = {
    "temperature": number(0, 100, "0 selects the most probable token."),
    "top_k": integer(-1, MAX_INT32, "0 and -1 are off."),
    "top_p": number(0, 1),
    "min_p": number(0, 1),
    "repetition_penalty": number(0.01, 100),
    "repeat_penalty": number(0.01, 100, "The same as repetition_penalty."),
    "repeat_last_n": integer(-1, MAX_INT32, "Number of last tokens that repetition_penalty considers; -1 is all."),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
}
SAMPLING: Body = {
    **TUNING,
    "stop": STOP,
    "seed": integer(-_LONG, _LONG - 1, "-1 is a random seed for each request."),
    "logit_bias": _LOGIT_BIAS,
    "samplers": {
        "anyOf": [array({"type": "string"}), {"type": "string"}],
        "description": "llama-server's samplers: any of penalties, top_k, top_p, min_p and temperature, in this order"
        " or with temperature before the other three.",
    },
    "min_tokens": integer(0),
    "ignore_eos": flag(),
}

# Structured output

_SCHEMA: Schema = {
    "anyOf": [
        {"type": "object"},
        {"type": "string", "contentMediaType": "application/json"},
        {"type": "null"},
    ],
    "description": "A JSON schema, or one as a string.",
}
_CHOICES: Schema = array(NON_EMPTY_TEXT, least=1, most=MAX_GUIDED_CHOICES)
NAMED_SCHEMA: Body = {
    "strict": flag(),
    "schema": _SCHEMA,
    "name": NO_EFFECT,
    "description": {"description": "Reported as ignored: not part of the prompt."},
}
# `schema`, `value` (TGI's name) and `json_schema` have the same meaning.
RESPONSE_FORMAT: Body = {
    "type": required(choice(FORMATS)),
    "schema": _SCHEMA,
    "value": _SCHEMA,
    "json_schema": record(NAMED_SCHEMA),
}
STRUCTURED: Body = {
    "json": _SCHEMA,
    "json_object": flag(),
    "regex": text(),
    "choice": _CHOICES,
    "grammar": text(),
    "disable_fallback": one_of([False]),
    "disable_any_whitespace": one_of([False]),
    "disable_additional_properties": one_of([False]),
}
FREE_FORMATS: tuple[Schema, ...] = (
    {**described({"type": {"const": "text"}}), "required": ["type"]},
    {**described({"type": {"const": "json_object"}, "schema": _SCHEMA, "value": _SCHEMA}), "required": ["type"]},
)
GRAMMAR: Body = {
    "response_format": or_null(
        {
            "anyOf": [
                *FREE_FORMATS,
                {
                    **described({k: v for k, v in RESPONSE_FORMAT.items() if k != "type"}),
                    "properties": {**RESPONSE_FORMAT, "type": {"const": "json_schema"}},
                    "required": ["type"],
                },
            ]
        }
    ),
    "json_schema": _SCHEMA,
    "grammar": text("GBNF."),
    "guided_json": _SCHEMA,
    "guided_regex": text(),
    "guided_choice": _CHOICES,
    "guided_grammar": text("GBNF."),
    "regex": text(),
    "ebnf": text("GBNF."),
    "structured_outputs": record(STRUCTURED, "Exactly one of json, json_object, regex, choice and grammar."),
}
