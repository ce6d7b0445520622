"""Request fields that several dialects share: sampling, structured output, and fields that have no effect."""

from worker.protocol import schema as s
from worker.protocol.schema import Body, Schema

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 4096  # characters; text that may be the beginning of a stop string is compared after each token
# Characters of names that answers repeat, in each frame, or that are kept until the answer ends.
MAX_NAME_LENGTH = 1024
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

# llama-server's samplers by the letters of an order given as a string, and other names of some (common/sampling.cpp).
# Clients of older versions list tfs_z, which llama-server skips since it was removed.
SAMPLER_LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature", "i": "infill", "a": "adaptive_p",
    "f": "tfs_z",
}  # fmt: skip
SAMPLER_ALIASES = {
    "top-k": "top_k", "top-p": "top_p", "nucleus": "top_p", "min-p": "min_p", "typ-p": "typ_p", "typ": "typ_p",
    "typical_p": "typ_p", "typical-p": "typ_p", "typical": "typ_p", "temp": "temperature", "top-n-sigma": "top_n_sigma",
    "adaptive-p": "adaptive_p",
}  # fmt: skip

ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")
FORMATS = ("text", "json_object", "json_schema")

# Schema of fields that clients send and that have no effect.
NO_EFFECT: Schema = {"description": "No effect."}
# Request fields without effect: any value is accepted.
NO_OPS: Body = s.members(
    NO_EFFECT,
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "moderation", "id_slot", "cache_prompt", "n_keep", "n_discard", "n_cache_reuse",
    "backend_sampling", "guided_decoding_backend", "spaces_between_special_tokens",
)  # fmt: skip

# Descriptions of the refused fields below are also the error messages: the name of the field comes before them.
_OFF = "Not supported; leave it out."
_TUNES: Schema = {"description": "No effect: the feature that it tunes is off."}
_IN_PRESET = "Not supported in a request; set it in the model's preset."
_NULL, _NO, _YES, _EMPTY = s.one_of([], _OFF), s.one_of([False], _OFF), s.one_of([True], _OFF), s.one_of([""], _OFF)
_ZERO, _ONE = s.one_of([0], _OFF), s.one_of([1], _OFF)
_NO_ENTRIES, _NO_MEMBERS = s.one_of([[]], _OFF), s.one_of([{}], _OFF)
_NO_BUDGET = s.one_of(
    [-1], "Not supported; turn reasoning off with reasoning_effort none, or limit all with max_tokens."
)
_AT_MOST_ZERO: Schema = {"type": ["number", "null"], "maximum": 0, "description": _OFF}
# Names of the limit of reasoning: llama-server's, an older one, Qwen's and vLLM's.
REASONING_BUDGETS = (
    "reasoning_budget_tokens", "thinking_budget_tokens", "reasoning_budget", "thinking_budget", "thinking_token_budget",
)  # fmt: skip
# Unsupported fields, with the values that have no effect and are therefore accepted.
NEUTRAL: Body = {
    **s.members(_TUNES, "mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent", "adaptive_decay"),
    **s.members(_TUNES, "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    **s.members(_TUNES, "length_penalty", "early_stopping"),
    **s.members(_NULL, "audio", "web_search_options"),
    **s.members(
        _NO, "store", "grammar_lazy", "thinking_forced_open", "use_beam_search", "echo", "return_hidden_states"
    ),
    "raw_scores": _NO,
    **s.members(_YES, "parse_tool_calls", "include_reasoning", "use_activation"),
    "normalize": s.one_of([True], "Not supported; send embd_normalize to POST /embedding."),
    "embed_dtype": s.one_of(["float32"], "Not supported; read 32-bit floats."),
    "endianness": s.one_of(["native", "little"], "Not supported; read little-endian numbers."),
    **s.members(_ZERO, "mirostat", "xtc_probability", "dry_multiplier", "dynatemp_range"),
    **s.members(_AT_MOST_ZERO, "top_n_sigma", "adaptive_target"),
    **s.members(_ONE, "typical_p", "typ_p", "tfs_z", "best_of"),
    **s.members(_NO_BUDGET, "reasoning_budget", "reasoning_budget_tokens"),
    **s.members(_NO_BUDGET, "thinking_budget_tokens", "thinking_token_budget"),
    **s.members(_EMPTY, "guided_whitespace_pattern", "structural_tag", "custom_logit_processor"),
    **s.members(_NO_ENTRIES, "grammar_triggers", "preserved_tokens", "logits_processors", "logprob_token_ids"),
    "allowed_token_ids": s.one_of([], "Not supported; give these tokens 100 in logit_bias."),
    "bad_words": s.one_of([[]], "Not supported; give each word false in logit_bias."),
    **s.members(_NO_MEMBERS, "repetition_detection", "kv_transfer_params", "vllm_xargs", "mm_processor_kwargs"),
    **s.members(_NO_MEMBERS, "media_io_kwargs", "session_params"),
    "modalities": s.one_of([[], ["text"]], _OFF),
    "functions": s.one_of([[]], "Not supported; send tools."),
    "function_call": s.one_of(["none", "auto"], "Not supported; send tool_choice."),
    "min_keep": s.one_of([0, 1], _OFF),
    "stop_regex": s.one_of(["", []], _OFF),
    "chat_template": s.one_of([""], _IN_PRESET),
    "priority": s.one_of([0], _IN_PRESET),
    "image_data": s.one_of([[]], "Not supported; send images in messages."),
    "prompt_embeds": s.one_of([[]], "Not supported; send text or token ids in prompt."),
    "lora_path": s.one_of([""], "Not supported; name the adapter in model, adapters or lora."),
}

# Sampling

NON_EMPTY_TEXT: Schema = {"type": "string", "minLength": 1}
STOP_TEXT: Schema = {**NON_EMPTY_TEXT, "maxLength": MAX_STOP_LENGTH}
STOP: Schema = s.any_of(
    STOP_TEXT,
    s.array(STOP_TEXT, most=MAX_STOPS),
    about="Strings at which the text ends; none of them is part of it.",
)
_BIAS: Schema = s.any_of({"type": "number", "minimum": -100, "maximum": 100}, s.const(False))
_BIAS_BY_NAME: Schema = {
    "type": "object",
    "propertyNames": {"minLength": 1, "maxLength": MAX_BIAS_LENGTH},
    "additionalProperties": _BIAS,
    "maxProperties": MAX_BIASES,
}
_BIAS_PAIR: Schema = {
    "type": "array",
    "prefixItems": [s.any_of(s.COUNT, {**s.TEXT, "maxLength": MAX_BIAS_LENGTH}), _BIAS],
    "minItems": 2,
    "maxItems": 2,
}
_LOGIT_BIAS = s.any_of(
    _BIAS_BY_NAME,
    s.array(_BIAS_PAIR, most=MAX_BIASES),
    about="Biases by token id; a text stands for each of its tokens; false bans a token.",
)
TUNING: Body = {
    "temperature": s.number(0, 100, "0 selects the most probable token."),
    "top_k": s.integer(-1, MAX_INT32, "0 and -1 are off."),
    "top_p": s.number(0, 1),
    "min_p": s.number(0, 1),
    "repetition_penalty": s.number(0.01, 100),
    "repeat_penalty": s.number(0.01, 100, "The same as repetition_penalty."),
    "repeat_last_n": s.integer(-1, MAX_INT32, "Number of last tokens that repetition_penalty considers; -1 is all."),
    "presence_penalty": s.number(-2, 2),
    "frequency_penalty": s.number(-2, 2),
    # The time that a prompt takes grows with this number: each of its positions is stored by as many tokens.
    "no_repeat_ngram_size": s.integer(0, 64, "No sequence of this many tokens occurs twice; 0 is off."),
}


def tuning(*names: str) -> Body:
    """The named fields of `TUNING`."""
    return {name: TUNING[name] for name in names}


SAMPLING: Body = {
    **TUNING,
    "stop": STOP,
    "seed": s.integer(-_LONG, _LONG - 1, "-1 is a random seed for each request."),
    "logit_bias": _LOGIT_BIAS,
    "samplers": s.any_of(
        s.array(s.TEXT),
        s.TEXT,
        about="llama-server's samplers: any of penalties, top_k, top_p, min_p and temperature, in this order or with"
        " temperature before the other three.",
    ),
    "min_tokens": s.integer(0),
    "ignore_eos": s.flag(),
}

# Speculative decoding, in llama-server's names.
SPECULATION: Body = {
    "speculative.n_max": s.integer(0, None, "Most tokens to draft in a step, at most the preset's draft-max; 0: none."),
    "speculative.n_min": s.integer(0, None, "Fewest tokens of a draft."),
}

# Structured output

_SCHEMA = s.any_of(
    s.ANY_OBJECT,
    {**s.TEXT, "contentMediaType": "application/json"},
    s.NULL,
    about="A JSON schema, or one as a string.",
)
_CHOICES: Schema = s.array(NON_EMPTY_TEXT, least=1, most=MAX_GUIDED_CHOICES)
NAMED_SCHEMA: Body = {
    "strict": s.flag(),
    "schema": _SCHEMA,
    "name": NO_EFFECT,
    "description": {"description": "Reported as ignored: not part of the prompt."},
}
# `schema`, `value` (TGI's name) and `json_schema` have the same meaning.
RESPONSE_FORMAT: Body = {
    "type": s.required(s.choice(FORMATS)),
    "schema": _SCHEMA,
    "value": _SCHEMA,
    "json_schema": s.record(NAMED_SCHEMA),
}
STRUCTURED: Body = {
    "json": _SCHEMA,
    "json_object": s.flag(),
    "regex": s.text(),
    "choice": _CHOICES,
    "grammar": s.text(),
    **s.members(s.one_of([False]), "disable_fallback", "disable_any_whitespace", "disable_additional_properties"),
}
FREE_FORMATS = (s.tagged("text", {}), s.tagged("json_object", {"schema": _SCHEMA, "value": _SCHEMA}))
_SCHEMA_FORMAT = s.tagged("json_schema", {name: RESPONSE_FORMAT[name] for name in ("schema", "value", "json_schema")})
GRAMMAR: Body = {
    "response_format": s.or_null(s.any_of(*FREE_FORMATS, _SCHEMA_FORMAT)),
    "json_schema": _SCHEMA,
    "grammar": s.text("GBNF."),
    "guided_json": _SCHEMA,
    "guided_regex": s.text(),
    "guided_choice": _CHOICES,
    "guided_grammar": s.text("GBNF."),
    "regex": s.text(),
    "ebnf": s.text("GBNF."),
    "structured_outputs": s.record(STRUCTURED, "Exactly one of json, json_object, regex, choice and grammar."),
}
