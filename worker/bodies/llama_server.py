"""Bodies of llama-server's own calls."""

from worker.bodies.common import GRAMMAR, MAX_CHOICES, MAX_SHOWN, MAX_TEXTS, SAMPLING
from worker.bodies.openai import ADAPTERS, MODEL, PIECES, PING, TEXTS, ZERO_TOO
from worker.schemas import Body, array, described, flag, integer, one_of, required, text

COMPLETION: Body = {
    "model": MODEL,
    **SAMPLING,
    **GRAMMAR,
    "prompt": TEXTS,
    "n_predict": ZERO_TOO,
    "max_tokens": ZERO_TOO,
    "n_probs": integer(0, None, "At most the model's max-logprobs."),
    "n": integer(1, MAX_CHOICES),
    "n_cmpl": integer(1, MAX_CHOICES, "The same as n."),
    "stream": flag(),
    "return_tokens": flag(),
    "return_progress": flag("Chunks tell how far the prompt is."),
    "timings_per_token": flag("Every chunk has timings."),
    "sse_ping_interval": PING,
    "post_sampling_probs": flag("With n_probs: how likely tokens were once all samplers had been at work."),
    "n_indent": one_of([0]),
    "response_fields": array(
        {"type": "string"}, most=MAX_SHOWN, about="Of the answer these fields alone; `a/b` is a field of a field."
    ),
    "return_tokens_only": one_of([False]),
    "lora": ADAPTERS,
    "adapters": ADAPTERS,
}
INFILL: Body = {
    **COMPLETION,
    "prompt": text("What the answer begins with already."),
    "input_prefix": required(text("What stands before the gap.")),
    "input_suffix": required(text("What follows it.")),
    "input_extra": array(
        described({"text": required(text()), "filename": text()}),
        most=MAX_TEXTS,
        about="Further files, to stand before.",
    ),
}
TOKENIZE: Body = {
    "model": MODEL,
    "content": {"anyOf": [{"type": "string"}, {**PIECES, "minItems": 0}]},
    "add_special": flag(),
    "parse_special": flag("true unless stated."),
    "with_pieces": flag(),
}
DETOKENIZE: Body = {"model": MODEL, "tokens": required(array({"type": "integer", "minimum": 0}))}
